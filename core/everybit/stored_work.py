"""The state of work on whole tensors under a policy: made, taken up by the work, and stored again, one parameter at a time.

It has the structure of the state of the optimizer of parts, so that slots have the names, and values the random bits, that they have where
one process steps the whole parameter. Slots of which that optimizer has elements of its own are empty in it; those that are full here hold
:class:`~everybit.stored_rows.StoredRows` there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from everybit import tree
from everybit.codec import Codec
from everybit.dtypes import torch_dtype
from everybit.optimizer import Optimizer, OptimizerState
from everybit.parts import transforms_in
from everybit.stored_rows import StoredRows, WorkState
from everybit.whole_work import Errand, OnWholes, WholeWork, slots_in, with_counts


@dataclass(frozen=True, slots=True)
class StoredWork:
    """How the work on one parameter keeps its state.

    Attributes:
        optimizer: That of parts, which asks for the work.
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
        """The work that the optimizer's transform asks for."""
        (node,) = [one for one in transforms_in(self.optimizer.transform) if isinstance(one, OnWholes)]
        return node.work

    def init(self, parts: OptimizerState[Any], weights: Tensor) -> Any:
        """The state before the first step, as stored.

        Args:
            parts: The optimizer's state for a part.
            weights: The whole parameter; of work that looks at no weights any tensor of its shape. On ``meta`` the state has shapes and
                dtypes only.
        """
        codec = self._codec(parts.step)
        wide = weights.detach().to(torch_dtype(codec.formats[0].policy.compute))
        return codec.encode_state(_in_place_of(parts.inner, self.work.init([wide])))

    def run(
        self, errand: Errand, update: Tensor, stored: Any, parts: OptimizerState[Any], weights: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Do the work on a whole update.

        Args:
            errand: What a part asked for.
            update: In the compute dtype.
            stored: The state before the step; None of work that keeps none.
            parts: The optimizer's state for a part, before the step.
            weights: In the compute dtype, if the work looks at them.

        Returns:
            The result, and the state after the step, as stored.
        """
        codec = self._codec(parts.step + 1)
        stored = self.init(parts, torch.empty(self.shape, device="meta")) if stored is None else stored
        before = with_counts(_work_state(codec.decode_state(stored)), _work_state(parts.inner))
        ctx = replace(errand.ctx, numbering=codec.numbering)
        result, after = errand.work.run(update, before, ctx, weights)
        return result, codec.encode_state(_in_place_of(parts.inner, after))

    def decode(self, stored: Any, step: Tensor) -> Any:
        """What is stored, in the compute dtype."""
        return self._codec(step).decode_state(stored)

    def encode(self, decoded: Any, step: Tensor) -> Any:
        """What :meth:`decode` gave, as stored: rounded once, as a step rounds it."""
        return self._codec(step).encode_state(decoded)

    def _codec(self, step: Tensor) -> Codec:
        like = [torch.empty(self.shape, dtype=self.dtype, device="meta")]
        return Codec.of(like, self.optimizer.formats(like), self.optimizer.seed, step, self.first)


def tensors_of(inner: Any) -> list[Tensor]:
    """The tensors of the work's slots, in order: of the whole's state, or its rows in the state of a part."""
    return [x for slot in slots_in(_work_state(inner)) for x in tree.leaves(slot)]


def with_tensors(inner: Any, tensors: Iterable[Tensor]) -> Any:
    """A state with these in the place of those that :func:`tensors_of` lists."""
    new = iter(tensors)

    def filled(state: WorkState) -> WorkState:
        return tree.map_slots(lambda _name, slot: tree.map(lambda _: next(new), slot), state)

    return tree.map_nodes(filled, WorkState, inner)


def with_rows(parts: OptimizerState[Any], stored: Any, rows: Callable[[Tensor], Tensor]) -> OptimizerState[Any]:
    """The state of a part with its rows of the whole's.

    Args:
        parts: The optimizer's state for the part.
        stored: The work's, of the whole.
        rows: Makes a vector of the part's rows of a tensor.
    """

    def slot(_name: str, values: list[Any]) -> list[StoredRows]:
        return [StoredRows(tree.map(rows, value)) for value in values]

    work = tree.map_slots(slot, _work_state(stored))
    inner = tree.map_nodes(lambda own: with_counts(work, own), WorkState, parts.inner)
    return OptimizerState(parts.step, parts.extra, inner)


def _in_place_of(inner: Any, work: WorkState) -> Any:
    """The state of a part, with the whole's of the work, and nothing in other slots; those that the part has count for random draws."""

    def emptied(_name: str, slot: Any) -> list[Any]:
        return [None if value is None else StoredRows(None) for value in slot]

    return tree.map_nodes(lambda _: work, WorkState, tree.map_slots(emptied, inner))


def _work_state(inner: Any) -> WorkState:
    found: list[WorkState] = []
    tree.map_nodes(found.append, WorkState, inner)
    (one,) = found
    return one
