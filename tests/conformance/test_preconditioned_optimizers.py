"""Optimizers with a matrix for each dimension against other packages' over 200 random steps in float64."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

import everybit as eb
from tests.core.test_apollo import ROUNDING as ROUNDING_OF_RATIOS
from tests.core.test_kron import ROUNDING as ROUNDING_OF_WHITENING
from tests.core.test_shampoo import ROUNDING as ROUNDING_OF_ROOTS
from tests.core.test_soap import ROUNDING, SHAPES
from tests.support.draws import Drawn
from tests.support.following import PEAK, STEPS, Tensors, deviation, ours, schedule, theirs
from tests.support.oracles import Noted, from_timm, module_alone

SOAPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "every step, other rates": (
        {"period": 1, "b1": 0.9, "b2": 0.99, "factor_decay": 0.8},
        {"precondition_frequency": 1, "betas": (0.9, 0.99), "shampoo_beta": 0.8},
    ),
    "not debiased": ({"debias": False}, {"correct_bias": False}),
    "small dimensions": ({"where": eb.Kronecker(max_dimension=3)}, {"max_precondition_dim": 3}),
}


def from_pytorch_optimizer(name: str, shapes: Any, **options: Any) -> list[Tensors]:
    """It decomposes in float32, which is float64 here."""
    package: Any = pytest.importorskip("pytorch_optimizer")
    with patch.object(torch, "float32", torch.float64):
        return theirs(lambda params: getattr(package, name)(params, **options), shapes=shapes)


@pytest.mark.parametrize("case", SOAPS)
def test_pytorch_optimizers_soap_is_followed(case: str, noted: Noted) -> None:
    """Learning rate, decay and periods are ours by default; a number it cannot step."""
    mine, its = SOAPS[case]
    shapes = {name: shape for name, shape in SHAPES.items() if shape}
    make: Any = eb.soap
    apart = deviation(ours(make(schedule, **mine), shapes=shapes), from_pytorch_optimizer("SOAP", shapes, **its))
    noted("pytorch_optimizer", "soap", apart)
    assert apart <= ROUNDING


def test_pytorch_optimizers_shampoo_is_followed(noted: Noted) -> None:
    """The paper's: sums that begin at eps, matrices for vectors too, steps of their own size, and no momentum."""
    shapes = {name: shape for name, shape in SHAPES.items() if shape}
    tx = eb.shampoo(
        schedule,
        b1=None,
        b2=None,
        eps=0.05,
        damping="start",
        period=1,
        graft=eb.Grafting(of="none"),
        where=eb.Kronecker(vectors=True, max_dimension=8192),
        weight_decay=0.1,
    )
    oracle = from_pytorch_optimizer("Shampoo", shapes, matrix_eps=0.05, weight_decay=0.1, weight_decouple=True)
    apart = deviation(ours(tx, shapes=shapes), oracle)
    noted("pytorch_optimizer", "shampoo", apart)
    assert apart <= ROUNDING_OF_ROOTS


graft: Any = partial(eb.Grafting, decay=0.99, eps=1e-10, start=1)
SCALABLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "means, adagrad's size": ({"b2": 0.99, "graft": graft("adagrad")}, {"betas": (0.9, 0.99), "graft_type": 2}),
    "means, rmsprop's size": ({"b2": 0.99, "graft": graft("rmsprop")}, {"betas": (0.9, 0.99), "graft_type": 3}),
    "means, sgd's size, nesterov": (
        {"b2": 0.99, "graft": graft("sgd"), "momentum": eb.trace(0.9, nesterov=True)},
        {"betas": (0.9, 0.99), "graft_type": 1, "nesterov": True},
    ),
    "another exponent": (
        {"b2": 0.99, "graft": graft("sgd"), "exponent": 0.5},
        {"betas": (0.9, 0.99), "graft_type": 1, "inverse_exponent_override": 2},
    ),
}


@pytest.mark.parametrize("case", SCALABLE)
def test_pytorch_optimizers_scalable_shampoo_is_followed(case: str, noted: Noted) -> None:
    """Its matrices begin at eps, and its momentum is that of the steps. Vectors have no matrices, but take the graft's step."""
    mine, its = SCALABLE[case]
    fixed: dict[str, Any] = {
        "b1": None, "eps": 0.05, "damping": "start", "period": 1, "momentum": 0.9,
        "weight_decay": 0.0,
    }  # fmt: skip
    shapes = {name: shape for name, shape in SHAPES.items() if len(shape) in (1, 2)}
    make: Any = eb.shampoo
    options = {
        "matrix_eps": 0.05, "start_preconditioning_step": 1, "preconditioning_compute_steps": 1, "use_svd": True,
        "shape_interpretation": False, "nesterov": False,
    } | its  # fmt: skip
    apart = deviation(
        ours(make(schedule, **fixed | mine), shapes=shapes),
        from_pytorch_optimizer("ScalableShampoo", shapes, **options),
    )
    noted("pytorch_optimizer", "shampoo", apart)
    assert apart <= ROUNDING_OF_ROOTS


KRONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "every step": ({}, {"preconditioner_update_probability": 1.0}),
    "of gradients": (
        {"of_momentum": False, "preconditioner_rate": 0.2},
        {"preconditioner_update_probability": 1.0, "momentum_into_precond_update": False, "precond_lr": 0.2},
    ),
    "diagonals": (
        {"where": eb.Kronecker(max_dimension=3), "start": 2.0},
        {"preconditioner_update_probability": 1.0, "max_size_triangular": 3, "precond_init_scale": 2.0},
    ),
}


@pytest.mark.parametrize("case", KRONS)
def test_timms_kron_is_followed(case: str, noted: Noted) -> None:
    """With the probes that ours draws, uncompiled, and solved in float64. It balances the factors' sizes at random, to no effect."""
    mine, its = KRONS[case]
    drawn, make = Drawn(), eb.kron
    untyped: Any = make
    with patch("everybit.transforms.kron.normal", drawn):
        found = ours(untyped(schedule, weight_decay=0.1, **mine), shapes=SHAPES)
    probes = iter(drawn.numbers)
    with (
        patch.object(torch, "compile", lambda function, **_: function),
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "randn", wraps=torch.randn) as randn,
    ):
        real = randn._mock_wraps
        # Weights and gradients of the test are drawn by a generator, its probes without one.
        randn.side_effect = lambda *a, **k: next(probes) if k.get("generator") is None else real(*a, **k)
        oracle = theirs(from_timm("Kron", weight_decay=0.1, **its), shapes=SHAPES)
    apart = deviation(found, oracle)
    noted("timm", "kron", apart)
    assert apart <= ROUNDING_OF_WHITENING


def test_pytorch_optimizers_galore_is_followed(noted: Noted) -> None:
    """In one subspace: after a second choice its means belong to vectors of whichever sign the library gives."""
    shapes = {"square": (4, 4), "tall": (6, 4), "wide": (3, 5), "vector": (5,)}
    tx = eb.galore(schedule, rank=2, period=1000, scale=0.5, weight_decay=0.1)
    package: Any = pytest.importorskip("pytorch_optimizer")

    def make(params: Any) -> Any:
        group = {"params": params, "rank": 2, "update_proj_gap": 1000, "scale": 0.5, "projection_type": "std"}
        return package.GaLore([group], weight_decay=0.1, foreach=False)

    # It decomposes in float32, which is float64 here.
    with patch.object(torch, "float", torch.float64), patch.object(torch.Tensor, "float", torch.Tensor.double):
        oracle = theirs(make, shapes=shapes)
    apart = deviation(ours(tx, shapes=shapes), oracle)
    noted("pytorch_optimizer", "galore", apart)
    assert apart <= ROUNDING


APOLLOS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "by channels": ({}, {}),
    "by matrices": (
        {"rank": 1, "scale_type": "tensor", "scale": 128.0},
        {"rank": 1, "scale_type": "tensor", "scale": 128.0},
    ),
    "on the larger side": (
        {"scale_type": "tensor", "side": "larger"},
        {"scale_type": "tensor", "proj_type": "reverse_std"},
    ),
    "in one subspace of singular vectors": (
        {"basis": "singular", "period": 1000},
        {"proj": "svd", "update_proj_gap": 1000},
    ),
    "unlimited": ({"limit": None}, {"disable_nl": True}),
}


@pytest.mark.parametrize("case", APOLLOS)
def test_the_authors_apollo_is_followed(case: str, noted: Noted) -> None:
    apart = apart_from_the_authors_apollo(*APOLLOS[case])
    noted("apollo-torch", "apollo", apart)
    assert apart <= ROUNDING_OF_RATIOS


def test_the_authors_apollo_that_limits_after_it_scales_is_the_same_but_for_what_it_adds_to_norms() -> None:
    """That is 1e-8 to norms of about 1, at each step, in steps of which each has the size that the last one leaves it."""
    apart = apart_from_the_authors_apollo({"scale": 4.0}, {"scale": 4.0, "scale_front": True})
    assert ROUNDING_OF_RATIOS < apart <= STEPS * PEAK * STEPS * 1e-8


def apart_from_the_authors_apollo(mine: dict[str, Any], its: dict[str, Any]) -> float:
    """With the vectors that ours draws, which the authors' code keeps for a period."""
    module = module_alone("apollo_torch.apollo")
    shapes = {"square": (4, 4), "tall": (6, 4), "wide": (3, 5), "vector": (5,)}
    drawn, make = Drawn(), eb.apollo
    untyped: Any = make
    options = {"rank": 2, "period": 7} | mine
    with patch("everybit.linalg.projections.normal", drawn):
        found = ours(untyped(schedule, weight_decay=0.1, **options), shapes=shapes)
    # Ours draws for three matrices at each update, theirs at the first of each period.
    numbers = iter(
        [one for start in range(0, 3 * STEPS, 3 * options["period"]) for one in drawn.numbers[start : start + 3]]
    )
    group = {
        "rank": 2,
        "proj": "random",
        "scale_type": "channel",
        "scale": 1.0,
        "update_proj_gap": 7,
        "proj_type": "std",
    } | its
    fixed = {name: group.pop(name) for name in ("scale_front", "disable_nl") if name in group}

    def their_vectors(shape: tuple[int, ...], **_: Any) -> torch.Tensor:
        vectors = next(numbers)
        return vectors if vectors.shape == shape else vectors.T

    def optimizer(params: Any) -> Any:
        return module.AdamW([{"params": params[:3], **group}, {"params": params[3:]}], weight_decay=0.1, **fixed)

    # It projects in float32, which is float64 here.
    with (
        patch.object(sys.modules["apollo_torch.random_projector"], "stable_randn", their_vectors),
        patch.object(torch, "float", torch.float64),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        oracle = theirs(optimizer, shapes=shapes)
    return deviation(found, oracle)
