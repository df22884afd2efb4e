"""This rank's part of a parameter's gradient, as code written for whole gradients meets it.

Most operations on gradients between the backward pass and the step go element by element, and are right on a part. Two are
not, and are in every training loop: ``torch.amp.GradScaler`` looks for infinities, and ``torch.nn.utils.clip_grad_norm_`` measures the
norm of all gradients. On parts of their own, ranks would skip different steps and scale by different norms. So these two reduce over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit_torch.torch_internals.tensors import check_and_unscale, foreach_norm, plain_tensors


class AllGradients:
    """The gradients of all ranks, of which this rank has parts.

    Args:
        axis: Sums and maxima over the ranks that have the other parts.
        has_nonfinite: Whether a part of this rank has an infinite or NaN element: 0-d, on the device.
        device: The device from which numbers are sent.
    """

    def __init__(self, axis: eb.Axis, has_nonfinite: Callable[[], Tensor], device: torch.device) -> None:
        self._axis, self._has_nonfinite, self._device = axis, has_nonfinite, device
        self._nonfinite: bool | None = None

    def forget(self) -> None:
        """They are other gradients from here on."""
        self._nonfinite = None

    @property
    def nonfinite(self) -> bool:
        """Whether any rank's part has an element that is not finite. Asked once of all ranks, however many parts each has."""
        if self._nonfinite is None:
            self._nonfinite = bool(self._axis.max(self._has_nonfinite().double()))
        return self._nonfinite

    def norm(self, own: Tensor, order: float) -> Tensor:
        """Return the norm over all ranks' parts, of which this rank's have the norm ``own``. Every rank has to call it."""
        wide = own.detach().double().to(self._device)
        if math.isinf(order):
            return self._axis.max(wide).to(own.device, own.dtype)
        return (self._axis.sum(wide**order) ** (1.0 / order)).to(own.device, own.dtype)


class ShardGradient(Tensor):
    """This rank's part of one parameter's gradient: 1-d, a plain tensor except for the two operations above."""

    _all: AllGradients

    @staticmethod
    def of(part: Tensor, all_gradients: AllGradients) -> ShardGradient:
        """A part of the main gradients, as it is in memory."""
        gradient = part.as_subclass(ShardGradient)
        gradient._all = all_gradients
        return gradient

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        """Run ``function``, on plain tensors."""
        with plain_tensors():
            if function is torch.linalg.vector_norm and arguments[0].numel() == 0:
                result: Any = arguments[0].new_zeros(())  # torch has none of order infinity
            elif function is foreach_norm:
                options = {"ord": arguments[1]} if len(arguments) > 1 else keywords or {}
                result = [
                    torch.linalg.vector_norm(x, **options) if x.numel() else x.new_zeros(()) for x in arguments[0]
                ]
            else:
                result = function(*arguments, **(keywords or {}))
        if function is check_and_unscale:
            gradients, found_inf, *_ = arguments
            if _of(gradients).nonfinite:
                found_inf.fill_(1.0)
        elif function is torch.linalg.vector_norm or function is foreach_norm:
            order = float((keywords or {}).get("ord", arguments[1] if len(arguments) > 1 else 2.0))
            if function is foreach_norm:
                norms = zip(arguments[0], result, strict=True)
                return [PartialNorm.of(x, g._all, order) if isinstance(g, ShardGradient) else x for g, x in norms]
            if isinstance(arguments[0], ShardGradient) and len(arguments) < 3 and set(keywords or {}) <= {"ord"}:
                return PartialNorm.of(result, arguments[0]._all, order)
        return result


class PartialNorm(Tensor):
    """The norm of this rank's part of a gradient, or several of them: the norm of a stack of them is that of all gradients of all ranks."""

    _all: AllGradients
    _order: float

    @staticmethod
    def of(value: Tensor, all_gradients: AllGradients, order: float) -> PartialNorm:
        """A norm of this order."""
        norm = value.as_subclass(PartialNorm)
        norm._all, norm._order = all_gradients, order
        return norm

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        """Run ``function``, on plain tensors; norms of norms of one order go over all ranks.

        Raises:
            ValueError: The norm has an order that cannot be added up over ranks, or other tensors' norms are among them.
        """
        with plain_tensors():
            result = function(*arguments, **(keywords or {}))
        if function is torch.Tensor.to and isinstance(arguments[0], PartialNorm):
            return PartialNorm.of(result, arguments[0]._all, arguments[0]._order)
        if function is torch.stack:
            owners = {id(one._all) if isinstance(one, PartialNorm) else None for one in arguments[0]}
            if len(owners) > 1:
                raise ValueError(
                    "gradients: got those of a stepper's as_optimizer(), of which each rank has a part, together with others, whose norm"
                    " cannot be added to theirs; accepted are the gradients of one as_optimizer() in one norm."
                )
            orders = {one._order for one in arguments[0]}
            return PartialNorm.of(result, arguments[0][0]._all, orders.pop()) if len(orders) == 1 else result
        if function is torch.linalg.vector_norm and isinstance(arguments[0], PartialNorm):
            order = float(arguments[1] if len(arguments) > 1 else (keywords or {}).get("ord", 2.0))
            if not order > 0:
                raise ValueError(
                    f"norm_type: got {order} for gradients of which each rank has a part; accepted are orders above zero, and inf."
                )
            if order == arguments[0]._order:
                return arguments[0]._all.norm(result, order)
        return result


def _of(gradients: Sequence[Tensor]) -> AllGradients:
    return next(one for one in gradients if isinstance(one, ShardGradient))._all
