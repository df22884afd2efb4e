"""How the state of work on whole parameters lies on ranks: each tensor by its own rows, as ``torch.chunk`` cuts them.

So the parts of a tensor are those of a DTensor, whatever its shape: a factor of a matrix lies on ranks as the matrix does, each rank
has its share to a row, and checkpoints know no owner. Every rank has numbers without dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.base import Blocks
from everybit.policies import Resolved
from everybit.protocol import AtOwner, transforms_in
from everybit.stepping import OptimizerState, entries
from everybit.stepping.stored_work import StoredWork, rows_of, tensors_of, with_rows, with_tensors
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
        tensors: Those of :attr:`like`, in order, with the first element of each rank's rows and the one behind the last.
    """

    parameter: Tensor
    ranks: RowShards
    rank: int
    like: Any
    shapes: dict[str, torch.Size]
    tensors: list[tuple[Tensor, list[tuple[int, int]]]] = field(init=False)

    def __post_init__(self) -> None:
        tensors = [(x, _spans(x.shape, self.ranks)) for x in tensors_of(self.like)]
        object.__setattr__(self, "tensors", tensors)

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
        if not any(isinstance(node, AtOwner) for node in transforms_in(optimizer.transform)):
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

    @property
    def nbytes(self) -> int:
        """Bytes of the state of the whole."""
        return sum(x.nbytes for x, _ in self.tensors)

    def own_shape(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's rows of an entry."""
        rows, *others = self.shapes[name]
        start, stop = self.ranks.edges(rows)[self.rank : self.rank + 2]
        return (stop - start, *others)

    def lengths(self, rank: int) -> list[int]:
        """How many bytes a rank has of each tensor."""
        return [(spans[rank][1] - spans[rank][0]) * x.itemsize for x, spans in self.tensors]

    def together(self, arrived: Sequence[Callable[[int], Tensor]]) -> Any:
        """The state of the whole, of the bytes that have arrived from each rank."""
        lengths = [self.lengths(rank) for rank in range(len(arrived))]
        found = [
            torch.cat([take(own[number]) for take, own in zip(arrived, lengths, strict=True)])
            for number in range(len(self.tensors))
        ]
        # Of a number without dimensions all ranks have sent the same.
        return self._with(
            [x[: one.nbytes].view(one.dtype).view(one.shape) for x, (one, _) in zip(found, self.tensors, strict=True)]
        )

    def apart(self, whole: Any, rank: int) -> list[Tensor]:
        """A rank's rows of a state of the whole, in bytes."""
        pairs = zip(tensors_of(whole), self.tensors, strict=True)
        return [as_bytes(x.reshape(-1)[slice(*spans[rank])]) for x, (_, spans) in pairs]

    def own(self, take: Callable[[int], Tensor]) -> list[Tensor]:
        """This rank's rows of a state, of its bytes."""
        taken = [take(count) for count in self.lengths(self.rank)]
        found = [_as_numbers(x, one.dtype) for x, (one, _) in zip(taken, self.tensors, strict=True)]
        return [x if one.ndim else x.view(()) for x, (one, _) in zip(found, self.tensors, strict=True)]

    def gathered(self, parts: OptimizerState[Any]) -> Any:
        """The state of the whole, which this rank and the others hold. All ranks have to call it."""
        return self._with(
            [self._gathered(x, one) for x, (one, _) in zip(rows_of(parts.inner), self.tensors, strict=True)]
        )

    def _gathered(self, own: Tensor, like: Tensor) -> Tensor:
        if not like.numel() or not like.ndim:
            return own.clone().view(like.shape)
        # In bytes, which every backend takes.
        rows = like.shape[0]
        width = like.nbytes // rows
        part: Any = like_parameter(self.parameter, as_bytes(own).view(-1, width), (rows, width))
        found: Tensor = part.full_tensor()
        return found.view(like.dtype).view(like.shape)

    def given_out(self, parts: OptimizerState[Any], whole: Any) -> OptimizerState[Any]:
        """A unit's state with this rank's rows of a state of the whole."""

        def rows(x: Tensor) -> Tensor:
            return x.reshape(-1)[slice(*_spans(x.shape, self.ranks)[self.rank])].clone() if x.ndim else x.clone()

        return with_rows(parts, whole, rows)

    def _with(self, tensors: list[Tensor]) -> Any:
        return with_tensors(self.like, tensors)


def _spans(shape: torch.Size, ranks: RowShards) -> list[tuple[int, int]]:
    """For each rank the first element of its rows of a tensor, and the one behind its last; of a number without dimensions all have all."""
    if not shape:
        return [(0, 1)] * ranks.ranks
    width = math.prod(shape[1:])
    return list(pairwise(edge * width for edge in ranks.edges(shape[0])))


def as_bytes(x: Tensor) -> Tensor:
    """A vector, or a number without dimensions, in bytes."""
    return x.contiguous().view(-1).view(torch.uint8)


def _as_numbers(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A vector of numbers of its bytes, over the same memory where numbers may begin there: at multiples of their size."""
    return (x.clone() if x.storage_offset() % dtype.itemsize else x).view(dtype)


def stored_work(optimizer: eb.Optimizer[Any], parameter: Tensor, first: int | Blocks) -> StoredWork:
    """How the work on a parameter keeps its state, where the first element of this rank's rows has the number ``first``."""
    assert isinstance(first, int)  # a parameter that is not flat has no gaps
    whole = first - first_element(parameter) if optimizer.draws_bits else first
    return StoredWork(optimizer, parameter.shape, parameter.dtype, whole)


def begun(
    optimizer: eb.Optimizer[Any], parameters: Sequence[Tensor], parts: OptimizerState[Any], first: int | Blocks
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
