"""Adafactor and its kin against other implementations, over 200 steps. Run by ``make conformance``.

Where implementations disagree, each is followed by the options that stand for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
import pytest
import torch
from torch import Tensor

import everybit as eb
from tests.support.following import KERNELS, PEAK, STEPS, deviation, ours, schedule, theirs
from tests.support.oracles import Noted, from_timm, optax_rate, theirs_of_optax

# As in tests/core/test_more_optimizers.py: some 16 rounded numbers a step, none larger than the largest weight.
FLOAT64 = STEPS * 16 * 2.0**-53
FLOAT32 = STEPS * 16 * 2.0**-24

DECAY: dict[str, Any] = {"weight_decay": 0.1}
WIDE: dict[str, Any] = {"momentum_dtype": torch.float64}
VISION: dict[str, Any] = {"scale_parameter": False, "momentum_of": "directions", "dimensions": "largest"}


def from_transformers(**options: Any) -> Callable[[list[Tensor]], Any]:
    optimization: Any = pytest.importorskip("transformers.optimization")
    return lambda params: optimization.Adafactor(params, **options)


def from_pytorch_optimizer(name: str, **options: Any) -> Callable[[list[Tensor]], Any]:
    package: Any = pytest.importorskip("pytorch_optimizer")
    return lambda params: getattr(package, name)(params, foreach=False, **options)


GIVEN: dict[str, Any] = {"lr": PEAK, "relative_step": False}
OF_TRANSFORMERS: dict[str, tuple[Callable[[], eb.Transform[Any]], dict[str, Any]]] = {
    "adafactor": (lambda: eb.adafactor(**DECAY), DECAY),
    "adafactor, warmed up": (
        lambda: eb.adafactor(eb.relative_step_schedule(slope=1e-6), **DECAY),
        {"warmup_init": True, **DECAY},
    ),
    "adafactor, momentum": (lambda: eb.adafactor(schedule, b1=0.9, **DECAY), {"beta1": 0.9, **GIVEN, **DECAY}),
    "adafactor, as the Trainer": (
        lambda: eb.adafactor(schedule, scale_parameter=False, **DECAY),
        {"scale_parameter": False, **GIVEN, **DECAY},
    ),
    "adafactor, other numbers": (
        lambda: eb.adafactor(schedule, beta2_decay=-0.6, eps1=1e-3, eps2=0.9, clip_threshold=0.5, **DECAY),
        {"decay_rate": -0.6, "eps": (1e-3, 0.9), "clip_threshold": 0.5, **GIVEN, **DECAY},
    ),
}


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_transformers_adafactor_is_followed(name: str, noted: Noted) -> None:
    make, options = OF_TRANSFORMERS[name]
    oracle = theirs(from_transformers(**options), shapes=KERNELS)
    apart = deviation(ours(make(), shapes=KERNELS), oracle)
    noted("transformers", name, apart)
    assert apart <= FLOAT64


def wide_decay(step: Any, exponent: Any) -> Any:
    """optax's schedule of decay rates, which it computes in float32, in float64."""
    return 1 - (jnp.asarray(step, jnp.float64) + 1) ** -exponent


@pytest.mark.parametrize("least", [3, 4, 128])
def test_optax_adafactor_is_followed(least: int, noted: Noted) -> None:
    """Its parts in its order, with decay rates in float64. Of the kernel two dimensions are at least 3 long, of the matrix 4."""
    oracle = optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=least, decay_rate_fn=wide_decay),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_learning_rate(optax_rate, flip_sign=False),
        optax.scale_by_param_block_rms(),
        optax.ema(0.9, debias=False),
        optax.add_decayed_weights(0.1),
        optax.scale(-1),
    )
    tx = eb.adafactor(
        schedule, b1=0.9, decay_by="alone", dimensions="largest", min_size_to_factor=least, weight_decay=0.1
    )
    apart = deviation(ours(tx, shapes=KERNELS), theirs_of_optax(oracle, KERNELS))
    noted("optax", f"adafactor, from {least}", apart)
    assert apart <= FLOAT64


def test_optax_adafactor_itself_is_followed_to_float32_in_which_its_decay_rates_are() -> None:
    oracle = optax.adafactor(optax_rate, min_dim_size_to_factor=3, weight_decay_rate=0.1)
    tx = eb.adafactor(schedule, decay_by="alone", dimensions="largest", min_size_to_factor=3, weight_decay=0.1)
    assert FLOAT64 < deviation(ours(tx, shapes=KERNELS), theirs_of_optax(oracle, KERNELS)) <= FLOAT32


OF_TIMM: dict[str, tuple[Callable[[], eb.Transform[Any]], dict[str, Any]]] = {
    "adafactor, as timm": (
        lambda: eb.adafactor(schedule, b1=0.9, b2_cap=0.9, clip_threshold=None, min_size_to_factor=4, **VISION, **DECAY),
        {"min_dim_size_to_factor": 4, "beta2_cap": 0.9, **DECAY},
    ),
    "adafactor, decay alone": (
        lambda: eb.adafactor(schedule, b1=0.9, b2_cap=0.999, step_offset=20, decay_by="alone", **VISION, **DECAY),
        {"min_dim_size_to_factor": 1, "clipping_threshold": 1.0, "decay_offset": 20, "unscaled_wd": True, **DECAY},
    ),
    "adafactor, without momentum": (
        lambda: eb.adafactor(schedule, b2_cap=0.999, clip_threshold=None, **VISION, **DECAY),
        {"min_dim_size_to_factor": 1, "momentum": None, **DECAY},
    ),
    "adafactor, cautious": (
        lambda: eb.chain(
            eb.cautious(eb.chain(eb.scale_by_factored_rms(b2_cap=0.999, clip_threshold=None, dimensions="largest"), eb.running_mean())),
            eb.add_decayed_weights(0.1),
            eb.scale_by_learning_rate(schedule),
        ),
        {"min_dim_size_to_factor": 1, "caution": True, **DECAY},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_TIMM)
def test_timm_adafactor_is_followed(name: str, noted: Noted) -> None:
    make, options = OF_TIMM[name]
    oracle = theirs(from_timm("AdafactorBigVision", "adafactor_bv", lr=PEAK, **WIDE, **options), shapes=KERNELS)
    apart = deviation(ours(make(), shapes=KERNELS), oracle)
    noted("timm", name, apart)
    assert apart <= FLOAT64


def test_pytorch_optimizers_adafactor_is_followed(noted: Noted) -> None:
    make = from_pytorch_optimizer("AdaFactor", betas=(0.9, 0.9), relative_step=False, **WIDE, **DECAY)
    tx = eb.adafactor(schedule, b1=0.9, b2_cap=0.9, **DECAY)
    apart = deviation(ours(tx, shapes=KERNELS), theirs(make, shapes=KERNELS))
    noted("pytorch_optimizer", "adafactor", apart)
    assert apart <= FLOAT64


CAME: dict[str, Any] = {"betas": (0.9, 0.99, 0.999), **DECAY}


def of_the_authors(params: list[Tensor]) -> Any:
    came_pytorch: Any = pytest.importorskip("came_pytorch")
    return came_pytorch.CAME(params, lr=PEAK, **CAME)


@pytest.mark.parametrize("oracle", ["came-pytorch", "pytorch_optimizer"])
def test_came_is_followed(oracle: str, noted: Noted) -> None:
    """pytorch_optimizer's for vectors, too: the release of 4.1.0 does not scale the momentum itself any more."""
    make = of_the_authors if oracle == "came-pytorch" else from_pytorch_optimizer("CAME", **CAME)
    tx = eb.came(schedule, b2=0.99, b3=0.999, **DECAY)
    apart = deviation(ours(tx, shapes=KERNELS), theirs(make, shapes=KERNELS))
    noted(oracle, "came", apart)
    assert apart <= FLOAT64
