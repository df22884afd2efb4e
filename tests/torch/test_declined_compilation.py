"""A compiler that declines to compile, in whatever way: a step happens once, with the bits of an uncompiled one, and says so."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import everybit as eb
from everybit_torch import SGD, AdamW, TorchOptimizer
from everybit_torch.compiled.fused_sums import FusedSums
from everybit_torch.segments import steps
from tests.support.small_models import Awkward, same_bits, train

dynamo: Any = torch._dynamo


class Passing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Let every operation pass, as modes do that count or log."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


DECLINES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "switched off": lambda: dynamo.config.patch(disable=True),
    "counting operations": lambda: FlopCounterMode(display=False),
    "in a dispatch mode": Passing,
    "eager by a stance": lambda: torch.compiler.set_stance("force_eager"),
    "errors are suppressed": lambda: dynamo.config.patch(suppress_errors=True, recompile_limit=0),
}


def adamw(model: Awkward, **options: Any) -> TorchOptimizer:
    return AdamW(model.parameters(), lr=1e-2, **options)


def clipped(model: Awkward, **options: Any) -> TorchOptimizer:
    """A transform that reduces: its partial results are compiled as well."""
    return TorchOptimizer(
        model.parameters(),
        lambda learning_rate: eb.chain(eb.clip_by_global_norm(0.1), eb.adamw(learning_rate)),
        lr=1e-2,
        **options,
    )


def counts(optimizer: TorchOptimizer) -> list[int]:
    return [int(value) for state in optimizer.state.values() for name, value in state.items() if name == "step"]


def trained(
    make: Callable[..., TorchOptimizer], inside: Callable[[], AbstractContextManager[Any]], when: int, **options: Any
) -> tuple[list[Tensor], TorchOptimizer]:
    """Weights and state after three steps, of which number ``when`` is taken inside a context."""
    model = Awkward()
    optimizer = make(model, **options)
    for step in range(3):
        with inside() if step == when else nullcontext():
            train(model, optimizer, 1, start=step)
    state = [value for entries in optimizer.state.values() for value in entries.values()]
    return [*(p.detach() for p in model.parameters()), *state], optimizer


@pytest.mark.parametrize(
    ("make", "when"),
    [
        pytest.param(adamw, 0, marks=pytest.mark.exhaustive),
        pytest.param(adamw, 1, marks=pytest.mark.exhaustive),
        pytest.param(clipped, 0, marks=pytest.mark.exhaustive),
        (clipped, 1),
    ],
)
@pytest.mark.parametrize("name", DECLINES)
@pytest.mark.sampled(5)
@pytest.mark.slow
def test_a_step_happens_once_however_the_compiler_declines(
    name: str, make: Callable[..., TorchOptimizer], when: int
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found, optimizer = trained(make, DECLINES[name], when, compile=True)
    expected, uncompiled = trained(make, nullcontext, 0, compile=False)
    assert counts(optimizer) == counts(uncompiled)
    assert set(counts(optimizer)) == {3}
    assert same_bits(found, expected)


@pytest.mark.slow
def test_it_is_compiled_again_when_the_compiler_is_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode for one step does not leave the rest of a run uncompiled."""
    compiled: list[Any] = []
    model = Awkward()
    optimizer = SGD(model.parameters(), lr=1e-2, compile=True)
    with FlopCounterMode(display=False), pytest.warns(UserWarning, match="compile: got True, but"):
        train(model, optimizer, 1)
    from torch._inductor import compile_fx

    before = compile_fx.compile_fx

    def note(*args: Any, **options: Any) -> Any:
        compiled.append(1)
        return before(*args, **options)

    monkeypatch.setattr(compile_fx, "compile_fx", note)
    train(model, optimizer, 2, start=1)
    assert compiled


def test_a_compiler_that_is_switched_off_is_tried_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    before = torch.compile

    def note(*args: Any, **options: Any) -> Any:
        tried.append(1)
        return before(*args, **options)

    monkeypatch.setattr(torch, "compile", note)
    model = Awkward()
    optimizer = SGD(model.parameters(), lr=1e-2, compile=True)
    with dynamo.config.patch(disable=True), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        train(model, optimizer, 30)
    assert len(tried) <= 6  # at steps 1, 2, 5 and 12 and 27


@pytest.mark.parametrize(("compile", "got"), [(True, "got True"), ("auto", "got 'auto'")])
def test_the_warning_says_what_was_given_and_points_at_the_users_line(
    compile: Any, got: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "WORTH_COMPILING", 1)
    model = Awkward()
    optimizer = AdamW(model.parameters(), lr=1e-2, compile=compile)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with dynamo.config.patch(disable=True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.step()
    (told,) = caught
    assert str(told.message).startswith(f"param group 0: compile: {got}, but its step runs uncompiled")
    assert "torch.compile is switched off" in str(told.message)
    assert told.filename == __file__


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_environments_switch_is_such_a_case() -> None:
    program = (
        "import torch; from everybit_torch import SGD\n"
        "p = torch.nn.Parameter(torch.zeros(300_000)); p.grad = torch.ones(300_000)\n"
        "SGD([p], lr=1.0).step(); print(p.detach().unique().tolist())"
    )
    environment = {**os.environ, "TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == "[-1.0]", done.stderr


@pytest.mark.parametrize("name", DECLINES)
def test_a_sum_of_gradients_happens_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sums that were not done the caller is told, and does them."""
    sums = FusedSums(torch.device("cpu"))
    monkeypatch.setattr(sums, "_usable", True)  # what it is on an accelerator
    main, parts = torch.full((50,), 7.0), torch.ones(3, 50, dtype=torch.bfloat16)
    with DECLINES[name](), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        done = sums(main, parts, adds=True, by=None, scale=1.0)
    assert torch.equal(main, torch.full((50,), 10.0 if done else 7.0))
