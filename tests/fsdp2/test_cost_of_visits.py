"""What visits take: bytes on the wire, work, memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import everybit as eb
from everybit_torch import TorchOptimizer
from everybit_torch.collectives.communicator import Communicator
from everybit_torch.optim import stepping, visits
from everybit_torch.segments.steps import Steps
from tests.support.allocations import counting
from tests.support.ranks import run
from tests.support.rows import cut, in_parts, mesh_of, whole
from tests.support.weights import equal


def noting(groups: list[Communicator]) -> Callable[..., None]:
    made = Communicator.__init__

    def note(self: Communicator, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        groups.append(self)

    return note


WIRED: dict[str, Callable[[float], eb.Transform[Any]]] = {
    "muon": lambda lr: eb.muon(lr, others=None),
    "muon in float32": lambda lr: eb.muon(lr, others=None, iteration=eb.NewtonSchulz(arithmetic="float32")),
    "normuon": lambda lr: eb.normuon(lr, others=None),
    "soap": eb.soap,
    "adafactor": eb.torch_adafactor,
}


def wired(name: str, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that this rank sends in a second step."""
    model = nn.Linear(6, 8, bias=False, dtype=dtype)
    cut(model, [])
    policy = eb.policies.FP32 if dtype is torch.float32 else eb.policies.LEAN_BF16
    optimizer = TorchOptimizer(model.parameters(), WIRED[name], lr=1e-2, policy=policy, compile=False)
    groups: list[Communicator] = []
    with patch.object(Communicator, "__init__", noting(groups)):
        optimizer.place()
    (communicator,) = groups
    before = communicator.sent["all_to_all"]
    grad = torch.ones(8, 6, dtype=dtype)
    model.weight.grad = distribute_tensor(grad, model.weight.device_mesh, [Shard(0)])  # type: ignore[attr-defined]
    optimizer.step()
    return communicator.sent["all_to_all"] - before, communicator.sent["all_reduce"]


def test_the_costliest_matrices_find_their_owners_first() -> None:
    assert visits.shared_out([1, 1, 1, 1, 4], 2) == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WIRED)
def test_what_travels_is_counted(name: str, dtype: torch.dtype) -> None:
    """Whatever the transform: half of 48 weights and gradients out, half of the new weights back. 16 bytes say who has gradients."""
    first, second = run(2, wired, name, dtype)
    half = 24 * dtype.itemsize
    assert first == (half, 16)  # the owner
    assert second == (2 * half, 16)


def shared(shape: tuple[int, ...] | None) -> int:
    """How many of eight matrices this rank steps."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(8)))
    cut(model, [], mesh_of(shape))
    optimizer = TorchOptimizer(model.parameters(), eb.muon, lr=1e-2, others=None, compile=False)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        parameter.grad = in_parts(torch.ones(4, 4), parameter)
    with patch.object(Steps, "step", autospec=True, side_effect=Steps.step) as worked:
        optimizer.step()
    return worked.call_count


@pytest.mark.parametrize(
    ("size", "shape"),
    [
        (2, None),
        pytest.param(4, None, marks=pytest.mark.exhaustive),
        pytest.param(4, (2, 2), marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_share_the_work_and_so_do_replicas(size: int, shape: tuple[int, ...] | None) -> None:
    assert run(size, shared, shape) == [8 // size] * size


def allocated(name: str, elements: int) -> tuple[int, int]:
    """The most memory that a step of 24 matrices takes, and what is left of it, without a look for reference cycles."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(24)))
    cut(model, [])
    optimizer = TorchOptimizer(model.parameters(), WIRED[name], lr=1e-2, compile=False)
    found = (0, 0)
    gc.disable()
    try:
        with patch.object(visits, "ROUND", elements):
            optimizer.place()
        for _ in range(2):
            for parameter in model.parameters():
                assert isinstance(parameter, DTensor)
                parameter.grad = in_parts(torch.ones(64, 64), parameter)
            with counting() as counter:
                optimizer.step()
            found = counter.peak, counter.live
    finally:
        gc.enable()
    return found


@pytest.mark.parametrize("name", ["muon", "soap", "adafactor"])
@pytest.mark.sampled(3)
def test_the_memory_of_a_step_is_that_of_two_rounds(name: str) -> None:
    """Twelve rounds of a matrix for each owner, or one of 24. The communication's thread lets go of a round a moment later."""
    for (few, left), (many, _) in zip(run(2, allocated, name, 1), run(2, allocated, name, 1 << 22), strict=True):
        assert 3 * few < many
        assert left <= 3 * 2 * 3 * 64 * 64 * 4


def captured() -> None:
    model = nn.Linear(6, 8, bias=False)
    cut(model, [])
    optimizer = TorchOptimizer(model.parameters(), WIRED["muon"], lr=1e-2, compile=False)
    weight: Any = model.weight
    weight.grad = in_parts(torch.ones(8, 6), weight)
    before = whole(model)
    optimizer.place()
    with patch.object(stepping, "is_capturing", lambda: True), pytest.raises(RuntimeError, match="CUDA graph"):
        stepping.add_totals(optimizer.own, *stepping.find_gradients(optimizer.own))
    assert equal(whole(model), before)
    optimizer.step()
    assert not equal(whole(model), before)


def test_a_capture_is_refused_and_the_optimizer_goes_on() -> None:
    run(2, captured)
