"""Gradients of a long flat unit are stepped range by range, without a copy of all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import everybit as eb
from everybit_torch import AdamW, TorchOptimizer, gradients, stepping
from everybit_torch.gradients import MemberGradients
from everybit_torch.sharded.allocations import AllocationCounter
from tests.support.small_models import Awkward, give_gradients, same_bits, train

LEAN, KAHAN, FP32 = eb.policies.LEAN_BF16, eb.policies.KAHAN_BF16, eb.policies.FP32
FLOATS = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


def clipped(learning_rate: Any) -> eb.Transform[Any]:
    return eb.chain(eb.clip_by_global_norm(0.5), eb.adamw(learning_rate, b2=0.95, weight_decay=0.1))


@pytest.fixture
def short_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long means a few elements here."""
    monkeypatch.setattr(gradients, "GATHERED", 24)
    monkeypatch.setattr(gradients, "ALONE", 16)
    monkeypatch.setattr(stepping, "PIECE", 11)


@given(
    st.lists(st.tuples(st.integers(0, 9), FLOATS), min_size=1, max_size=8).filter(lambda s: any(n for n, _ in s)),
    st.data(),
)
def test_a_range_has_the_elements_of_all_gradients_one_after_the_other(
    kinds: list[tuple[int, torch.dtype]], data: st.DataObject
) -> None:
    """Against ``torch.cat``, which promotes dtypes as numbers need it; the gradients of every second parameter lie transposed."""
    grads: list[Tensor] = [torch.randn(3, n, dtype=torch.float32).to(dtype) for n, dtype in kinds]
    grads = [g.T.contiguous().T if i % 2 else g for i, g in enumerate(grads)]
    expected = torch.cat([g.reshape(-1) for g in grads])
    found = MemberGradients(grads)
    assert (found.numel(), found.dtype) == (expected.numel(), expected.dtype)
    for _ in range(4):
        start = data.draw(st.integers(0, expected.numel()))
        stop = data.draw(st.integers(start, expected.numel()))
        assert same_bits([found[start:stop]], [expected[start:stop]])
    # Squares of float32 numbers are exact in float64, and n of them are added up with an error of at most n halves of a last place.
    exact = math.fsum(expected.double().square().tolist())
    assert found.sum_of_squares().item() == pytest.approx(exact, rel=expected.numel() * 2.0**-53, abs=0.0)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=20).filter(any))
def test_long_gradients_are_ranges_of_their_own_and_short_ones_come_together(sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "GATHERED", 24)
        patch.setattr(gradients, "ALONE", 16)
        stops = list(MemberGradients([torch.ones(size) for size in sizes]).stops())
    starts = [0, *stops[:-1]]
    assert stops[-1] == sum(sizes)
    assert all(start < stop for start, stop in zip(starts, stops, strict=True))
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    alone = {(end - size, end) for size, end in zip(sizes, ends, strict=True) if size >= 16}
    ranges = set(zip(starts, stops, strict=True))
    assert alone <= ranges
    assert all(stop - start <= 24 for start, stop in ranges - alone)
    # As few as that allows: two neighbours that are not long would not fit together.
    short = sorted(ranges - alone)
    following = dict(short)
    for start, stop in short:
        if stop in following:
            (first_of_next,) = [size for size, end in zip(sizes, ends, strict=True) if size and end - size == stop]
            assert stop - start + first_of_next > 24


@pytest.mark.usefixtures("short_ranges")
@pytest.mark.parametrize("policy", [LEAN, KAHAN, FP32], ids=["LEAN", "KAHAN", "FP32"])
@pytest.mark.parametrize("factory", [eb.adamw, clipped], ids=["adamw", "clipped"])
def test_steps_by_ranges_give_the_bits_of_steps_on_a_buffer_of_gradients(factory: Any, policy: eb.Policy) -> None:
    dtype = torch.float32 if policy is FP32 else torch.bfloat16
    found = []
    for flat in (False, True):
        model = Awkward(dtype)
        optimizer = TorchOptimizer(
            model.parameters(), factory, lr=1e-2, policy=policy, flat_gradients=flat, compile=False, metrics=True
        )
        weights = train(model, optimizer, 4)
        state = [x for entries in optimizer.state.values() for x in entries.values()]
        found.append((weights + state, optimizer.metrics()))
    (ranges, measured), (buffer, expected) = found
    assert same_bits(ranges, buffer)
    # float64 sums in another order.
    for one, other in zip(eb.tree.leaves(measured), eb.tree.leaves(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0.0)


@pytest.mark.usefixtures("short_ranges")
def test_compiled_ranges_of_many_lengths_take_one_compilation_and_give_eagers_bits() -> None:
    from torch._dynamo.utils import counters

    found = []
    for compile in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model = Awkward(torch.bfloat16)
        optimizer = AdamW(model.parameters(), lr=1e-2, policy=eb.policies.EXACT_BF16, compile=compile)
        for step in range(3):
            give_gradients(model, step)
            optimizer.step()
        found.append([p.detach() for p in model.parameters()])
        assert counters["stats"]["unique_graphs"] == int(compile)
    assert same_bits(*found)


def test_a_step_makes_no_copy_of_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "GATHERED", 1 << 12)
    monkeypatch.setattr(stepping, "PIECE", 1 << 11)
    size = 1 << 16
    model = nn.ParameterList([nn.Parameter(torch.ones(size // 16)) for _ in range(16)])
    optimizer = AdamW(model.parameters(), compile=False)
    for _ in range(2):
        for p in model:
            p.grad = torch.ones_like(p)
        optimizer.step()
    with AllocationCounter(smallest=1) as counter:
        optimizer.step()
    # The temporaries of a piece, of which there are fewer than a dozen.
    assert counter.peak < 12 * (1 << 11) * 4 < size * 4
