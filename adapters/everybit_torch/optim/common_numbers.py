"""Numbers of a transform's state that all parameters of one optimizer share, such as Prodigy's estimate of the distance to the solution.

Each segment has a copy of them. Parameters that are stepped find the same new numbers, since these depend on totals. Parameters without a
gradient, and those that begin later, take the numbers over from the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from everybit.stepping.entries import field_of

if TYPE_CHECKING:
    from everybit_torch.optim.parameters import Parameters, Stepped
    from everybit_torch.optim.visiting import Visit
    from everybit_torch.segments import Segment


def numbers(segment: Segment) -> dict[str, Tensor]:
    """Return the common numbers in a segment's state, by the names of their entries."""
    names = segment.optimizer.common
    return {entry.name: x for entry, x in segment.entries() if entry.role == "shared" and field_of(entry.name) in names}


def require_all(parameters: Parameters, stepped: Sequence[Stepped], visits: Sequence[Visit]) -> None:
    """Refuse a step of some parameters only, where parameters visit owners: their owners alone would know the common numbers.

    Args:
        parameters: All there are.
        stepped: Those that have gradients, and are stepped here.
        visits: Those that visit, with their gradients.

    Raises:
        RuntimeError: The message names a parameter without a gradient.
    """
    sources = {one.visiting.source for one in visits if any(member.optimizer.common for member in one.visiting.members)}
    if not sources:
        return
    present = {id(one) for one in stepped}
    none = [
        name
        for one in parameters.stepped
        if one.group.source in sources and one.optimizer.common and id(one) not in present
        for name in one.names
    ]
    for visit in visits:
        pairs = zip(visit.visiting.members, visit.grads, strict=True)
        none += [one.name for one, grad in pairs if grad is None and one.optimizer.common and one.parameter.numel()]
    if none and (len(none) < len(list(parameters.own())) + len(list(parameters.visited()))):
        raise RuntimeError(
            f"step: {none[0]} has no gradient, and all parameters share numbers of their transform, which only owners of blocks that"
            " ranks cut would know. Accepted are gradients for all parameters, or a policy without blocks (LEAN_BF16)."
        )


@torch.no_grad()
def spread(every: Sequence[Stepped], known: Iterable[Stepped]) -> None:
    """Give all parameters the common numbers of those that are known.

    Args:
        every: The parameters.
        known: Parameters with the present numbers, which are equal.
    """
    sharing = [one for one in every if one.optimizer.common]
    if not sharing:
        return
    found: dict[tuple[str, str], Tensor] = {}
    present = {id(one) for one in known}
    for one in sharing:
        if id(one) in present:
            for name, x in numbers(one.of.segment).items():
                found.setdefault((one.group.source, name), x)
    for one in sharing:
        if id(one) not in present:
            for name, x in numbers(one.of.segment).items():
                if (one.group.source, name) in found:
                    x.copy_(found[one.group.source, name])
