"""Optimizers that see whole tensors of several shapes, compiled: the code is made for numbers of rows that it does not know."""

from __future__ import annotations

import warnings

import pytest
import torch

from everybit.testing.own_transforms import REGISTRY
from everybit_torch import TorchOptimizer


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["adafactor", "shampoo"])
def test_compiled_code_takes_tensors_of_several_shapes_and_gives_the_bits_of_uncompiled_code(name: str) -> None:
    shapes = ((24, 24), (20, 24), (30, 18), (7,))

    def trained(compile: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        optimizer = TorchOptimizer(params, REGISTRY[name], lr=1e-2, policy="FP32", compile=compile)
        for _ in range(3):
            for parameter in params:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        return [parameter.detach() for parameter in params]

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compiled = trained(True)
    assert not [str(one.message) for one in said if "runs uncompiled" in str(one.message)]
    assert all(torch.equal(a, b) for a, b in zip(compiled, trained(False), strict=True))
