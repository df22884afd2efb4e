"""Other implementations as oracles: the same gradients, the same weights, over 200 steps. Run by ``make conformance``.

Where implementations disagree, each is followed by the option that stands for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax
import pytest
import torch
from torch import Tensor

import everybit as eb
from tests.support.following import (
    PEAK,
    STEPS,
    Tensors,
    deviation,
    ours,
    ours_with_averages,
    rate,
    schedule,
    start,
    theirs,
)
from tests.support.oracles import Noted, from_timm, optax_rate, theirs_of_optax

# As in tests/core/test_more_optimizers.py: some 16 rounded numbers a step, none larger than the largest weight.
FLOAT64 = STEPS * 16 * 2.0**-53
FLOAT32 = STEPS * 16 * 2.0**-24
DECAY: dict[str, Any] = {"weight_decay": 0.1}


OF_OPTAX: dict[str, tuple[Callable[[], eb.Transform[Any]], Callable[[], Any]]] = {
    "ademamix": (
        lambda: eb.ademamix(schedule, b3=0.999, eps_root=1e-12, **DECAY),
        lambda: optax.contrib.ademamix(optax_rate, b3=0.999, eps_root=1e-12, **DECAY),
    ),
    "adopt": (
        lambda: eb.adopt(schedule, decay_at_first=True),
        lambda: optax.contrib.adopt(optax_rate),
    ),
    "adopt, decay, nesterov": (
        lambda: eb.adopt(schedule, nesterov=True, decay_at_first=True, **DECAY),
        lambda: optax.chain(
            optax.contrib.scale_by_adopt(nesterov=True),
            optax.add_decayed_weights(0.1),
            optax.scale_by_learning_rate(optax_rate),
        ),
    ),
    "lamb": (lambda: eb.lamb(schedule, **DECAY), lambda: optax.lamb(optax_rate, eps=1e-6, **DECAY)),
    "lars": (
        lambda: eb.lars(schedule, trust_coefficient=0.5, eps=0.0, joint_norm=True, rate_inside=True, **DECAY),
        lambda: optax.lars(optax_rate, trust_coefficient=0.5, eps=0.0, momentum=0.9, **DECAY),
    ),
    "adan": (
        lambda: eb.adan(schedule, eps_root=1e-8, look_ahead=1 - 0.92, proximal=False, **DECAY),
        lambda: optax.adan(optax_rate, **DECAY),
    ),
    "adabelief": (lambda: eb.adabelief(schedule), lambda: optax.adabelief(optax_rate)),
    "yogi": (lambda: eb.yogi(schedule, initial_mean=1e-6), lambda: optax.yogi(optax_rate)),
    "prodigy": (
        lambda: eb.prodigy(lambda done: 50 * schedule(done), d0=1e-3, weight_decay=0.1, bias_correction=True),
        lambda: optax.contrib.prodigy(lambda count: 50 * optax_rate(count), estim_lr0=1e-3, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("name", OF_OPTAX)
def test_optax_is_followed(name: str, noted: Noted) -> None:
    transform, oracle = (make() for make in OF_OPTAX[name])
    apart = deviation(ours(transform), theirs_of_optax(oracle))
    noted("optax", name, apart)
    assert apart <= FLOAT64


def test_optax_takes_another_weight_of_differences_in_adan() -> None:
    """0.08 in the place of the paper's 0.92: ours at its default is somewhere else."""
    ours_here = ours(eb.adan(schedule, proximal=False, **DECAY))
    assert deviation(ours_here, theirs_of_optax(optax.adan(optax_rate, **DECAY))) > 1e-3


class Packages:
    """Optimizers with torch's interface, each imported where it is asked for."""

    @staticmethod
    def bitsandbytes(params: list[Tensor]) -> Any:
        bitsandbytes: Any = pytest.importorskip("bitsandbytes")
        return bitsandbytes.optim.AdEMAMix(params, weight_decay=0.1, t_alpha=150, t_beta3=150)

    @staticmethod
    def optimi(params: list[Tensor]) -> Any:
        optimi: Any = pytest.importorskip("optimi")
        return optimi.StableAdamW(params, lr=PEAK, betas=(0.9, 0.5), weight_decay=0.1, foreach=False, triton=False)


def test_bitsandbytes_ademamix_is_followed_with_both_schedules(noted: Noted) -> None:
    """In float32, the only dtype that it has."""
    tx = eb.ademamix(schedule, alpha_warmup=150, b3_warmup=150, **DECAY)
    apart = deviation(ours(tx, torch.float32), theirs(Packages.bitsandbytes, torch.float32))
    noted("bitsandbytes (float32)", "ademamix", apart)
    assert apart <= FLOAT32


def test_optimis_stable_adamw_is_followed(noted: Noted) -> None:
    apart = deviation(ours(eb.stable_adamw(schedule, b2=0.5, **DECAY)), theirs(Packages.optimi))
    noted("torch-optimi", "stable adamw", apart)
    assert apart <= FLOAT64


def test_lucidrains_adam_atan2_is_followed(noted: Noted) -> None:
    package: Any = pytest.importorskip("adam_atan2_pytorch.adam_atan2")
    oracle = theirs(lambda params: package.AdamAtan2(params, lr=PEAK, b=0.5, **DECAY))
    apart = deviation(ours(eb.adam_atan2(schedule, b=0.5, **DECAY)), oracle)
    noted("adam-atan2-pytorch", "adam atan2", apart)
    assert apart <= FLOAT64


OF_TIMM: dict[str, tuple[Callable[[], eb.Transform[Any]], str, dict[str, Any]]] = {
    "adopt": (lambda: eb.adopt(schedule, clip_power=0.333, **DECAY), "Adopt", {"decoupled": True, **DECAY}),
    "lamb": (lambda: eb.lamb(schedule, max_grad_norm=1.0, **DECAY), "Lamb", DECAY),
    "lambc": (
        lambda: eb.lamb(schedule, max_ratio=1.0, **DECAY),
        "Lamb",
        {"max_grad_norm": None, "trust_clip": True, **DECAY},
    ),
    "lamb, no decay": (lambda: eb.lamb(schedule, weight_decay=0.0, always_adapt=False), "Lamb", {
        "max_grad_norm": None, "weight_decay": 0.0,
    }),
    "lars": (
        lambda: eb.lars(schedule, trust_coefficient=0.5, **DECAY),
        "Lars",
        {"momentum": 0.9, "trust_coeff": 0.5, **DECAY},
    ),
    "adan": (lambda: eb.adan(schedule, **DECAY), "Adan", DECAY),
    "adan, no prox": (lambda: eb.adan(schedule, proximal=False, **DECAY), "Adan", {"no_prox": True, **DECAY}),
    "lion": (lambda: eb.lion(schedule, **DECAY), "Lion", DECAY),
    "lion, cautious": (
        lambda: eb.chain(eb.cautious(eb.scale_by_lion()), eb.add_decayed_weights(0.1), eb.scale_by_learning_rate(schedule)),
        "Lion",
        {"caution": True, **DECAY},
    ),
    "lion, corrected decay": (
        lambda: eb.chain(eb.scale_by_lion(), eb.add_corrected_decay(0.1, schedule, PEAK), eb.scale_by_learning_rate(schedule)),
        "Lion",
        {"corrected_weight_decay": True, **DECAY},
    ),
    "laprop": (lambda: eb.laprop(PEAK), "LaProp", {"eps": 1e-15}),
    "mars": (
        lambda: eb.mars(schedule, b1=0.9, **DECAY),
        "Mars",
        {"betas": (0.9, 0.99), "optimize_1d": True, **DECAY},
    ),
    "mars lion": (
        lambda: eb.mars(schedule, b1=0.9, sign=True, **DECAY),
        "Mars",
        {"betas": (0.9, 0.99), "optimize_1d": True, "mars_type": "lion", **DECAY},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_TIMM)
def test_timm_is_followed(name: str, noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    make, cls, options = OF_TIMM[name]
    foreach = {} if cls == "Mars" else {"foreach": False}
    # Counts and corrections of timm's are in torch's default dtype.
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    oracle = theirs(from_timm(cls, None, lr=PEAK, **foreach, **options), varying=name != "laprop")
    apart = deviation(ours(make()), oracle)
    noted("timm", name, apart)
    assert apart <= FLOAT64


def in_both_modes(name: str, averages: list[Tensors], **options: Any) -> Callable[[list[Tensor]], Any]:
    """An optimizer of ``schedulefree`` that notes its averages after each step, switching to them and back."""
    schedulefree = pytest.importorskip("schedulefree")

    class InBothModes:
        def __init__(self, params: list[Tensor]) -> None:
            self.params = params
            self.inner = getattr(schedulefree, name)(params, lr=PEAK, weight_decay=0.1, **options)
            self.param_groups = self.inner.param_groups
            self.inner.train()

        def step(self) -> None:
            self.inner.step()
            self.inner.eval()
            averages.append(dict(zip(start(), (p.detach().clone() for p in self.params), strict=True)))
            self.inner.train()

    return InBothModes


SCHEDULE_FREE: dict[str, tuple[Callable[[], eb.Transform[Any]], str, dict[str, Any]]] = {
    "schedule-free sgd": (lambda: eb.schedule_free_sgd(schedule, **DECAY), "SGDScheduleFree", {}),
    "schedule-free sgd, warmed up": (
        lambda: eb.schedule_free_sgd(schedule, warmup_steps=30, r=2.0, **DECAY),
        "SGDScheduleFree",
        {"warmup_steps": 30, "r": 2.0},
    ),
    "schedule-free adamw": (lambda: eb.schedule_free_adamw(schedule, **DECAY), "AdamWScheduleFree", {}),
    "schedule-free adamw, warmed up": (
        lambda: eb.schedule_free_adamw(schedule, warmup_steps=30, r=2.0, **DECAY),
        "AdamWScheduleFree",
        {"warmup_steps": 30, "r": 2.0},
    ),
    "schedule-free radam": (lambda: eb.schedule_free_radam(schedule, r=1.0, **DECAY), "RAdamScheduleFree", {"r": 1.0}),
    "schedule-free radam, sgd": (
        lambda: eb.schedule_free_radam(schedule, sgd_phase=True, **DECAY),
        "RAdamScheduleFree",
        {"silent_sgd_phase": False},
    ),
}


@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_schedulefree_is_followed_in_both_of_its_modes(name: str, noted: Noted) -> None:
    """It switches its parameters between modes at each step here; ours stay where they are."""
    make, cls, options = SCHEDULE_FREE[name]
    averages: list[Tensors] = []
    oracle = theirs(in_both_modes(cls, averages, **options))
    found = ours_with_averages(make())
    trained, evaluated = deviation([one[0] for one in found], oracle), deviation([one[1] for one in found], averages)
    noted("schedulefree", name, max(trained, evaluated))
    assert max(trained, evaluated) <= FLOAT64


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({}, {}),
        ({"growth_rate": 1.02}, {"growth_rate": 1.02}),
        ({"bias_correction": True}, {"use_bias_correction": True}),
        ({"safeguard_warmup": True}, {"safeguard_warmup": True}),
        ({"b3": 0.9, "d_coef": 0.5}, {"beta3": 0.9, "d_coef": 0.5}),
    ],
)
def test_prodigyopt_is_followed(options: dict[str, Any], same: dict[str, Any], noted: Noted) -> None:
    """Everything is in proportion to the estimate, a quotient of sums: ten times the roundings of one step."""
    prodigyopt = pytest.importorskip("prodigyopt")
    made: list[Any] = []

    def make(params: list[Tensor]) -> Any:
        made.append(prodigyopt.Prodigy(params, d0=1e-3, weight_decay=0.1, **same))
        return made[0]

    oracle = theirs(make, factor=50)
    tx = eb.prodigy(lambda done: 50 * schedule(done), d0=1e-3, weight_decay=0.1, **options)
    apart = deviation(ours(tx), oracle)
    assert made[0].param_groups[0]["d"] > 1.5e-3, "the estimate has grown"
    noted("prodigyopt", "prodigy", apart)
    assert apart <= FLOAT64 * 10


def test_the_learning_rate_of_the_problem_is_the_same_for_all() -> None:
    assert [float(schedule(torch.tensor(done))) for done in (0, 7)] == [rate(0), rate(7)]
    assert float(optax_rate(7)) == rate(7)
