"""State dicts of a model while it is sharded, and copies of it: made one unit after the other, in the host's memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from everybit_torch.dtensors import is_dtensor
from everybit_torch.sharded.executor import Executor
from everybit_torch.sharded.guards import Guards
from everybit_torch.sharded.layout import Layout, Slice
from everybit_torch.sharded.model_buffers import ModelBuffers
from everybit_torch.sharded.scheduling.copies import copy_out
from everybit_torch.sharded.scheduling.events import Event
from everybit_torch.sharded.scheduling.schedule import Schedule
from everybit_torch.sharded.shard_tensor import ShardTensor

StateForm = Literal["rank0", "full", "sharded"]
"""Which rank has what: all of the model on the first rank, all of it on every rank, or on every rank its own shards."""

FORMS: tuple[StateForm, ...] = get_args(StateForm)


def require_form(form: object, accepted: Sequence[str] = FORMS) -> None:
    """Refuse a form that is none.

    Raises:
        ValueError: It is none.
    """
    if form not in accepted:
        raise ValueError(f"form: got {form!r}; accepted are {', '.join(map(repr, accepted))}.")


def on_host(x: Tensor) -> Tensor:
    """A contiguous copy in the host's memory, which shares nothing with ``x``."""
    if is_dtensor(x):
        return x.detach().clone().cpu()
    return torch.empty(x.shape, dtype=x.dtype).copy_(x.detach())


class ModelState:
    """What a stepper's model consists of, whole or sharded.

    Args:
        model: The model.
        layout: Of it.
        parameters: Those that are laid out, by name.
        buffers: In which they lie.
        schedule: Of the stepper.
        executor: Of its events.
        guards: Of the model; None where parameters are not sharded.

    Attributes:
        parameters: Those that are laid out, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        parameters: Mapping[str, nn.Parameter],
        buffers: ModelBuffers,
        schedule: Schedule,
        executor: Executor,
        guards: Guards | None,
    ) -> None:
        self.model, self.layout, self.parameters, self._buffers = model, layout, dict(parameters), buffers
        self._schedule, self._executor, self._guards = schedule, executor, guards
        self.members: list[list[str]] = [[] for _ in layout.units]
        """The names of each unit's parameters, in the layout's order."""
        for group in layout.groups:
            self.members[group.unit] += [placement.spec.name for placement in group.placements]

    def named(self) -> dict[str, Any]:
        """The model's own tensors by all of their names in its ``state_dict()``; those of sharded parameters may have no values.

        Raises:
            TypeError: A hook of the model's makes tensors of its parameters, which are sharded.
        """
        with nullcontext() if self._guards is None else self._guards.lifted():
            named: dict[str, Any] = self.model.state_dict(keep_vars=True)
        if self._guards is not None:
            known = {id(x) for x in (*self.model.parameters(), *self.model.buffers())}
            for name, value in named.items():
                if isinstance(value, Tensor) and id(value) not in known:
                    raise TypeError(
                        f"{name}: is made by a state_dict hook of the model, from weights that are sharded; accepted are parameters and"
                        " buffers, or model.state_dict() inside `with stepper.full_parameters():`."
                    )
        return named

    def visit(
        self, take: Callable[[Sequence[tuple[str, nn.Parameter]]], None], units: Sequence[int] | None = None
    ) -> None:
        """Call ``take`` with the parameters of one unit after the other, while they have their values. Every rank has to do it.

        Args:
            take: Is given names and parameters.
            units: The numbers of some units; None: all.

        What ``take`` raises is raised after all units, for other ranks gather them too.
        """
        failed: list[BaseException] = []

        def copied(event: Event) -> None:
            if not failed:
                try:
                    take([(name, self.parameters[name]) for name in self.members[event.number]])
                except BaseException as error:
                    failed.append(error)

        numbers = range(len(self.members)) if units is None else units
        self._executor.begin_here()
        with torch.no_grad(), self._executor.handling("copy out", copied):
            self._executor.run(copy_out(numbers, self._schedule.weights))
        if failed:
            raise failed[0]

    def full(self, *, here: bool) -> dict[str, Any]:
        """The state dict of the whole model, in the host's memory. Every rank has to call it.

        Args:
            here: Whether this rank wants it. If not, it takes part and gets an empty one.
        """
        named = self.named()
        copies: dict[int, Tensor] = {}

        def take(members: Sequence[tuple[str, nn.Parameter]]) -> None:
            for _, parameter in members if here else ():
                copies[id(parameter)] = on_host(parameter)

        self.visit(take)
        if not here:
            return {}
        return _with_copies(named, copies)

    def sharded(self) -> dict[str, Any]:
        """The state dict of this rank's shards, copied to the host's memory. Nothing is sent.

        Every rank has all names: sharded parameters are :class:`~everybit_torch.sharded.shard_tensor.ShardTensor`, what no rank shards is
        whole.
        """
        named, own = self.named(), self.own()
        copies: dict[int, Tensor] = {}
        for name, (s, part) in own.items():
            parameter = self.parameters[name]
            if parameter.numel():  # of nothing there are no parts
                copies[id(parameter)] = ShardTensor(on_host(part), parameter.shape, 0 if s is None else s.low)
        return _with_copies(named, copies)

    def own(self) -> dict[str, tuple[Slice | None, Tensor]]:
        """The elements of each parameter that this rank's buffers own, 1-d, by its first name; a slice of None: it has none of them.

        Frozen parameters have no buffer, and are not in it, unless parameters are sharded.
        """
        found: dict[str, tuple[Slice | None, Tensor]] = {}
        for weights in self._buffers.weights.values():
            low, high = self._buffers.own_range(weights.group)
            own = weights.own
            here = {s.placement.spec.name: s for s in weights.group.slices(low, high)}
            for placement in weights.group.placements:
                s = here.get(placement.spec.name)
                start, length = (0, 0) if s is None else (s.offset, s.high - s.low)
                found[placement.spec.name] = s, own[start : start + length]
        return found

    def copy(self, *, here: bool) -> nn.Module | None:
        """A copy of the model with all of its weights in the host's memory; None where it is not wanted. Every rank has to call it."""
        copies: dict[int, Any] = {}

        def take(members: Sequence[tuple[str, nn.Parameter]]) -> None:
            for _, parameter in members if here else ():
                copies[id(parameter)] = nn.Parameter(on_host(parameter), requires_grad=parameter.requires_grad)

        self.visit(take)
        if not here:
            return None
        for parameter in self.model.parameters():
            if id(parameter) not in copies:
                copies[id(parameter)] = nn.Parameter(on_host(parameter), requires_grad=parameter.requires_grad)
        copies |= {id(x): on_host(x) for x in self.model.buffers()}
        with nullcontext() if self._guards is None else self._guards.lifted():
            return copy.deepcopy(self.model, copies)


def _with_copies(named: dict[str, Any], copies: dict[int, Tensor]) -> dict[str, Any]:
    """``named``, with copies in the place of its tensors, by their ids; what has none yet is copied. Tied names share a copy."""
    for name, value in named.items():
        if isinstance(value, Tensor):
            if id(value) not in copies:
                copies[id(value)] = on_host(value)
            named[name] = copies[id(value)]
    return named
