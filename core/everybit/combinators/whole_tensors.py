"""Whether a transform needs whole tensors."""

from __future__ import annotations

from everybit.combinators.chain import Chain, NamedChain
from everybit.combinators.masked import Masked, Partition
from everybit.protocol import transforms_in


def needs_whole_tensors(transform: object) -> bool:
    """Whether a transform, or one inside it, says that it must see whole tensors.

    Masks and labels do not count: a front end that decides them before cutting may cut as the transforms inside may be.
    """
    return any(
        node.cut == "tensor"
        for node in transforms_in(transform)
        if not isinstance(node, (Chain, NamedChain, Masked, Partition))
    )
