"""Types of a model's modules and names tell embeddings and heads; where neither is known, a default that needs them refuses."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import AdamW, FlatStepper, TorchOptimizer, create, plan, routing
from everybit_torch.config import OptimizerConfig, algorithm
from everybit_torch.label_resolution import choices

WITH_OTHERS: dict[str, Any] = {"others": eb.adamw}
MATRIX: dict[str, dict[str, Any]] = {
    "muon": {}, "normuon": {}, "dion": {}, **dict.fromkeys(("soap", "shampoo", "kron"), WITH_OTHERS),
}  # fmt: skip
"""Optimizers that leave embeddings and heads to another one, and the arguments with which they do."""


def sequence() -> nn.Sequential:
    """A model whose names say nothing."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6, bias=False))


class Fused(nn.Module):
    """Large weights: one that a pattern of names misses, and experts, which are no matrix without a view."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 256)
        self.w2, self.w13 = nn.Linear(256, 256, bias=False), nn.Linear(256, 512, bias=False)
        self.experts = nn.Parameter(torch.randn(2, 256, 256))
        self.lm_head = nn.Linear(256, 300, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.lm_head(self.w13(self.w2(self.table(tokens)))[..., :256] @ self.experts.sum(0))
        return out


class Tied(nn.Module):
    """A model whose table is first met as something else."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 11, bias=False)
        self.hidden = nn.Linear(6, 6, bias=False)
        self.table = nn.Embedding(11, 6)
        self.table.weight = self.project.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.project(self.hidden(self.table(tokens)))
        return out


def rows(table: str) -> dict[str, str]:
    """The label of each parameter of a table."""
    found, label = {}, ""
    for line in table.splitlines():
        if line.startswith("  "):
            found[line.split()[0]] = label
        else:
            label = line.partition(":")[0]
    return found


def matrices(table: str) -> set[str]:
    return {name for name, label in rows(table).items() if label.split(", ")[0] == "matrix"}


@pytest.mark.parametrize("name", MATRIX)
def test_with_a_model_the_types_of_its_modules_decide(name: Any) -> None:
    table = routing(create(name, sequence(), **MATRIX[name]))
    assert table.startswith("labels by types of modules, names and shapes\n")
    assert "  0.weight (11, 6) by the type of its module\n" in table
    assert matrices(table) == {"1.weight", "3.weight"}
    assert matrices(routing(create(name, Tied(), **MATRIX[name]))) == {"hidden.weight"}


@pytest.mark.parametrize("name", MATRIX)
def test_names_decide_where_there_are_names_alone(name: Any) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(11, 6), "up": nn.Linear(6, 8), "lm_head": nn.Linear(8, 11)})
    for optimizer in (
        create(name, model.named_parameters(), **MATRIX[name]),
        TorchOptimizer(model.named_parameters(), getattr(eb, name), **MATRIX[name]),
    ):
        table = routing(optimizer)
        assert table.startswith("labels by names and shapes\n")
        assert "  embed.weight (11, 6) by name\n" in table
        assert matrices(table) == {"up.weight"}


GIVEN: list[Callable[[nn.Module], Any]] = [
    lambda model: model.parameters(),
    lambda model: list(model.parameters())[:1],
    lambda model: [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim < 2]},
    ],
]


@pytest.mark.parametrize("given", range(len(GIVEN)))
@pytest.mark.parametrize("name", MATRIX)
def test_without_names_they_refuse_and_say_what_to_pass(name: Any, given: int) -> None:
    accepted = r"labels: params\[0\] has no name, .* accepted are named parameters, such as model\.named_parameters\(\), or others=None"
    makers: list[Callable[[Any], object]] = [
        lambda params: create(name, params, **MATRIX[name]),
        lambda params: TorchOptimizer(params, getattr(eb, name), **MATRIX[name]),
    ]
    for make in makers:
        with pytest.raises(ValueError, match=accepted):
            make(GIVEN[given](sequence()))
    with pytest.raises(ValueError, match=accepted):
        getattr(eb, name)(**MATRIX[name]).init([torch.ones(3, 3)])


@pytest.mark.parametrize("name", MATRIX)
def test_without_names_they_take_what_does_not_need_them(name: Any) -> None:
    weights = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(3, 4))]
    create(name, weights, others=None)
    create(name, weights, others=eb.adamw, matrices=eb.Matrices(labels=lambda path, p: "matrix"))


@pytest.mark.parametrize("name", eb.optimizers())
def test_no_default_looks_at_names_that_are_not_there(name: eb.OptimizerName) -> None:
    """Whatever treats a matrix by its name has to refuse one without."""
    x = torch.ones(8, 8)
    for choice in choices(eb.optimizers()[name].function()):
        if len({choice(f"['{path}']", x) for path in ("embed.weight", "up.weight", "head.weight")}) > 1:
            for path in ("", "[0]", "[0][1]"):
                with pytest.raises(ValueError, match=r"has no name"):
                    choice(path, x)


def test_a_policy_that_goes_by_names_refuses_and_knows_modules() -> None:
    policy = eb.keep_wide("LEAN_8BIT", smallest=1)
    assert isinstance(policy, eb.ByLabel)
    with pytest.raises(ValueError, match=r"^keep_wide: params\[0\] has no name, .* or names=\(\)"):
        AdamW(sequence().bfloat16().parameters(), policy=policy)
    AdamW(sequence().bfloat16().parameters(), policy=eb.keep_wide("LEAN_8BIT", smallest=1, names=()))
    model = sequence().bfloat16()
    optimizer = create("adamw", model, policy=policy)
    optimizer.place()
    weights = dict(model.named_parameters())
    assert optimizer.state[weights["0.weight"]]["momentum"].dtype is torch.bfloat16  # wide
    assert optimizer.state[weights["1.weight"]]["momentum"].dtype is torch.int8


def test_the_stepper_and_the_plan_know_modules() -> None:
    table = routing(FlatStepper(sequence(), eb.muon(0.02)))
    assert matrices(table) == {"1.weight", "3.weight"}
    assert rows(table)["0.weight"].startswith("others")
    planned = plan(sequence(), eb.muon(0.02), policy="FP32", strategy="no_shard", ranks=1)
    tied = plan(
        sequence(), eb.muon(0.02, matrices=eb.Matrices(labels=labelled)), policy="FP32", strategy="no_shard", ranks=1
    )
    assert planned.persistent == tied.persistent


def labelled(path: str, parameter: Tensor) -> str:
    return "matrix" if path in ("['1.weight']", "['3.weight']") else "others"


def test_a_configuration_and_groups_beside_a_model_know_modules() -> None:
    model = sequence()
    assert matrices(routing(OptimizerConfig(algorithm=algorithm("muon")).build(model))) == {"1.weight", "3.weight"}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = create("muon", groups, model=model)
    assert matrices(routing(optimizer)) == {"1.weight", "3.weight"}
    assert optimizer.param_groups[1]["param_names"] == ["1.bias", "2.weight", "2.bias"]
    assert optimizer.param_groups[1]["weight_decay"] == 0.0
    with pytest.raises(TypeError, match=r"^create: got a model twice"):
        create("muon", model, model=model)


@pytest.mark.exhaustive
def test_an_optimizer_for_a_model_is_copied_saved_and_compiled_as_any_other() -> None:
    one, other = sequence(), sequence()
    ours = create("muon", one, lr=0.02, compile=True)
    plain = create("muon", other, lr=0.02, matrices=eb.Matrices(labels=labelled), compile=False)
    assert "embeddings" not in inspect.signature(eb.muon).parameters  # it is no hyperparameter
    for step in range(3):
        for model, optimizer in ((one, ours), (other, plain)):
            optimizer.zero_grad()
            model(torch.arange(11)).square().mean().backward()
            optimizer.step()
        if step == 1:
            one, ours = pickle.loads(pickle.dumps((one, ours)))
            again = create("muon", one, lr=0.02, compile=True)
            again.load_state_dict(ours.state_dict())
            ours = again
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


# -- large weights that no rule names -------------------------------------------------------------------------------------------


def by_pattern(path: str, parameter: Tensor) -> str:
    """The pattern of torchtitan's issue 4812, which does not find fused weights."""
    return "matrix" if parameter.ndim == 2 and re.search(r"w[123]\b", path) else "others"


MISSED = [
    (None, ["experts (2, 256, 256) by shape"], {"others": "experts"}),
    (
        by_pattern,
        ["experts (2, 256, 256) by the function", "w13.weight (512, 256) by the function"],
        {"others": "w13|expert"},
    ),
]


@pytest.mark.parametrize(("labels", "missed", "rule"), MISSED)
def test_large_weights_that_no_rule_names_are_told(labels: Any, missed: list[str], rule: dict[str, str]) -> None:
    def make(kind: str, **further: Any) -> Any:
        model, matrices = Fused(), eb.Matrices(labels=labels, **further)
        if kind == "create":
            optimizer = create("muon", model, lr=0.1, matrices=matrices, compile=False)
            model(torch.tensor([1])).sum().backward()
            optimizer.step()
            return optimizer
        tx = eb.muon(0.1, matrices=matrices)
        return (
            plan(model, tx, ranks=1, strategy="no_shard")
            if kind == "plan"
            else FlatStepper(model, tx, strategy="no_shard")
        )

    for kind in ("create", "stepper", "plan"):
        with pytest.warns(UserWarning, match="matrices: large weights go to the optimizer of the others") as caught:
            made = make(kind)
        (text,) = [str(one.message) for one in caught]
        assert f"names them: {', '.join(missed)}. Accepted are a view" in text
        if kind == "create":
            shown = [line.strip() for line in routing(made).splitlines() if "named by no rule" in line]
            assert shown == [f"{one}, large, and named by no rule" for one in missed]
        make(kind, **rule)  # without a warning
    if labels is None:
        make("create", views={"experts": eb.batched()})
    model = Fused()
    model.experts.requires_grad = False
    FlatStepper(model, eb.muon(0.1), strategy="no_shard")


# -- a clip beside Muon -----------------------------------------------------------------------------------------------------------

CLIP = eb.clip_by_global_norm(1.0)
CLIPPED: dict[str, Any] = {
    "before": eb.chain(CLIP, eb.muon(0.1)),
    "after": eb.chain(eb.orthogonalize(), CLIP, eb.scale_by_learning_rate(0.1)),
    "after a chain": eb.named_chain({"muon": eb.muon(0.1), "clip": CLIP}),
}


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_clip_of_all_beside_muon_is_told() -> None:
    for name, transform in CLIPPED.items():
        model = nn.Sequential(nn.Linear(6, 6, bias=False))
        with pytest.warns(UserWarning, match=rf"^clip_by_global_norm {name.split()[0]} .*Matrices\(others_clip="):
            TorchOptimizer(model.named_parameters(), lambda lr, transform=transform: transform, lr=0.1)
        with pytest.warns(UserWarning, match=r"^clip_by_global_norm"):
            FlatStepper(model, transform, strategy="no_shard")
    for quiet in (
        eb.muon(0.1, matrices=eb.Matrices(others_clip=1.0)),
        eb.chain(eb.masked(CLIP, where=lambda path, _: "embed" in path), eb.muon(0.1)),
        eb.chain(CLIP, eb.muon(0.1, others=None)),  # of matrices alone: it limits what the momentum takes in
        eb.chain(CLIP, eb.adamw(0.1)),
    ):
        model = nn.Sequential(nn.Linear(6, 6, bias=False))
        TorchOptimizer(model.named_parameters(), lambda lr, quiet=quiet: quiet, lr=0.1)


def test_the_clip_of_the_others_is_of_their_gradients_alone() -> None:
    params = {"embed": torch.randn(7, 6), "w": torch.randn(6, 6), "bias": torch.randn(6)}
    grads = {name: 10 * torch.randn_like(x) for name, x in params.items()}
    tx: Any = eb.muon(0.1, matrices=eb.Matrices(others_clip=1.0))
    updates, _ = tx.update(grads, tx.init(params), params)
    others = {name: params[name] for name in ("embed", "bias")}
    alone: Any = eb.chain(eb.clip_by_global_norm(1.0), eb.adamw(0.1))
    expected, _ = alone.update({name: grads[name] for name in others}, alone.init(others), others)
    plain: Any = eb.muon(0.1)
    matrices, _ = plain.update(grads, plain.init(params), params)
    assert all(torch.equal(updates[name], expected[name]) for name in others)
    assert torch.equal(updates["w"], matrices["w"])
    with pytest.raises(ValueError, match=r"^matrices.others_clip: got 1\.0 with others=None; accepted with it is None"):
        eb.muon(others=None, matrices=eb.Matrices(others_clip=1.0))
    with pytest.raises(ValueError, match=r"^matrices.others: got 'embed' with others=None; accepted with it is None"):
        eb.soap(matrices=eb.Matrices(others="embed"))
    with pytest.raises(ValueError, match=r"^others_clip: got -1\.0; accepted is"):
        eb.Matrices(others_clip=-1.0)
    with pytest.raises(ValueError, match=r"^others: got '\('; accepted are regular expressions"):
        eb.Matrices(others="(")
