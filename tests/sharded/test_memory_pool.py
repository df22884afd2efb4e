"""Memory of units is lent and taken back: who holds a tensor keeps its storage, and the next unit has the memory."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import everybit as eb
from everybit.testing.examples import assert_same_bits
from everybit_torch.memory_pool import Account, MemoryPool, keeps_memory
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.torch_internals import tensors
from tests.support.allocations import counting
from tests.support.programs import weights_of
from tests.support.ranks import run

CPU = torch.device("cpu")
POOLED = keeps_memory(CPU)
needs_exchange = pytest.mark.skipif(not POOLED, reason="storages of this torch cannot be given other memory")


def test_every_torch_from_2_12_on_can_give_a_storage_other_memory() -> None:
    assert tensors.can_exchange_memory() is (torch.__version__ >= "2.12")


@needs_exchange
def test_a_view_has_no_memory_while_another_tensor_has_it_and_its_values_when_it_is_lent_memory_again() -> None:
    pool = MemoryPool(keeps=True)
    other = pool.empty(8, torch.float32, CPU)  # while something is lent, what comes back is kept
    first = pool.empty(64, torch.float32, CPU)
    view, address = first[3:].view(61), first.data_ptr()
    pool.take_back(first)
    assert view.untyped_storage().nbytes() == 0
    second = pool.empty(64, torch.float32, CPU)
    assert second.data_ptr() == address
    pool.take_back(second)
    pool.refill(first)
    first.copy_(torch.arange(64.0))
    assert view.data_ptr() == address + 12
    assert view.tolist() == torch.arange(3.0, 64.0).tolist()
    pool.take_back(first)
    pool.take_back(other)
    with counting(everything=True) as counter:
        pool.take_back(pool.empty(64, torch.float32, CPU))
        assert counter.peak == 256  # nothing was kept when nothing was lent
        assert counter.live == 0


sizes = st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.sampled_from([64, 128, 192, 1024])), max_size=60)


@given(sizes)
@settings(max_examples=200, deadline=None)
def test_a_pool_needs_no_more_than_was_lent_at_most_and_keeps_nothing_for_nobody(
    steps: list[tuple[bool, int, int]],
) -> None:
    account, lent, most = Account(keeps=True), [0] * 8, 0
    for lends, place, nbytes in steps:
        if lends and not lent[place]:
            account.lend(nbytes)
            lent[place] = nbytes
        elif not lends and lent[place]:
            account.take_back(lent[place])
            lent[place] = 0
        most = max(most, sum(lent)) if any(lent) else 0
        assert account.lent == sum(lent)
        assert sum(lent) <= account.nbytes <= most


@needs_exchange
@given(sizes)
@settings(max_examples=50, deadline=None)
def test_what_is_lent_is_shared_by_nobody_and_counted_as_the_account_has_it(steps: list[tuple[bool, int, int]]) -> None:
    with counting(everything=True) as counter:
        pool, account = MemoryPool(keeps=True), Account(keeps=True)
        lent: dict[int, Tensor] = {}
        for number, (lends, place, nbytes) in enumerate(steps):
            if lends and place not in lent:
                lent[place] = pool.empty(nbytes, torch.uint8, CPU).fill_(number)
                account.lend(nbytes)
            elif not lends and place in lent:
                x = lent.pop(place)
                account.take_back(x.numel())
                pool.take_back(x)
                del x
            values = {place: int(x[0]) for place, x in lent.items()}
            assert all(bool((x == values[place]).all()) for place, x in lent.items())
            assert len(set(values.values())) == len(values)
            assert counter.live == account.nbytes


@needs_exchange
def test_a_tensor_that_is_dropped_takes_its_memory_with_it_and_the_pool_does_not_wait_for_it() -> None:
    with counting(everything=True) as counter:
        pool = MemoryPool(keeps=True)
        lost, first, second = (pool.empty(256, torch.float32, CPU) for _ in range(3))
        pool.take_back(first)
        assert counter.live == 3 * 1024
        del lost
        gc.collect()
        pool.take_back(second)
        assert counter.live == 0


class Deep(nn.Module):
    """Units of one size between two layers."""

    def __init__(self, units: int = 6) -> None:
        super().__init__()
        self.entry = nn.Linear(8, 16)
        self.units = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(units))
        self.exit = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for unit in self.units:
            x = x + unit(x)
        out: Tensor = self.exit(x)
        return out


def trained(strategy: Any, reduce: Any, units: int, *, pooled: bool) -> tuple[int, dict[str, Tensor]]:
    """How often memory was allocated for a storage in a microbatch at most, and the weights after two steps."""
    torch.manual_seed(0)
    model = Deep(units)
    policy = eb.Policy(params=eb.Nearest("float32"), grads=eb.Grads(main="float32", comm="bfloat16", reduce=reduce))
    with mock.patch.object(tensors, "can_exchange_memory", return_value=pooled and POOLED):
        stepper = FlatStepper(model, eb.adamw(1e-2), strategy=strategy, units=[nn.Sequential], policy=policy)
    allocated: list[int] = []
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        allocated[-1] += size > 0
        return resize(storage, size)

    with mock.patch.object(torch.UntypedStorage, "resize_", resized):
        for step in range(2):
            for number in range(2):
                allocated.append(0)
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + number))
                with stepper.microbatch(last=number == 1):
                    model(x).square().mean().backward()
            stepper.step()
    return max(allocated[2:]), dict(weights_of(stepper))


def both_ways(strategy: Any) -> list[tuple[int, int, int]]:
    """How often memory is allocated with six units and with ten, and with ten where storages are resized; the weights are the same."""
    found = []
    for reduce in ("native", "fp32"):
        few, _ = trained(strategy, reduce, 6, pooled=True)
        many, weights = trained(strategy, reduce, 10, pooled=True)
        resized, expected = trained(strategy, reduce, 10, pooled=False)
        assert_same_bits(weights, expected, "pooled, against resized")
        found.append((few, many, resized))
    return found


@pytest.mark.parametrize("strategy", ["optim_grads"])
def test_memory_is_allocated_for_the_units_that_are_there_at_once_and_not_for_each(strategy: Any) -> None:
    """With the bits of a run whose memory is freed and allocated for each unit, in both passes."""
    for found in run(2, both_ways, strategy):
        for few, many, _ in found:
            if POOLED:
                assert few == many <= 12
