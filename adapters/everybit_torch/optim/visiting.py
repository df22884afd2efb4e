"""Parameters that are stepped whole although ranks hold rows of them: their steps and state dicts.

Every rank calls these functions, in the same order: rows travel to the owners, and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.protocol import Due
from everybit.stepping import Metrics
from everybit.stepping.entries import Entry
from everybit_torch.collectives import Communicator
from everybit_torch.label_resolution import Decision
from everybit_torch.optim.groups import Group
from everybit_torch.optim.visits import Of, Visitor, Visits
from everybit_torch.placements import RowShards, like
from everybit_torch.segments import Partial, Segment, Steps
from everybit_torch.torch_internals.dtensors import local


@dataclass(slots=True, eq=False)
class Visited:
    """A parameter that visits its owner.

    Attributes:
        group: Its group.
        decision: The results of the group's masks and labels for it.
        name: Its name, for messages.
        visitor: The parameter, and its segment at the owner.
        step: Its count of steps, on every rank.
        due: The periodic work that is due at the next step.
    """

    group: Group
    decision: Decision | None
    name: str
    visitor: Visitor
    step: Tensor = field(init=False)
    due: Due = ()

    def __post_init__(self) -> None:
        self.step = torch.zeros((), dtype=torch.int64, device=local(self.parameter).device)

    @property
    def parameter(self) -> Tensor:
        """The parameter."""
        return self.visitor.parameter

    @property
    def steps(self) -> Steps:
        """The steps of its policy."""
        return self.group.steps[self.parameter.dtype]

    @property
    def optimizer(self) -> eb.Optimizer[Any]:
        """The optimizer, as masks and labels came out."""
        return self.visitor.optimizer

    def give(self, optimizer: eb.Optimizer[Any]) -> None:
        """Step it with another optimizer from here on."""
        self.visitor.optimizer = optimizer
        if self.visitor.segment is not None:
            self.visitor.segment.optimizer = optimizer


class Visiting:
    """Parameters that visit owners among the same ranks.

    Args:
        members: The parameters, in an order that is the same on every rank.
        rows: How ranks hold their rows.
    """

    def __init__(self, members: Sequence[Visited], rows: RowShards) -> None:
        shards = Communicator(rows.mesh.get_group(rows.shards))
        copies = None if rows.copies is None else Communicator(rows.mesh.get_group(rows.copies))
        self.members = list(members)
        self._visits = Visits([one.visitor for one in members], shards, copies)
        self._of = {id(one.visitor.segment): one for one in members if one.visitor.segment is not None}
        self._asked: tuple[int, dict[Visited, Partial | None]] | None = None

    @property
    def source(self) -> str:
        """The source of the members' groups."""
        return self.members[0].group.source

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of this rank's rows; None for a parameter without one, or without elements."""
        grads = [one.parameter.grad if one.parameter.numel() else None for one in self.members]
        return [None if grad is None else local(grad) for grad in grads]

    def prepare(self, grads: Sequence[Tensor | None]) -> None:
        """Find out at the owners which periodic work is due.

        Raises:
            RuntimeError: Ranks have gradients for different parameters.
        """
        names = [one.name for one, grad in zip(self.members, grads, strict=True) if grad is not None]
        if not self._visits.agree("\n".join(names)):
            raise RuntimeError(
                f"step: ranks have gradients for different parameters, this one for {', '.join(names[:5]) or 'none'} of those that are"
                " stepped whole; accepted is that all of them have the same. Let every rank run the same modules."
            )
        self._asked = None
        for one in self.members:
            one.due = () if one.visitor.segment is None else one.steps.due(one.visitor.segment)

    # -- a step ---------------------------------------------------------------------------------------------------------------

    def contribution(self, member: Visited, grads: Sequence[Tensor | None], totals: Sequence[Tensor]) -> Partial | None:
        """Return this rank's contribution to a total for a parameter; zero or the least value without ownership.

        All of them visit their owners at the first call of a step.
        """
        if self._asked is None or self._asked[0] != len(totals):
            found: dict[Visited, Partial | None] = {}
            for arrived in self._visits.look(grads):
                one = self._of[id(arrived.segment)]
                found[one] = one.steps.find(arrived.segment, arrived.grad, totals, one.due, decision=one.decision)
            self._asked = (len(totals), found)
        found = self._asked[1]
        if member in found:
            return found[member]
        part = next(iter(found.values())) if found else self._without_elements(member, totals)
        if part is None:
            return None
        return Partial(
            part.kind, torch.full_like(part.value, 0 if part.kind == "sum" else _least(part.dtype)), part.dtype
        )

    def _without_elements(self, member: Visited, totals: Sequence[Tensor]) -> Partial | None:
        """Find the next request at a rank without a parameter of its own."""
        here = local(member.parameter)
        zeros = torch.zeros(member.parameter.shape, dtype=here.dtype, device=here.device)
        segment = Segment.new(member.optimizer, zeros, member.visitor.first)
        return member.steps.find(segment, torch.zeros_like(zeros), totals, member.due, decision=member.decision)

    def step(self, grads: Sequence[Tensor | None], totals: Sequence[Tensor], *, metrics: bool) -> Metrics | None:
        """Step the parameters that have a gradient, each at its owner; return the metrics of this rank."""
        measured: Metrics | None = None

        def step(segment: Segment, grad: Tensor) -> None:
            nonlocal measured
            one = self._of[id(segment)]
            own = totals if one.optimizer.reduces else ()
            found = one.steps.step(segment, grad, own, decision=one.decision, due=one.due, metrics=metrics)
            if found is not None:
                measured = found if measured is None else measured + found

        self._visits.step(grads, step)
        for one, grad in zip(self.members, grads, strict=True):
            if grad is not None:
                one.step += 1
        return measured

    # -- state ----------------------------------------------------------------------------------------------------------------

    def hand_out(self, of: Of, *, weights: bool) -> Iterator[tuple[Visited, dict[str, Tensor]]]:
        """Compute tensors of each parameter at its owner, and yield them as DTensors that are sharded as it is; counts are plain.

        Args:
            of: Computes them of a segment, by name.
            weights: Whether it needs the present weights.
        """
        for one, found in zip(self.members, self._visits.hand_out(of, weights=weights), strict=True):
            shapes = {name: x.shape for name, x in of(one.visitor.shadow()).items()}
            yield one, {name: like(one.parameter, x, shapes[name]) if x.ndim else x for name, x in found.items()}

    def take(
        self,
        given: Mapping[int, Mapping[str, Tensor]],
        into: Callable[[Segment, Mapping[str, Tensor] | None], None],
        known: Of,
        *,
        weights: bool,
    ) -> None:
        """Give owners tensors of which ranks have rows.

        Args:
            given: DTensors by name, by id of the parameter.
            into: Takes whole tensors over; None: the parameter has no given tensors.
            known: Which tensors there may be.
            weights: Whether ``into`` needs the weights, and may change them.
        """
        shadows = {id(one.visitor.shadow()): one for one in self.members}
        values = [
            {name: local(x) for name, x in given.get(id(one.parameter), {}).items() if isinstance(x, Tensor)}
            for one in self.members
        ]
        names = dict(zip(self.members, values, strict=True))

        def wanted(shadow: Segment) -> dict[str, Tensor]:
            own = names[shadows[id(shadow)]]
            return {name: x for name, x in known(shadow).items() if name in own}

        def take(segment: Segment, whole: Mapping[str, Tensor]) -> None:
            into(segment, whole if id(self._of[id(segment)].parameter) in given else None)

        device = local(self.members[0].parameter).device
        values = [{name: x.to(device) for name, x in own.items()} for own in values]
        self._visits.take(values, wanted, take, weights=weights)
        for one, own in names.items():
            one.step.copy_(own["step"]) if "step" in own else one.step.zero_()

    def begin_with(self, optimizer_of: Callable[[Visited], eb.Optimizer[Any]]) -> None:
        """Let owners have state for other optimizers, which is loaded after this."""
        for one in self.members:
            one.give(optimizer_of(one))
            if one.visitor.segment is not None:
                here = local(one.parameter)
                zeros = torch.zeros(one.parameter.shape, dtype=here.dtype, device=here.device)
                self._replace(one, Segment.new(one.optimizer, zeros, one.visitor.first, host=one.visitor.host))
                one.visitor.leave()

    def _replace(self, one: Visited, segment: Segment) -> None:
        self._of.pop(id(one.visitor.segment), None)
        one.visitor.segment = segment
        self._of[id(segment)] = one

    def renumber(self, firsts: Mapping[Tensor, int]) -> None:
        """Give elements other global indices, from which they draw their random bits."""
        for one in self.members:
            if one.parameter in firsts and firsts[one.parameter] != one.visitor.first:
                one.visitor.first = firsts[one.parameter]
                old = one.visitor.segment
                if old is not None:
                    self._replace(one, replace(old, first=one.visitor.first))


@dataclass(slots=True)
class Visit:
    """Parameters that visit owners for a step.

    Attributes:
        visiting: The parameters.
        grads: The gradients of this rank's rows.
        totals: The totals of the transform's requests.
    """

    visiting: Visiting
    grads: list[Tensor | None]
    totals: Sequence[Tensor] = ()


def _least(dtype: torch.dtype) -> float:
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def entries_of(one: Visited) -> list[Entry]:
    """List the entries of a parameter's state."""
    return [entry for entry, _ in one.visitor.shadow().entries()]
