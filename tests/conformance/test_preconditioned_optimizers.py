"""Optimizers with a matrix for each dimension against other packages' over 200 random steps in float64."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

import everybit as eb
from tests.core.test_kron import ROUNDING as ROUNDING_OF_WHITENING
from tests.core.test_shampoo import ROUNDING as ROUNDING_OF_ROOTS
from tests.core.test_soap import ROUNDING, SHAPES
from tests.support.draws import Drawn
from tests.support.following import Tensors, deviation, ours, schedule, theirs
from tests.support.oracles import Noted, from_timm

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
