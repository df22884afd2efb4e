"""A statistical battery for the random bits: what independent fair coins would show, and how far they may stray from it.

Every bound is that which truly independent fair coins exceed with a probability of at most ``RISK`` in a whole test, divided over the
comparisons that the test makes. The keys are fixed, so a test that passes once passes always; the risk is that of choosing unlucky keys.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from everybit import Key
from everybit.base import Lane, stream
from tests.support.float_patterns import key

RISK = 1e-6
KEYS = [key(seed=seed, step=step, stream=stream(name)) for seed, step, name in ((0, 1, "params"), (7, 11, "variance"))]
POWERS = [2**k for k in range(33)]
ODD_LAGS = [3, 7, 48, 768, 1000, 3 * 2**18, 5 * 2**26]


def gaussian_bound(comparisons: int) -> float:
    """The number of standard deviations that none of so many Gaussian numbers exceeds in magnitude, but for ``RISK``."""
    return -NormalDist().inv_cdf(RISK / (2 * comparisons))


def chi_square_bounds(degrees: int, comparisons: int) -> tuple[float, float]:
    """Between which so many chi-square numbers all lie, but for ``RISK`` (Laurent & Massart 2000, Lemma 1)."""
    x = math.log(2 * comparisons / RISK)
    return degrees - 2 * math.sqrt(degrees * x), degrees + 2 * math.sqrt(degrees * x) + 2 * x


def drawn(key: Key, count: int, lag: int = 0) -> Tensor:
    return replace(key, first=lag).bits(torch.empty(count))


def noise(words: Tensor) -> list[Tensor]:
    """The three 16-bit numbers of each word as numbers of mean 0 and variance 1: the noise that rounding to bfloat16 adds."""
    scale = math.sqrt((2.0**32 - 1) / 12)
    drawn = [replace(KEYS[0], lane=Lane(0, index, [words])).bits16(words) for index in (0, 1, 2)]
    return [((number & 0xFFFF).double() - 32767.5) / scale for number in drawn]


def signs(words: Tensor) -> Tensor:
    return ((words[:, None] >> torch.arange(32, dtype=torch.int32)) & 1).float() * 2 - 1


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.sampled(2)
@pytest.mark.slow
def test_the_rounding_noise_of_elements_any_distance_apart_is_uncorrelated(key: Key) -> None:
    count = 2**20
    lags = POWERS + ODD_LAGS
    here = noise(drawn(key, count))
    bound = gaussian_bound(9 * len(lags))
    for lag in lags:
        for one in here:
            for other in noise(drawn(key, count, lag)):
                # A sum of n products of independent numbers of variance 1 has standard deviation sqrt(n).
                assert abs(float(one @ other)) / math.sqrt(count) < bound, lag


@pytest.mark.parametrize("key", KEYS)
def test_every_bit_is_independent_of_every_bit_of_an_element_any_distance_apart(key: Key) -> None:
    count = 2**16
    lags = POWERS + ODD_LAGS
    here = signs(drawn(key, count))
    bound = gaussian_bound(1024 * len(lags))
    for lag in lags:
        # Sums of at most 2**16 signs are whole numbers that float32 holds exactly.
        products = here.T @ signs(drawn(key, count, lag))
        assert float(products.abs().max()) / math.sqrt(count) < bound, lag


@pytest.mark.parametrize("key", KEYS)
def test_all_values_of_a_few_bits_and_of_pairs_of_neighbours_are_equally_frequent(key: Key) -> None:
    count = 2**20
    here = drawn(key, count + 4096)
    cases = [("low 8 bits", here[:count] & 255, 8), ("high 8 bits", (here[:count] >> 24) & 255, 8)]
    for lag, width in ((1, 8), (2, 4), (16, 4), (1024, 4), (4096, 4)):
        for shift in (0, 8, 16):
            one, other = (((x >> shift) & (2**width - 1)) for x in (here[:count], here[lag : count + lag]))
            cases.append((f"bits from {shift} on, {lag} apart", (one << width) | other, 2 * width))
    for what, values, width in cases:
        cells = 2**width
        expected = count / cells
        found = torch.bincount(values.long(), minlength=cells).double()
        low, high = chi_square_bounds(cells - 1, len(cases))
        assert low < float(((found - expected) ** 2 / expected).sum()) < high, what


def one_word(seed: Tensor, step: Tensor, name: Tensor, first: Tensor) -> Tensor:
    """The first word for every (seed, step, stream, index): three int64 tensors and one of ints below 2**32."""

    def draw(seed: Tensor, step: Tensor, first: Tensor, number: int) -> Tensor:
        return Key(seed, step, number, first).bits(torch.empty(()))

    words = [
        torch.func.vmap(lambda s, t, f, number=number: draw(s, t, f, number))(
            seed[name == number], step[name == number], first[name == number]
        )
        for number in sorted(set(name.tolist()))
    ]
    return torch.cat(words)


def random_places(count: int, low: int = 48) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    seed, step, first = (torch.randint(-(2**62), 2**62, (count,), generator=generator) for _ in range(3))
    return seed, step >> 23, (first >> 15) & (2**low - 1)


def test_a_flipped_bit_of_seed_step_or_index_flips_every_bit_with_probability_one_half() -> None:
    count = 2**14
    seed, step, first = random_places(count)
    name = torch.zeros(count, dtype=torch.int64)
    before = one_word(seed, step, name, first)
    flips = [(seed ^ (1 << bit), step, first) for bit in range(62)]
    flips += [(seed, step ^ (1 << bit), first) for bit in range(40)]
    flips += [(seed, step, first ^ (1 << bit)) for bit in range(48)]
    bound = gaussian_bound(32 * len(flips))
    for number, (a, b, c) in enumerate(flips):
        changed = signs(before ^ one_word(a, b, name, c))
        assert float(changed.sum(0).abs().max()) / math.sqrt(count) < bound, number


def test_a_flipped_bit_of_the_stream_flips_every_bit_with_probability_one_half() -> None:
    count = 2**14
    seed, step, first = random_places(count)
    base = stream("variance")
    names = [base] + [base ^ (1 << bit) for bit in range(32)]
    words = [one_word(seed, step, torch.full((count,), name), first) for name in names]
    bound = gaussian_bound(32 * 32)
    for word in words[1:]:
        assert float(signs(words[0] ^ word).sum(0).abs().max()) / math.sqrt(count) < bound


@pytest.mark.parametrize(
    ("what", "other"),
    [(f"{d} steps later", {"step": torch.tensor(1 + d)}) for d in (1, 2, 3, 10, 1000, 2**31, 2**32, 2**40)]
    + [(f"a seed {d} higher", {"seed": d}) for d in (1, 2, 3, 10, 1000, 2**31, 2**32, 2**62)]
    + [(f"the stream of {name}", {"stream": stream(name)}) for name in ("momentum", "variance", "mean", "a", "")],
)
def test_other_steps_seeds_and_streams_round_independently(what: str, other: dict[str, int | Tensor]) -> None:
    count = 2**20
    here = noise(drawn(KEYS[0], count))
    there = noise(drawn(replace(KEYS[0], **other), count))  # type: ignore[arg-type]
    assert all(abs(float(a @ b)) / math.sqrt(count) < gaussian_bound(9 * 21) for a in here for b in there), what


@pytest.mark.slow
def test_seeds_below_a_million_draw_a_million_sequences() -> None:
    """A salt of 32 bits was shared by the seeds 40189 and 797186. Of 2**20 sequences told apart by 64 bits two agree with odds of
    2**-25.
    """
    seeds = torch.arange(2**20)
    zero = torch.zeros_like(seeds)
    pairs = torch.stack([one_word(seeds, zero + 1, zero, zero + index) for index in (0, 1)], dim=1)
    assert len({(int(a), int(b)) for a, b in pairs.tolist()}) == 2**20
