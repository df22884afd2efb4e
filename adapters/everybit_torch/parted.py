"""Transforms for processes that have parts of parameters: what must see whole tensors becomes work that is done elsewhere.

See :mod:`everybit.whole_work` for that work, and :mod:`everybit_torch.exchange` for how parts come together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.combinators.cautious import Cautious
from everybit.combinators.chain import Chain, NamedChain
from everybit.combinators.low_rank import LowRank
from everybit.joint_work import Work
from everybit.parts import map_parts, needs_whole_tensors, transforms_in
from everybit.transform import HasEvalParams, periods
from everybit.whole_work import OnWholes, WholeWork, why_not_elsewhere
from everybit_torch.reductions_only import ReductionsOnly

Stand = Callable[[Sequence[Any]], Any]
"""From transforms one after the other that must see whole tensors to what stands in for them."""


def parted(transform: Any) -> Any:
    """Return a transform that may be cut anywhere, and that asks for the work of what must see whole tensors.

    Its state has the slots of the transform's, in order.
    """
    return _replaced(transform, lambda run: OnWholes(WholeWork.of(run)))


def work_in(transform: Any) -> WholeWork:
    """The work that such a transform asks for."""
    return next(node.work for node in transforms_in(transform) if isinstance(node, OnWholes))


def require_parted(optimizer: eb.Optimizer[Any], whole: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Refuse what cannot be stepped in parts.

    Args:
        optimizer: With what :func:`parted` returned.
        whole: The transform that it was made of.
        shape: Of a parameter.
        dtype: Of the parameter.

    Raises:
        ValueError: The message names the part.
    """
    works = [node.work for node in transforms_in(optimizer.transform) if isinstance(node, OnWholes)]
    for part in (part for work in works for part in work.parts):
        if (why := why_not_elsewhere(part, shape)) is not None:
            raise _refusal(part, why)
    if needs_whole_tensors(optimizer.transform):
        raise _refusal(whole, "it is no chain of transforms of which some must see them")
    none = torch.empty(0, dtype=dtype)
    here = replace(optimizer, transform=_without_others(optimizer.transform))
    every = periods(whole)
    for due in dict.fromkeys([(), *(tuple((period, due) for period in every) for due in (True, False))]):
        # A run on tensors without elements tells what it asks for.
        asked = _Asked()
        ctx = eb.Context(joint=asked, pending=True, due=due, members=_nobody() if here.per_tensor else None)
        request, reduces_after = here.ask([none], [none], here.init([none]), ctx), False
        while request is not None:
            reduces_after |= bool(asked.times)
            found = request.resume(request.partial())
            request = found if isinstance(found, eb.Pending) else None
        if asked.times != 1:
            raise _refusal(whole, f"it asks for them {asked.times} times in a step")
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


def _replaced(node: Any, stand: Stand) -> Any:
    if isinstance(node, ReductionsOnly):
        # Reductions come before the work.
        return ReductionsOnly(_replaced(node.transform, lambda _run: eb.identity()))
    if _is_whole(node):
        return stand([node])
    if not isinstance(node, (Chain, NamedChain)):
        return map_parts(lambda part: _replaced(part, stand), node)
    named = node.transforms if isinstance(node, NamedChain) else None
    whole = _with_those_between(list(node.transforms if named is None else named.values()))
    parts: list[Any] = []
    run: list[Any] = []
    for part, is_done_there in (*whole, (None, False)):
        if is_done_there:
            run.append(part)
            continue
        # Each has a place of its own, by which random bits are drawn and state is found.
        parts += [stand(run), *[eb.identity()] * (len(run) - 1)] if run else []
        parts += [] if part is None else [_replaced(part, stand)]
        run = []
    return Chain(tuple(parts)) if named is None else NamedChain(dict(zip(named, parts, strict=True)))


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


class _Asked:
    """Counts questions for work."""

    def __init__(self) -> None:
        self.times = 0

    def results(self, batches: Sequence[Tensor], work: Work) -> list[Tensor]:  # noqa: ARG002  # what it is asked for
        self.times += 1
        return list(batches)


def _nobody() -> tuple[eb.Members, ...]:
    none = torch.empty(0, dtype=torch.int64)
    return (eb.Members(none, torch.zeros(1, dtype=torch.int64), none.double()),)
