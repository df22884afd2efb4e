"""Work for matrices of several parameters at once: those of one shape are stepped one after the other, with results found before.

The transform of each is run up to the question for its work, the work of all is done together, and each is stepped with its results.
Matrices of one shape at a time, so that no more directions than theirs are held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

import everybit as eb
from everybit.joint_work import Asking, AtOnce, NeedsJointWorkError
from everybit.parts import transforms_in
from everybit_torch.exchange import Exchange
from everybit_torch.gradients import Gathered, Grads, have_gradients
from everybit_torch.host_counts import Due
from everybit_torch.members import members_of
from everybit_torch.units import Unit


def does_joint_work(transform: object) -> bool:
    """Whether a transform, or one inside it, does work for several matrices at once."""
    return any(getattr(node, "batching", None) == "together" for node in transforms_in(transform))


class JointSteps:
    """Knows of which optimizers' transforms do work for several matrices at once.

    Attributes:
        exchange: Where work is done for matrices of which each rank has parts.
    """

    def __init__(self) -> None:
        self.exchange = Exchange()
        self._known: list[tuple[eb.Optimizer[Any], bool]] = []

    def ask(self, optimizer: eb.Optimizer[Any]) -> bool:
        """Whether an optimizer's transform does."""
        for known, asks in self._known:
            if known is optimizer:
                return asks
        asks = does_joint_work(optimizer.transform)
        self._known = [*self._known[-63:], (optimizer, asks)]
        return asks


def arranged(
    work: Sequence[tuple[Unit, Grads]],
    joint: JointSteps | None,
    optimizer_of: Callable[[Unit], eb.Optimizer[Any]],
    known: Callable[[Unit], tuple[Sequence[Tensor], Due]],
    gathered: Mapping[int, Gathered],
) -> Iterator[tuple[tuple[Unit, Grads], list[Tensor]]]:
    """Yield units with their gradients and the results of the work that they have in common, those of one shape one after the other.

    Args:
        work: All units, with their members' gradients.
        joint: Which transforms have such work; None: it is not done.
        optimizer_of: What steps a unit.
        known: Of a unit, the totals of its transform's reductions, and which periodic work is due.
        gathered: By id of the unit, gradients that were gathered already.
    """

    def asked(unit: Unit, grads: Grads) -> NeedsJointWorkError | None:
        grad = gathered.get(id(unit))
        grad = unit.gathered(cast(list[Tensor], grads)) if grad is None else grad
        return ask(optimizer_of(unit), unit, cast(Tensor, grad), *known(unit))

    parted = [(unit, grads) for unit, grads in work if unit.decision is not None and unit.decision.parted]
    if joint is None or not parted:
        yield from _batched(work, joint, optimizer_of, asked)
        return
    travel = {id(unit) for unit, _ in parted}
    others = _batched([one for one in work if id(one[0]) not in travel], joint, optimizer_of, asked)
    present = [(unit, grads) for unit, grads in parted if have_gradients(grads)]
    absent = [unit for unit, grads in parted if not have_gradients(grads)]
    yield from joint.exchange.steps(present, absent, optimizer_of, asked, others)


def _batched(
    work: Sequence[tuple[Unit, Grads]],
    joint: JointSteps | None,
    optimizer_of: Callable[[Unit], eb.Optimizer[Any]],
    asked: Callable[[Unit, Grads], NeedsJointWorkError | None],
) -> Iterator[tuple[tuple[Unit, Grads], list[Tensor]]]:
    """Units whose work is done here, those of one shape one after the other."""
    kinds: dict[object, list[tuple[Unit, Grads]]] = {}
    for number, (unit, grads) in enumerate(work):
        has_work = joint is not None and not unit.flat and have_gradients(grads) and joint.ask(optimizer_of(unit))
        same = (unit.group, unit.decision, unit.tensor.shape, unit.tensor.dtype, unit.tensor.device)
        kinds.setdefault(same if has_work else number, []).append((unit, grads))
    for kind, alike in kinds.items():
        if isinstance(kind, int):
            yield alike[0], []
            continue
        for one, answers in zip(alike, _answers(alike, asked), strict=True):
            yield one, answers
            # Whoever steps holds on to the list until the next one comes.
            answers.clear()


def ask(
    optimizer: eb.Optimizer[Any], unit: Unit, grad: Tensor, totals: Sequence[Tensor], due: Due
) -> NeedsJointWorkError | None:
    """Run a unit's transform up to its question; None if it has none.

    Args:
        optimizer: That steps it.
        unit: The unit.
        grad: In the shape of its tensor.
        totals: Of the transform's reductions.
        due: Which periodic work is due.
    """
    ctx = eb.Context(first_element=unit.first, members=members_of(unit), due=due, joint=Asking())
    here = [x.to(unit.tensor.device) for x in totals]
    try:
        optimizer.ask([unit.tensor], [grad], unit.state, replace(ctx, pending=bool(here)), totals=here)
    except NeedsJointWorkError as question:
        # Its frames hold what the transform has computed, and those before them hold the question.
        return question.with_traceback(None)
    return None


def _answers(
    alike: Sequence[tuple[Unit, Grads]], asked: Callable[[Unit, Grads], NeedsJointWorkError | None]
) -> Iterator[list[Tensor]]:
    """Of units of one shape the results of their work. What it was done for is given up before the first is stepped."""
    questions = [asked(unit, grads) for unit, grads in alike]
    counts = [0 if one is None else len(one.batches) for one in questions]
    found = iter(_results([one for one in questions if one is not None]))
    del questions
    for count in counts:
        yield [next(found) for _ in range(count)]


def _results(asked: Sequence[NeedsJointWorkError]) -> list[Tensor]:
    return AtOnce.results([batch for one in asked for batch in one.batches], asked[0].work) if asked else []


def collected(units: Sequence[Unit]) -> list[tuple[Unit, Grads]]:
    """Units with their members' gradients.

    Raises:
        TypeError: A sparse gradient.
    """
    work = [(unit, unit.collect()) for unit in units]
    for unit, grads in work:
        # Those that lie in a buffer are dense.
        for member, grad in zip(unit.members, grads, strict=True) if unit.gradients is None else ():
            if grad is not None and grad.layout is not torch.strided:
                raise TypeError(
                    f"{member.name}: got a {grad.layout} gradient; accepted are dense gradients (torch.nn.Embedding(sparse=False), or"
                    " torch.optim.SparseAdam for sparse ones)."
                )
    return work
