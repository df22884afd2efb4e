"""Parameters and gradients in the compute dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from everybit.base import FLOAT_DTYPES, ComputeDType, FloatDType, is_parameter, rounding, torch_dtype, tree
from everybit.policies.policy import Resolved

P = TypeVar("P")

_ACCEPTED: dict[ComputeDType, dict[torch.dtype, FloatDType]] = {
    "float64": {torch_dtype(one): one for one in FLOAT_DTYPES},
    "float32": {torch_dtype(one): one for one in FLOAT_DTYPES[1:]},
}
"""The dtypes of gradients, by that in which they are computed with."""


def widened_param(leaf: Tensor, one: Resolved) -> Tensor:
    """A parameter as stored, in the compute dtype; never the parameter itself, which a transform might keep in its state.

    A module's parameter is detached, or the state would keep a graph; a plain tensor is not: a start may be differentiated by.
    """
    plain = leaf.detach() if is_parameter(leaf) else leaf
    value = plain.to(one.wide)
    return value.clone() if value.dtype is leaf.dtype else value


def widened(grads: P, params: P, formats: Sequence[Resolved], *, name: str = "grads") -> P:
    """``grads`` in the compute dtype, after a look at each."""
    tree.require_same_structure(grads, params, name=name, reference_name="params")
    wide = []
    # By the parameters' order: the keys of a dict may come in another.
    for index, (grad, one) in enumerate(zip(tree.flatten_up_to(params, grads), formats, strict=True)):
        compute = one.policy.compute
        if not is_gradient(grad, one):
            path = f"{name}{tree.paths(params)[index]}"
            kind = f"a {grad.layout} tensor" if grad.layout is not torch.strided else str(grad.dtype)
            raise TypeError(
                f"{path}: got {kind} with Policy.compute={compute!r}; accepted are dense, real floating-point tensors:"
                f" {', '.join(_ACCEPTED[compute].values())}."
            )
        wide.append(wide_gradient(grad, one.wide))
    return tree.replace(params, wide)


def is_gradient(grad: Tensor, one: Resolved) -> bool:
    """Whether a step can take a tensor as a gradient: it is dense, and of a dtype not above the compute dtype."""
    return grad.layout is torch.strided and grad.dtype in _ACCEPTED[one.policy.compute]


def wide_gradients(
    grads: Sequence[Tensor], leaves: Sequence[Tensor], formats: Sequence[Resolved]
) -> list[Tensor] | None:
    """The gradients in the compute dtypes; None if one of them is no gradient of its parameter."""
    wide = []
    for grad, leaf, one in zip(grads, leaves, formats, strict=True):
        if grad.shape != leaf.shape or not is_gradient(grad, one):
            return None
        wide.append(wide_gradient(grad, one.wide))
    return wide


def wide_gradient(grad: Tensor, wide: torch.dtype) -> Tensor:
    """``grad`` in the compute dtype, with the rounding that its own dtype stands for.

    A user's compiled function may round a gradient to 16 bits and step in one graph; the compiler would then fold the two casts and hand
    on the number as it was before the rounding. In eager code a cast is a cast, and can be differentiated.
    """
    if torch.compiler.is_compiling() and grad.dtype is torch.bfloat16:
        return (grad.view(torch.int16).to(torch.int32) << 16).view(torch.float32).to(wide)
    if torch.compiler.is_compiling() and grad.dtype is torch.float16:
        return rounding.nearest(grad.float(), "float16").to(wide)
    return (grad if grad.dtype.itemsize >= 4 else grad.float()).to(wide)
