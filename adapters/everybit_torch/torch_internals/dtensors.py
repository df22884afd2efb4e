"""The inside of a DTensor. Importing this module does not import ``torch.distributed.tensor``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, as FSDP2's are. Their module, which imports slowly, is not imported to find out."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor: a plain tensor over the same memory.

    Without torch's attribute it is that of ``to_local()``, which is slower.
    """
    if not is_dtensor(x):
        return x
    part: Tensor | None = getattr(x, "_local_tensor", None)
    if part is None:
        with torch.no_grad():
            part = x.to_local()
    return part


def with_part(like: DTensor, part: Tensor, shape: Sequence[int], stride: Sequence[int]) -> DTensor:
    """Return a DTensor over ``part``, on whatever device it is, sharded as ``like`` is; ``from_local`` would move it to the mesh's device.

    Raises:
        ImportError: torch has no such constructor any more; there is no public one.
    """
    spec: Any = getattr(import_module("torch.distributed.tensor._dtensor_spec"), "DTensorSpec", None)
    meta: Any = getattr(import_module("torch.distributed.tensor._dtensor_spec"), "TensorMeta", None)
    if spec is None or meta is None:
        raise ImportError(
            "offload: this torch has no torch.distributed.tensor._dtensor_spec.DTensorSpec; accepted are versions of torch that everybit"
            " was tested with (2.11 to 2.13)."
        )
    kind: Any = import_module("torch.distributed.tensor").DTensor
    of = meta(torch.Size(shape), tuple(stride), part.dtype)
    found: DTensor = kind(part, spec(like.device_mesh, like.placements, tensor_meta=of), requires_grad=False)
    return found


def is_cut(placement: Placement) -> bool:
    """Whether ranks along a dimension of a mesh hold other elements of a tensor, and not copies of the same ones.

    torch's ``_StridedShard``, which FSDP2 makes of a weight that tensor parallelism cut along dimension 0, is no ``Shard`` by its type.

    Raises:
        ValueError: A placement that is not known to do either.
    """
    if placement.is_replicate():
        return False
    if placement.is_shard() or type(placement).__name__ == "_StridedShard":
        return True
    raise ValueError(
        f"got a DTensor with the placement {placement!r}; accepted are Shard, _StridedShard and Replicate."
    )


def offset_of_local_part(x: DTensor, shape: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the offsets of this rank's part in the whole, by dimension; or in a tensor of another shape that is placed as ``x`` is.

    Raises:
        ImportError: torch has no function for it any more; there is no public one.
    """
    return _shape_and_offset(x, x.shape if shape is None else shape)[1]


def shape_of_local_part(x: DTensor) -> tuple[int, ...]:
    """Return the shape of this rank's part of the whole.

    Raises:
        ImportError: The function is missing, as for :func:`offset_of_local_part`.
    """
    return _shape_and_offset(x, x.shape)[0]


def _shape_and_offset(x: DTensor, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    find: Any = getattr(import_module("torch.distributed.tensor._utils"), "compute_local_shape_and_global_offset", None)
    if find is None:
        raise ImportError(
            "DTensor parameters: this torch has no torch.distributed.tensor._utils.compute_local_shape_and_global_offset; accepted are"
            " versions of torch that everybit was tested with (2.11 to 2.13)."
        )
    own, offset = find(tuple(shape), x.device_mesh, x.placements)
    return tuple(own), tuple(offset)
