"""Parameters that FSDP2 shards: the optimizer works on their local parts as plain tensors, and speaks of them as DTensors outside.

Operations on a DTensor are dispatched in Python, several times for each; a step over a model's parameters would spend most of its time
there. So a step works on local tensors, and only states that are shown, saved or loaded are wrapped again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from everybit.base import Blocks
from everybit_torch.collectives import Communicator, GroupAxis
from everybit_torch.torch_internals.dtensors import (
    is_cut,
    is_dtensor,
    local,
    offset_of_local_part,
    shape_of_local_part,
    with_part,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def like(parameter: Tensor, part: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """``part``, with a number for each element of this rank's part of ``parameter``, as a tensor of the whole's shape, sharded as it is.

    With another ``shape``: with a number for each block of elements, or with this rank's rows of a factor, as a tensor of this shape, which
    is sharded in the same way.
    """
    if not is_dtensor(parameter):
        return part
    shape = parameter.shape if shape is None else tuple(shape)
    # State on the host, which from_local would move.
    if part.device.type not in (parameter.device_mesh.device_type, "meta"):
        return with_part(parameter, part, shape, _dense(shape))
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=parameter.stride() if shape == parameter.shape else _dense(shape),
    )


def sendable(value: Tensor) -> Tensor:
    """A tensor in a dtype that every backend sends: int16 as int32, because neither gloo nor NCCL has int16.

    Values stay, so that ``copy_`` between checkpoints of both dtypes is exact, as :mod:`torch.distributed.checkpoint` copies them.
    """
    return value.to(torch.int32) if value.dtype is torch.int16 else value


def saved_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes in which checkpoints have a tensor: its own, and that of :func:`sendable`."""
    return (torch.int16, torch.int32) if dtype is torch.int16 else (dtype,)


def fits_in(wide: Tensor, dtype: torch.dtype) -> bool:
    """Whether a dtype holds all numbers of a tensor."""
    return wide.dtype is dtype or torch.equal(wide.to(dtype).to(wide.dtype), wide)


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor in the usual order."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def is_cut_evenly(x: Tensor) -> bool:
    """Whether this rank's part of a DTensor has the shape that torch's rule gives it, as it has not if it was made otherwise."""
    return not is_dtensor(x) or tuple(local(x).shape) == shape_of_local_part(x)


class Region(NamedTuple):
    """Where this rank's elements of a parameter lie in the whole.

    Attributes:
        shape: The shape of the part.
        offsets: Its first corner, by dimension.
        whole: The shape of the whole.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    whole: tuple[int, ...]

    @classmethod
    def of(cls, parameter: Tensor) -> Region:
        """Return that of a whole tensor, or of a DTensor."""
        offsets = offset_of_local_part(parameter) if is_dtensor(parameter) else (0,) * parameter.ndim
        return cls(tuple(local(parameter).shape), offsets, tuple(parameter.shape))

    def in_whole(self, indices: Tensor) -> Tensor:
        """Return flat indices in the whole, of flat indices in the part: int32 where that holds all of them, else int64."""
        if self.shape[1:] == self.whole[1:]:
            found = indices + self.offsets[0] * math.prod(self.whole[1:]) if self.shape else indices
        else:
            found = torch.zeros_like(indices)
            for dimension in reversed(range(len(self.shape))):
                place = indices % self.shape[dimension] + self.offsets[dimension]
                found += place * math.prod(self.whole[dimension + 1 :])
                indices = indices // self.shape[dimension]
        return found.to(torch.int32 if math.prod(self.whole) <= 1 << 31 else torch.int64)


def place_in_whole(parameter: Tensor, first: int) -> int | Blocks:
    """Return the global index of this rank's first element, which the others follow in memory order; or the indices of rows, on the host.

    Args:
        parameter: The parameter.
        first: Global index of its first element.

    Raises:
        ValueError: Parts in strides: elements that are neighbours in this rank's part, and not in the whole.
    """
    if not is_dtensor(parameter) or not parameter.ndim:
        return first
    for number, placement in enumerate(parameter.placements):
        if is_cut(placement) and not _is_run(parameter, number):
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} has the placement {placement!r}, and stochastic rounding draws bits by an"
                " element's place in the whole, which parts in strides do not have in a row. Accepted are Shard, also over tensor"
                " parallelism, and Replicate, or a policy without stochastic rounding."
            )
    region = Region.of(parameter)
    if region.shape[1:] == region.whole[1:] or not math.prod(region.shape):
        return first + region.offsets[0] * math.prod(region.whole[1:])
    last = max(dim for dim, n in enumerate(region.shape) if n != region.whole[dim])
    size = math.prod(region.shape[last:])
    rows = region.in_whole(torch.arange(0, math.prod(region.shape), size))
    return Blocks(first + rows.long(), None, size)


def _is_run(parameter: DTensor, number: int) -> bool:
    """Whether elements that a placement leaves together are neighbours along its dimension."""
    placement: Any = parameter.placements[number]
    if placement.is_shard():
        return True
    # The mesh's later dimensions cut first, into so many parts; this one cuts each of them.
    later = range(number + 1, parameter.device_mesh.ndim)
    cut = [parameter.device_mesh.size(one) for one in later if is_cut(parameter.placements[one])]
    return bool(placement.split_factor == math.prod(cut))


@dataclass(frozen=True, slots=True)
class RowShards:
    """How the rows of a parameter lie on the ranks of a mesh.

    Attributes:
        mesh: The mesh.
        shards: The dimension of the mesh along which ranks have other rows.
        copies: The dimension of ranks with the same rows; None: there is no such dimension.
    """

    mesh: DeviceMesh
    shards: int
    copies: int | None

    @property
    def ranks(self) -> int:
        """The number of ranks with other rows."""
        return self.mesh.size(self.shards)

    @property
    def replicas(self) -> int:
        """The number of ranks with the same rows."""
        return 1 if self.copies is None else self.mesh.size(self.copies)

    def edges(self, rows: int) -> list[int]:
        """The first row of each rank, of a parameter of so many, and the number of rows: as ``torch.chunk`` cuts them."""
        return row_edges(rows, self.ranks)


def row_edges(rows: int, ranks: int) -> list[int]:
    """The first row of each rank, and the number of rows: as ``torch.chunk`` cuts them, and with it FSDP2."""
    each = -(-rows // ranks)
    return [min(each * rank, rows) for rank in range(ranks + 1)]


def dimensions_of_rows(parameter: DTensor) -> list[int] | None:
    """The dimensions of the mesh along which ranks have other rows, of which there is one at most; None: parts are no runs of rows."""
    from torch.distributed.tensor import Shard

    cut = [number for number, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    placements = [parameter.placements[number] for number in cut]
    # Of the relatives of Shard (_StridedShard) rows of one rank are not neighbours.
    are_rows = all(type(one) is Shard and one.dim == 0 for one in placements)
    return cut if are_rows and len(cut) <= 1 else None


def row_shards(parameter: Tensor) -> RowShards | None:
    """Return how ranks hold a parameter's rows; None: this rank holds all.

    Raises:
        ValueError: Parts that are no such rows.
    """
    if not is_dtensor(parameter):
        return None
    cut = dimensions_of_rows(parameter)
    if cut == []:
        return None
    copies = [number for number in range(parameter.device_mesh.ndim) if number not in (cut or ())]
    if cut is not None and len(copies) <= 1:
        found = RowShards(parameter.device_mesh, cut[0], copies[0] if copies else None)
        rank = parameter.device_mesh.get_local_rank(cut[0])
        first, stop = found.edges(parameter.shape[0])[rank : rank + 2]
        if local(parameter).shape == (stop - first, *parameter.shape[1:]):
            return found
    if sum(not placement.is_replicate() for placement in parameter.placements) > 1:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} has the placements {tuple(parameter.placements)}, as tensor parallelism and"
            " fully_shard cut it together, and its transform must see it whole. Accepted are matrices that one of both cuts by rows; write"
            " Matrices(others=r'...') with an expression for the names of the weights that both cut, which AdamW then steps where they lie."
        )
    raise ValueError(
        f"a parameter of shape {tuple(parameter.shape)} has the placements {tuple(parameter.placements)}, and ranks bring rows together;"
        " accepted are Shard(0) along one dimension of the mesh, as fully_shard cuts by default, and Replicate along at most one other."
    )


class Over(NamedTuple):
    """The ranks over which something is reduced.

    Attributes:
        axis: The processes that have parts.
        counts: Whether this process, among those that hold the same elements, contributes them.
    """

    axis: GroupAxis
    counts: Callable[[Tensor], bool]


def is_primary_copy(parameter: Tensor, mesh: DeviceMesh) -> bool:
    """Whether this rank, among those with the same part of a parameter, counts it. All ranks hold a plain tensor."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    shards = [*map(is_cut, parameter.placements)] if is_dtensor(parameter) else [False] * mesh.ndim
    return all(sharded or place == 0 for sharded, place in zip(shards, coordinate, strict=True))


def axis_of(mesh: DeviceMesh) -> GroupAxis:
    """Reductions over all ranks of a mesh."""
    return GroupAxis(tuple(Communicator(mesh.get_group(dimension)) for dimension in range(mesh.ndim)))


def mesh_of(parameters: Sequence[Tensor]) -> DeviceMesh | None:
    """The mesh of the DTensors among some parameters; None without DTensors.

    Raises:
        ValueError: Several meshes, or placements that are neither parts nor copies, such as ``Partial``.
    """
    meshes: list[DeviceMesh] = []
    for parameter in parameters:
        if is_dtensor(parameter):
            for placement in parameter.placements:
                is_cut(placement)  # which refuses others
            if parameter.device_mesh not in meshes:
                meshes.append(parameter.device_mesh)
    if len(meshes) > 1:
        raise ValueError(
            f"parameters lie on {len(meshes)} device meshes, and a reduction over all of them, such as a global norm, goes over one;"
            " accepted is one mesh."
        )
    return meshes[0] if meshes else None
