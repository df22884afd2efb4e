"""Edits of weights between steps, which keep what their residuals hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor

from everybit.base import plain_name, tree
from everybit.protocol import Context
from everybit.stepping.optimizer import Optimizer, OptimizerState

P = TypeVar("P")
S = TypeVar("S")


def scale_rows(
    optimizer: Optimizer[Any],
    params: P,
    state: OptimizerState[S],
    factors: Mapping[str, Tensor],
    ctx: Context | None = None,
) -> tuple[P, OptimizerState[S]]:
    """Multiply rows of some parameters by factors, with all the precision that parameters and state hold together.

    QK-clip (Kimi K2, https://arxiv.org/abs/2507.20534) is such an edit: after a step it scales the rows of heads whose attention logits are
    too large. A product of the stored weights alone would leave residuals that belong to other weights.

    Args:
        optimizer: The optimizer of these parameters.
        params: The parameters, as stored.
        state: Its step and moments stay.
        factors: By names of parameters: a factor for each index of the first dimension, 1-d. Other parameters stay as they are.
        ctx: Its ``first_element`` is that of the tree, for formats that draw random bits.

    Returns:
        New parameters and state.

    Raises:
        ValueError: A name of no parameter, or factors of another shape.

    Examples:
        >>> import torch, everybit as eb
        >>> optimizer = eb.with_policy(eb.adamw(1e-3), "LEAN_BF16")
        >>> params = {"q": torch.ones(4, 2, dtype=torch.bfloat16)}
        >>> params, state = eb.scale_rows(optimizer, params, optimizer.init(params), {"q": torch.tensor([1.0, 1.0, 0.5, 0.5])})
        >>> params["q"][:, 0].tolist()
        [1.0, 1.0, 0.5, 0.5]
    """
    names, leaves = [plain_name(path) for path in tree.paths(params)], tree.leaves(params)
    require_factors(factors, {name: tuple(leaf.shape) for name, leaf in zip(names, leaves, strict=True)})
    weights = optimizer.export_fp32(params, state)
    scaled = [
        by_row(weight, factors[name]) if name in factors else weight
        for name, weight in zip(names, tree.leaves(weights), strict=True)
    ]
    new, stored = optimizer.import_fp32(tree.replace(weights, scaled), params, state, ctx)
    chosen = tree.replace(params, [name in factors for name in names])

    def merged(is_scaled: bool, one: object, other: object) -> object:
        return one if is_scaled else other

    extra = tree.map(merged, chosen, stored.extra, state.extra)
    return tree.map(merged, chosen, new, params), OptimizerState(state.step, extra, state.inner)


def by_row(weights: Tensor, factors: Tensor) -> Tensor:
    """Return weights times a factor for each index of the first dimension, rounded once, in the weights' dtype."""
    shape = (-1, *(1,) * (weights.ndim - 1))
    return weights * factors.to(device=weights.device, dtype=weights.dtype).reshape(shape)


def require_factors(factors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse factors that do not belong to the rows of parameters.

    Args:
        factors: By names of parameters.
        shapes: The parameters' shapes.

    Raises:
        ValueError: A name of no parameter, or factors of another shape.
    """
    for name, given in factors.items():
        if name not in shapes:
            known = ", ".join([*shapes][:3])
            raise ValueError(f"factors: got {name!r}; accepted are names of trained parameters, such as {known}.")
        rows = shapes[name][:1]
        if tuple(given.shape) != rows or not rows:
            raise ValueError(
                f"factors: {name}: got shape {tuple(given.shape)}; accepted is {rows}, a factor for each row."
            )
