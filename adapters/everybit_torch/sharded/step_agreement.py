"""What all ranks have to know alike before a step: who has gradients, how large they are, whether to step. One sum over the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everybit import barriers
from everybit_torch.collectives.communicator import Communicator
from everybit_torch.collectives.reduction import free_storage
from everybit_torch.sharded.nonfinite import find_nonfinite, has_nonfinite
from everybit_torch.sharded.planning.traffic import AGREED
from everybit_torch.sharded.reports import NanCheck, NonFinite
from everybit_torch.sharded.shard_optimizer import Shard
from everybit_torch.stepping import piece_size

# Sums of squares outside are made again in float64.
_TINY, _HUGE = 1e-24, 1e36


@dataclass(frozen=True, slots=True)
class StepAgreement:
    """The same on every rank.

    Attributes:
        touched: For each parameter, whether any rank has a gradient.
        norm: Of the gradient: float64, 0-d, on the device.
        is_nan: Whether that is NaN.
        skipped: Whether nothing is to be stepped.
        nonfinite: Whose gradients are not finite, if that was to be found out.
    """

    touched: list[bool]
    norm: Tensor
    is_nan: bool
    skipped: bool
    nonfinite: tuple[NonFinite, ...]


def agree(
    names: Sequence[str],
    touched: Sequence[bool],
    passes: int,
    nonfinite: Tensor,
    shards: Sequence[Shard],
    nan: NanCheck,
    inner: Communicator,
    outer: Communicator,
    holding: Sequence[Communicator],
) -> StepAgreement:
    """Ask all ranks. Every rank has to call it, with final gradients.

    Args:
        names: Of all parameters.
        touched: For each of them, whether this rank had a gradient.
        passes: What has to be the same number on every rank: of backward passes, where each is summed over the ranks.
        nonfinite: For each parameter, how many elements of this rank's own gradients were not finite.
        shards: This rank's.
        nan: What to look for.
        inner: The inner ranks.
        outer: The outer ranks.
        holding: Which of the two hold different parts of one gradient; the others hold copies.

    Raises:
        RuntimeError: Ranks had different numbers of passes.
    """
    count, device = len(names), nonfinite.device
    numbers = torch.zeros(count + AGREED, dtype=torch.float64)
    numbers[:count] = torch.tensor(touched)
    numbers[count + 2], numbers[count + 3] = passes, passes**2
    numbers = numbers.to(device, non_blocking=True)
    # Of ranks that hold the same the first one counts.
    counts = all(one.rank == 0 for one in (inner, outer) if one not in holding)
    if counts:
        numbers[count] = _sum_of_squares(shards, torch.float32, device)
    if nan == "step":
        numbers[count + 1] = has_nonfinite(shards)
    for communicator in (inner, outer):
        communicator.all_reduce(numbers, "what the gradients are like").wait()
    *flags, square, bad, sum_of_passes, sum_of_squared_passes = numbers.tolist()
    if inner.size * outer.size * sum_of_squared_passes != sum_of_passes**2:  # they are equal exactly if all passes are
        raise RuntimeError(
            f"step: ranks had different numbers of backward passes in this cycle, this one {passes}: zero_grad() was called on some of"
            " them only. Accepted next is zero_grad(), on every rank."
        )
    if not _TINY < square < _HUGE:
        # Squares of float32 numbers may be too large or too small for it, where the numbers are not. All ranks see the same here.
        numbers[count] = _sum_of_squares(shards, torch.float64, device) if counts else 0.0
        for communicator in (inner, outer):
            communicator.all_reduce(numbers[count : count + 1], "the gradient's norm").wait()
    norm = barriers.sqrt(numbers[count])
    free_storage(numbers)
    found = find_nonfinite(shards, names, nonfinite, inner, outer) if nan == "param" else ()
    return StepAgreement([flag > 0 for flag in flags], norm, math.isnan(square), bad > 0 or bool(found), found)


def _sum_of_squares(shards: Sequence[Shard], precision: torch.dtype, device: torch.device) -> Tensor:
    """Of this rank's part of the gradient: float64, 0-d. Short pieces are summed in ``precision`` at least, and added up in float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for shard in shards:
        own = shard.without_padding
        wide = torch.promote_types(own.dtype, precision)
        size = piece_size(own.device)
        for low in range(0, own.numel(), size):
            part = own[low : low + size].to(wide)
            total += torch.dot(part, part)
    return total
