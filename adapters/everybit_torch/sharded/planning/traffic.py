"""The bytes that one rank sends in a collective, if collectives are rings."""

from __future__ import annotations

from collections import Counter

import torch

from everybit_torch.collectives.reduction import Wire
from everybit_torch.sharded.planning.groups import GroupPlan

AGREED = 4
"""Numbers beside one for each parameter in which ranks agree on a step."""

COMPARED = 4
"""Numbers in which ranks compare what they begin."""


def agreed_bytes(groups: list[GroupPlan]) -> int:
    """Bytes of the numbers in which ranks agree on a step: who has gradients, and what they are like."""
    return (sum(len(one.group.placements) for one in groups) + AGREED) * torch.float64.itemsize


def compared_bytes(ranks: tuple[int, int]) -> Counter[str]:
    """Bytes that a comparison of all (inner and outer) ranks sends."""
    return sum((sent_by_sum(COMPARED * torch.int64.itemsize, size) for size in ranks), Counter())


def sent_by_sum(nbytes: int, size: int) -> Counter[str]:
    """Bytes that an all-reduce of so many bytes sends, over ``size`` ranks."""
    return Counter({"all_reduce": 2 * (size - 1) * nbytes // size})


def sent_by_exchange(kind: str, nbytes: int, size: int) -> Counter[str]:
    """Bytes that an all-gather, a reduce-scatter or an all-to-all of so many bytes sends, over ``size`` ranks."""
    return Counter({kind: (size - 1) * nbytes // size})


def sent_by_reduction(one: GroupPlan, *, last: bool) -> Counter[str]:
    """Bytes that the reduction of a group's gradients sends: over the inner ranks, and the ``last`` of a cycle over the outer ones too."""
    main = one.group.padded * one.main.itemsize
    sent = _sent(one.bucket, main, one.wire, one.ranks.inner, whole=not one.kind.state)
    if last and one.ranks.outer > 1:
        reduced = one.part if one.kind.state else one.group.padded
        wire = one.outer_wire
        nbytes = reduced * wire.dtype.itemsize
        sent.update(_sent(nbytes, reduced * one.main.itemsize, wire, one.ranks.outer, whole=True))
    return sent


def _sent(nbytes: int, main: int, wire: Wire, size: int, *, whole: bool) -> Counter[str]:
    if wire.exact:
        sent = sent_by_exchange("all_to_all", nbytes, size)
        if whole:
            sent.update(sent_by_exchange("all_gather", main, size))
        return sent
    return sent_by_sum(nbytes, size) if whole else sent_by_exchange("reduce_scatter", nbytes, size)
