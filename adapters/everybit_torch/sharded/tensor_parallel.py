"""Parameters of which tensor parallelism has given this rank a part: DTensors over other ranks than those that a stepper shards over.

A stepper lays out the local parts, as if they were the model's tensors. What it needs to know of the whole is which rectangle of it is here
(:class:`~everybit_torch.sharded.layout.Part`): by it bits are drawn, parts are put together for state dicts and files, and whole tensors
are cut for checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from everybit_torch.dtensors import first_element, is_counted, is_dtensor, local
from everybit_torch.sharded.layout import Part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def require_in_parts(parameters: Mapping[str, Tensor], ranks: Collection[int]) -> None:
    """Refuse DTensors over the ranks that a stepper shards over, on several meshes, or placed in another way than a part can be laid out.

    Args:
        parameters: Any tensors, by name.
        ranks: Those that the stepper shards over, numbered as in the world; none if that is not known.

    Raises:
        TypeError: One lies over these ranks; the message names it.
        ValueError: One is neither sharded nor replicated, or they lie on several meshes.
    """
    for name, parameter in parameters.items():
        _require_beside(name, parameter, ranks)
    _require_one_mesh(parameters)


def _require_beside(name: str, parameter: Tensor, ranks: Collection[int]) -> None:
    """Refuse a DTensor over the ranks that a stepper shards over, or placed in another way than a part can be laid out.

    Args:
        name: The parameter's name.
        parameter: Any tensor.
        ranks: Those that the stepper shards over, numbered as in the world; none if that is not known.

    Raises:
        TypeError: It lies over these ranks.
        ValueError: It is neither sharded nor replicated.
    """
    if not is_dtensor(parameter):
        return
    from torch.distributed.tensor import Replicate, Shard

    for dimension, placement in enumerate(parameter.placements):
        if type(placement) not in (Shard, Replicate):
            raise ValueError(f"{name}: got a DTensor placed as {placement!r}; accepted are Shard and Replicate.")
        if ranks and len(both := set(ranks).intersection(_ranks_along(parameter, dimension))) > 1:
            raise TypeError(
                f"{name}: got a DTensor over the ranks {', '.join(map(str, sorted(both)))}, which the stepper is to shard over (of"
                " fully_shard; or of tensor parallelism, and mesh is not the data-parallel dimension). Accepted are plain parameters, and"
                " DTensors over other ranks than mesh: FlatStepper(model, ..., mesh=device_mesh['dp']). For a model that fully_shard has"
                " sharded there is TorchOptimizer."
            )


def require_as_cut(name: str, parameter: Tensor) -> None:
    """Refuse a DTensor whose part on this rank is not what its mesh and placements say, which other ranks may not see.

    Raises:
        ValueError: It is not.
    """
    if is_dtensor(parameter) and tuple(local(parameter).shape) != (expected := part_of(parameter)).sizes:
        raise ValueError(
            f"{name}: this rank's part of it has the shape {tuple(local(parameter).shape)}; accepted is {expected.sizes}, as"
            " distribute_tensor cuts it: in equal parts, and of what cannot be divided so the last ranks have less."
        )


def _require_one_mesh(parameters: Mapping[str, Tensor]) -> None:
    """Refuse DTensors that lie on several meshes.

    Raises:
        ValueError: They do; the message names one of each.
    """
    found = {name: parameter.device_mesh for name, parameter in parameters.items() if is_dtensor(parameter)}
    first = next(iter(found), "")
    for name, mesh in found.items():
        if mesh != found[first]:
            raise ValueError(
                f"{name}: is a DTensor on {mesh}, and {first} on {found[first]}; accepted is one mesh for all of a stepper's DTensors."
                " (Parameters with ranks of their own have a stepper of their own: JointStepper.)"
            )


def part_of(parameter: DTensor) -> Part:
    """The part of a DTensor that this rank has."""
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    return _part_at(parameter, coordinate)


def part_beside(parameter: Tensor, mesh: DeviceMesh | None) -> Part | None:
    """The part of a tensor that this rank has, in a model with DTensors over a mesh: of a plain one, all of it.

    Args:
        parameter: A DTensor, or a tensor of which all ranks of the mesh have copies.
        mesh: Of the model's DTensors; None if there are none.
    """
    if is_dtensor(parameter):
        return part_of(parameter)
    if mesh is None:
        return None
    shape = tuple(parameter.shape)
    return Part(shape, (0,) * len(shape), shape, is_counted(parameter, mesh))


def parts_of(parameter: DTensor) -> Iterator[Part]:
    """The parts of all ranks of a DTensor's mesh, row by row of the dimensions along which it is sharded."""
    sharded = [placement.is_shard() for placement in parameter.placements]
    sizes = parameter.device_mesh.shape
    for coordinate in product(*(range(size if cut else 1) for size, cut in zip(sizes, sharded, strict=True))):
        yield _part_at(parameter, coordinate)


def _part_at(parameter: DTensor, coordinate: Sequence[int]) -> Part:
    """The part of the rank at these coordinates of the mesh: each dimension of it cuts what those before it have left."""
    shape, counted = tuple(parameter.shape), True
    offsets, sizes = [0] * len(shape), list(shape)
    cuts: list[tuple[int, int]] = []
    for place, ranks, placement in zip(coordinate, parameter.device_mesh.shape, parameter.placements, strict=True):
        cut = getattr(placement, "dim", None)
        if cut is None:
            counted = counted and place == 0
            continue
        start, stop = _chunk(sizes[cut], ranks, place)
        offsets[cut], sizes[cut] = offsets[cut] + start, stop - start
        cuts.append((cut, ranks))
    return Part(shape, tuple(offsets), tuple(sizes), counted, tuple(cuts))


def _chunk(size: int, chunks: int, number: int) -> tuple[int, int]:
    """One of the parts into which ``torch.chunk`` cuts a dimension; those that it does not make are empty, and come last."""
    each = -(-size // chunks)
    return min(each * number, size), min(each * (number + 1), size)


def _ranks_along(parameter: DTensor, dimension: int) -> list[int]:
    return dist.get_process_group_ranks(parameter.device_mesh.get_group(dimension))


def first_element_of_part(name: str, parameter: nn.Parameter, block: int, *, draws_bits: bool) -> int:
    """The place in the whole of this rank's first element, where a step depends on it; else 0.

    Args:
        name: The parameter's name.
        parameter: Any.
        block: How many elements share a number in its state.
        draws_bits: Whether a step draws bits by the places of elements.

    Raises:
        ValueError: The elements are no run of the whole's, or begin inside a block.
    """
    if not is_dtensor(parameter) or not (draws_bits or block > 1):
        return 0
    if not local(parameter).numel():
        return 0
    try:
        first = first_element(parameter)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if first % block:
        raise ValueError(
            f"{name}: this rank's part of it begins at element {first}, inside a block of {block} elements that have one number in its"
            " state; accepted are parts that begin at multiples of the block, or a policy without blocks."
        )
    return first


def replicated(parameter: Tensor, *, beside_others: bool) -> str:
    """Over which ranks of a tensor-parallel mesh copies of a parameter lie, in words; empty if each rank has a part of its own.

    Args:
        parameter: Any.
        beside_others: Whether there are DTensors in its model; a plain tensor is on all of their ranks then.
    """
    if not is_dtensor(parameter):
        return "replicated" if beside_others else ""
    copied = [n for n, placement in enumerate(parameter.placements) if placement.is_replicate()]
    if not copied:
        return ""
    many = len(parameter.placements) > len(copied)
    return "replicated over " + ", ".join(map(str, copied)) if many else "replicated"


def local_gradient(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The part of a gradient that belongs to this rank's part of its parameter. All ranks that have parts may have to call it.

    Autograd may leave a gradient placed otherwise than its parameter: still to be summed, for one that is replicated.
    """
    if not is_dtensor(gradient):
        return gradient
    if is_dtensor(parameter) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local(gradient)
