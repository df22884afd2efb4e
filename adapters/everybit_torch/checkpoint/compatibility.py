"""Whether a checkpoint fits: the names, shapes and dtypes in it, counts, and values that are one tensor here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from everybit_torch.checkpoint.agreement import gathered
from everybit_torch.checkpoint.inventory import Inventory
from everybit_torch.checkpoint.parts import MODEL, STATE, CheckpointPart
from everybit_torch.collectives import Communicator
from everybit_torch.optim import as_count
from everybit_torch.placements import saved_dtypes

COMPARED = (MODEL, STATE)
"""The beginnings of names of which a checkpoint and the ranks together have the same."""


def require_same(own: Sequence[CheckpointPart], found: Inventory, ranks: Communicator) -> None:
    """Refuse, on every rank, a checkpoint with more, fewer or other tensors than are here. Collective.

    Raises:
        ValueError: It has; the message names them.
    """
    problems = []
    for part in own:
        key, there = part.name, found.tensors.get(part.name)
        if key in found.others:
            problems.append(f"{key} is no tensor there")
        elif there is None:
            problems.append(f"{key} is not there")
        elif there.shape != part.shape:
            problems.append(f"{key} is of shape {there.shape} there, and {part.shape} here")
        elif there.dtype not in saved_dtypes(part.tensor.dtype):
            problems.append(f"{key} is {there.dtype} there, and {part.tensor.dtype} here")
    # Ranks have different names, and the checkpoint has one order of names on all of them.
    names = [*found.tensors, *sorted(found.others)]
    empty = {name for name, there in found.tensors.items() if not math.prod(there.shape)}
    names_here = {part.name for part in own}
    known = [name in names_here or name in empty or not name.startswith(COMPARED) for name in names]
    anywhere = torch.tensor(known, dtype=torch.uint8, device=ranks.device)
    ranks.all_reduce(anywhere, "names in a checkpoint", dist.ReduceOp.MAX).wait()
    strange = [name for name, is_known in zip(names, anywhere.tolist(), strict=True) if not is_known]
    problems += [f"{name} is there, and not here" for name in strange]
    problems = list(dict.fromkeys(problem for several in gathered(problems, ranks) for problem in several))
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            f"{found.folder}: does not fit: {'; '.join(problems[:5])}{more}. It was written for another model, transform or policy; nothing"
            " is cast, and nothing was changed."
        )


def require_values(own: Sequence[CheckpointPart], aside: Mapping[str, Tensor], place: Path) -> None:
    """Refuse values that differ between names of one tensor, and counts that count nothing.

    Args:
        own: This rank's parts.
        aside: The values that were read for them, by name.
        place: The checkpoint's folder, for messages.

    Raises:
        ValueError: They do.
    """
    first: dict[tuple[int, torch.Size], str] = {}
    for part in own:
        key, here = part.name, part.tensor
        if part.entry is None and here.numel():
            other = first.setdefault((here.data_ptr(), here.shape), key)
            if other != key and not _same_bits(aside[other], aside[key]):
                raise ValueError(
                    f"{place}: does not fit: {other} and {key} are one tensor here, and differ there. Nothing was changed."
                )
        elif part.entry is not None and here.dtype is torch.int64 and not part.shape:
            as_count(f"{place}: {key}", int(aside[key]))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits, whatever they stand for: NaN is like itself, and -0 is not 0."""
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    left, right = (x.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for x in (one, other))
    return torch.equal(left, right)
