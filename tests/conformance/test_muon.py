"""Muon against optax's and timm's, and NorMuon against pytorch_optimizer's, over 200 random steps in float64.

optax has JAX's layout: its scale has rows and columns exchanged. It corrects the bias of its momentum, which the norm divides out again
where momentum is not Nesterov's; where it is, the gradient's share of the mix is another one, which everybit does not offer.
"""

from __future__ import annotations

import math
from typing import Any

import optax
import pytest
import torch
from torch import Tensor

import everybit as eb
from tests.support.following import PEAK, STEPS, deviation, ours, schedule, theirs
from tests.support.oracles import Noted, from_timm, optax_rate, theirs_of_optax

SHAPES = {"tall": (6, 4), "wide": (3, 5), "row": (1, 4)}

# As in tests/core/test_muon.py: a step rounds some 100 times, and the iteration makes that up to 1000 times larger.
ROUNDING = STEPS * PEAK * 100 * 1000 * 2.0**-53


def exchanged(rows: int, columns: int) -> float:
    return math.sqrt(max(1.0, columns / rows))


def optaxs(**options: Any) -> Any:
    return optax.contrib.muon(optax_rate, eps=1e-30, weight_decay=0.1, **options)


def test_optax_muon_is_followed(noted: Noted) -> None:
    oracle = theirs_of_optax(optaxs(nesterov=False), SHAPES)
    tx = eb.muon(schedule, iteration=eb.NewtonSchulz(arithmetic="float64", eps=1e-30), nesterov=False, scale=exchanged)
    apart = deviation(ours(tx, shapes=SHAPES), oracle)
    noted("optax", "muon", apart)
    assert apart <= ROUNDING


@pytest.mark.parametrize("averaged", [True, False])
def test_its_nesterov_momentum_is_another(averaged: bool) -> None:
    oracle = theirs_of_optax(optaxs(nesterov=True), SHAPES)
    tx = eb.muon(
        schedule, iteration=eb.NewtonSchulz(arithmetic="float64", eps=1e-30), averaged=averaged, scale=exchanged
    )
    assert deviation(ours(tx, shapes=SHAPES), oracle) > 1e-4


# Those of timm and pytorch_optimizer have a bfloat16 iteration, of the same products as ours. In float64 the last bits of the momentum
# disappear when it is rounded to bfloat16, so that all 200 steps can be followed.
BFLOAT16_SHAPES = {"tall": (6, 4), "wide": (4, 9)}
# Some twenty operations a step on weights and updates of the size of the largest.
FOLLOWED = STEPS * 20 * 2.0**-53


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_timms_muon_is_followed(scale: Any, nesterov: bool, noted: Noted) -> None:
    oracle = theirs(
        from_timm("Muon", lr=PEAK, nesterov=nesterov, weight_decay=0.1, adjust_lr_fn=scale, ns_coefficients="original"),
        shapes=BFLOAT16_SHAPES,
    )
    apart = deviation(ours(eb.muon(schedule, nesterov=nesterov, scale=scale), shapes=BFLOAT16_SHAPES), oracle)
    noted("timm", "muon", apart)
    assert apart <= FOLLOWED


def test_torchs_muon_is_followed(noted: Noted) -> None:
    oracle = theirs(lambda params: torch.optim.Muon(params, lr=PEAK, weight_decay=0.1), shapes=BFLOAT16_SHAPES)
    apart = deviation(ours(eb.muon(schedule), shapes=BFLOAT16_SHAPES), oracle)
    noted("torch", "muon", apart)
    assert apart <= FOLLOWED


@pytest.mark.parametrize("norm", ["kept", "exact"])
def test_pytorch_optimizers_normuon_is_followed(norm: Any, noted: Noted) -> None:
    peer = pytest.importorskip("pytorch_optimizer")
    scale: Any = {"kept": "original", "exact": "match_rms_adamw"}[norm]
    update = {"kept": "preserve_norm", "exact": "match_rms"}[norm]

    def make(params: list[Tensor]) -> Any:
        group = {"params": params, "use_muon": True, "lr": PEAK, "update_scale": update, "weight_decay": 0.1}
        return peer.NorMuon([group], foreach=False)

    oracle = theirs(make, shapes=BFLOAT16_SHAPES)
    tx = eb.normuon(schedule, norm=norm, scale=scale, weight_decay=0.1)
    apart = deviation(ours(tx, shapes=BFLOAT16_SHAPES), oracle)
    noted("pytorch_optimizer", f"normuon {norm}", apart)
    assert apart <= FOLLOWED


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_pytorch_optimizers_muon_is_followed(scale: Any, nesterov: bool, noted: Noted) -> None:
    peer = pytest.importorskip("pytorch_optimizer")

    def make(params: list[Tensor]) -> Any:
        group = {"params": params, "use_muon": True, "lr": PEAK, "nesterov": nesterov, "weight_decay": 0.1}
        return peer.Muon([group | {"use_adjusted_lr": scale == "match_rms_adamw"}], foreach=False)

    oracle = theirs(make, shapes=BFLOAT16_SHAPES)
    apart = deviation(ours(eb.muon(schedule, nesterov=nesterov, scale=scale), shapes=BFLOAT16_SHAPES), oracle)
    noted("pytorch_optimizer", f"muon {scale}", apart)
    assert apart <= FOLLOWED


def test_pytorch_optimizers_gram_form_is_ours() -> None:
    """With the published restart, in float32. Rounding errors grow as small singular values do, by the factor of each step."""
    matrix = pytest.importorskip("pytorch_optimizer.optimizer.utils.matrix")
    iteration = eb.NewtonSchulz(arithmetic="float32", form="gram")
    grown = math.prod(a for a, _, _ in iteration.triples)
    for shape in ((40, 160), (300, 700), (160, 40)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        expected = matrix.zero_power_via_gram_newton_schulz(x, dtype=torch.float32)
        assert float((iteration.orthogonalized(x) - expected).abs().max()) <= 10 * 2.0**-24 * grown


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["spectral_unclamped", "match_rms_adamw", 1.0])
def test_dions_muon_is_followed(scale: Any, nesterov: bool, noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    """With our iteration in the place of its own, whose products round in another order. Its package is on git alone."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    peer = pytest.importorskip("dion.muon_reference")
    iteration = eb.NewtonSchulz(arithmetic="float64", eps=1e-30)
    monkeypatch.setattr(peer, "zeropower_via_newtonschulz5", lambda x, **_: iteration.orthogonalized(x))
    adjusted = {"spectral_unclamped": "spectral_norm", "match_rms_adamw": "rms_norm", 1.0: None}[scale]

    def make(params: list[Tensor]) -> Any:
        return peer.Muon(params, lr=PEAK, nesterov=nesterov, adjust_lr=adjusted, weight_decay=0.1)

    tx = eb.muon(schedule, averaged=False, nesterov=nesterov, scale=scale, iteration=iteration)
    apart = deviation(ours(tx, shapes=BFLOAT16_SHAPES), theirs(make, shapes=BFLOAT16_SHAPES))
    noted("dion", f"muon {scale}", apart)
    assert apart <= FOLLOWED
