"""Compiled steps are called without Dynamo where nothing can have changed, and through it everywhere else: always with eager's bits."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import AdamW, TorchOptimizer
from everybit_torch.compiled.dependencies import variables
from everybit_torch.compiled.direct_calls import DirectCalls
from tests.support.small_models import same_bits

LEAN, EXACT, FP32 = eb.policies.LEAN_BF16, eb.policies.EXACT_BF16, eb.policies.FP32


@pytest.fixture
def through_dynamo(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which calls of a compiled step, by number, Dynamo saw, which remembers nothing of other tests."""
    torch._dynamo.reset()
    seen: list[int] = []
    count = 0
    call = DirectCalls.__call__

    def counted(self: DirectCalls, *args: Any) -> None:
        nonlocal count
        inner: Callable[..., Any] = self._through_dynamo

        def noted(*args: Any) -> Any:
            seen.append(count)
            return inner(*args)

        self._through_dynamo = noted
        try:
            call(self, *args)
        finally:
            self._through_dynamo = inner
        count += 1

    monkeypatch.setattr(DirectCalls, "__call__", counted)
    return seen


def stepped(
    gradient: Callable[[int, nn.Parameter], Tensor],
    *,
    compile: bool,
    policy: eb.Policy = LEAN,
    factory: Callable[..., Any] = eb.adamw,
    **hyperparameters: Any,
) -> list[Tensor]:
    """Everything stored after five steps of a parameter."""
    generator = torch.Generator().manual_seed(7)
    dtype = torch.float32 if policy is FP32 else torch.bfloat16
    parameter = nn.Parameter(torch.randn(50, generator=generator).to(dtype))
    optimizer = TorchOptimizer([parameter], factory, lr=1e-2, policy=policy, compile=compile, **hyperparameters)
    for step in range(5):
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        parameter.grad = gradient(step, parameter)
        optimizer.step()
    return [parameter.detach(), *optimizer.state[parameter].values()]


def random_like(step: int, parameter: nn.Parameter) -> Tensor:
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)).to(parameter.dtype)


@pytest.mark.parametrize(
    "policy", [pytest.param(LEAN, id="LEAN", marks=pytest.mark.exhaustive), pytest.param(FP32, id="FP32")]
)
def test_from_the_second_step_on_dynamo_is_not_asked(policy: eb.Policy, through_dynamo: list[int]) -> None:
    direct = stepped(random_like, compile=True, policy=policy)
    assert through_dynamo == [0]
    assert same_bits(direct, stepped(random_like, compile=False, policy=policy))


@pytest.mark.parametrize("alone", [True], indirect=True)
@pytest.mark.slow
def test_parameters_of_all_lengths_are_called_directly_by_the_code_of_the_first(
    alone: bool, through_dynamo: list[int]
) -> None:
    found = []
    for compile in (False, True):
        parameters = [nn.Parameter(torch.full((size,), 1.0)) for size in (40, 1, 7, 2, 1000)]
        optimizer = AdamW(parameters, lr=1e-2, compile=compile)
        for step in range(2):
            for parameter in parameters:
                parameter.grad = random_like(step, parameter)
            optimizer.step()
        found.append([p.detach() for p in parameters])
    # The tensor of one element is no vector to the compiler.
    assert through_dynamo == [0, 1, 6]
    assert same_bits(*found)


def wider(step: int, parameter: nn.Parameter) -> Tensor:
    return random_like(step, parameter).float()


def every_second(step: int, parameter: nn.Parameter) -> Tensor:
    return random_like(step, parameter).repeat_interleave(2)[::2]


def with_a_graph(step: int, parameter: nn.Parameter) -> Tensor:
    return random_like(step, parameter).requires_grad_()


def the_weights(step: int, parameter: nn.Parameter) -> Tensor:
    return parameter.detach()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("alone", [True], indirect=True)
@pytest.mark.parametrize(
    "kind",
    [*(pytest.param(one, marks=pytest.mark.exhaustive) for one in (wider, the_weights)), every_second, with_a_graph],
)
@pytest.mark.sampled(2)
@pytest.mark.slow
def test_gradients_of_another_kind_go_through_dynamo(
    alone: bool, kind: Callable[[int, nn.Parameter], Tensor], through_dynamo: list[int]
) -> None:
    """Gradients in another dtype, with strides, that need gradients, or in the memory of the weights, at the third of five steps."""

    def gradient(step: int, parameter: nn.Parameter) -> Tensor:
        return kind(step, parameter) if step == 2 else random_like(step, parameter)

    if kind is wider:
        # The dtype of `.grad` has to be allowed.
        def gradient(step: int, parameter: nn.Parameter) -> Tensor:
            parameter.grad_dtype = None
            return kind(step, parameter) if step == 2 else random_like(step, parameter)

    found = stepped(gradient, compile=True, policy=EXACT, factory=eb.sgd)
    assert through_dynamo == [0, 2]
    assert same_bits(found, stepped(gradient, compile=False, policy=EXACT, factory=eb.sgd))


class Scaled:
    """A factory with something that may change."""

    def __init__(self) -> None:
        self.reversed = False

    def __call__(self, learning_rate: Any) -> eb.Transform[Any]:
        return eb.chain(eb.scale(-1.0 if self.reversed else 1.0), eb.sgd(learning_rate, momentum=0.9))


@pytest.mark.usefixtures("traced")
@pytest.mark.exhaustive
def test_what_may_change_besides_is_left_to_dynamo(through_dynamo: list[int]) -> None:
    """A function of the user's own may be given other numbers by its closure at any time, and compiled code follows it."""
    found = []
    for compile in (False, True):
        factory = Scaled()
        parameter = nn.Parameter(torch.ones(50))
        optimizer = TorchOptimizer([parameter], factory.__call__, lr=1e-2, compile=compile)
        for step in range(4):
            factory.reversed = step >= 2
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
            parameter.grad = random_like(step, parameter)
            optimizer.step()
        found.append([parameter.detach()])
    assert same_bits(*found)
    assert not through_dynamo, "no direct calls at all"


@pytest.mark.usefixtures("traced")
@pytest.mark.slow
def test_no_gradient_is_kept_alive(through_dynamo: list[int]) -> None:
    parameter = nn.Parameter(torch.ones(50))
    optimizer = AdamW([parameter], compile=True)
    for step in range(2):
        parameter.grad = random_like(step, parameter)
        held = weakref.ref(parameter.grad)
        optimizer.step()
        parameter.grad = None
        assert held() is None
    assert through_dynamo == [0]


LIMIT, BETAS = 1.0, [0.9]


def clipped(learning_rate: Any) -> eb.Transform[Any]:
    return eb.chain(eb.clip(LIMIT), eb.sgd(learning_rate))


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("changed", ["global", "cell", "global of a schedule"])
def test_a_function_of_the_users_is_called_directly_until_a_variable_of_it_changes(
    changed: str, through_dynamo: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for compile in (False, True):
        monkeypatch.setitem(globals(), "LIMIT", 1.0)
        decay = 0.0

        def factory(learning_rate: Any) -> eb.Transform[Any]:
            return eb.chain(clipped(learning_rate), eb.scale(1 - decay))  # noqa: B023  # the test changes it

        def gradient(step: int, parameter: nn.Parameter) -> Tensor:
            if step == 3:
                nonlocal decay
                decay = 0.5 if changed == "cell" else decay
                monkeypatch.setitem(globals(), "LIMIT", LIMIT if changed == "cell" else 0.01)
            return random_like(step, parameter)

        given: Any = {"factory": factory}
        if changed == "global of a schedule":
            given = {"factory": eb.sgd, "weight_decay": lambda step: LIMIT / (step + 1)}
        found.append(stepped(gradient, compile=compile, policy=FP32, **given))
    assert same_bits(*found)
    assert through_dynamo == [0], "three steps by direct calls, and none later"


def test_code_depends_on_what_functions_read() -> None:
    """A value is followed to variables, as long as each holds what cannot change in place."""

    class OwnFormat(eb.Nearest):
        pass

    def names(value: object) -> list[str] | None:
        found = variables(value)
        return None if found is None else [one.name for one in found]

    limit, several = 1.0, [1.0]
    assert names((eb.adamw, LEAN, {"nesterov": True, "betas": (1, 2.0)})) == []
    assert names(functools.partial(eb.adamw, b1=0.8)) == ["b1"]
    assert names(lambda rate: clipped(rate)) == ["clipped", "LIMIT", "eb"]
    assert names(lambda rate: eb.chain(eb.scale(max(limit, 1)), eb.sgd(rate))) == ["limit", "eb", "max"]
    assert names(lambda rate, mask=lambda path, p: p.ndim > 1: eb.adamw(rate, mask=mask)) == ["eb"]
    refused: list[object] = [
        stepped, Scaled(), Scaled().__call__, eb.Policy(momentum=OwnFormat("bfloat16")), {"options": object()},
        functools.partial(eb.adamw, mask=Scaled()), lambda rate: eb.sgd(rate, momentum=several[0]),
        lambda rate: eb.sgd(rate, momentum=BETAS[0]), lambda rate: eb.sgd(rate, momentum=float(input())),
        lambda rate: eb.sgd(rate * torch.ones(())), lambda rate: __import__("everybit").sgd(rate),
    ]  # fmt: skip
    assert [names(one) for one in refused] == [None] * len(refused)


def test_on_an_accelerator_code_for_whole_lines_is_called_directly_for_such_lengths_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its threads load several elements at a time, and would go beyond the end of another vector."""
    memory = itertools.count()
    monkeypatch.setattr(torch.UntypedStorage, "data_ptr", lambda _: next(memory))  # tensors on "meta" have none
    calls: list[tuple[str, int]] = []

    def code(length: int) -> None:
        calls.append(("directly", length))

    def through_dynamo(tensors: list[Tensor], *_: Any) -> None:
        calls.append(("through Dynamo", tensors[0].numel()))
        direct.note(code, [tensors[0].numel()])

    direct = DirectCalls(through_dynamo, lambda: None)
    for length in (32, 48, 33, 35, 64):
        tensor, grad = (torch.empty(length, device="meta") for _ in range(2))
        first, numbers = torch.empty((), dtype=torch.int64, device="meta"), torch.empty(1, device="meta")
        direct([tensor], [grad], eb.with_policy(eb.sgd(), FP32).init([tensor]), numbers, {}, first, [])
    assert calls == [
        ("through Dynamo", 32),
        ("directly", 48),
        ("through Dynamo", 33),
        ("directly", 35),
        ("directly", 64),
    ]
