"""Ranks agree before a step on which parameters have gradients, the norm, and whether to step, by one sum over the ranks.

The host waits for that sum, and for all that the device was told to do before it, only where it has to know something of it: see
:func:`agree`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everybit.base import barriers
from everybit_torch import streams
from everybit_torch.collectives.communicator import Communicator
from everybit_torch.memory_pool import UNPOOLED
from everybit_torch.sharded.gradient_norm import squares_of, tells_finite
from everybit_torch.sharded.nonfinite import find_nonfinite, has_nonfinite
from everybit_torch.sharded.pass_counts import PassCounts
from everybit_torch.sharded.planning.traffic import AGREED
from everybit_torch.sharded.reports import NanCheck, NonFinite
from everybit_torch.sharded.shard_optimizer import Shard


@dataclass(frozen=True, slots=True)
class StepAgreement:
    """The same on every rank, but for what a rank did not have to know.

    Attributes:
        touched: For each parameter, whether any rank has a gradient.
        squares: The sum of the squares of the gradient: float64, 0-d, on the device.
        norm: Its root.
        skipped: Whether nothing is to be stepped.
        nonfinite: Whose gradients are not finite, if that was to be found out.
    """

    touched: list[bool]
    squares: Tensor
    norm: Tensor
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
    pass_counts: PassCounts | None,
    *,
    looks: bool,
    as_written: bool,
) -> StepAgreement:
    """Ask all ranks. Every rank has to call it, with final gradients.

    Every rank takes part in the same sums. The host of a rank reads them, and waits for the device, if it looks for gradients that are not
    finite, or if it ``looks``.

    Args:
        names: Of all parameters.
        touched: For each of them, whether this rank had a gradient.
        passes: How many backward passes this rank had.
        nonfinite: For each parameter, how many elements of this rank's own gradients were not finite.
        shards: This rank's.
        nan: What to look for; the same on every rank.
        inner: The inner ranks.
        outer: The outer ranks.
        holding: Which of the two hold different parts of one gradient; the others hold copies.
        pass_counts: Compares the numbers of passes, where each is summed over the ranks: now if all ranks read, else before the next
            step.
        looks: Whether this rank has to know who has gradients. Not if it has one of each parameter that is trained: then some rank has.
        as_written: Nobody has had this rank's gradients in hand.

    Raises:
        RuntimeError: Ranks had different numbers of passes.
    """
    count, device = len(names), nonfinite.device
    numbers = torch.zeros(count + AGREED, dtype=torch.float64)
    numbers[:count] = torch.tensor(touched)
    if pass_counts is not None:
        numbers[count + 2], numbers[count + 3] = pass_counts.of(passes)
    numbers = numbers.to(device, non_blocking=streams.copies_need_no_wait(device))
    # Of ranks that hold the same the first one counts.
    if all(one.rank == 0 for one in (inner, outer) if one not in holding):
        numbers[count] = squares_of([shard.gradients for shard in shards], device, as_written=as_written)
    # An element that is not finite shows in the sum of the squares, but for float64, whose squares may overflow.
    told = all(tells_finite(shard.gradients.main.dtype) for shard in shards)
    if nan == "step" and not told:
        numbers[count + 1] = has_nonfinite(shards)
    for communicator in (inner, outer):
        communicator.all_reduce(numbers, "what the gradients are like").wait()
    squares = numbers[count].clone()
    norm = barriers.sqrt(squares)
    if pass_counts is not None and nan == "off":
        pass_counts.begin(numbers[count + 2 :], passes)
    read = numbers.tolist() if looks or nan != "off" else None
    UNPOOLED.take_back(numbers)
    if read is None:
        return StepAgreement(list(touched), squares, norm, skipped=False, nonfinite=())
    *flags, square, bad, _, _ = read
    if pass_counts is not None and nan != "off":
        pass_counts.require_equal(read[count + 2 :], passes)
    found = find_nonfinite(shards, names, nonfinite, inner, outer) if nan == "param" else ()
    skipped = bad > 0 or bool(found) or (nan == "step" and told and not math.isfinite(square))
    return StepAgreement([flag > 0 for flag in flags], squares, norm, skipped, found)
