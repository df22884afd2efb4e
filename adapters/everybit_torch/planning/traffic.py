"""The bytes that a rank sends in a collective over a ring."""

from __future__ import annotations

from collections import Counter

import torch

from everybit_torch.collectives import Wire


def sent_by_sum(nbytes: int, size: int) -> Counter[str]:
    """Bytes that an all-reduce of so many bytes sends, over ``size`` ranks."""
    return Counter({"all_reduce": 2 * (size - 1) * nbytes // size})


def sent_by_exchange(kind: str, nbytes: int, size: int) -> Counter[str]:
    """Bytes that an all-gather, a reduce-scatter or an all-to-all of so many bytes sends, over ``size`` ranks."""
    return Counter({kind: (size - 1) * nbytes // size})


def sent_by_reduction(numel: int, main: torch.dtype, wire: Wire, size: int, *, scatters: bool) -> Counter[str]:
    """Bytes that a sum of gradients over ``size`` ranks sends.

    Args:
        numel: The number of elements that each rank adds.
        main: The dtype of the sums.
        wire: How they are sent.
        size: The number of ranks.
        scatters: Whether each rank needs only its part of the sums.
    """
    nbytes = numel * wire.dtype.itemsize
    if wire.exact:
        sent = sent_by_exchange("all_to_all", nbytes, size)
        return sent if scatters else sent + sent_by_exchange("all_gather", numel * main.itemsize, size)
    return sent_by_exchange("reduce_scatter", nbytes, size) if scatters else sent_by_sum(nbytes, size)
