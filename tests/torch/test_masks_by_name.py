"""Masks, labels of partitions and labels of policies see one name for a parameter, in every front end and at every step."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import FlatStepper, TorchOptimizer, enable_gradient_release

FP32 = eb.policies.FP32
Seen = list[str]


class Small(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4, dtype=dtype)
        self.second = nn.Linear(4, 2, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).tanh())
        return out


def is_weight(path: str, parameter: Tensor) -> bool:
    return path.endswith("weight']")


def kind(path: str, parameter: Tensor) -> str:
    return "matrix" if is_weight(path, parameter) else "vector"


def masked(lr: float = 0.1, momentum: float = 0.9) -> eb.Transform[Any]:
    return eb.chain(
        eb.trace(momentum), eb.masked(eb.add_decayed_weights(0.5), where=is_weight), eb.scale_by_learning_rate(lr)
    )


def partitioned(lr: float = 0.1, momentum: float = 0.9) -> eb.Transform[Any]:
    parts: dict[str, eb.Transform[Any]] = {
        "matrix": eb.chain(eb.scale_by_adam(), eb.scale(0.5)),
        "vector": eb.trace(momentum),
    }
    return eb.chain(eb.partition(parts, kind), eb.scale_by_learning_rate(lr))


def clipped(lr: float = 0.1, momentum: float = 0.9) -> eb.Transform[Any]:
    return eb.chain(eb.clip_by_global_norm(0.05), masked(lr, momentum))


def partly_clipped(lr: float = 0.1, momentum: float = 0.9) -> eb.Transform[Any]:
    return eb.chain(eb.masked(eb.clip_by_global_norm(0.05), where=is_weight), partitioned(lr, momentum))


FACTORIES: dict[str, Callable[..., eb.Transform[Any]]] = {
    "masked": masked, "partitioned": partitioned, "clipped": clipped, "partly clipped": partly_clipped,
}  # fmt: skip


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=generator).to(p.dtype) for name, p in model.named_parameters()}


def pure(factory: Callable[..., eb.Transform[Any]], policy: Any, model: nn.Module, steps: int) -> dict[str, Tensor]:
    optimizer = eb.with_policy(factory(), policy)
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = optimizer.init(params)
    for step in range(steps):
        params, state = optimizer.step(params, gradients(model, step), state)
    return params


@pytest.mark.parametrize("alone", [False, True], indirect=True)
@pytest.mark.parametrize("name", list(FACTORIES))
def test_the_optimizer_steps_as_the_pure_function_and_the_stepper_do(name: str, alone: bool) -> None:
    model = Small()
    expected = pure(FACTORIES[name], FP32, model, 3)
    optimizer = TorchOptimizer(model.named_parameters(), FACTORIES[name], lr=0.1)
    stepped = Small()
    stepper = FlatStepper(stepped, FACTORIES[name](), policy=FP32)
    for step in range(3):
        found = gradients(model, step)
        for key, parameter in model.named_parameters():
            parameter.grad = found[key]
        optimizer.step()
        with stepper.microbatch(last=True):
            loss = torch.zeros(())
            for key, parameter in stepped.named_parameters():
                loss = loss + (parameter * found[key]).sum()
            loss.backward()  # type: ignore[no-untyped-call]
        stepper.step()
    other = dict(stepped.named_parameters())
    for key, parameter in model.named_parameters():
        if "clipped" in name:  # the norm of a tree is added up leaf by leaf, that of a buffer in one
            torch.testing.assert_close(parameter.detach(), expected[key], rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(other[key].detach(), expected[key], rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(parameter, expected[key]), key
            assert torch.equal(other[key], expected[key]), key
    stepper.close()


def test_a_function_is_asked_once_of_whole_parameters_with_one_name() -> None:
    model = Small(torch.bfloat16)
    seen: list[tuple[str, torch.Size]] = []

    def where(path: str, parameter: Tensor) -> bool:
        seen.append((path, parameter.shape))
        return True

    def factory(lr: float) -> eb.Transform[Any]:
        return eb.chain(eb.masked(eb.add_decayed_weights(0.1), where=where), eb.scale_by_learning_rate(lr))

    def labels(path: str, parameter: Tensor) -> str:
        seen.append((path, parameter.shape))
        return "one"

    policy = eb.by_label(labels, {"one": eb.policies.LEAN_BF16})
    expected = {(f"['{name}']", p.shape) for name, p in model.named_parameters()}
    optimizer = TorchOptimizer(model.named_parameters(), factory, lr=0.1, policy=policy)
    for step in range(2):
        for name, parameter in model.named_parameters():
            parameter.grad = gradients(model, step)[name]
        optimizer.step()
    assert set(seen) == expected
    asked = len(seen)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.step()
    assert len(seen) == asked  # placed parameters are not asked again
    seen.clear()
    unnamed = TorchOptimizer(list(model.parameters()), factory, lr=0.1, policy=policy)
    unnamed.step()
    assert {path for path, _ in seen} == {"[0]", "[1]", "[2]", "[3]"}


def test_parameters_that_are_treated_alike_are_stepped_together() -> None:
    model = Small()
    optimizer = TorchOptimizer(model.named_parameters(), masked, lr=0.1)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients(model, 0)[name]
    optimizer.step()
    assert "4 parameters, 4 of them in 2 vectors" in repr(optimizer)
    every = TorchOptimizer(
        model.named_parameters(), lambda lr: eb.chain(eb.masked(eb.trace(0.9), where=lambda path, p: True)), lr=0.1
    )
    every.step()
    assert "4 parameters, 4 of them in 1 vectors" in repr(every)


def test_policies_by_name_store_what_they_say() -> None:
    model = Small(torch.bfloat16)
    policy = eb.by_label(kind, {"matrix": eb.policies.LEAN_BF16, "vector": eb.policies.EXACT_BF16})
    optimizer = TorchOptimizer(model.named_parameters(), eb.adamw, lr=1e-2, policy=policy)
    expected = pure(lambda: eb.adamw(1e-2), policy, model, 2)
    for step in range(2):
        for name, parameter in model.named_parameters():
            parameter.grad = gradients(model, step)[name]
        optimizer.step()
    for name, parameter in model.named_parameters():
        low = torch.bfloat16 if is_weight(f"['{name}']", parameter) else torch.float32
        assert optimizer.state[parameter]["momentum"].dtype is low
        if low is torch.float32:  # what is drawn depends on an element's number, which a tree counts leaf by leaf
            assert torch.equal(parameter, expected[name])
    weights = optimizer.export_fp32()[0]
    assert all(one.dtype is torch.float32 for one in weights)


def test_it_survives_copies_checkpoints_missing_gradients_and_release() -> None:
    for factory in (masked, partitioned):
        model = Small()
        optimizer = TorchOptimizer(model.named_parameters(), factory, lr=0.1)
        for step in range(4):
            for name, parameter in model.named_parameters():
                parameter.grad = None if step == 1 and name == "first.weight" else gradients(model, step)[name]
            optimizer.step()
        pair = copy.deepcopy((model, optimizer))
        again = pickle.loads(pickle.dumps((model, optimizer)))
        fresh_model = copy.deepcopy(model)
        fresh = TorchOptimizer(fresh_model.named_parameters(), factory, lr=0.1)
        fresh.load_state_dict(optimizer.state_dict())
        for one, own in ((model, optimizer), pair, again, (fresh_model, fresh)):
            for name, parameter in one.named_parameters():
                parameter.grad = gradients(one, 9)[name]
            own.step()
        for other in (pair[0], again[0], fresh_model):
            assert all(map(torch.equal, model.parameters(), other.parameters()))
        released, plain = Small(), Small()
        releasing = TorchOptimizer(released.named_parameters(), factory, lr=0.1)
        enable_gradient_release(released, releasing)
        usual = TorchOptimizer(plain.named_parameters(), factory, lr=0.1)
        for step in range(2):
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
            released(x).square().sum().backward()
            releasing.step()
            usual.zero_grad()
            plain(x).square().sum().backward()
            usual.step()
        assert all(map(torch.equal, released.parameters(), plain.parameters()))


def test_trees_of_masks_go_by_name_too() -> None:
    model = Small()
    mask = {"second.weight": False, "first.weight": True, "first.bias": False, "second.bias": False}

    def factory(lr: float) -> eb.Transform[Any]:
        return eb.chain(eb.masked(eb.set_to_zero(), mask), eb.scale_by_learning_rate(lr))

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = TorchOptimizer(model.named_parameters(), factory, lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == mask[name]


def no_bool(path: str, parameter: Tensor) -> Any:
    return 1


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda lr: eb.chain(eb.partition({"a": eb.trace(0.9)}, lambda path, p: "b")), r"labelled 'b', for which there is no transform"),
        (lambda lr: eb.chain(eb.masked(eb.trace(0.9), where=no_bool)), r"accepted are True and False"),
        (
            lambda lr: eb.chain(eb.masked(eb.trace(0.9), where=lambda path, p: "wieght" in path)),
            r"^masked: the mask selects none of the 4 parameters, \['first\.weight'\], .*Drop the transform, or mend the mask\.$",
        ),
        (lambda lr: eb.chain(eb.masked(eb.trace(0.9), {"first.weight": True})), r"not a prefix of the parameters' tree"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_moves(factory: Any, message: str) -> None:
    model = Small()
    addresses = [p.data_ptr() for p in model.parameters()]
    optimizer = TorchOptimizer(model.named_parameters(), factory, lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer.step()
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_a_mask_may_select_nothing_of_a_param_group_and_has_to_select_something() -> None:
    model = Small()

    def factory(lr: float) -> Any:
        return eb.chain(eb.masked(eb.trace(0.9), where=is_weight), eb.scale_by_learning_rate(lr))

    groups = [
        {"params": [(name, p) for name, p in model.named_parameters() if ("weight" in name) == weights]}
        for weights in (True, False)
    ]
    for one in (TorchOptimizer(groups, factory, lr=0.1), TorchOptimizer(groups[:1], factory, lr=0.1)):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        one.step()
    with pytest.raises(ValueError, match=r"^masked: the mask selects none of the 2 parameters, \['first\.bias'\]"):
        TorchOptimizer(groups[1:], factory, lr=0.1).step()
    with pytest.raises(ValueError, match=r"^masked: the mask selects none of the 4 parameters"):
        FlatStepper(
            Small(), eb.chain(eb.masked(eb.trace(0.9), where=lambda path, p: False), eb.scale_by_learning_rate(0.1))
        )


def test_a_label_without_a_policy_is_refused_by_name() -> None:
    policy = eb.by_label(lambda path, p: "c" if "bias" in path else "a", {"a": FP32})
    with pytest.raises(ValueError, match=r"params\['first\.bias'\]: labelled 'c', for which by_label has no policy"):
        TorchOptimizer(Small().named_parameters(), eb.adamw, lr=1e-3, policy=policy)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["masked", "clipped"])
def test_compiled_steps_are_the_same_and_are_not_compiled_again(name: str, recwarn: pytest.WarningsRecorder) -> None:
    torch._dynamo.reset()
    policy = eb.by_label(kind, {"matrix": FP32, "vector": eb.Policy(momentum=eb.Nearest("bfloat16"))})
    models = [Small(), Small()]
    optimizers = [
        TorchOptimizer(model.named_parameters(), FACTORIES[name], lr=0.1, policy=policy, compile=compile)
        for model, compile in zip(models, (False, True), strict=True)
    ]
    graphs = []
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            found = gradients(model, step)
            for key, parameter in model.named_parameters():
                parameter.grad = found[key]
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            optimizer.step()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
    assert graphs[0] == graphs[2] > 0
    assert [str(one.message) for one in recwarn if "uncompiled" in str(one.message)] == []


@dataclass(frozen=True)
class FromRankOn:
    least: float

    def __call__(self, path: str, parameter: Tensor) -> bool:
        return parameter.ndim >= self.least


def by_function(lr: float, least: float) -> Any:
    return eb.adamw(lr, weight_decay=0.5, mask=lambda path, p: p.ndim >= least)


def by_object(lr: float, least: float) -> Any:
    return eb.adamw(lr, weight_decay=0.5, mask=FromRankOn(least))


def stepped(optimizer: TorchOptimizer) -> TorchOptimizer:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("factory", [by_function, by_object])
def test_hyperparameters_that_change_a_mask_are_refused_and_others_go_on(factory: Any) -> None:
    model = Small()
    optimizer = stepped(TorchOptimizer(model.named_parameters(), factory, lr=0.1, least=2))
    (group,) = optimizer.param_groups
    other = TorchOptimizer(Small().named_parameters(), factory, lr=0.1, least=1)
    with pytest.raises(ValueError, match=r"param group 0, parameter 1: masks .* as \(True,\) .* as \(False,\)"):
        stepped(other).load_state_dict(optimizer.state_dict())
    before = [p.detach().clone() for p in model.parameters()]
    group["least"] = 1
    with pytest.raises(ValueError, match=r"param group 0, parameter 1: masks .* as \(False,\) .* as \(True,\)"):
        stepped(optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    group |= {"least": 1.5, "lr": 0.2}  # which selects the same
    assert stepped(optimizer).state_dict()["state"][0]["step"] == 2
