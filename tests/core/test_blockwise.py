"""Blockwise formats: levels, bounds of one encode, expectations, what no input may do, and what goes wrong elsewhere."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import everybit as eb
from everybit.formats import Rounding, block_maps
from everybit.formats.block_maps import MAP_NAMES, Bits, MapName
from everybit.testing import check_format

KINDS: tuple[eb.SlotKind, ...] = ("signed", "non-negative")
SCALES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
BITS: tuple[Bits, ...] = (8, 4)
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic")
FORMATS = [
    eb.Blockwise(name, bits, 32, rounding, kind=kind)
    for name, bits, rounding, kind in itertools.product(MAP_NAMES, BITS, ROUNDINGS, KINDS)
    if name != "expanded"  # whose levels depend on the block: test_expansion.py
]
NEAREST = [one for one in FORMATS if one.rounding == "nearest"]
STOCHASTIC = [one for one in FORMATS if one.rounding == "stochastic"]
IDS = {id(one): f"{one.map}-{one.bits}-{one.kind}" for one in FORMATS}


def named(formats: list[eb.Blockwise]) -> list[Any]:
    return [pytest.param(one, id=IDS[id(one)]) for one in formats]


def key(step: int = 1) -> eb.Key:
    return eb.Key(7, torch.tensor(step), 11)


def kept(format: eb.Blockwise, x: Tensor, step: int = 1) -> Tensor:
    return format.decode(format.encode(x, key(step)), x.shape, "float32")


def scales(format: eb.Blockwise, x: Tensor) -> Tensor:
    """The scale of each element, float64."""
    scale = format.encode(x, key())[1].double()
    return scale.repeat_interleave(format.block)[: x.numel()]


@pytest.mark.parametrize("format", named(NEAREST))
@pytest.mark.sampled(3)
def test_levels_rise_to_one_and_every_level_is_kept_as_it_is(format: eb.Blockwise) -> None:
    levels = format.levels()
    assert bool((levels.diff() > 0).all())
    assert levels[-1] == 1.0
    expected = {8: {"signed": (255, 256), "non-negative": (256,)}, 4: {"signed": (15, 16), "non-negative": (16,)}}
    few = format.map == "float" and format.bits == 8 and format.kind == "signed"  # e4m3 without its two NaNs
    assert len(levels) == 253 if few else len(levels) in expected[format.bits][format.kind]
    for rounding in ROUNDINGS:
        one = eb.Blockwise(format.map, format.bits, 32, rounding, kind=format.kind)
        for level in levels.tolist():
            if level == 0.0 and format.kind == "non-negative":
                continue
            block = torch.zeros(32)
            block[0], block[1] = 1.0, level
            assert kept(one, block)[1].item() == level


@pytest.mark.parametrize("format", named(NEAREST))
def test_nearest_is_nearest_between_every_two_levels(format: eb.Blockwise) -> None:
    """Exhaustive: just below and just above the middle of each two levels, in float64."""
    levels = format.levels()
    low, high = levels[:-1], levels[1:]
    middle = (low.double() + high.double()) / 2
    distance = (high - low).double()
    for side, expected in ((-1e-3, low), (1e-3, high)):
        x = (middle + side * distance).float()
        rows = torch.zeros(len(x), 32)
        rows[:, 0], rows[:, 1] = 1.0, x
        got = kept(format, rows.view(-1)).view(-1, 32)[:, 1]
        if format.kind == "non-negative":  # nothing above zero becomes zero
            expected = torch.where(expected == 0, levels[levels > 0][0], expected)
        assert torch.equal(got, expected)


def test_the_middle_of_two_levels_goes_to_the_even_one() -> None:
    """In a map of powers of two, whose middles are float32 numbers: levels are 0 and 2**-6 to 1, at the indices 0 to 7."""
    format = eb.Blockwise("float", 4, 32, "nearest")
    levels = format.levels()[format.levels() >= 0]
    rows = torch.zeros(7, 32)
    rows[:, 0], rows[:, 1] = 1.0, (levels[:-1] + levels[1:]) / 2
    assert torch.equal(kept(format, rows.view(-1)).view(-1, 32)[:, 1], levels[[0, 2, 2, 4, 4, 6, 6]])


@pytest.mark.parametrize("format", named(FORMATS))
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1000), spread=st.floats(0.0, 20.0))
def test_an_encode_is_off_by_no_more_than_the_distance_of_two_levels(
    format: eb.Blockwise, seed: int, spread: float
) -> None:
    """Half of it to nearest. Products and quotients of float32 add 2**-22 of the number."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(100, generator=generator) * torch.exp(torch.randn(100, generator=generator) * spread / 4)
    x = x.square() if format.kind == "non-negative" else x
    y, unit, levels = kept(format, x).double(), scales(format, x), format.levels().double()
    ratio = x.double() / unit
    index = (torch.searchsorted(levels, ratio, right=True) - 1).clamp(0, len(levels) - 2)
    distance = (levels[index + 1] - levels[index]) * unit
    share = 0.5 if format.rounding == "nearest" else 1.0
    least = levels[levels > 0][0]
    raised = (format.kind == "non-negative") & (x > 0) & (ratio < least)  # to the least level above zero
    # The signed dynamic map has no -1: numbers below its least level go to it.
    bound = torch.where(ratio < levels[0], (levels[0] - ratio).abs() * unit, share * distance)
    bound = torch.where(raised, least * unit, bound)
    assert bool(((y - x.double()).abs() <= bound + 2.0**-22 * unit).all())


@pytest.mark.parametrize("format", named(STOCHASTIC))
def test_rounding_at_random_is_right_on_average(format: eb.Blockwise) -> None:
    """Of n draws of two neighbours at a distance d the mean is off by d / 2 / sqrt(n) on average: five times that, at most."""
    draws = 4000
    levels = format.levels()
    middle = len(levels) * 3 // 4
    low, high = levels[middle].item(), levels[middle + 1].item()
    for share in (0.1, 0.5, 0.95):
        x = low + share * (high - low)
        rows = torch.zeros(draws, 32)
        rows[:, 0], rows[:, 1] = 1.0, x
        got = kept(format, rows.view(-1)).view(-1, 32)[:, 1]
        assert set(got.tolist()) == {low, high}
        exact = rows[0, 1].double().item()
        assert got.double().mean().item() == pytest.approx(exact, abs=5 * (high - low) / 2 / math.sqrt(draws))


ADVERSARIAL = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 1e30, -1e30, 3.4e38, 1e-38, 1e-42, 1e-45, -1e-45, 1e-19, math.inf, -math.inf, math.nan]
) | st.floats(width=32, allow_nan=False)


@settings(max_examples=150, deadline=None)
@given(values=st.lists(ADVERSARIAL, min_size=0, max_size=100), which=st.integers(0, len(FORMATS) - 1))
def test_no_input_breaks_more_than_its_block(values: list[float], which: int) -> None:
    format = FORMATS[which]
    x = torch.tensor(values, dtype=torch.float32)
    x = x.abs() if format.kind == "non-negative" else x
    y = kept(format, x)
    for start in range(0, len(x), format.block):
        block, got = x[start : start + format.block], y[start : start + format.block]
        if not bool(block.isfinite().all()):
            assert bool(got.isnan().all())
            continue
        assert bool(got.isfinite().all())
        assert bool(((got == 0) | (got.sign() == block.sign()) | (block == 0)).all())
        if not bool(block.any()):
            assert not bool(got.any())
        if format.kind == "non-negative":
            assert bool((got[block > 0] > 0).all()), "a second moment above zero became zero"
        elif format.map != "dynamic" and bool(block.any()):
            assert got.abs().max() == block.abs().max()


@settings(max_examples=60, deadline=None)
@given(values=st.lists(ADVERSARIAL, min_size=1, max_size=70))
def test_scales_in_bfloat16_are_rounded_up(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    wide, narrow = (
        eb.Blockwise("linear", block=32, scale=scale).encode(x, key())[1] for scale in ("float32", "bfloat16")
    )
    largest = torch.finfo(torch.bfloat16).max
    for exact, rounded in zip(wide.tolist(), narrow.double().tolist(), strict=True):
        if math.isnan(exact):
            assert math.isnan(rounded)
        else:
            assert min(exact, largest) <= rounded <= max(exact * (1 + 2.0**-7), 2.0**-133)


@pytest.mark.parametrize("format", named(FORMATS))
def test_runs_of_blocks_are_encoded_as_the_whole_and_what_is_kept_is_kept_again(format: eb.Blockwise) -> None:
    x = torch.randn(167, generator=torch.Generator().manual_seed(3)) * torch.logspace(-9, 2, 167)
    x = x.square() if format.kind == "non-negative" else x
    codes, scale = format.encode(x, key())
    share = 2 if format.bits == 4 else 1
    for start, stop in ((0, 64), (64, 96), (96, 167)):
        part = eb.Key(7, torch.tensor(1), 11, first=start)
        run_codes, run_scale = format.encode(x[start:stop], part)
        assert torch.equal(run_codes, codes[start // share : -(-stop // share)])
        assert torch.equal(run_scale, scale[start // 32 : -(-stop // 32)])
    y = kept(format, x)
    again = kept(format, y, step=2)
    if format.map == "dynamic" and format.kind == "signed":
        # A scale is a quotient where a block's greatest number is negative, rounded again.
        torch.testing.assert_close(again, y, rtol=2.0**-22, atol=0.0)
    else:
        assert torch.equal(again, y)


def test_vmap_encodes_each_member_as_alone() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(5))
    for format in (eb.Blockwise("float", block=32, rounding="nearest"), eb.Blockwise("dynamic", 4, 32, "nearest")):
        got = torch.func.vmap(lambda row, format=format: kept(format, row))(x)
        assert torch.equal(got, torch.stack([kept(format, row) for row in x]))


@pytest.mark.exhaustive  # one compiled case of a policy is in tests/torch/test_blocks_of_elements.py
@pytest.mark.parametrize("format", named(FORMATS))
def test_compiled_code_gives_the_bits_of_eager_code(format: eb.Blockwise) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(3)) * torch.logspace(-12, 2, 4096)
    x = x.square() if format.kind == "non-negative" else x
    torch._dynamo.reset()
    step = torch.tensor(1)

    def both(x: Tensor, step: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        parts = format.encode(x, eb.Key(7, step, 11))
        return parts, format.decode(parts, x.shape, "float32")

    expected, got = both(x, step), torch.compile(both, fullgraph=True)(x, step)
    assert all(torch.equal(a, b) for a, b in zip((*expected[0], expected[1]), (*got[0], got[1]), strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("format", named([one for one in FORMATS if one.kind == "signed"]))
def test_formats_keep_what_every_format_promises(format: eb.Blockwise) -> None:
    check_format(format)


def test_slow_averages_to_nearest_are_refused_and_derivatives_too() -> None:
    nearest = eb.Policy(params=eb.Split(8), variance=eb.Blockwise("float", rounding="nearest"))
    with pytest.raises(ValueError, match=r"Policy.variance: got Blockwise.*it would stop moving"):
        eb.with_policy(eb.adamw(1e-3), nearest)
    with pytest.raises(RuntimeError, match="codes carry no derivative"):
        eb.Blockwise().encode(torch.ones(3, requires_grad=True), key())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"map": "log"}, "Blockwise.map: got 'log'; accepted are 'dynamic', 'linear'"),
        ({"bits": 6}, "Blockwise.bits: got 6; accepted are 8 and 4"),
        ({"block": 100}, "Blockwise.block: got 100; accepted are 32, 64"),
        ({"scale": "float16"}, "Blockwise.scale: got 'float16'; accepted are 'float32' and 'bfloat16'|Blockwise.scale: got 'float16'"),
    ],
)  # fmt: skip
def test_arguments_out_of_range_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eb.Blockwise(**arguments)


# -- what goes wrong elsewhere --------------------------------------------------------------------------------------------------------


def peers_unsigned(x: Tensor) -> Tensor:
    """The second moment as bitsandbytes' unsigned dynamic map keeps it, by its definition: the nearest level, zero among them."""
    levels = torch.tensor(block_maps.table(8, "non-negative"))
    middles = (levels[1:] + levels[:-1]) / 2
    scale = x.max()
    return levels[torch.bucketize(x / scale, middles)] * scale


def test_a_second_moment_that_peers_round_to_zero_stays_above_zero() -> None:
    """bitsandbytes issues 152, 227 and 262: 1e-7 of the block's greatest becomes 0, and the step is the momentum over eps."""
    variance = torch.full((256,), 1e-9)
    variance[0] = 1.0
    assert peers_unsigned(variance)[1] == 0.0
    for name in MAP_NAMES:
        for rounding in ROUNDINGS:
            assert bool((kept(eb.Blockwise(name, kind="non-negative", rounding=rounding), variance) > 0).all())


def test_scales_that_underflow_in_float16_do_not_here() -> None:
    """FlashOptim keeps the root of the block's greatest second moment in float16, with a floor of 1e-12, which float16 has not."""
    variance = torch.full((32,), 1e-17)
    assert variance.sqrt().max().clamp(min=1e-12).half() == 0.0
    for scale in SCALES:
        got = kept(eb.Blockwise("float", block=32, kind="non-negative", scale=scale), variance)
        assert bool(((got / variance - 1).abs() < 0.1).all())


def drift(format: eb.StateFormat, rate: float) -> float:
    """The mean of a slow average of ones under a format, over what it should be: after it had been at 1, gradients fall to 0.25."""
    resolved = format.for_slot("non-negative", "float32")
    x = torch.cat([torch.ones(255), torch.full((1,), 4.0)])
    parts = resolved.encode(x, key(0))
    for step in range(1, 401):
        value = resolved.decode(parts, x.shape, "float32")
        parts = resolved.encode(rate * value + (1 - rate) * torch.where(x == 4.0, 4.0, 0.25), key(step))
    exact = 0.25 + 0.75 * rate**400
    return resolved.decode(parts, x.shape, "float32")[:-1].double().mean().item() / exact


@pytest.mark.parametrize("name", MAP_NAMES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.sampled(4)
def test_slow_averages_stall_to_nearest_and_move_at_random(name: MapName, bits: Bits) -> None:
    """An average of 0.999 that has to fall to 0.75 of itself. 255 elements of relative noise below 1.3: the mean to within a quarter.

    A level is at most 4.6 times the one before in these maps' upper half, so that the variance of one element's walk is below
    1.7 times its square.
    """
    assert drift(eb.Blockwise(name, bits, rounding="nearest"), 0.999) > 1.15
    assert drift(eb.Blockwise(name, bits), 0.999) == pytest.approx(1.0, abs=0.25)


@pytest.mark.parametrize("format", named(FORMATS))
def test_levels_that_are_looked_up_are_those_that_compiled_code_computes(
    format: eb.Blockwise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every level, at the numbers beside it, between each two, and at numbers that are not finite."""
    levels = format.levels()
    between = (levels[1:] + levels[:-1]) / 2
    beside = [torch.nextafter(levels, torch.full_like(levels, far)) for far in (-2.0, 2.0)]
    x = torch.cat([levels, between, *beside, torch.tensor([torch.nan, torch.inf, 1e-45, -0.0])])
    x = x.clamp(min=0) if format.kind == "non-negative" else x
    rows = torch.zeros(len(x), 32)
    rows[:, 0], rows[:, 1] = 1.0, x
    looked_up = format.encode(rows.view(-1), key())
    decoded = format.decode(looked_up, torch.Size([rows.numel()]), "float32")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    computed = format.encode(rows.view(-1), key())
    again = format.decode(looked_up, torch.Size([rows.numel()]), "float32")
    for one, other in zip((*looked_up, decoded), (*computed, again), strict=True):
        assert torch.equal(one.float().nan_to_num(7.0), other.float().nan_to_num(7.0))
