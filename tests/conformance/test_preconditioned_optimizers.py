"""Optimizers with a matrix for each dimension against other packages' over 200 random steps in float64."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

import everybit as eb
from tests.core.test_soap import ROUNDING, SHAPES
from tests.support.following import Tensors, deviation, ours, schedule, theirs
from tests.support.oracles import Noted

SOAPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "every step, other rates": (
        {"period": 1, "b1": 0.9, "b2": 0.99, "factor_decay": 0.8},
        {"precondition_frequency": 1, "betas": (0.9, 0.99), "shampoo_beta": 0.8},
    ),
    "not debiased": ({"debias": False}, {"correct_bias": False}),
    "small dimensions": ({"max_dimension": 3}, {"max_precondition_dim": 3}),
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
