"""What a review found by fuzzing layouts, copies and refused steps: each case as it was found."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import SGD, AdamW, TorchOptimizer

# -- counts of units that are joined again ------------------------------------------------------------------------------------------------


def cut(*, refused: bool) -> tuple[list[float], list[Tensor]]:
    """Counts of two parameters, of which one alone was stepped first, and their weights; with a step between that is refused."""
    a, b = (nn.Parameter(torch.ones(64)) for _ in range(2))
    b.grad_dtype = None
    optimizer = AdamW([a, b], lr=1e-2, compile=False)
    gradient = torch.full((64,), 0.5)
    a.grad, b.grad = gradient, None
    optimizer.step()
    if refused:
        a.grad, b.grad = None, gradient.double()
        with pytest.raises(TypeError, match="float64"):
            optimizer.step()
    for _ in range(2):
        a.grad, b.grad = gradient, gradient
        optimizer.step()
    return [float(optimizer.state[p]["step"]) for p in (a, b)], [a.detach(), b.detach()]


def test_a_step_that_is_refused_is_not_counted() -> None:
    (counts, weights), (expected, others) = cut(refused=True), cut(refused=False)
    assert counts == expected == [3.0, 2.0]
    assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))


# -- chains that reduce, under formats without a sign -------------------------------------------------------------------------------------


INNER: dict[str, Callable[[], Any]] = {
    "adamw": lambda: eb.adamw(1e-2),
    "soap": lambda: eb.soap(1e-2),
    "shampoo": lambda: eb.shampoo(1e-2),
    "adafactor": lambda: eb.adafactor(1e-2),
    "nested": lambda: eb.chain(eb.scale_by_adam(), eb.chain(eb.add_decayed_weights(0.1), eb.scale(-1e-2))),
}


def clipped(inner: Callable[[], Any]) -> Any:
    return eb.chain(eb.clip_by_global_norm(1e9), inner())


# Factors in 4 bits are refused.
CASES = [
    (i, p) for i in INNER for p in ("LEAN_8BIT", "FLOOR_8BIT", "LEAN_4BIT") if (i, p) != ("adafactor", "LEAN_4BIT")
]


@pytest.mark.parametrize(("inner", "policy"), CASES)
@pytest.mark.parametrize("shape", ["contiguous", "transposed", "channels last"])
@pytest.mark.sampled(3)
def test_a_clip_that_clips_nothing_changes_no_bit(inner: str, policy: Any, shape: str) -> None:
    def stepped(make: Callable[[], Any]) -> Tensor:
        torch.manual_seed(0)
        p = {
            "contiguous": lambda: nn.Parameter(torch.randn(16, 32).bfloat16()),
            "transposed": lambda: nn.Parameter(torch.randn(32, 16).bfloat16().t()),
            "channels last": lambda: nn.Parameter(
                torch.randn(8, 3, 3, 3).bfloat16().to(memory_format=torch.channels_last)
            ),
        }[shape]()
        optimizer = TorchOptimizer([p], make, policy=policy, compile=False)
        for step in range(3):
            p.grad = torch.full_like(p, 0.5 + step)
            optimizer.step()
        return p.detach()

    expected = stepped(INNER[inner])
    # A total of 1 is multiplied by; momentum draws at the same addresses.
    assert torch.equal(stepped(lambda: clipped(INNER[inner])), expected)


# -- copies -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alone", [False, True], indirect=True)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_whose_parameter_takes_the_originals_memory_steps_it(how: str, alone: bool) -> None:
    p = nn.Parameter(torch.zeros(256))
    optimizer = SGD([p], lr=1.0, compile=False)
    p.grad = torch.ones(256)
    optimizer.step()
    pair = (p, optimizer)
    q, other = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    q.data = p.data
    for _ in range(3):
        q.grad = torch.ones(256)
        other.step()
    assert q.tolist() == [-4.0] * 256
    # A flat buffer takes the parameter in; one that stays where it is shares the memory.
    assert p.tolist() == [-4.0] * 256


# -- inside of a user's compiled function -------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_first_step_inside_of_a_users_compiled_function() -> None:
    p, q = (nn.Parameter(torch.ones(64)) for _ in range(2))
    optimizer, other = AdamW([p], lr=1e-2, compile=True), AdamW([q], lr=1e-2, compile=False)
    compiled = torch.compile(lambda: optimizer.step())
    for _ in range(3):
        p.grad = q.grad = torch.full((64,), 0.5)
        compiled()
        other.step()
    assert torch.equal(p, q)
    assert float(optimizer.state[p]["step"]) == 3.0


# -- padding ------------------------------------------------------------------------------------------------------------------------------
