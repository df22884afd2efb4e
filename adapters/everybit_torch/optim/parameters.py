"""The parameters of a torch optimizer: those that are stepped together, those that wait, and the state of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import everybit as eb
from everybit.policies import block_of
from everybit.stepping.entries import STEP, Entry
from everybit_torch.collectives import GroupAxis
from everybit_torch.label_resolution import Decision
from everybit_torch.optim.groups import Group, Optimizers
from everybit_torch.optim.planned import New, ParamGroups, Settled, StatePlan, parameters_of, planned, tied_by_memory
from everybit_torch.optim.states import States
from everybit_torch.optim.visiting import Visited, Visiting, entries_of
from everybit_torch.optim.visits import Visitor
from everybit_torch.optim.visits import entries_of as state_of
from everybit_torch.optim.watching import Watch
from everybit_torch.placements import RowShards, axis_of, is_primary_copy, like, mesh_of, place_in_whole
from everybit_torch.segments import (
    Bucket,
    HostState,
    Memory,
    Run,
    Segment,
    Single,
    Sources,
    Steps,
    Watched,
    most_short,
    neighbours,
    require_streams,
    upper_words,
)
from everybit_torch.shared_memory import has_repeated_elements
from everybit_torch.torch_internals.dtensors import is_dtensor, local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(slots=True, eq=False)
class Stepped:
    """Parameters that are stepped at once.

    Attributes:
        group: Their group.
        decision: The results of its masks and labels for them.
        names: Their names, for messages.
        of: The parameters where they lie, and their segment.
        steps: The steps of the parameters' policy.
    """

    group: Group
    decision: Decision | None
    names: list[str]
    of: Single | Bucket
    steps: Steps = field(init=False)

    def __post_init__(self) -> None:
        self.steps = self.group.steps[self.dtype]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.of.parameters[0].dtype

    @property
    def optimizer(self) -> eb.Optimizer[Any]:
        """The optimizer of the parameters, as masks and labels came out for them."""
        return self.of.segment.optimizer

    def apart(self) -> list[Stepped]:
        """Return each parameter by itself."""
        assert isinstance(self.of, Bucket)
        return [
            Stepped(self.group, self.decision, [name], of) for name, of in zip(self.names, self.of.apart(), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Own:
    """One parameter with its state.

    Attributes:
        parameter: The parameter.
        stepped: The parameters with which it is stepped.
        number: Its number among them.
    """

    parameter: Tensor
    stepped: Stepped
    number: int

    def segment(self) -> Segment:
        """Return the parameter's segment: its present weights, and views of its state."""
        return self.stepped.of.own(self.number)

    def entries(self) -> list[tuple[Entry, Tensor]]:
        """List the tensors of the parameter's state with their names and roles."""
        return self.stepped.of.entries(self.number)

    def write(self, weights: Tensor) -> None:
        """Write stored weights of the segment's shape."""
        here = local(self.parameter).detach()
        here.copy_(weights.reshape(here.shape))


class KeptEntry(NamedTuple):
    """An entry of a parameter's state.

    Attributes:
        parameter: The parameter.
        entry: The entry.
        shape: The shape of the whole entry.
        tensor: This rank's part of it.
    """

    parameter: Tensor
    entry: Entry
    shape: tuple[int, ...]
    tensor: Tensor


class Parameters:
    """The parameters of all param groups. They stay where they are, and may be moved or swapped before the first step.

    Args:
        states: Shows the state of each.

    Attributes:
        groups: The param groups as they are stepped.
        stepped: The parameters that are stepped here.
        visiting: Those that visit owners.
        shows: How often state was shown anew.
        axes: The ranks of each mesh.
        sources: The known requests of their transforms.
        ranks: The processes with the other elements of plain tensors, and whether this process contributes its own; None: it has all.
        memory: The memory of plain tensors that lie one after the other with their gradients.
        parts: Plain tensors that are a part of a parameter, with other elements elsewhere.
        watch: The parameters of which changes are in masks; None: changes are not noted.
        hosts: The host's memory for the state of parameters on a device; None: state lies where they do.
    """

    def __init__(self, states: States) -> None:
        self.states = states
        self.groups: list[Group] = []
        self.stepped: list[Stepped] = []
        self.visiting: list[Visiting] = []
        self.shows = 0
        self.axes: dict[DeviceMesh, GroupAxis] = {}
        self.sources = Sources()
        self.ranks: tuple[eb.Axis, bool] | None = None
        self.parts: set[Tensor] = set()
        self.watch: Watch | None = None
        self.hosts: dict[torch.device, HostState] | None = None
        self.memory: Mapping[Tensor, Memory] = {}
        self._settled: list[Settled] = []
        self._counted: dict[torch.dtype, int] = {}
        self._firsts: dict[Tensor, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A front end saves the entries of other code in the states.
        return self.__dict__ | {"states": None, "axes": {}}

    def add_group(self, group: Group) -> None:
        """Add a param group."""
        self.groups.append(group)
        self._settled.append(Settled())

    def waiting(self) -> list[Tensor]:
        """Return the parameters of all groups that are frozen, and have no state."""
        return [parameter for group in self._settled for parameter, _ in group.waiting]

    def has_lazy(self) -> bool:
        """Whether some parameters have no shape yet."""
        return any(group.uninitialized for group in self._settled)

    def counts(self) -> list[Tensor]:
        """Return a count that is shown for each segment: other code that moves state away moves it, too."""
        found = (dict.get(self.states[one.of.parameters[0]], STEP) for one in self.stepped)
        return [count for count in found if count is not None]

    def own(self) -> Iterator[Own]:
        """Yield the parameters that are stepped."""
        for stepped in self.stepped:
            for number, parameter in enumerate(stepped.of.parameters):
                yield Own(parameter, stepped, number)

    # -- settling -------------------------------------------------------------------------------------------------------------

    def plan(
        self, param_groups: ParamGroups, wanted: frozenset[int], optimizers: Sequence[Optimizers] | None = None
    ) -> StatePlan | None:
        """Plan the state of every parameter without state. No parameter is changed. None: all parameters have state.

        A frozen parameter has no state until it is unfrozen; a parameter of a lazy module has no state until it has a shape.

        Args:
            param_groups: The optimizer's.
            wanted: Parameters, by id, that get state although they are frozen.
            optimizers: The future optimizers of each group, by dtype; None: the present optimizers.

        Raises:
            RuntimeError: Parameters were cast since the optimizer was made, or taken out of a param group since the first step.
            ValueError: Parameters that cannot be stepped: elements that are one place in memory, memory that parameters share and that a
                policy keeps residuals of, shapes that a transform cannot take.
        """
        given = [values["params"] for values in param_groups]
        if all(group.is_current(params, wanted) for group, params in zip(self._settled, given, strict=True)):
            return None
        if self.watch is not None and (tied := tied_by_memory(parameters_of(param_groups))):
            raise ValueError(_unseen(len(tied)))
        for parameter in () if self.hosts is None else parameters_of(param_groups):
            require_streams(local(parameter).device)
        present = [group.optimizers for group in self.groups] if optimizers is None else optimizers
        return planned(self._settled, self._counted, self._firsts, param_groups, wanted, present)

    def carry_out(self, plan: StatePlan) -> None:
        """Give parameters state as planned.

        Raises:
            RuntimeError: Parameters that visit begin later than those with which they share numbers of their transform.
        """
        begun_sources = {one.group.source for one in self.stepped if one.optimizer.common}
        begun_sources |= {one.group.source for one in self.visited() if one.optimizer.common}
        for one in plan.new:
            if one.rows is not None and one.optimizer.common and self.groups[one.group].source in begun_sources:
                raise RuntimeError(
                    f"{one.name}: begins after others, with which it shares numbers of its transform, and the owners of its blocks do not"
                    " know them. Accepted is to train it from the first step on, or a policy without blocks (LEAN_BF16)."
                )
        self._counted, self._settled = plan.counted, plan.settled
        together: dict[Any, list[New]] = {}
        visiting: dict[Any, tuple[RowShards, list[New]]] = {}
        for one in plan.new:
            _ = self.states[one.parameter]  # which is shown in the order of the parameters
            if one.rows is not None:
                where = (self.groups[one.group].source, one.rows, one.parameter.device)
                visiting.setdefault(where, (one.rows, []))[1].append(one)
                continue
            here = local(one.parameter)
            key: Any = (one.group, here.dtype, here.device, one.decision)
            memory = self.memory.get(one.parameter)
            if memory is not None and not one.looks_at_tensors():
                together.setdefault((*key, id(memory)), []).append(one)
                continue
            if is_dtensor(one.parameter):
                key = (*key, one.parameter.device_mesh, one.parameter.placements)
            key = (*key, upper_words(one.first, one.parameter.numel()))
            together.setdefault((*key, id(one.parameter)) if one.is_alone() else key, []).append(one)
        for several in together.values():
            for part in self._at_once(several):
                self._add(part)
        for rows, several in visiting.values():
            self._visit(several, rows)

    def _at_once(self, new: list[New]) -> Iterator[list[New]]:
        """Yield parts of what may be stepped together, each of which is: neighbours in memory may have indices far apart."""
        (first, *_), here = new, local(new[0].parameter)
        optimizer = self.groups[first.group].decided(here.dtype, first.decision)
        is_a_run = first.parameter in self.memory and not first.looks_at_tensors()
        if is_a_run and optimizer.draws_bits and block_of(optimizer.policy) == 1:
            lengths = [one.parameter.numel() for one in new]
            for where in neighbours(lengths, [one.first for one in new], most_short(here.device)):
                yield new[where]
        else:
            yield new

    def _add(self, new: list[New]) -> None:
        group, decision = self.groups[new[0].group], new[0].decision
        parameters = [one.parameter for one in new]
        optimizer = group.decided(parameters[0].dtype, decision)
        firsts = [place_in_whole(one.parameter, one.first) if optimizer.draws_bits else one.first for one in new]
        of: Single | Bucket
        memory = None if new[0].looks_at_tensors() else self.memory.get(parameters[0])
        whole = optimizer.needs_whole
        host = self._host_of(local(parameters[0]).device)
        if memory is not None:
            of = Run(optimizer, parameters, [one.first for one in new], memory, host)
        elif len(new) == 1 and (whole or local(parameters[0]).is_contiguous()):
            of = Single.new(optimizer, parameters[0], firsts[0], parameters[0] in self.parts, host)
        else:
            of = Bucket(optimizer, parameters, firsts, parameters[0] in self.parts, host)
        if self.watch is not None:
            of.segment.watched = Watched.of(of.segment.tensor, self.watch.dtype)
        stepped = Stepped(group, decision, [one.name for one in new], of)
        stepped.steps.elements += of.numel
        self.stepped.append(stepped)
        self.show([stepped])

    def _host_of(self, device: torch.device) -> HostState | None:
        if self.hosts is None:
            return None
        if device not in self.hosts:
            self.hosts[device] = HostState(device)
        return self.hosts[device]

    def _visit(self, new: list[New], rows: RowShards) -> None:
        members = []
        for one in new:
            group = self.groups[one.group]
            watched = None if self.watch is None else Watched.of(local(one.parameter), self.watch.dtype)
            optimizer = group.decided(one.parameter.dtype, one.decision)
            host = self._host_of(local(one.parameter).device)
            visitor = Visitor(one.parameter, optimizer, one.first, watched=watched, host=host)
            members.append(Visited(group, one.decision, one.name, visitor))
            group.steps[one.parameter.dtype].elements += local(one.parameter).numel()
        self.visiting.append(Visiting(members, rows))
        for member in members:
            # The rest of the state is with the owner; torch looks whether there is any.
            self.states[member.parameter].publish({"step": member.step}, self.states.torch_names)

    def visited(self) -> Iterator[Visited]:
        """Yield the parameters that visit owners."""
        for visiting in self.visiting:
            yield from visiting.members

    def kept(self) -> list[KeptEntry]:
        """List the entries of the state of every parameter. Every rank has to call it if parameters visit."""
        found = []
        for own in self.own():
            parameter, here = own.parameter, local(own.parameter).shape
            for entry, x in own.entries():
                is_alike = entry.cut == "element"
                shape = tuple(parameter.shape) if is_alike else entry.shape(parameter.shape, x.shape)
                found.append(KeptEntry(parameter, entry, shape, x.view(here) if is_alike else x))
        for visiting in self.visiting:
            for member, values in visiting.hand_out(state_of, weights=False):
                named = [(entry, values[entry.name]) for entry in entries_of(member) if entry.name in values]
                found += [KeptEntry(member.parameter, entry, tuple(x.shape), local(x)) for entry, x in named]
        return found

    def show(self, several: Iterable[Stepped]) -> None:
        """Show the state of parameters in the optimizer's ``state``."""
        self.shows += 1
        for stepped in several:
            for number, parameter in enumerate(stepped.of.parameters):
                self.states[parameter].publish(shown(parameter, stepped.of.entries(number)), self.states.torch_names)

    def take_back(self) -> None:
        """Take over state that other code moved away and gave back by assigning to ``.data``, as programs do that offload state.

        The memory that is stepped stays where it is: what was given back is copied into it.

        Raises:
            RuntimeError: State that was freed and not given back; nothing is changed.
        """
        moved = [one for one in self.stepped if not self._shows_memory(one)]
        copies: list[tuple[Tensor, Tensor]] = []
        for one in moved:
            for number, (name, parameter) in enumerate(zip(one.names, one.of.parameters, strict=True)):
                for entry, x in shown(parameter, one.of.entries(number)).items():
                    given, held = local(self.states[parameter].own[entry]), local(x)
                    if given.shape != held.shape or given.dtype is not held.dtype:
                        raise RuntimeError(
                            f"{name}: its state {entry!r} was given other memory by assigning to `.data`: got {tuple(given.shape)},"
                            f" {given.dtype}; accepted is {tuple(held.shape)}, {held.dtype}, given back before the step."
                        )
                    if given.data_ptr() != held.data_ptr() or given.device != held.device:
                        copies.append((held, given))
        for held, given in copies:
            held.copy_(given)
        self.show(moved)

    def _shows_memory(self, one: Stepped) -> bool:
        """Whether the count that a parameter shows is that of its segment. Fast: called at every step."""
        entry = dict.get(self.states[one.of.parameters[0]], STEP)
        return entry is None or entry.data_ptr() == one.of.segment.state.step.data_ptr()

    def axis_and_counts(self, parameter: Tensor) -> tuple[eb.Axis, bool]:
        """Return the processes with other elements of a parameter, and whether this process counts, of those with equal elements."""
        if not is_dtensor(parameter):
            return (eb.Local, True) if self.ranks is None else self.ranks
        mesh = mesh_of([parameter])
        assert mesh is not None
        if mesh not in self.axes:
            self.axes[mesh] = axis_of(mesh)
        return self.axes[mesh], is_primary_copy(parameter, mesh)

    def come_apart(self, which: Iterable[Stepped]) -> None:
        """Step parameters of buckets by themselves from here on."""
        parts = {id(one): one.apart() for one in which if isinstance(one.of, Bucket) and len(one.names) > 1}
        if parts:
            self.stepped = [part for one in self.stepped for part in parts.get(id(one), [one])]
            for several in parts.values():
                self.show(several)

    def come_apart_by_shared(self, given: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Step parameters by themselves to which other counts are given than to their neighbours.

        Args:
            given: Entries by id of the parameter. One without any will be as before its first step.
        """

        def differ(one: Stepped) -> bool:
            names = [entry.name for entry, _ in one.of.segment.entries() if entry.role == "shared"]
            several = [given.get(id(p), {}) for p in one.of.parameters]
            begun: dict[str, Tensor] = {}
            if not all(name in values for values in several for name in names):
                fresh = Segment.new(one.optimizer, one.of.segment.tensor[:0])
                begun = {entry.name: x for entry, x in fresh.entries()}
            found = [[values[name] if name in values else begun[name] for name in names] for values in several]
            return len({tuple(map(_bits, numbers)) for numbers in found}) > 1

        self.come_apart([one for one in self.stepped if len(one.names) > 1 and differ(one)])

    def number_elements(self, parameters: Iterable[Tensor]) -> None:
        """Number elements through all ``parameters`` of a model, as a ``FlatStepper`` does, whichever of them are this optimizer's.

        An element draws its random bits by its number: a run goes on with the same bits in another front end.
        """
        counted: dict[torch.dtype, int] = {}
        firsts: dict[Tensor, int] = {}
        for parameter in parameters:
            firsts[parameter] = counted.get(parameter.dtype, 0)
            counted[parameter.dtype] = firsts[parameter] + parameter.numel()
        self.number_at(firsts)

    def number_at(self, firsts: Mapping[Tensor, int]) -> None:
        """Let the elements of parameters have other global indices, from which they draw their random bits.

        Args:
            firsts: That of the first element of each.
        """
        self._firsts.update(firsts)
        for group in self._settled:
            group.waiting = [(p, self._firsts.get(p, first)) for p, first in group.waiting]
        for visiting in self.visiting:
            visiting.renumber(self._firsts)
        for one in self.stepped:
            if one.optimizer.draws_bits and all(p in self._firsts for p in one.of.parameters):
                one.of.renumber([place_in_whole(p, self._firsts[p]) for p in one.of.parameters])

    def described(self, number: int) -> str:
        """Say how the parameters of a group are stepped, and whether this is compiled, if that was left open."""
        group, own = self.groups[number], [one for one in self.stepped if one.group.number == number]
        visits = sum(one.group.number == number for one in self.visited())
        if not own and not visits:
            return "no parameter was stepped yet"
        together = [one for one in own if len(one.names) > 1]
        parts = [f"{sum(len(one.names) for one in own) + visits} parameters"]
        if together:
            parts.append(f"{sum(len(one.names) for one in together)} of them in {len(together)} vectors")
        if visits:
            parts.append(f"{visits} of them whole at owners")
        if frozen := len(self._settled[number].waiting):
            parts.append(f"{frozen} frozen")
        if own and group.compile == "auto":
            compiles = own[0].steps.compiles(own[0].of.segment.tensor.device)
            parts.append("compiled" if compiles else "uncompiled")
        return ", ".join(parts)

    def note_loading(self) -> None:
        """Let all weights count as changed: they, or their state, are replaced."""
        if self.watch is not None:
            self.watch.forget()

    # -- where they lie ------------------------------------------------------------------------------------------------------------

    def require_relocatable(self, parameters: Sequence[Tensor]) -> None:
        """Refuse parameters with another dtype, device or shape, or with unusable memory. No parameter is changed.

        Raises:
            RuntimeError: A parameter has another dtype, device or shape, memory that cannot be written to, or memory of another parameter
                and a residual of its own.
        """
        tied: set[int] | None = None
        for one in self.stepped:
            if one.of.in_place():
                continue
            tied = tied_by_memory(parameters) if tied is None else tied
            keeps_rest = len(one.of.segment.stored.params.parts()) > 1
            parts = [local(p) for p in one.of.parameters]
            for moved in one.of.places.moved(parts):
                parameter, here, (shape, dtype, device) = (
                    one.of.parameters[moved],
                    parts[moved],
                    one.of.places.kind(moved),
                )
                where = f"param group {one.group.number}: a parameter of shape {tuple(here.shape)}"
                if (here.dtype, here.device, here.shape) != (dtype, device, shape):
                    raise RuntimeError(
                        f"{where} is {here.dtype} on {here.device} now, but was {dtype} on {device} with shape {tuple(shape)} when the"
                        " optimizer first stepped. Change the model first; a state_dict carries the state of parameters of the same shapes"
                        " to a new optimizer."
                    )
                if has_repeated_elements(here):
                    raise RuntimeError(
                        f"{where} has strides {here.stride()} now: several of its elements are one place in memory (expand), which a step"
                        " cannot write; clone it."
                    )
                if id(parameter) in tied and self.watch is not None:
                    raise RuntimeError(f"{where}: {_unseen(len(tied))}")
                if id(parameter) in tied and keeps_rest:
                    raise RuntimeError(
                        f"{where} was given memory of another parameter since the optimizer first stepped, and what is kept for it was kept"
                        " for weights of its own. To tie two weights let them be one Parameter, before the first step."
                    )

    def relocate(self, param_groups: ParamGroups) -> None:
        """Step parameters where they lie now.

        Raises:
            RuntimeError: The parameter cannot be followed, as for :meth:`require_relocatable`.
        """
        if all(one.of.in_place() for one in self.stepped):
            return
        parameters = parameters_of(param_groups)
        self.require_relocatable(parameters)
        tied = tied_by_memory(parameters)
        self.come_apart([one for one in self.stepped if any(id(p) in tied for p in one.of.parameters)])
        for one in self.stepped:
            if one.of.in_place():
                continue
            (parameter, *_), segment = one.of.parameters, one.of.segment
            if isinstance(one.of, Single) and not segment.is_whole and not local(parameter).is_contiguous():
                one.of = Bucket.of(segment, parameter)
            one.of.relocate()


def shown(parameter: Tensor, entries: Iterable[tuple[Entry, Tensor]]) -> dict[str, Tensor]:
    """Return entries of a parameter's state by name, as views: in its shape where there is one number for each element.

    Those of a DTensor are sharded as it is. Counts are plain tensors on all ranks.
    """
    found: dict[str, Tensor] = {}
    shape = local(parameter).shape
    for entry, x in entries:
        if entry.cut == "copy":
            found[entry.name] = x.detach()  # of each parameter its own: other code may give it other memory by `.data`
        elif entry.cut == "element":
            found[entry.name] = like(parameter, x.view(shape))
        else:
            found[entry.name] = like(parameter, x, entry.shape(parameter.shape, x.shape))
    return found


def _unseen(count: int) -> str:
    return (
        f"watch: {count} parameters share memory with others, so that a step of one changes another unseen; accepted are parameters with"
        " memory of their own. Let tied weights be one Parameter."
    )


def _bits(number: Tensor) -> bytes:
    return bytes(local(number).detach().reshape(-1).view(torch.uint8).tolist())
