"""Sharpness-aware minimization in a torch loop: a second gradient, at other weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch.torch_internals.dtensors import is_dtensor


@contextmanager
def sam_weights(
    optimizer: torch.optim.Optimizer, radius: float | Tensor = 0.05, *, adaptive: bool = False, eps: float = 1e-12
) -> Iterator[None]:
    """Give the model the weights of :func:`everybit.sam_point` inside, for the second backward pass of a step; gradients begin anew.

    After it the weights have the bits that they had before, also if something is raised, and the gradients are those that were computed
    inside. Memory for a copy of the weights is taken. Of a model of 16 bits see there what becomes of a small radius.

    Args:
        optimizer: Of everybit or of torch; with the gradients of all its parameters that are to be moved, on every rank the same, as under
            DDP. Parameters without a gradient stay where they are.
        radius: The radius, at least zero.
        adaptive: Measure distances relative to each weight (ASAM).
        eps: Added to the norm of the gradients.

    Raises:
        RuntimeError: No parameter has a gradient.
        TypeError: FSDP2's parameters or ``FlatStepper.as_optimizer()``, since a rank does not know the norms of shards.
        ValueError: A hyperparameter out of range.

    Examples:
        >>> import torch
        >>> from everybit_torch import AdamW, sam_weights
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = AdamW(model.parameters(), lr=0.01)
        >>> loss = lambda: model(torch.ones(4, 2)).square().mean()
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     loss().backward()
        ...     with sam_weights(optimizer, 0.05):
        ...         loss().backward()
        ...     optimizer.step()
    """
    parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
    if getattr(optimizer, "of_shards", False) or any(map(is_dtensor, parameters)):
        raise TypeError(
            "sam_weights: got parameters that are shards, and this rank does not know the norm of the whole gradient; accepted are whole"
            " parameters."
        )
    gradients = {p: p.grad for p in parameters if p.grad is not None}
    if not gradients:
        raise RuntimeError(
            "sam_weights: no parameter has a gradient; accepted is an optimizer after the first backward pass of a step."
        )
    with torch.no_grad():
        kept: list[Tensor] = [p.detach().clone() for p in gradients]
        there = eb.sam_point(kept, [*gradients.values()], radius, adaptive=adaptive, eps=eps)
        moved = [*gradients]
        for parameter, value in zip(moved, there, strict=True):
            parameter.copy_(value)
    del there, gradients
    optimizer.zero_grad()
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(moved, kept, strict=True):
                parameter.copy_(value)
