"""Which transforms inside a transform need whole tensors, and which of them run at a parameter's owner."""

from __future__ import annotations

from typing import Any

from everybit.combinators.chain import Chain, NamedChain
from everybit.combinators.masked import Masked, Partition
from everybit.protocol import AtOwner, WholeWork, map_parts, transforms_in


def needs_whole_tensors(transform: object) -> bool:
    """Whether a transform, or one inside it, says that it must see whole tensors.

    Masks and labels do not count: who asks them before cutting may cut as the transforms inside may be.
    """
    return any(
        node.cut == "tensor"
        for node in transforms_in(transform)
        if not isinstance(node, (Chain, NamedChain, Masked, Partition))
    )


def owner_runs(transform: Any) -> list[tuple[AtOwner, ...]]:
    """The transforms that run at a parameter's owner: neighbours in a chain, which make one request, together."""
    if isinstance(transform, AtOwner):
        return [(transform,)]
    found: list[tuple[AtOwner, ...]] = []
    before = False

    def look(part: Any) -> Any:
        nonlocal before
        runs = owner_runs(part)
        if before and isinstance(part, AtOwner):
            found[-1] += runs[0]
        else:
            found.extend(runs)
        before = isinstance(part, AtOwner) and isinstance(transform, (Chain, NamedChain))
        return part

    map_parts(look, transform)
    return found


def owner_work(transform: Any) -> WholeWork:
    """The work that a transform with one run of such transforms requests."""
    (run,) = owner_runs(transform)
    return WholeWork(tuple(one for at_owner in run for one in at_owner.work.transforms))
