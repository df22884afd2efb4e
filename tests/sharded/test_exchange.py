"""What the exchange of rows of updates takes: bytes on the wire, work, memory."""

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
from everybit.protocol import WholeWork
from everybit_torch import TorchOptimizer, create, exchange, routing
from everybit_torch.collectives.communicator import Communicator
from everybit_torch.exchange import distributed
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
    "muon in float32": lambda lr: eb.muon(lr, others=None, arithmetic="float32"),
    "normuon": lambda lr: eb.normuon(lr, others=None),
    "soap": eb.soap,
    "adafactor": eb.torch_adafactor,
}


def wired(name: str) -> tuple[int, int]:
    """Bytes that this rank sends in a step."""
    model = nn.Linear(6, 8, bias=False)
    cut(model, [])
    optimizer = TorchOptimizer(model.parameters(), WIRED[name], lr=1e-2, compile=False)
    model.weight.grad = distribute_tensor(torch.ones(8, 6), model.weight.device_mesh, [Shard(0)])  # type: ignore[attr-defined]
    groups: list[Communicator] = []
    with patch.object(Communicator, "__init__", noting(groups)):
        optimizer.step()
    (communicator,) = groups
    return communicator.sent["all_to_all"], communicator.sent["all_reduce"]


@pytest.mark.parametrize(
    ("name", "out", "back"),
    [
        # Half of 48 elements, in 16 bits and in 32.
        ("muon", 24 * 2, 24 * 2),
        ("muon in float32", 24 * 4, 24 * 4),
        # The input is rounded, and the result is scaled in float32; half of 8 numbers, one for each row.
        ("normuon", 24 * 2 + 4 * 4, 24 * 4 + 4 * 4),
        # Two means of the parameter's shape, and twice two factors, halves of all.
        ("soap", (3 * 24 + 2 * (32 + 18)) * 4, (3 * 24 + 2 * (32 + 18)) * 4),
        # Weights, which do not come back; half of 8 rows, and the only row of columns, which is the first rank's.
        ("adafactor", (2 * 24 + 4) * 4, (24 + 4) * 4),
    ],
)
def test_what_travels_is_counted(name: str, out: int, back: int) -> None:
    """On two ranks the first is the owner. 16 bytes say who has gradients."""
    first, second = run(2, wired, name)
    assert first == (back, 16)
    assert second == (out, 16)


def shared(shape: tuple[int, ...] | None) -> int:
    """How many of eight matrices this rank works on."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(8)))
    cut(model, [], mesh_of(shape))
    optimizer = TorchOptimizer(model.parameters(), eb.muon, lr=1e-2, others=None, compile=False)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        parameter.grad = in_parts(torch.ones(4, 4), parameter)
    with patch.object(WholeWork, "run", autospec=True, side_effect=WholeWork.run) as worked:
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


def allocated(name: str, at_least: int) -> tuple[int, int]:
    """The most memory that a step of 24 matrices takes, and what is left of it, without a look for reference cycles."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(24)))
    cut(model, [])
    optimizer = TorchOptimizer(model.parameters(), WIRED[name], lr=1e-2, compile=False)
    found = (0, 0)
    gc.disable()
    try:
        for _ in range(2):  # the first makes state
            for parameter in model.parameters():
                assert isinstance(parameter, DTensor)
                parameter.grad = in_parts(torch.ones(64, 64), parameter)
            with patch.object(exchange, "AT_LEAST", at_least), counting() as counter:
                optimizer.step()
            found = counter.peak, counter.live
    finally:
        gc.enable()
    return found


@pytest.mark.parametrize(("name", "matrices"), [("muon", 1), ("soap", 7), ("adafactor", 2)])
def test_the_memory_of_a_step_is_that_of_three_buckets(name: str, matrices: int) -> None:
    """Twelve buckets of two matrices with their state, or one of 24. The communication's thread lets go of a bucket a moment later."""
    for (few, left), (many, _) in zip(run(2, allocated, name, 1), run(2, allocated, name, 1 << 22), strict=True):
        assert 3 * few < many
        assert left <= 3 * 2 * matrices * 64 * 64 * 4


def captured() -> str:
    model = nn.Linear(6, 8, bias=False)
    cut(model, [])
    optimizer = create("muon", model, lr=1e-2, compile=False)
    weight: Any = model.weight
    weight.grad = in_parts(torch.ones(8, 6), weight)
    before = whole(model)
    with (
        patch.object(exchange, "is_capturing", lambda: True),
        pytest.raises(RuntimeError, match="a CUDA graph is being captured"),
    ):
        optimizer.step()
    assert equal(whole(model), before)
    optimizer.step()
    assert not equal(whole(model), before)
    return routing(optimizer)


def test_a_capture_is_refused_and_the_optimizer_goes_on() -> None:
    for found in run(2, captured):
        assert (
            found == "labels by types of modules, names and shapes\nmatrix: 1 parameter, 48 elements\n  weight (8, 6)"
        )


def test_work_is_distributed_evenly_and_in_order() -> None:
    loads = [3.0, 0.0]
    # 4 to the second, which has nothing; 2 to the first, which has 3; the other 2 to the second, which has 4; and 1 to the first.
    assert distributed([1.0, 4.0, 2.0, 2.0], loads) == [[0, 2], [1, 3]]
    assert loads == [6.0, 6.0]
