"""Parameters of which tensor parallelism has given this rank a part: DTensors over other ranks than those that a stepper shards over.

A stepper lays out the local parts, as if they were the model's tensors. What it needs to know of the whole is the place of the part's first
element, by which bits are drawn, and its number of elements.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from everybit_torch.dtensors import first_element, is_dtensor, local

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def require_beside(name: str, parameter: Tensor, ranks: Collection[int]) -> None:
    """Refuse a DTensor over the ranks that a stepper shards over, or placed in another way than a part can be laid out.

    Args:
        name: Of the parameter.
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


def _ranks_along(parameter: DTensor, dimension: int) -> list[int]:
    return dist.get_process_group_ranks(parameter.device_mesh.get_group(dimension))


def first_element_of_part(name: str, parameter: nn.Parameter, block: int, *, draws_bits: bool) -> int:
    """The place in the whole of this rank's first element, where a step depends on it; else 0.

    Args:
        name: Of the parameter.
        parameter: Any.
        block: How many elements share a number in its state.
        draws_bits: Whether a step draws bits by the places of elements.

    Raises:
        ValueError: The elements are no run of the whole's, or begin inside a block.
    """
    if not is_dtensor(parameter) or not (draws_bits or block > 1):
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
