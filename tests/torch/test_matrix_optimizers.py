"""Matrix optimizers through the torch optimizer and the stepper: one optimizer for a model, its table, its refusals, its checkpoints."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit.linalg import Batching
from everybit_torch import FlatStepper, TorchOptimizer, create, plan, routing
from everybit_torch.config import OptimizerConfig, algorithm
from everybit_torch.config.trees import READER
from tests.support.block_formats import Int8Blocks
from tests.support.exact_models import whole_of
from tests.support.matrix_model import Small, small


def backward(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.arange(7)).square().mean().backward()


TABLE = """\
labels by types of modules, names and shapes
others: 5 parameters, 114 elements
  embed.weight (7, 6) by the type of its module
  qkv.bias (18,) by shape
  norm.weight (6,) by shape
  norm.bias (6,) by shape
  lm_head.weight (7, 6) by name
qkv: 1 parameter, 108 elements
  qkv.weight (18, 6) as 3 x 6 x 6
matrix: 1 parameter, 108 elements
  ensemble.weight (6, 18)"""
VIEWS = {"qkv": eb.heads(3)}


@pytest.mark.parametrize("name", ["muon", "normuon"])
def test_an_optimizer_by_name_says_what_goes_where(name: Any) -> None:
    options: Any = {"matrices": eb.Matrices(views=VIEWS)}
    model = small()
    optimizer = create(name, model, lr=0.02, **options)
    assert routing(optimizer) == TABLE
    by_names = TABLE.replace("types of modules, ", "").replace("the type of its module", "name")
    assert eb.routing(getattr(eb, name)(**options), dict(model.named_parameters())) == by_names
    # The same, of a stepper, whose labels name the dtype too, and in the order of its buffers.
    found = routing(FlatStepper(small(), getattr(eb, name)(**options)))
    reasons = (" by the type of its module", " by name", " by shape")
    plain = [min(line.removesuffix(reason) for reason in reasons) for line in TABLE.splitlines()[1:]]
    assert sorted(found.replace(", float32", "").splitlines()) == sorted(plain)


def test_a_table_of_several_param_groups_and_of_one_transform() -> None:
    model = small()
    gains = [(name, p) for name, p in model.named_parameters() if p.ndim < 2]
    matrices = [(name, p) for name, p in model.named_parameters() if p.ndim > 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]
    lines = routing(TorchOptimizer(groups, eb.muon, lr=0.1)).splitlines()
    assert lines[0] == "param group 0"
    assert lines[lines.index("param group 1") + 2] == "others: 3 parameters, 30 elements"
    plain = routing(TorchOptimizer([model.qkv.weight], eb.adamw, lr=0.1))
    assert plain.splitlines() == ["all: 1 parameter, 108 elements", "  0 (18, 6)"]
    with pytest.raises(TypeError, match=r"^routing: got Small; accepted are a TorchOptimizer and a FlatStepper"):
        routing(model)  # type: ignore[arg-type]


def first_step(**options: Any) -> None:
    model = small()
    optimizer = TorchOptimizer(model.named_parameters(), eb.muon, lr=0.1, **options)
    backward(model)
    optimizer.step()


def first_step_of_groups(**options: Any) -> None:
    model = small()
    named = list(model.named_parameters())
    optimizer = TorchOptimizer([{"params": named[:2]}, {"params": named[2:]}], eb.muon, lr=0.1, **options)
    backward(model)
    optimizer.step()


def table(**options: Any) -> None:
    routing(TorchOptimizer(small().named_parameters(), eb.muon, lr=0.1, **options))


def of_stepper(**options: Any) -> None:
    FlatStepper(small(), eb.muon(0.1, **options))


def of_plan(**options: Any) -> None:
    plan(small(), eb.muon(0.1, **options), policy="FP32", strategy="optim", ranks=4)


FRONTS: list[Callable[..., None]] = [first_step, first_step_of_groups, table, of_stepper, of_plan]


@pytest.mark.parametrize("front", FRONTS)
def test_a_pattern_that_matches_nothing_is_refused(front: Callable[..., None]) -> None:
    with pytest.raises(
        ValueError,
        match=r"^partition: no parameter is labelled 'qvk'; the labels given are 'others', 'matrix', to \['embed\.weight'\] of shape"
        r" \(7, 6\), .*Drop the transform, or mend the labels",
    ):
        front(matrices=eb.Matrices(views={"qvk": eb.heads(3)}))


@pytest.mark.parametrize("front", FRONTS)
def test_a_shape_that_does_not_fit_is_refused_by_name(front: Callable[..., None]) -> None:
    with pytest.raises(
        ValueError, match=r"^qkv\.weight: heads\(5\): got \(18, 6\); accepted are parameters whose rows 5"
    ):
        front(matrices=eb.Matrices(views={"qkv": eb.heads(5)}))


def test_parameters_without_names_are_numbered() -> None:
    model = small()
    optimizer = TorchOptimizer([model.qkv.weight], eb.muon, lr=0.1, others=None, matrices=eb.Matrices(view=eb.heads(5)))
    model.qkv.weight.grad = torch.ones(18, 6)
    with pytest.raises(ValueError, match=r"^param group 0, parameter 0: heads\(5\): got \(18, 6\)"):
        optimizer.step()


def test_frozen_and_lazy_parameters_count_as_they_will() -> None:
    """A label that frozen parameters have is not missing; of lazy ones nobody knows yet."""
    model = small()
    model.ensemble.requires_grad_(False)
    optimizer = TorchOptimizer(model.named_parameters(), eb.muon, lr=0.1)
    model.qkv.requires_grad_(False)
    backward(model)
    optimizer.step()
    assert model.ensemble.weight not in optimizer.state
    model.zero_grad()
    FlatStepper(model, eb.muon(0.1))
    embedding = nn.Embedding(7, 6)
    lazy = nn.Sequential(embedding, nn.LazyLinear(4))
    waiting = TorchOptimizer(lazy.named_parameters(), eb.muon, lr=0.1)
    embedding.weight.grad = torch.ones(7, 6)
    with pytest.raises(ValueError, match=r"no parameter is labelled 'matrix'"):
        TorchOptimizer([("embed.weight", embedding.weight)], eb.muon, lr=0.1).step()
    waiting.step()


def test_a_checkpoint_holds_no_code_and_goes_on_with_the_same_bits() -> None:
    options: Any = {
        "matrices": eb.Matrices(views=VIEWS), "others": eb.adamw, "others_rate": 0.1, "scale": lambda r, c: 0.1 * (r + c),
    }  # fmt: skip

    def new(model: nn.Module) -> TorchOptimizer:
        return create("normuon", model, lr=0.1, **options)

    one = small()
    optimizer = new(one)
    backward(one)
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": one.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    held = saved["optimizer"]["param_groups"][0]
    assert all(held[name].startswith("not saved: ") for name in ("others", "matrices", "scale"))
    assert {"lr", "momentum", "others_rate", "nesterov"} <= held.keys()
    assert optimizer.param_groups[0]["others"] is eb.adamw
    other = Small()
    other.load_state_dict(saved["model"])
    resumed = new(other)
    resumed.load_state_dict(saved["optimizer"])
    for model, stepped in ((one, optimizer), (other, resumed)):
        backward(model)
        stepped.step()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_others_may_have_a_share_of_the_learning_rate() -> None:
    one, other = small(), small()
    shared = TorchOptimizer(one.named_parameters(), eb.muon, lr=0.1, others_rate=0.25)
    others: Any = lambda rate: eb.adamw(0.25 * rate)  # noqa: E731
    apart = TorchOptimizer(other.named_parameters(), eb.muon, lr=0.1, others=others)
    for model, optimizer in ((one, shared), (other, apart)):
        backward(model)
        optimizer.step()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)  # a quarter is a power of two


def test_a_configuration_names_it() -> None:
    read = READER.read(
        OptimizerConfig, {"algorithm": {"name": "muon", "lr": 0.02, "scale": "match_rms_adamw", "before": "rows"}}, ""
    )
    assert read.algorithm == algorithm("muon", lr=0.02, scale="match_rms_adamw", before="rows")
    model = small()
    optimizer = read.build(model)
    assert routing(optimizer).splitlines()[-3] == "matrix: 2 parameters, 216 elements"
    assert optimizer.param_groups[0]["scale"] == "match_rms_adamw"


def test_each_part_of_a_model_gets_its_own_optimizers_bits() -> None:
    """Through the torch optimizer, with a scheduler, whose learning rate both parts follow; and resumed."""
    together = small()
    options: dict[str, Any] = {
        "matrices": eb.Matrices(views={"qkv": eb.row_blocks(6, 6, 6)}),
        "others": eb.adamw,
        "weight_decay": 0.01,
    }

    def new(model: nn.Module) -> Any:
        return TorchOptimizer(model.named_parameters(), eb.muon, lr=0.1, policy="FP32", **options)

    one = new(together)
    schedule = torch.optim.lr_scheduler.ExponentialLR(one, 0.5)
    apart = small()
    hidden = {"qkv.weight": apart.qkv.weight}
    others = [(name, p) for name, p in apart.named_parameters() if name not in ("qkv.weight", "ensemble.weight")]
    each = [
        TorchOptimizer(
            hidden.items(), eb.muon, lr=0.1, matrices=eb.Matrices(view=eb.row_blocks(6, 6, 6)), weight_decay=0.01
        ),
        TorchOptimizer([apart.ensemble.weight], eb.muon, lr=0.1, weight_decay=0.01, others=None),
        TorchOptimizer(others, eb.adamw, lr=0.1),
    ]
    for step in range(3):
        if step == 2:
            saved = one.state_dict()
            again = new(together)
            again.load_state_dict(saved)
            one, schedule = again, torch.optim.lr_scheduler.ExponentialLR(again, 0.5, last_epoch=1)
        for model in (together, apart):
            model.zero_grad()
            model(torch.arange(7)).square().mean().backward()
        one.step()
        schedule.step()
        for optimizer in each:
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5
        for (name, p), q in zip(together.named_parameters(), apart.parameters(), strict=True):
            assert torch.equal(p, q), (step, name)


# -- momentum in any format ---------------------------------------------------------------------------------------------------

BLOCKS = eb.Policy(params=eb.Split(16), momentum=Int8Blocks(8), variance=Int8Blocks(8))
STORED: dict[str, tuple[eb.Policy, float]] = {
    # The largest error of the momentum, over its largest entry so far: that of one rounding, 20 of which a mean with a decay of 0.95 adds
    # up. bfloat16 rounds up or down within 2**-7 of a number; int8 within half a 127th of its block's largest.
    "float32": (eb.policies.MIXED_BF16, 0.0),
    "bfloat16": (eb.policies.LEAN_BF16, 20 * 2.0**-7),
    "bfloat16, and weights without a residual": (eb.policies.FLOOR_BF16, 20 * 2.0**-7),
    "int8 in blocks": (BLOCKS, 20 * 0.5 / 127),
}


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("muon", "bfloat16"),
        ("normuon", "int8 in blocks"),
        *(
            pytest.param(name, stored, marks=pytest.mark.exhaustive)
            for name in ("muon", "normuon")
            for stored in STORED
            if (name, stored) not in (("muon", "bfloat16"), ("normuon", "int8 in blocks"))
        ),
    ],
)
def test_momentum_may_have_any_format(stored: str, name: Any) -> None:
    """Its error is that of the format, the update stays orthogonal, and a stepper and a resumed optimizer have the same bits."""
    policy, allowed = STORED[stored]
    exact, model = small().bfloat16(), small().bfloat16()
    views: Any = {"matrices": eb.Matrices(views=VIEWS)}
    reference = create(name, exact, policy="MIXED_BF16", lr=0.0, compile=False, **views)
    optimizer = create(name, model, policy=policy, lr=0.0, compile=False, **views)
    resumed = create(name, model, policy=policy, lr=0.0, compile=False, **views)
    largest = 0.0
    for step in range(30):
        drawn = torch.Generator().manual_seed(step)
        for p, q in zip(model.parameters(), exact.parameters(), strict=True):
            gradient = torch.randn(p.shape, generator=drawn) + 0.3
            p.grad, q.grad = gradient.to(main_dtype(p)), gradient.to(main_dtype(q))
        optimizer.step()
        reference.step()
        largest = max(largest, float(momentum_of(reference).abs().max()))
    assert float((momentum_of(optimizer) - momentum_of(reference)).abs().max()) <= allowed * largest
    resumed.load_state_dict(optimizer.state_dict())
    for part, again in zip(entries_of(optimizer), entries_of(resumed), strict=True):
        assert torch.equal(part, again)


def main_dtype(p: Tensor) -> torch.dtype:
    return p.grad_dtype or p.dtype


def momentum_of(optimizer: TorchOptimizer) -> Tensor:
    """Of the matrices, decoded."""
    state = optimizer.full_state_dict()["state"]
    return torch.cat([entry["momentum"].reshape(-1) for number, entry in state.items() if number in (1, 3)])


def entries_of(optimizer: TorchOptimizer) -> list[Tensor]:
    return [x for entry in optimizer.state_dict()["state"].values() for x in entry.values() if isinstance(x, Tensor)]


def test_a_stepper_has_the_same_bits_with_momentum_in_blocks() -> None:
    one, other = small().bfloat16(), small().bfloat16()
    optimizer = create("normuon", one, policy=BLOCKS, lr=0.1, compile=False)
    stepper = FlatStepper(other, eb.normuon(0.1), policy=BLOCKS, compile=False)
    for _ in range(3):
        backward(one)
        optimizer.step()
        with stepper.microbatch(last=True):
            other(torch.arange(7)).square().mean().backward()
        stepper.step()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


# -- matrices of several parameters together ----------------------------------------------------------------------------------


class Deep(nn.Module):
    """Four equal matrices, one that is seen as heads of another shape, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        self.last = nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.layers(x))
        return found


def deep() -> Deep:
    torch.manual_seed(0)
    return Deep()


def viewed(learning_rate: eb.Hyperparameter, batching: Batching = "alone") -> eb.Transform[Any]:
    """With a view of one parameter; in float64, where products differ by rounding only."""
    return eb.normuon(
        learning_rate,
        iteration=eb.NewtonSchulz(batching=batching, arithmetic="float64"),
        matrices=eb.Matrices(views={"layers.0.weight": eb.heads(3)}),
    )


def clipped(learning_rate: eb.Hyperparameter, batching: Batching = "alone") -> eb.Transform[Any]:
    """With a reduction before it."""
    return eb.chain(eb.clip_by_global_norm(0.5), viewed(learning_rate, batching))


def trained(front: str, batching: Batching, *, compile: bool, skip: int | None = None) -> list[Tensor]:
    model = deep()
    if front == "stepper":
        stepper = FlatStepper(model, viewed(0.1, batching), compile=compile)
        stepper.as_optimizer().metrics_enabled = True
        for step in range(3):
            with stepper.microbatch(last=True):
                model(torch.full((2, 6), 1.0 + step)).square().mean().backward()
            stepper.step()
        return [whole_of(p).clone() for p in model.parameters()]
    factory = clipped if front == "torch, clipped" else viewed
    optimizer = TorchOptimizer(
        model.named_parameters(), factory, lr=0.1, batching=batching, compile=compile, metrics=True
    )
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 6), 1.0 + step)).square().mean().backward()
        if step == skip:
            model.layers[1].weight.grad = None
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.exhaustive
def test_compiled_steps_of_many_shapes_have_eager_bits_and_do_not_fall_back() -> None:
    """Warnings are errors here: a step that cannot be compiled warns."""
    for name in ("muon", "normuon"):
        found = []
        for compile in (False, True):
            model = nn.Sequential(*(nn.Linear(4 + n, 5 + n) for n in range(4)))
            for number, p in enumerate(model.parameters()):
                nn.init.normal_(p, generator=torch.Generator().manual_seed(number))
            options: Any = {"before": "both"} if name == "muon" else {}
            optimizer = create(name, model, lr=0.1, compile=compile, **options)
            for step in range(3):
                for number, p in enumerate(model.parameters()):
                    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + number))
                optimizer.step()
            found.append([p.detach().clone() for p in model.parameters()])
        for p, q in zip(*found, strict=True):
            assert torch.equal(p, q), name
