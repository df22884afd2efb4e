"""What is found out of a run of elements by stepping it on the meta device, once for all runs that are equal.

A plan asks for the same runs again and again: for each strategy, each unit and each call of the stepper; and a step of tensors without
memory takes as long as one of real tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

import everybit as eb
from everybit.base import Blocks

P = ParamSpec("P")
R = TypeVar("R")


def remembered(function: Callable[P, R]) -> Callable[P, R]:
    """Remember what a function returned for its latest arguments; of arguments that cannot be compared it is called anew."""
    known: Callable[..., R] = lru_cache(maxsize=1024)(function)

    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        given: Hashable = (arguments, tuple(options.items()))
        try:
            hash(given)
        except TypeError:
            return function(*arguments, **options)
        return known(*arguments, **options)

    return call


Shape = tuple[int, ...]
"""Of what is stepped at once: a vector of the elements of several parameters, or a whole tensor."""


def indices(shape: Shape, block: int, device: torch.device | str = "meta") -> int | Blocks:
    """The global indices of a run's elements, whose values do not matter: of the first, or of each block of so many elements.

    Args:
        shape: Of the run, or of a piece of it.
        block: Elements of a block, where each has an index of its own; else 0.
        device: Where the run lies.
    """
    if not block:
        return 0
    count = math.prod(shape) // block
    full = torch.full((count,), block, dtype=torch.int32, device=device)
    return Blocks(torch.zeros(count, dtype=torch.int64, device=device), full, block)


def elements(dtype: torch.dtype, shape: Shape) -> Tensor:
    """The parameters of a run, without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


@remembered
def state_of(optimizer: eb.Optimizer[Any], dtype: torch.dtype, shape: Shape) -> eb.OptimizerState[Any]:
    """The state of a run, without memory."""
    return optimizer.init([elements(dtype, shape)])
