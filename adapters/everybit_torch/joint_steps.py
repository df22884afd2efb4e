"""Units whose steps have work in common: alike matrices, whose work is batched.

A step of such a unit runs up to the request for its work. The work of several units is done together, and each is stepped with its results.
Matrices of one shape are batched at a time, so that no more updates than theirs are held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

import everybit as eb
from everybit.protocol import JointWork, transforms_in
from everybit.protocol.joint_work import worked
from everybit_torch.gradients import Grads, have_gradients
from everybit_torch.stepping import Begun, Ready
from everybit_torch.units import Unit


def does_joint_work(transform: object) -> bool:
    """Whether a transform, or one inside it, does work for several matrices at once."""
    return any(getattr(node, "batching", None) == "together" for node in transforms_in(transform))


Begin = Callable[[Unit, Grads], Begun | None]
"""Runs a unit's step up to its joint work; None if it has none."""


class JointSteps:
    """Knows of which optimizers' transforms do work for several matrices at once."""

    def __init__(self) -> None:
        self._known: list[tuple[eb.Optimizer[Any], bool]] = []

    def does(self, optimizer: eb.Optimizer[Any]) -> bool:
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
    begin: Begin,
) -> Iterator[Ready]:
    """Yield units with the results of the work that they have in common, those of one shape one after the other.

    Args:
        work: All units, with their members' gradients.
        joint: Which transforms have such work; None: it is not done.
        optimizer_of: What steps a unit.
        begin: Runs a unit's step up to its joint work.
    """
    kinds: dict[object, list[tuple[Unit, Grads]]] = {}
    for number, (unit, grads) in enumerate(work):
        has_work = joint is not None and not unit.flat and have_gradients(grads) and joint.does(optimizer_of(unit))
        same = (unit.group, unit.decision, unit.tensor.shape, unit.tensor.dtype, unit.tensor.device)
        kinds.setdefault(same if has_work else number, []).append((unit, grads))
    for kind, alike in kinds.items():
        if isinstance(kind, int):
            yield Ready(*alike[0], [])
            continue
        for one, results in zip(alike, _results(alike, begin), strict=True):
            yield Ready(*one, results)
            # The caller holds on to the list until the next one comes.
            results.clear()


def _results(alike: Sequence[tuple[Unit, Grads]], begin: Begin) -> Iterator[list[Tensor]]:
    """The results of the work of units of one shape. Its inputs are given up before the first unit is stepped."""
    requests = [None if (begun := begin(*one)) is None else cast(JointWork, begun.pending.request) for one in alike]
    counts = [0 if one is None else len(one.batches) for one in requests]
    present = [one for one in requests if one is not None]
    found = iter(worked([batch for one in present for batch in one.batches], present[0].work) if present else [])
    del requests, present
    for count in counts:
        yield [next(found) for _ in range(count)]


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
