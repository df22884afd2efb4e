"""Process groups that steppers make for themselves: each has an order of collectives of its own, and is used again when it is free.

A group has threads and connections (with NCCL a communicator), so that steppers reuse groups. And no group is destroyed
alone: torch names a group by its ranks and by how many groups there are, and finds the other ranks' addresses under that name, so that
a group made after another was destroyed could be connected to the destroyed group.

Ranks may have lost a stepper at different times, or seen a collective fail that completed elsewhere. So a group is used again only if it is
free on all of its ranks. They find that out through the store that the process group was initialized with, and not by a collective: after
an error another collective may be under way.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from everybit_torch.torch_internals.process_groups import default_store, new_group


@dataclass(slots=True)
class _Made:
    """A group, which torch keeps until it is destroyed. A reference beyond that could end the process with its threads."""

    world: weakref.ref[dist.ProcessGroup]
    kind: tuple[object, ...]
    group: weakref.ref[dist.ProcessGroup]
    idle: bool = False
    spoiled: bool = False


_MADE: list[_Made] = []
_ASKED: Counter[str] = Counter()  # how often it was asked which groups are free, by key; of one world


def take(ranks: Sequence[int], backend: str, timeout: timedelta | None) -> dist.ProcessGroup:
    """Take a group of these ranks for exclusive use. Collective.

    Args:
        ranks: The ranks, as numbered in the world.
        backend: Its backend, or several by device.
        timeout: The timeout of its collectives; None: the backend's.
    """
    world, kind = dist.group.WORLD, (tuple(ranks), backend, timeout)
    assert world is not None
    if any(one.world() is not world for one in _MADE):
        # Groups end with the world that they are of.
        _MADE[:] = [one for one in _MADE if one.world() is world]
        _ASKED.clear()
    known = [one for one in _MADE if one.kind == kind]  # the same on every rank, in the order in which they were made
    for one in _free_everywhere(known, ranks, timeout):
        if (group := one.group()) is not None:
            one.idle = False
            return group
    name = "everybit/" + hashlib.sha256(repr((kind, len(known))).encode()).hexdigest()
    group = new_group(ranks, backend, timeout, name)
    _MADE.append(_Made(weakref.ref(world), kind, weakref.ref(group)))
    return group


def _free_everywhere(known: Sequence[_Made], ranks: Sequence[int], timeout: timedelta | None) -> list[_Made]:
    """Return the groups that are free on all of these ranks."""
    if not known:
        return []
    store: Any = default_store()
    kind = hashlib.sha256(repr(known[0].kind).encode()).hexdigest()
    key = f"everybit/groups/{kind}/{_ASKED[kind]}"
    _ASKED[kind] += 1
    for number, one in enumerate(known):
        if one.idle:
            store.add(f"{key}/{number}", 1)
    if store.add(f"{key}/arrived", 1) == len(ranks):
        store.set(f"{key}/complete", "")
    store.wait([f"{key}/complete"], *(() if timeout is None else (timeout,)))
    return [one for number, one in enumerate(known) if store.add(f"{key}/{number}", 0) == len(ranks)]


def give_back(group: weakref.ref[dist.ProcessGroup], under_way: Sequence[object] = ()) -> None:
    """Release a group that this rank no longer uses. It is used again unless a collective is under way in it, or has failed."""
    for one in _MADE:
        if one.group == group:
            one.idle = not under_way and not one.spoiled


def spoil(group: weakref.ref[dist.ProcessGroup]) -> None:
    """A collective of this group has failed: what its ranks would do next may not belong together."""
    for one in _MADE:
        if one.group == group:
            one.spoiled = True
