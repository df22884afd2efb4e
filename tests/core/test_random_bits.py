"""Random bits are held to two things: they depend on the named place and nothing else, and they look like coin flips there."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import everybit as eb
from everybit import Key
from everybit.base import Lane, Scattered, stream, uniform
from tests.support.float_patterns import assert_same_bits, key

COUNT = 2**15
PINNED = 2825397445
LIKE = torch.empty(COUNT)
BASE = key(seed=7, step=11, stream=stream("params"))


def signs(words: Tensor) -> Tensor:
    """-1 or 1 for each of the 32 bits of each word, lowest first."""
    return ((words[:, None] >> torch.arange(32, dtype=torch.int32)) & 1).double() * 2 - 1


def correlations(a: Tensor, b: Tensor) -> Tensor:
    """Of each bit of ``a`` with each bit of ``b``, in standard deviations of what independent fair coins would show."""
    return signs(a).T @ signs(b) / math.sqrt(len(a))


# 1024 pairs of bits are compared at a time: at 5 standard deviations a fair coin fails such a test once in 1700 keys. Keys are fixed.
FIVE_SIGMA = 5.0

ELSEWHERE = {
    "the next step": replace(BASE, step=BASE.step + 1),
    "a step 2**32 later": replace(BASE, step=BASE.step + 2**32),
    "the next seed": replace(BASE, seed=8),
    "a seed that shares its low bits": replace(BASE, seed=7 + 2**32),
    "a negative seed": replace(BASE, seed=-7),
    "another stream": replace(BASE, stream=stream("variance")),
    "the next element": replace(BASE, first=1),
    "the next row of 4096": replace(BASE, first=4096),
    "elements 2**32 further": replace(BASE, first=2**32),
    "elements 2**33 further": replace(BASE, first=2**33),
    "seed and stream exchanged": replace(BASE, seed=stream("params"), stream=7),
}


@given(
    parts=st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 40)), min_size=1, max_size=6),
    high=st.sampled_from([0, 1, 2**20]),
    low=st.sampled_from([0, 2**31 - 10, 2**32 - 2**21]),
)
def test_gathered_elements_draw_what_they_draw_where_they_belong(
    parts: list[tuple[int, int]], high: int, low: int
) -> None:
    firsts, lengths = [(high << 32) + low + first for first, _ in parts], [n for _, n in parts]
    scattered = Scattered.of(firsts, lengths, torch.device("cpu"))
    gathered = key(first=scattered).bits(torch.empty(sum(lengths)))
    apart = [key(first=first).bits(torch.empty(n)) for first, n in zip(firsts, lengths, strict=True)]
    assert torch.equal(gathered, torch.cat(apart))
    cut = sum(lengths) // 2
    assert torch.equal(
        key(first=scattered.cut(cut, sum(lengths))).bits(torch.empty(sum(lengths) - cut)), gathered[cut:]
    )


def test_elements_with_different_upper_words_are_not_gathered() -> None:
    with pytest.raises(ValueError, match=r"^firsts: got indices with the upper words \[0, 1\]"):
        Scattered.of([2**32 - 2], [4], torch.device("cpu"))


@given(
    cuts=st.lists(st.integers(0, 300), max_size=6),
    first=st.sampled_from([0, 1, 2**31 - 150, 2**32 - 150, 2**40 - 1]),
    as_tensor=st.booleans(),
)
def test_shards_draw_what_the_whole_draws(cuts: list[int], first: int, as_tensor: bool) -> None:
    whole = key(first=first).bits(torch.empty(300))
    edges = [0, *sorted(cuts), 300]
    shards = [
        key(first=torch.tensor(first + a) if as_tensor else first + a).bits(torch.empty(b - a))
        for a, b in pairwise(edges)
    ]
    assert_same_bits(torch.cat(shards), whole)


def test_shape_does_not_matter_but_order_does() -> None:
    flat = BASE.bits(LIKE)
    assert_same_bits(BASE.bits(torch.empty(8, COUNT // 8)), flat.view(8, -1))
    assert_same_bits(BASE.bits(torch.empty(COUNT, dtype=torch.bfloat16)), flat)
    assert_same_bits(BASE.bits(torch.empty(())), flat[0])
    assert BASE.bits(torch.empty(0)).shape == (0,)


def test_the_same_key_draws_the_same_bits_again() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert_same_bits(BASE.bits(LIKE), replace(BASE, step=BASE.step.clone()).bits(LIKE))
    assert torch.equal(torch.get_rng_state(), before)


def in_whole_numbers(seed: int, step: int, number: int, index: int) -> int:
    """The hash as it is defined, in Python's integers."""
    word = 0xFFFFFFFF

    def mix(x: int, inner: int = 0) -> int:
        x &= word
        x = (x ^ (x >> 17)) * 0xED5AD4BB & word
        x = (x ^ (x >> 11)) + inner & word
        x = x * 0xAC4C1B51 & word
        x = (x ^ (x >> 15)) * 0x31848BAB & word
        return x ^ (x >> 14)

    one = mix(mix(seed ^ mix(number)) ^ (seed >> 32))
    two = mix(mix(seed + mix(number ^ 0x6A09E667)) ^ (seed >> 32))
    outer = mix(mix(step ^ one) ^ (step >> 32))
    inner = mix(mix(step + two) ^ (step >> 32))
    return mix(index + mix(outer ^ (index >> 32)), inner)


@pytest.mark.parametrize(
    ("seed", "step", "first"), [(0, 1, 0), (7, 2**40 + 3, 2**40), (-3, 5, 2**32 - 2), (2**63 - 1, 0, 2**33 - 1)]
)
def test_the_bits_are_these(seed: int, step: int, first: int) -> None:
    """A run that is resumed with a later version must round as it did: the hash may not change unnoticed."""
    expected = [in_whole_numbers(seed, step, 11, first + i) for i in range(4)]
    for start in (first, torch.tensor(first)):
        for seeded in (seed, torch.tensor(seed)):
            drawn = Key(seeded, torch.tensor(step), 11, start).bits(torch.empty(4))
            assert [x & 0xFFFFFFFF for x in drawn.tolist()] == expected
    assert in_whole_numbers(0, 1, 11, 0) == PINNED


def lanes(words: Tensor) -> list[Tensor]:
    """The three numbers of given words, 0 to 2**16 - 1, drawn as the tensors of one step draw them."""
    return [replace(BASE, lane=Lane(11, index, [words])).bits16(words) & 0xFFFF for index in (0, 1, 2)]


def test_three_tensors_draw_the_numbers_of_one_word() -> None:
    drawn: list[Tensor] = []
    moments = stream("moments")
    third = replace(BASE, lane=Lane(moments, 2, drawn)).bits16(LIKE) & 0xFFFF
    (word,) = drawn
    low, high = (replace(BASE, lane=Lane(moments, index, drawn)).bits16(LIKE) & 0xFFFF for index in (0, 1))
    assert drawn[0] is word
    assert_same_bits(word, replace(BASE, stream=moments).bits(LIKE))
    assert_same_bits(low, word & 0xFFFF)
    assert_same_bits(high, (word >> 16) & 0xFFFF)
    assert_same_bits(third, (low * 0x9E37 + high * 0x79B1) & 0xFFFF)
    assert_same_bits(BASE.bits16(LIKE) & 0xFFFF, BASE.bits(LIKE) & 0xFFFF)


@given(half=st.integers(0, 0xFFFF), given_upper=st.booleans())
def test_with_either_half_given_the_third_number_takes_every_value_once(half: int, given_upper: bool) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32)
    numbers = lanes((half << 16 | every) if given_upper else (every << 16 | half))
    assert set(numbers[2].tolist()) == set(range(1 << 16))


@pytest.mark.parametrize("kept", [16, 8])
def test_three_rounding_errors_of_one_word_are_independent_to_within_4e_8(kept: int) -> None:
    """A number x between two neighbours is rounded up if x plus a lane's number carries: its error is e(u) = [u >= t] - x for some t.

    On the grid of 2**16 values e has Fourier coefficients of at most 1 / (2**16 sin(pi k / 2**16)), and none for k = 0. The mean of the
    product of three errors is the sum over those (i, j, k) for which i * low + j * high + k * third is 0 for every word; the third number
    is linear in the halves, so that k determines i and j. ``kept``: the third number's bits that are used, of which TIGHT_BF16 has 8.
    """
    size = 1 << 16
    one, sixteenth = torch.tensor([1, 1 << 16], dtype=torch.int64)
    lower, upper = (int(lanes(word.to(torch.int32))[2]) for word in (one, sixteenth))

    def greatest(frequency: Tensor, of: int) -> Tensor:
        found = 1 / (of * torch.sin(math.pi * frequency.double() / of).abs())
        return torch.where(frequency % of == 0, 0.0, found)

    used = torch.arange(1, 1 << kept, dtype=torch.int64)
    whole = used << (16 - kept)
    bound = greatest(-whole * lower % size, size) * greatest(-whole * upper % size, size) * greatest(used, 1 << kept)
    assert float(bound.sum()) < 4e-8


def test_the_tensors_of_a_step_are_rounded_by_different_numbers() -> None:
    """Errors of rounding by one number would have a correlation of 1/2: its mean is (1 - 2r)/2 for the number r, its variance 1/6."""
    policy = eb.policies.FLOOR_BF16
    generator, rate = torch.Generator().manual_seed(0), eb.adamw(1e-2, weight_decay=0.1)
    weights, gradient = torch.randn(2, 1 << 16, generator=generator).bfloat16()
    rounded, exact = (eb.with_policy(rate, one) for one in (policy, eb.policies.FP32))
    wide = weights.float()
    _, state = rounded.step(weights, gradient, rounded.init(weights))
    new, _ = rounded.step(weights, gradient, rounded.init(weights))
    expected, reference = exact.step(wide, gradient, exact.init(wide))
    errors = []
    for stored, number in (
        (eb.tree.get(state, "momentum"), eb.tree.get(reference, "momentum")),
        (eb.tree.get(state, "variance"), eb.tree.get(reference, "variance")),
        (new, expected),
    ):
        unit = torch.exp2(number.abs().log2().floor() - 7)
        errors.append((stored.float() - number) / unit)
    correlation = torch.corrcoef(torch.stack(errors)) - torch.eye(3)
    assert float(correlation.abs().max()) < 5 / 256


@pytest.mark.parametrize("other", ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_bits_here_tell_nothing_about_bits_elsewhere(other: Key) -> None:
    here, there = BASE.bits(LIKE), other.bits(LIKE)
    # Of 2**15 pairs of independent words, 2**-17 are equal on average.
    assert int((here == there).sum()) == 0
    assert correlations(here, there).abs().max() < FIVE_SIGMA


@pytest.mark.parametrize("key", [BASE, *ELSEWHERE.values()], ids=["here", *ELSEWHERE.keys()])
def test_each_bit_is_a_fair_coin_and_independent_of_the_other_31(key: Key) -> None:
    drawn = key.bits(LIKE)
    # The sum of n fair signs has standard deviation sqrt(n).
    assert (signs(drawn).sum(0) / math.sqrt(COUNT)).abs().max() < FIVE_SIGMA
    assert correlations(drawn, drawn).fill_diagonal_(0).abs().max() < FIVE_SIGMA
    # A hash that is a bijection of the index draws no word twice.
    assert len(set(drawn.tolist())) == COUNT


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 8, 16, 64, 128, 768, 1024, 4096])
def test_neighbouring_elements_are_independent(lag: int) -> None:
    drawn = BASE.bits(torch.empty(COUNT + lag))
    assert correlations(drawn[:-lag], drawn[lag:]).abs().max() < FIVE_SIGMA


def test_one_element_sees_fair_coins_as_steps_go_by() -> None:
    """An element's luck over time is what decides whether its rounding errors cancel."""
    steps = torch.arange(COUNT)
    drawn = torch.func.vmap(lambda step: replace(BASE, step=step).bits(torch.empty(3)))(steps)
    for element in drawn.T:
        assert (signs(element).sum(0) / math.sqrt(COUNT)).abs().max() < FIVE_SIGMA
        assert correlations(element[:-1], element[1:]).abs().max() < FIVE_SIGMA


def test_uniform_numbers_are_multiples_of_two_to_the_minus_24_below_one() -> None:
    assert uniform(torch.tensor([0, 255, 256, 2**31 - 1, -(2**31), -1], dtype=torch.int32)).tolist() == [
        0.0, 0.0, 2.0**-24, 0.5 - 2.0**-24, 0.5, 1 - 2.0**-24,
    ]  # fmt: skip
    numbers = uniform(BASE.bits(LIKE)).double()
    # The mean of n uniform numbers has standard deviation 1 / sqrt(12 n).
    assert abs(float(numbers.mean()) - 0.5) < FIVE_SIGMA / math.sqrt(12 * COUNT)


def test_streams_are_fnv_1a() -> None:
    """Reference values from http://www.isthe.com/chongo/src/fnv/test_fnv.c."""
    assert [stream(name) for name in ("", "a", "foobar")] == [0x811C9DC5, 0xE40C292C, 0xBF9CF968]


def test_vmap_draws_what_a_loop_draws() -> None:
    steps = torch.tensor([1, 5, 2**33])
    rows = torch.func.vmap(lambda step, x: replace(BASE, step=step).bits(x))(steps, torch.empty(3, 4, 5))
    for row, step in zip(rows, steps, strict=True):
        assert_same_bits(row, replace(BASE, step=step).bits(torch.empty(4, 5)))
    # What is not told apart by its key is treated alike.
    alike = torch.func.vmap(BASE.bits)(torch.empty(3, 7))
    assert_same_bits(alike, BASE.bits(torch.empty(7)).expand(3, 7))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_traced_function_draws_the_bits_of_the_step_that_it_is_given(
    mode: Literal["real", "fake", "symbolic"],
) -> None:
    """The host computes with a step's value, and a trace must not keep it."""

    def drawn(step: Tensor) -> Tensor:
        return replace(BASE, step=step).bits(torch.empty(40))

    traced = make_fx(drawn, tracing_mode=mode)(torch.tensor(3))
    for step in (3, 4, 2**33):
        assert_same_bits(traced(torch.tensor(step)), drawn(torch.tensor(step)))


@pytest.mark.exhaustive  # tests/core/test_users_compile.py holds it for a step
def test_compiled_code_draws_the_same_bits() -> None:
    """257 and 0-d: in vectors, in the scalar tail behind them, and without a loop; across 2**32 as well."""
    torch._dynamo.reset()

    def run(step: Tensor, first: Tensor) -> list[Tensor]:
        far, here = Key(2**40 + 1, step, stream("variance"), 2**32 - 100), Key(-3, step, stream("params"), first)
        return [far.bits(torch.empty(257)), here.bits(torch.empty(()))]

    compiled = torch.compile(run, fullgraph=True)
    for step, first in ((1, 5), (2**32 + 17, 2**32 - 3)):
        arguments = torch.tensor(step), torch.tensor(first)
        for actual, expected in zip(compiled(*arguments), run(*arguments), strict=True):
            assert_same_bits(actual, expected)
    torch._dynamo.reset()
