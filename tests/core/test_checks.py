"""A policy is refused where a slot would stop moving: one rule for every format, every slot and every way of giving the rate."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import everybit as eb
from everybit.policies.checks import MARGIN
from everybit.protocol import ALONE

P = TypeVar("P")
BF16 = torch.bfloat16

TO_NEAREST: list[eb.StateFormat] = [
    eb.Nearest("bfloat16"), eb.Nearest("float16"), eb.Kahan(), eb.Kahan("float16"), eb.Kahan("float16", "stochastic"), eb.Split(8),
    eb.Kahan(value="float16"), eb.Split(8, value="float16"),
]  # fmt: skip
FOLLOW_EVERY_RATE: list[eb.StateFormat] = [
    eb.Nearest(), eb.Nearest("float32"), eb.Stochastic(), eb.Stochastic("float16"), eb.Kahan("float32"), eb.Kahan(rounding="stochastic"),
    eb.Split(), eb.Split(8, rounding="stochastic"),
]  # fmt: skip


def stored(format: eb.StateFormat) -> eb.Format:
    return format.for_slot("signed", "float32")


def stuck(format: eb.Format, rate: float, target: Tensor, distance: Tensor, reach: float) -> bool:
    """Whether some mean of ``target`` that is stored farther from it than ``reach``, relative to it, comes no closer by a step."""

    def kept(x: Tensor) -> Tensor:
        return format.decode(format.encode(x, eb.Key(0, torch.tensor(1), 1)), x.shape, "float32")

    target = target[:, None]
    before = kept(target * (1 + distance))
    after = kept(rate * before + (1 - rate) * target)
    far = (before / target - 1).abs() > reach
    return bool((far & ~((after - target).abs() < (before - target).abs())).any())


@pytest.mark.parametrize("format", TO_NEAREST, ids=str)
def test_what_is_accepted_comes_within_a_seventh_of_its_mean_and_a_sixteenth_of_its_rate_does_not(
    format: eb.StateFormat,
) -> None:
    """A step moves a mean that is off by ``d`` by ``(1 - rate) d``, and it stays where that is less than half a unit of the mean, ``1 +
    d``.

    Float32 arithmetic takes three half units more. Targets have magnitudes at which all parts of a format are in use, but for parts of
    float16 such at which they are not.
    """
    one = stored(format)
    rate = 1 - MARGIN * one.resolution("float32")
    stays = (one.resolution("float32") + 3 * 2.0**-24) / (1 - rate)
    reach = stays / (1 - stays)
    assert 1 / MARGIN < reach < 1 / 6
    target = 1 + torch.arange(256) / 256
    if isinstance(format, eb.Kahan) and "float16" in (format.residual, format.value):
        target = target * 2.0 ** (-18 if format.residual == "float16" else -30)
    away = torch.cat([torch.linspace(0.1, 3, 500), -torch.linspace(0.1, 0.9, 300)])
    assert not stuck(one, rate, target, away, reach)
    assert stuck(one, 1 - (1 - rate) / 16, target, away, reach)


@pytest.mark.parametrize("format", TO_NEAREST, ids=str)
def test_the_boundary_is_exact_and_said_for_every_slot(format: eb.StateFormat) -> None:
    limit = 1 - MARGIN * stored(format).resolution("float32")
    policy = eb.Policy(momentum=format, state=format)
    makers: list[Callable[[float], eb.Transform[Any]]] = [
        eb.trace, lambda rate: eb.scale_by_lion(b2=rate), lambda rate: eb.adamw(b1=rate),
    ]  # fmt: skip
    for make in makers:
        eb.with_policy(make(limit), policy)
        with pytest.raises(
            ValueError, match=rf"Policy\.momentum: got .*'momentum' has a decay rate of .* at most {limit:.12g}\."
        ):
            eb.with_policy(make((limit + 1) / 2), policy)
    centered = eb.Policy(state=format)
    eb.with_policy(eb.scale_by_rms(limit, centered=True), centered)
    with pytest.raises(ValueError, match=r"Policy\.state: got .*'mean' has a decay rate of"):
        eb.with_policy(eb.scale_by_rms((limit + 1) / 2, centered=True), centered)


@pytest.mark.parametrize("format", FOLLOW_EVERY_RATE, ids=str)
@pytest.mark.parametrize("rate", [0.9, 0.999, 1 - 1e-7, torch.tensor(0.5), lambda step: 0.5 + 0.0 * step])
def test_formats_that_follow_every_rate_are_accepted_at_every_rate(format: eb.StateFormat, rate: Any) -> None:
    eb.with_policy(eb.chain(eb.scale_by_lion(b2=rate), eb.trace(rate)), eb.Policy(momentum=format))


@given(st.floats(0.0, 1.0, exclude_max=True), st.sampled_from(TO_NEAREST))
def test_a_rate_is_judged_alike_wherever_it_is_found(rate: float, format: eb.StateFormat) -> None:
    policy = eb.Policy(momentum=format)
    inner = eb.scale_by_lion(b2=rate)
    wrapped: list[eb.Transform[Any]] = [
        inner,
        eb.chain(inner, eb.scale_by_lion(b2=0.0)),
        eb.chain(eb.scale_by_lion(b2=0.0), inner),
        eb.named_chain({"x": inner}),
        eb.masked(inner, True),
        eb.partition({"x": inner, "y": eb.scale_by_lion(b2=0.0)}, "x"),
        eb.partition({"x": eb.scale_by_lion(b2=0.0), "y": inner}, "x"),
        eb.accumulate(inner, 2),
        eb.apply_if_finite(eb.chain(inner)),
    ]
    judged = set()
    for transform in wrapped:
        try:
            eb.with_policy(transform, policy)
            judged.add(True)
        except ValueError:
            judged.add(False)
    assert judged == {1 - rate >= MARGIN * stored(format).resolution("float32")}


@pytest.mark.parametrize(
    "rate", [torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64), lambda step: 0.5 + 0.0 * step]
)
def test_a_rate_that_the_host_does_not_know_is_judged_as_the_slowest_and_hides_nothing(rate: Any) -> None:
    with pytest.raises(
        ValueError, match=r"Policy\.variance: got .* is (a tensor|a schedule), whose value may come close"
    ):
        eb.with_policy(eb.adamw(b2=rate), eb.policies.PURE_BF16)
    # A tensor in one place used to hide a number in another.
    mixed = eb.partition({"x": eb.adamw(b2=0.999), "y": eb.adamw(b2=rate)}, "x")
    with pytest.raises(ValueError, match=r"Policy\.variance: got"):
        eb.with_policy(mixed, eb.policies.PURE_BF16)
    eb.with_policy(mixed, eb.policies.LEAN_BF16)


@pytest.mark.parametrize(
    "format",
    [
        eb.Nearest("float16"),
        eb.Stochastic("float16"),
        eb.Kahan("float16"),
        eb.Kahan(value="float16"),
        eb.Split(value="float16"),
    ],
)
def test_squares_are_not_kept_where_a_float16_would_lose_the_small_ones(format: eb.StateFormat) -> None:
    with pytest.raises(ValueError, match=r"Policy\.variance: got .*squares of gradients; of a gradient below 2\.4e-4"):
        eb.with_policy(eb.adam(b2=0.5), eb.Policy(variance=format))
    eb.with_policy(eb.trace(0.5), eb.Policy(variance=format))  # no squares


def after_a_fall(variance: eb.StateFormat) -> float | None:
    """The second moment after gradients of 1e-3 at 200 steps and of 1e-5 at 1000; None if it is refused."""
    policy = eb.Policy(params=eb.Nearest("float32"), variance=variance)
    try:
        optimizer = eb.with_policy(eb.scale_by_adam(), policy)
    except ValueError:
        return None
    params = torch.ones(64)
    state = optimizer.init(params)
    for gradient in itertools.chain([1e-3] * 200, [1e-5] * 1000):
        params, state = optimizer.step(params, torch.full((64,), gradient), state)
    decoded: Any = optimizer.decode(params, state)[1].inner
    return float(decoded.variance.double().mean())


@functools.cache
def after_a_fall_in_float32() -> float | None:
    return after_a_fall(eb.Nearest("float32"))


@pytest.mark.parametrize(
    "variance",
    [
        pytest.param(one, id=str(one), marks=pytest.mark.exhaustive if number % 3 else ())
        for number, one in enumerate((*FOLLOW_EVERY_RATE, *TO_NEAREST))
    ],
)
def test_a_gradient_of_1e_3_that_falls_to_1e_5_is_followed_or_refused(variance: eb.StateFormat) -> None:
    """A float16 residual, whose quantum is 2**-24, kept the second moment where it was at step 200."""
    found, right = after_a_fall(variance), after_a_fall_in_float32()
    assert right is not None
    # Of 64 draws that are a bfloat16 apart: 3.8 % noise each (docs/formats.md), 5 standard deviations of their mean.
    assert found is None or abs(found / right - 1) < 5 * 0.038 / 8


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
@pytest.mark.sampled(3)
@pytest.mark.slow
def test_a_slow_momentum_falls_when_gradients_do(name: str) -> None:
    """Gradient 1 for 200 steps, then none for 700: a momentum to nearest stayed where it was, and weights ran away."""
    makers: dict[str, Callable[[], eb.Transform[Any]]] = {
        "adamw": lambda: eb.adamw(1e-3, b1=0.999),
        "lion": lambda: eb.lion(1e-4, b2=0.999),
        "sgd": lambda: eb.sgd(1e-5, momentum=0.999),
    }
    make = makers[name]

    def end(policy: eb.Policy, dtype: torch.dtype) -> float:
        optimizer = eb.with_policy(make(), policy)
        params = torch.ones(256, dtype=dtype)
        state = optimizer.init(params)
        for step in range(900):
            params, state = optimizer.step(params, torch.full((256,), float(step < 200)), state)
        inner = optimizer.decode(params, state)[1].inner
        (momentum,) = (one.momentum for one in inner.states if hasattr(one, "momentum"))
        return float(momentum.double().mean())

    right = end(eb.policies.FP32, torch.float32)
    for preset in ("LEAN_BF16", "FLOOR_BF16") if name == "adamw" else ("LEAN_BF16",):
        # Rounding noise of a mean with rate b is at most 2**-7 / sqrt(6 (1 - b)) = 10 % of it; 5 standard deviations of 256 draws.
        assert abs(end(eb.policies.PRESETS[preset], BF16) / right - 1) < 5 * 0.10 / 16, preset


@eb.state
class OwnState(Generic[P]):
    variance: eb.Slot[P]
    previous: eb.Slot[P]


@dataclass(frozen=True, slots=True)
class Undeclared:
    """A transform of somebody's own, that says nothing about its slots."""

    cut: ClassVar[eb.Cut] = "element"

    reduces: ClassVar[bool] = False

    def init(self, params: P) -> OwnState[P]:
        return OwnState(eb.tree.zeros_like(params), eb.tree.zeros_like(params))

    def update(self, updates: P, state: OwnState[Any], params: P, ctx: eb.Context = ALONE) -> tuple[P, OwnState[P]]:
        variance = eb.tree.elementwise(lambda g, v: 0.999 * v + 0.001 * g * g, updates, state.variance)
        return updates, OwnState(variance, updates)


@dataclass(frozen=True, slots=True)
class Declared(Undeclared):
    rate: float = 0.9

    def decays(self) -> tuple[eb.SlotDecay, ...]:
        return eb.SlotDecay("variance", self.rate, squares=True), eb.SlotDecay("previous", 0.0)


def test_a_slot_of_ones_own_is_asked_how_slowly_it_moves_where_that_matters() -> None:
    params = {"w": torch.ones(3, dtype=BF16)}
    transforms: list[eb.Transform[Any]] = [Undeclared(), eb.chain(Undeclared(), eb.scale_by_learning_rate(0.1))]
    for transform in transforms:
        refused = eb.with_policy(transform, eb.policies.PURE_BF16)
        with pytest.raises(
            ValueError,
            match=r"state\.variance: \w+ does not say how slowly it moves, and Policy\.variance = Nearest.*def decays\(self\).*'variance'",
        ):
            refused.init(params)
        with pytest.warns(UserWarning, match=r"state\.(variance|previous): \w+ does not say"):
            eb.with_policy(transform, eb.policies.PURE_BF16, unsafe="warn").init(params)
        for policy in (eb.policies.EXACT_BF16, eb.policies.LEAN_BF16):  # formats that follow every rate
            eb.with_policy(transform, policy).init(params)
    declared: eb.Transform[Any] = Declared()
    eb.with_policy(declared, eb.policies.PURE_BF16).init(params)
    declared = Declared(0.999)
    with pytest.raises(ValueError, match=r"'variance' has a decay rate of 0.999"):
        eb.with_policy(declared, eb.policies.PURE_BF16)


def test_what_is_suggested_is_accepted() -> None:
    for format, compute in ((eb.Nearest("bfloat16"), "float32"), (eb.Nearest("float32"), "float64")):
        fields: dict[str, Any] = {"compute": compute, "params": eb.Nearest()}
        if compute == "float64":
            fields |= {"momentum": eb.Nearest("float64"), "state": eb.Nearest("float64")}
        with pytest.raises(ValueError, match="Accepted here are") as refused:
            eb.with_policy(eb.scale_by_adam(b2=1 - 1e-8), eb.Policy(variance=format, **fields))
        suggestions = str(refused.value).split("Accepted here are ")[1].split(", or a decay")[0]
        made = eval(
            f"[{suggestions}]", {name: getattr(eb, name) for name in ("Stochastic", "Split", "Kahan", "Nearest")}
        )
        assert made
        for one in made:
            eb.with_policy(eb.scale_by_adam(b2=1 - 1e-8), eb.Policy(variance=one, **fields))


def test_a_warning_points_at_the_callers_line_and_allow_is_silent() -> None:
    with pytest.warns(UserWarning, match=r"Policy\.variance: got Nearest\(dtype='bfloat16'\)") as caught:
        warned = eb.with_policy(eb.adamw(1e-3), eb.policies.PURE_BF16, unsafe="warn")
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert eb.with_policy(eb.adamw(1e-3), eb.policies.PURE_BF16, unsafe="allow") == warned
    params = torch.ones(3, dtype=BF16)
    warned.step(params, params, warned.init(params))


def test_every_preset_but_the_two_that_round_to_nearest_takes_every_registered_optimizer() -> None:
    for name, policy in eb.policies.PRESETS.items():
        builds: list[Callable[[], eb.Transform[Any]]] = [
            eb.adamw, eb.lion, eb.rmsprop, lambda: eb.sgd(momentum=0.999), lambda: eb.rmsprop(centered=True),
        ]  # fmt: skip
        for build in builds:
            if name in ("PURE_BF16", "ANYPRECISION"):
                continue
            eb.with_policy(build(), policy)
