"""Whether a checkpoint fits: the names, shapes and dtypes in it, and values that are one tensor here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from everybit_torch.checkpoint.agreement import objects_of
from everybit_torch.checkpoint.inventory import Inventory
from everybit_torch.checkpoint.raw_bytes import same_bits
from everybit_torch.checkpoint.shard_tensor import ShardTensor
from everybit_torch.dtensors import local, saved_dtypes


def elements(value: Tensor) -> Tensor:
    """Return this rank's elements of a tensor."""
    return value.local if isinstance(value, ShardTensor) else local(value)


def require_ties(own: Mapping[str, Tensor], aside: Mapping[str, Tensor], place: Path) -> None:
    """Refuse values that differ between names of one tensor.

    Raises:
        ValueError: They do.
    """
    first: dict[tuple[int, torch.Size], str] = {}
    for key, value in own.items():
        here = elements(value)
        if not key.startswith("model.") or not here.numel():
            continue
        other = first.setdefault((here.data_ptr(), here.shape), key)
        if other != key and not same_bits(elements(aside[other]), elements(aside[key])):
            raise ValueError(
                f"{place}: does not fit: {other} and {key} are one tensor here, and differ there. Nothing was changed."
            )


def require_same(
    own: Mapping[str, Tensor], found: Inventory, expected: set[str], group: dist.ProcessGroup | None
) -> None:
    """Refuse, on every rank, a checkpoint with more, fewer or other tensors than are here."""
    problems = []
    for key, value in own.items():
        there = found.tensors.get(key)
        if key in found.others:
            problems.append(f"{key} is no tensor there")
        elif there is None:
            problems.append(f"{key} is not there")
        elif there.shape != tuple(value.shape):
            problems.append(f"{key} is of shape {there.shape} there, and {tuple(value.shape)} here")
        elif there.dtype not in saved_dtypes(value.dtype):
            problems.append(f"{key} is {there.dtype} there, and {value.dtype} here")
    known = expected | set(own)
    elsewhere = [key for key, there in found.tensors.items() if math.prod(there.shape)] + sorted(found.others)
    problems += [
        f"{key} is there, and not here"
        for key in elsewhere
        if key not in known and key.startswith(("model.", "optimizer.state."))
    ]
    if group is not None:
        problems = list(dict.fromkeys(problem for one in objects_of(problems, group) for problem in one))
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            f"{found.folder}: does not fit: {'; '.join(problems[:5])}{more}. It was written for another model, transform or policy; nothing"
            " is cast, and nothing was changed."
        )
