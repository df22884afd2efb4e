"""The stored state of transforms that run at a parameter's owner: made, used in a step, and stored again, one parameter at a time.

It has the structure of the state of the optimizer that steps rows. So slots have the names, and values the random bits, that they have
where one process steps the whole parameter. Slots of which a process holds elements of its own are empty in it. In the place of the full
ones the process has :class:`~everybit.protocol.stored_rows.StoredRows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from everybit.base import torch_dtype, tree
from everybit.combinators import owner_work
from everybit.policies import Codec
from everybit.protocol import StoredRows, Whole, WholeWork, holds_rows, slots_in, with_slots
from everybit.stepping.optimizer import Optimizer, OptimizerState


@dataclass(frozen=True, slots=True)
class StoredWork:
    """How the state of one parameter's work at its owner is stored.

    Attributes:
        optimizer: That steps rows, and requests the work.
        shape: Of the parameter.
        dtype: Of the parameter.
        first: Global index of the parameter's first element.
    """

    optimizer: Optimizer[Any]
    shape: torch.Size
    dtype: torch.dtype
    first: int

    @property
    def work(self) -> WholeWork:
        """The work that the optimizer's transform requests."""
        return owner_work(self.optimizer.transform)

    def init(self, rows: OptimizerState[Any], weights: Tensor) -> Any:
        """The state before the first step, as stored.

        Args:
            rows: The optimizer's state for some rows.
            weights: The whole parameter; of work that reads no weights any tensor of its shape. On ``meta`` the state has shapes and dtypes
                only.
        """
        codec = self._codec(rows.step)
        wide = weights.detach().to(torch_dtype(codec.formats[0].policy.compute))
        return codec.encode_state(_in_place_of_rows(rows.inner, slots_in(self.work.init([wide]))))

    def run(
        self,
        work: WholeWork,
        request: Whole,
        update: Tensor,
        stored: Any,
        rows: OptimizerState[Any],
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Do the work on a whole update.

        Args:
            work: Of the optimizer.
            request: Of some rows.
            update: In the compute dtype.
            stored: The state before the step; None of work without state.
            rows: The optimizer's state for some rows, before the step.
            weights: In the compute dtype, if the work reads them.

        Returns:
            The result, and the state after the step, as stored.
        """
        codec = self._codec(rows.step + 1)
        slots = [] if stored is None else _slots_of(codec.decode_state(stored), rows.inner)
        ctx = replace(request.ctx, numbering=codec.numbering)
        result, after = work.run(update, with_slots(request.states, slots), ctx, weights)
        return result, codec.encode_state(_in_place_of_rows(rows.inner, slots_in(after)))

    def decode(self, stored: Any, step: Tensor) -> Any:
        """The stored values in the compute dtype."""
        return self._codec(step).decode_state(stored)

    def encode(self, decoded: Any, step: Tensor) -> Any:
        """The values of :meth:`decode`, as stored: rounded once, as a step rounds them."""
        return self._codec(step).encode_state(decoded)

    def _codec(self, step: Tensor) -> Codec:
        like = [torch.empty(self.shape, dtype=self.dtype, device="meta")]
        return Codec.of(like, self.optimizer.formats(like), self.optimizer.seed, step, self.first)


def tensors_of(whole: Any) -> list[Tensor]:
    """The tensors of a stored state, in order."""
    return [x for slot in slots_in(whole) for x in tree.leaves(slot)]


def rows_of(inner: Any) -> list[Tensor]:
    """The rows of stored tensors in the state of an optimizer that steps rows, in the order of :func:`tensors_of`."""
    return [x for slot in slots_in(inner) if holds_rows(slot) for x in tree.leaves(slot)]


def with_tensors(whole: Any, tensors: Iterable[Tensor]) -> Any:
    """A stored state with other tensors in the place of those that :func:`tensors_of` lists."""
    new = iter(tensors)
    return tree.map_slots(lambda _name, slot: tree.map(lambda _: next(new), slot), whole)


def with_rows(rows: OptimizerState[Any], stored: Any, cut: Callable[[Tensor], Tensor]) -> OptimizerState[Any]:
    """The state of some rows, with the rows of a stored state.

    Args:
        rows: The optimizer's state for them.
        stored: The stored state of the whole.
        cut: Makes a vector of the rows of a tensor.
    """

    def slot(own: Any, whole: Any) -> Any:
        return [StoredRows(tree.map(cut, value)) for value in whole] if holds_rows(own) else own

    slots = [slot(own, whole) for own, whole in zip(slots_in(rows.inner), slots_in(stored), strict=True)]
    return OptimizerState(rows.step, rows.extra, with_slots(rows.inner, slots))


def _in_place_of_rows(inner: Any, slots: Sequence[Any]) -> Any:
    """The state of some rows, with the slots of the whole; empty ones in the place of others, which count for random draws."""
    new = iter(slots)

    def slot(_name: str, own: Any) -> Any:
        return next(new) if holds_rows(own) else [None if value is None else StoredRows(None) for value in own]

    return tree.map_slots(slot, inner)


def _slots_of(whole: Any, inner: Any) -> list[Any]:
    """The slots of a whole state that the state of some rows holds rows of."""
    return [value for value, own in zip(slots_in(whole), slots_in(inner), strict=True) if holds_rows(own)]
