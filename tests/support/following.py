"""One problem for an optimizer and what it has to follow: 100 random steps in float64, with a learning rate that changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

import everybit as eb

STEPS = 100
SHAPES = {"matrix": (4, 3), "vector": (5,), "scalar": ()}
KERNELS = {"kernel": (4, 2, 3), "matrix": (5, 4), "vector": (5,)}
"""For optimizers that keep something of rows and columns: of the kernel's dimensions the last two are not the two largest."""

PEAK = 0.02

Tensors = dict[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]


def rate(done: int) -> float:
    """The learning rate after so many updates."""
    return PEAK / (1 + done / 50)


def schedule(done: Tensor) -> Tensor:
    """:func:`rate` as a schedule of ours."""
    return PEAK / (1 + done.double() / 50)


def start(dtype: torch.dtype = torch.float64, shapes: Shapes = SHAPES) -> Tensors:
    """The weights before the first step."""
    return _draw(0, dtype, shapes)


def gradients(dtype: torch.dtype = torch.float64, shapes: Shapes = SHAPES) -> list[Tensors]:
    """The gradients of all steps, which do not depend on the weights: noise around 1/2, so that weights go somewhere."""
    return [{name: value + 0.5 for name, value in _draw(step, dtype, shapes).items()} for step in range(1, STEPS + 1)]


def ours(transform: eb.Transform[Any], dtype: torch.dtype = torch.float64, shapes: Shapes = SHAPES) -> list[Tensors]:
    """The weights after each step of a transform."""
    return [weights for weights, _ in ours_with_averages(transform, dtype, shapes)]


def ours_with_averages(
    transform: eb.Transform[Any], dtype: torch.dtype = torch.float64, shapes: Shapes = SHAPES
) -> list[tuple[Tensors, Tensors]]:
    """The weights after each step of a transform, and those for evaluation."""
    optimizer = eb.with_policy(transform, eb.policies.FP64 if dtype is torch.float64 else eb.policies.FP32)
    params = start(dtype, shapes)
    state, found = optimizer.init(params), []
    for gradient in gradients(dtype, shapes):
        params, state = optimizer.step(params, gradient, state)
        found.append((params, optimizer.eval_params(params, state)))
    return found


def theirs(
    make: Callable[[list[Tensor]], Any],
    dtype: torch.dtype = torch.float64,
    *,
    varying: bool = True,
    factor: float = 1.0,
    shapes: Shapes = SHAPES,
) -> list[Tensors]:
    """The weights after each step of an optimizer with torch's interface, at ``factor`` times the learning rate."""
    params = {name: torch.nn.Parameter(value) for name, value in start(dtype, shapes).items()}
    optimizer = make(list(params.values()))
    found = []
    for done, gradient in enumerate(gradients(dtype, shapes)):
        for group in optimizer.param_groups:
            group["lr"] = factor * (rate(done) if varying else PEAK)
        for name, parameter in params.items():
            parameter.grad = gradient[name].clone()
        optimizer.step()
        found.append({name: parameter.detach().clone() for name, parameter in params.items()})
    return found


def formula(
    follow: Callable[[Tensor, list[Tensor], Callable[[int], float]], Iterable[Tensor]], shapes: Shapes = SHAPES
) -> list[Tensors]:
    """The weights after each step of a formula, written for one tensor: from weights, gradients and learning rate to weights."""
    sequence = gradients(shapes=shapes)
    each = {
        name: list(follow(value, [gradient[name] for gradient in sequence], rate))
        for name, value in start(shapes=shapes).items()
    }
    return [{name: values[step] for name, values in each.items()} for step in range(STEPS)]


def deviation(found: list[Tensors], expected: list[Tensors]) -> float:
    """The largest difference of two runs, over the largest weight."""
    assert len(found) == len(expected) == STEPS
    assert all(bool(value.isfinite().all()) for run in (found, expected) for one in run for value in one.values())
    largest = max(float(value.abs().max()) for one in expected for value in one.values())
    apart = max(
        float((one[name] - other[name]).abs().max())
        for one, other in zip(found, expected, strict=True)
        for name in other
    )
    return apart / largest


def _draw(seed: int, dtype: torch.dtype, shapes: Shapes) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in shapes.items()
    }
