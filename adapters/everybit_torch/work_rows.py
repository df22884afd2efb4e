"""How the state of work on whole parameters lies on ranks: each tensor by its own rows, as ``torch.chunk`` cuts them.

So the parts of a tensor are those of a DTensor, whatever its shape: a factor of a matrix lies on ranks as the matrix does, each rank
has its share to a row, and checkpoints know no owner. Every rank has numbers without dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.entries import entries
from everybit.optimizer import OptimizerState
from everybit.parts import transforms_in
from everybit.policy import Resolved
from everybit.stored_work import StoredWork, tensors_of, with_rows, with_tensors
from everybit.whole_work import OnWholes
from everybit_torch.dtensors import RowShards, first_element, is_dtensor, row_shards
from everybit_torch.dtensors import like as like_parameter


@dataclass(frozen=True, slots=True)
class WorkRows:
    """How the state of a parameter's work lies on ranks.

    Attributes:
        parameter: The parameter, whose rows lie on the same ranks.
        ranks: Those ranks.
        rank: The number of this one.
        like: The state of the whole, without memory.
        shapes: Of the whole's tensors, by the names of their entries.
    """

    parameter: Tensor
    ranks: RowShards
    rank: int
    like: Any
    shapes: dict[str, torch.Size]

    @classmethod
    def of(
        cls, optimizer: eb.Optimizer[Any], parameters: Sequence[Tensor], parts: OptimizerState[Any]
    ) -> WorkRows | None:
        """Those of a unit's parameter; None if no state of its optimizer lies so.

        Args:
            optimizer: That steps the unit.
            parameters: Of the unit.
            parts: Its state, with rows or without.
        """
        if len(parameters) != 1 or not is_dtensor(parameters[0]):
            return None
        (parameter,) = parameters
        if not any(isinstance(node, OnWholes) for node in transforms_in(optimizer.transform)):
            return None
        ranks = row_shards(parameter)
        assert ranks is not None  # which placement made sure of
        none = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        like = stored_work(optimizer, parameter, 0).init(parts, none)
        if not tensors_of(like):
            return None
        shapes = _shapes(like, none, optimizer.formats([none])[0])
        return cls(parameter, ranks, ranks.mesh.get_local_rank(ranks.shards), like, shapes)

    def of_values(self, optimizer: eb.Optimizer[Any], step: Tensor) -> WorkRows:
        """How the values that are stored would lie on ranks, in the compute dtype."""
        none = torch.empty(self.parameter.shape, dtype=self.parameter.dtype, device="meta")
        like = stored_work(optimizer, self.parameter, 0).decode(self.like, step.to("meta"))
        return replace(self, like=like, shapes=_shapes(like, none, None))

    def spans(self, whole: Tensor) -> list[tuple[int, int]]:
        """For each rank the first element of its rows of a tensor of the whole's state, and the one behind its last."""
        if not whole.ndim:
            return [(0, 1)] * self.ranks.ranks  # which all have
        rows = whole.shape[0]
        width = whole.numel() // rows if rows else 0
        return list(pairwise(edge * width for edge in self.ranks.edges(rows)))

    def own(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor, as a vector with memory of its own."""
        if not whole.ndim:
            return whole.clone()
        start, stop = self.spans(whole)[self.rank]
        return whole.reshape(-1)[start:stop].clone()

    def own_shape(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's rows of an entry."""
        rows, *others = self.shapes[name]
        start, stop = self.ranks.edges(rows)[self.rank : self.rank + 2]
        return (stop - start, *others)

    def whole(self, tensors: Iterable[Tensor]) -> Any:
        """The state of the whole, of its tensors in order."""
        return with_tensors(self.like, tensors)

    def gathered(self, parts: OptimizerState[Any]) -> Any:
        """The state of the whole, which this rank and the others hold. All ranks have to call it."""
        return self.whole(map(self._gathered, tensors_of(parts.inner), tensors_of(self.like)))

    def _gathered(self, own: Tensor, like: Tensor) -> Tensor:
        if not like.numel() or not like.ndim:
            return own.clone().view(like.shape)
        # In bytes, which every backend takes.
        rows = like.shape[0]
        width = like.nbytes // rows
        part: Any = like_parameter(self.parameter, own.view(torch.uint8).view(-1, width), (rows, width))
        found: Tensor = part.full_tensor()
        return found.view(like.dtype).view(like.shape)

    def given_out(self, parts: OptimizerState[Any], whole: Any) -> OptimizerState[Any]:
        """A unit's state with this rank's rows of a state of the whole."""
        return with_rows(parts, whole, self.own)


def stored_work(optimizer: eb.Optimizer[Any], parameter: Tensor, first: int) -> StoredWork:
    """How the work on a parameter keeps its state, where the first element of this rank's rows has the number ``first``."""
    whole = first - first_element(parameter) if optimizer.draws_bits else first
    return StoredWork(optimizer, parameter.shape, parameter.dtype, whole)


def begun(
    optimizer: eb.Optimizer[Any], parameters: Sequence[Tensor], parts: OptimizerState[Any], first: int
) -> OptimizerState[Any]:
    """A unit's state before its first step, with the rows of its work's. Of work that looks at weights all ranks have to call it.

    Args:
        optimizer: That steps the unit.
        parameters: Of the unit.
        parts: What the optimizer made.
        first: Number of the first element.
    """
    rows = WorkRows.of(optimizer, parameters, parts)
    if rows is None:
        return parts
    stored, parameter, device = stored_work(optimizer, rows.parameter, first), rows.parameter, parts.step.device
    if stored.work.reads_weights and device.type != "meta":
        sharded: Any = parameter.detach()
        whole = sharded.full_tensor()
    else:
        whole = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
    return rows.given_out(parts, stored.init(parts, whole))


def _shapes(inner: Any, like: Tensor, stored: Resolved | None) -> dict[str, torch.Size]:
    state = OptimizerState(torch.empty((), device="meta"), [()], inner)
    return {entry.name: x.shape for entry, x in entries(state, [like], 0, stored) if entry.role == "slot"}
