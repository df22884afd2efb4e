"""State dicts of a model while it is sharded, and copies of it: made one unit after the other, in the host's memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from everybit_torch.dtensors import is_dtensor, local
from everybit_torch.sharded.executor import Executor
from everybit_torch.sharded.guards import Guards
from everybit_torch.sharded.layout import Group, Layout, Part, Slice
from everybit_torch.sharded.main_values import MainValues
from everybit_torch.sharded.model_buffers import ModelBuffers
from everybit_torch.sharded.model_parallel import ModelParallel
from everybit_torch.sharded.scheduling.copies import copy_out
from everybit_torch.sharded.scheduling.events import Event
from everybit_torch.sharded.scheduling.schedule import Schedule
from everybit_torch.sharded.shard_tensor import ShardTensor
from everybit_torch.sharded.tensor_parallel import part_beside, part_of
from everybit_torch.sharded.whole_tensors import Room, is_in_parts, put_together
from everybit_torch.torch_internals.dtensors import remove_parallel_hooks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

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
    """A contiguous copy of a plain tensor in the host's memory, which shares nothing with ``x``."""
    return torch.empty(x.shape, dtype=x.dtype, device="cpu").copy_(x.detach())


class ModelState:
    """The parameters, buffers and extra state of a stepper's model, whole or sharded.

    Args:
        model: The model.
        layout: Of it.
        parameters: Those that are laid out, by name.
        buffers: In which they lie.
        schedule: Of the stepper.
        executor: Of its events.
        guards: Of the model; None where parameters are not sharded.
        beside: The ranks that hold other parts of the model.

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
        beside: ModelParallel,
    ) -> None:
        self.model, self.layout, self.parameters, self._buffers = model, layout, dict(parameters), buffers
        self._schedule, self._executor, self._guards, self._beside = schedule, executor, guards, beside
        self._is_first_of_data = buffers.inner.rank == buffers.outer.rank == 0
        self._parts = {spec.name: spec.part for spec in layout.specs}
        self.members: list[list[str]] = [[] for _ in layout.units]
        """The names of each unit's parameters, in the layout's order."""
        self._groups: list[list[tuple[int, Group]]] = [[] for _ in layout.units]
        for number, group in enumerate(layout.groups):
            self.members[group.unit] += [placement.spec.name for placement in group.placements]
            self._groups[group.unit].append((number, group))

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
        self,
        take: Callable[[Tensor, Tensor], None],
        wanted: Collection[int] | None = None,
        *,
        here: bool,
        everywhere: bool = False,
        main: MainValues | None = None,
    ) -> None:
        """Call ``take`` with one parameter after the other, while its unit is gathered, and with what else is in parts. Every rank has to.

        What tensor parallelism has cut is put together, one tensor at a time: by the first of the data-parallel ranks, or by all of them.

        Args:
            take: Is given the model's tensor, and its values as a plain tensor: a view of them, or a copy in the host's memory of those
                that were put together. What it raises is raised after all units, for other ranks gather them too.
            wanted: The ids of some tensors, the same ones on all ranks; None: all.
            here: Whether this rank wants them. If not, it takes part, and ``take`` is not called.
            everywhere: Whether all ranks want them, and not the first one alone.
            main: Has the values to show of parameters that are trained; None: the model's.
        """
        failed: list[BaseException] = []
        wide = {} if main is None else main.dtypes

        def attempt(function: Callable[[], Tensor | None]) -> Tensor | None:
            try:
                return function() if here and not failed else None
            except BaseException as error:
                failed.append(error)
                return None

        def copied(event: Event) -> None:
            for number, group in self._groups[event.number]:
                names = [place.spec.name for place in group.placements]
                if wanted is not None and not any(id(self.parameters[name]) in wanted for name in names):
                    continue
                others = main.of_group(number) if main is not None and group.requires_grad else None
                for name, place in zip(names, group.placements, strict=True):
                    parameter = self.parameters[name]
                    if wanted is None or id(parameter) in wanted:
                        show(parameter, name, None if others is None else others[place.start : place.stop])

        assembles = everywhere or self._is_first_of_data
        room = Room(self._in_parts(wanted, wide) if assembles else (), self._buffers.device)

        def show(parameter: nn.Parameter, name: str, others: Tensor | None) -> None:
            own = local(parameter).detach()
            values: Tensor | None = own if others is None else others.view(own.shape)
            if is_in_parts(parameter):
                if not assembles:
                    return
                dtype = parameter.dtype if others is None else others.dtype
                values = attempt(partial(torch.empty, parameter.shape, dtype=dtype, device="cpu"))
                put_together(parameter, self._beside.of_tensors, values, name, room, others)
            if values is not None:
                attempt(partial(take, parameter, values))

        units = [
            number
            for number, names in enumerate(self.members)
            if wanted is None or any(id(self.parameters[name]) in wanted for name in names)
        ]
        self._executor.begin_here()
        with torch.no_grad(), self._executor.handling("copy out", copied):
            self._executor.run(copy_out(units, self._schedule.weights))
            for one in self.left_alone():
                if wanted is None or id(one) in wanted:
                    whole: Tensor = one.full_tensor().detach()
                    attempt(partial(take, one, whole))
        if failed:
            raise failed[0]

    def _in_parts(
        self, wanted: Collection[int] | None, dtypes: Mapping[str, torch.dtype]
    ) -> Iterator[tuple[Part, int]]:
        """This rank's parts of the parameters that are to be put together, and the bytes of an element of theirs."""
        for name, parameter in self.parameters.items():
            part = self._parts[name]
            if part is not None and is_in_parts(parameter) and (wanted is None or id(parameter) in wanted):
                yield part, dtypes.get(name, parameter.dtype).itemsize

    def left_alone(self) -> list[DTensor]:
        """The DTensors that are not laid out: ignored parameters, and buffers."""
        laid_out = {id(parameter) for parameter in self.parameters.values()}
        everything: list[Tensor] = [*self.model.parameters(), *self.model.buffers()]
        return [x for x in everything if is_dtensor(x) and id(x) not in laid_out]

    def full(self, *, here: bool, everywhere: bool) -> dict[str, Any]:
        """The state dict of the whole model, in the host's memory. Every rank has to call it.

        Args:
            here: Whether this rank wants it. If not, it takes part and gets an empty one.
            everywhere: Whether all ranks want it.
        """
        named = self.named()
        copies: dict[int, Tensor] = {}

        def take(tensor: Tensor, values: Tensor) -> None:
            copies[id(tensor)] = values if is_in_parts(tensor) and values.device.type == "cpu" else on_host(values)

        self.visit(take, here=here, everywhere=everywhere)
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
        for name, (s, here) in own.items():
            parameter = self.parameters[name]
            if parameter.numel():  # of nothing there are no parts
                part = self._parts[name]
                copies[id(parameter)] = ShardTensor(on_host(here), parameter.shape, 0 if s is None else s.low, part)
        for value in named.values():
            if is_dtensor(value) and id(value) not in copies:
                copies[id(value)] = ShardTensor(on_host(local(value)).view(-1), value.shape, 0, part_of(value))
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

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._buffers.device

    def part(self, tensor: Tensor) -> Part | None:
        """The part of one of the model's tensors that tensor parallelism has given this rank; None: there is none."""
        return part_beside(tensor, self._beside.tensor_parallel)

    def copy(self, *, here: bool, everywhere: bool) -> nn.Module | None:
        """A copy of the model with all of its weights in the host's memory; None where it is not wanted. Every rank has to call it."""
        copies: dict[int, Any] = {}

        def take(tensor: Tensor, values: Tensor) -> None:
            whole = values if is_in_parts(tensor) and values.device.type == "cpu" else on_host(values)
            is_parameter = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = nn.Parameter(whole, requires_grad=tensor.requires_grad) if is_parameter else whole

        self.visit(take, here=here, everywhere=everywhere)
        if not here:
            return None
        for parameter in self.model.parameters():
            if id(parameter) not in copies:
                copies[id(parameter)] = nn.Parameter(on_host(parameter), requires_grad=parameter.requires_grad)
        copies |= {id(x): on_host(x) for x in self.model.buffers() if id(x) not in copies}
        with nullcontext() if self._guards is None else self._guards.lifted():
            made = copy.deepcopy(self.model, copies)
        if self._beside.tensor_parallel is not None:
            remove_parallel_hooks(made)
        return made


def _with_copies(named: dict[str, Any], copies: dict[int, Tensor]) -> dict[str, Any]:
    """``named``, with copies in the place of its tensors, by their ids; what has none yet is copied. Tied names share a copy."""
    for name, value in named.items():
        if isinstance(value, Tensor):
            if id(value) not in copies:
                copies[id(value)] = on_host(value)
            named[name] = copies[id(value)]
    return named
