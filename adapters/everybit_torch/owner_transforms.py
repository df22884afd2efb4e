"""Transforms for processes that hold rows of parameters: parts that need whole tensors run at the parameter's owner.

See :mod:`everybit.protocol.whole_work` for these, and :mod:`everybit_torch.exchange` for how rows reach the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

import everybit as eb
from everybit.combinators import Cautious, Chain, LowRank, NamedChain, needs_whole_tensors
from everybit.protocol import (
    AtOwner,
    HasEvalParams,
    Whole,
    WholeWork,
    map_parts,
    periods,
    transforms_in,
    why_not_elsewhere,
)
from everybit_torch.reductions_only import ReductionsOnly

Mark = Callable[[Any], Any]
"""From a transform that needs whole tensors to the transform that stands in its place."""


def for_rows(transform: Any) -> Any:
    """Return a transform of rows, with the parts that need whole tensors at the owner. Its state has the structure of the transform's."""
    return _marked(transform, lambda node: AtOwner(WholeWork((node,))))


def require_rows(optimizer: eb.Optimizer[Any], whole: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Refuse transforms that cannot be stepped in rows.

    Args:
        optimizer: With the result of :func:`for_rows`.
        whole: The transform that it was made of.
        shape: Of a parameter.
        dtype: Of the parameter.

    Raises:
        ValueError: The message names the transform.
    """
    works = [node.work for node in transforms_in(optimizer.transform) if isinstance(node, AtOwner)]
    for part in (part for work in works for part in work.parts):
        if (why := why_not_elsewhere(part, shape)) is not None:
            raise _refusal(part, why)
    if needs_whole_tensors(optimizer.transform):
        raise _refusal(whole, "it is no chain of transforms of which some must see them")
    none = torch.empty(0, dtype=dtype)
    here = replace(optimizer, transform=_without_others(optimizer.transform))
    every = periods(whole)
    for due in dict.fromkeys([(), *(tuple((period, due) for period in every) for due in (True, False))]):
        # A step without elements shows the requests.
        found: Any
        ctx = eb.Context(joint=True, pending=True, due=due, members=_nobody() if here.per_tensor else None)
        result: Any = here.step([none], [none], here.init([none]), ctx)
        times, reduces_after = 0, False
        while isinstance(result, eb.Pending):
            if isinstance(result.request, Whole):
                times, found = times + 1, eb.tree.leaves((result.request.updates, result.request.states))
            else:
                reduces_after |= times > 0
                found = result.request.here() if result.request.joint else result.partial()
            result = result.resume(found)
        if times != 1:
            raise _refusal(whole, f"it asks for them {times} times in a step")
        if reduces_after:
            raise _refusal(whole, "it reduces over what it computes from them")


def _refusal(transform: Any, why: str) -> ValueError:
    return ValueError(
        f"{transform!r} must see whole tensors (cut 'tensor'); ranks hold parts of them, and {why}. Accepted for sharded parameters are"
        " transforms of the cut 'element', and in a chain with them some of the cut 'tensor', such as eb.orthogonalize in eb.muon,"
        " with no reduction over several parameters between these or behind them. A FlatStepper steps this one, too."
    )


def _is_whole(node: Any) -> bool:
    """Whether a transform itself must see whole tensors, and not only one inside it, or looks at all of what that one has computed."""
    if isinstance(node, Cautious) and node.rescale != "none":
        return needs_whole_tensors(node.transform)
    return node.cut == "tensor" and (isinstance(node, LowRank) or _is_alone(node))


def _marked(node: Any, mark: Mark) -> Any:
    if isinstance(node, ReductionsOnly):
        # Reductions come before the work.
        return ReductionsOnly(_marked(node.transform, lambda _: eb.identity()))
    if _is_whole(node):
        return mark(node)
    if not isinstance(node, (Chain, NamedChain)):
        return map_parts(lambda part: _marked(part, mark), node)
    named = node.transforms if isinstance(node, NamedChain) else None
    whole = _with_those_between(list(node.transforms if named is None else named.values()))
    parts = tuple(mark(part) if at_owner else _marked(part, mark) for part, at_owner in whole)
    return Chain(parts) if named is None else NamedChain(dict(zip(named, parts, strict=True)))


def _with_those_between(parts: Sequence[Any]) -> list[tuple[Any, bool]]:
    """The transforms of a chain, and whether each sees whole tensors: those that must, what is between them, and numbers of each behind."""
    must = [number for number, part in enumerate(parts) if _is_whole(part)]
    if must:
        behind = [n for n in range(must[0], len(parts)) if n not in must and _is_alone(parts[n])]
        must += [n for n in behind if getattr(parts[n], "per_tensor", False)]
    between = range(must[0], max(must) + 1) if must else range(0)
    if all(number in must or _may_be_whole(parts[number]) for number in between):
        must = list(between)
    return [(part, number in must) for number, part in enumerate(parts)]


def _may_be_whole(node: Any) -> bool:
    """Whether a transform may be run on whole tensors where one that must is."""
    return _is_alone(node) and not node.reduces and not isinstance(node, HasEvalParams)


def _is_alone(node: Any) -> bool:
    """Whether a transform has no others inside it."""
    return len(list(transforms_in(node))) == 1


def _without_others(node: Any) -> Any:
    """A transform without the reductions to which its parameters contribute nothing."""
    return eb.identity() if isinstance(node, ReductionsOnly) else map_parts(_without_others, node)


def _nobody() -> tuple[eb.Members, ...]:
    none = torch.empty(0, dtype=torch.int64)
    return (eb.Members(none, torch.zeros(1, dtype=torch.int64), none.double()),)
