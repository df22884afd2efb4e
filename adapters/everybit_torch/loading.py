"""The one judge in front of everything that loads: a state dict is looked at as a whole, and refused before anything is changed.

What is judged: the structure, the hyperparameters (by making the transform that they describe), and for each parameter the entries that
this transform keeps under the policy, with their dtypes, shapes, layouts and devices, and counts of steps. Everything that is kept is
copied here, so that what may fail to be copied fails here, and two optimizers never share a tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

import everybit as eb
from everybit.dtypes import torch_dtype
from everybit.entries import STEP, WEIGHTS, former_names
from everybit.policy import resolve_tree
from everybit.scalars import at
from everybit_torch.arguments import as_python
from everybit_torch.choosing import applied
from everybit_torch.dtensors import is_dtensor, local
from everybit_torch.entries import KEPT, is_own_name
from everybit_torch.memory import has_memory
from everybit_torch.migration import shadow_state, skeleton
from everybit_torch.placement import Placement
from everybit_torch.saved_structure import Saved, copied, names, read, shown
from everybit_torch.stepping import Group
from everybit_torch.units import Member, Unit

__all__ = [
    "LARGEST_COUNT",
    "Kind",
    "Loaded",
    "Loads",
    "Saved",
    "Settings",
    "as_count",
    "copied",
    "expectations",
    "judge",
    "judge_settings",
    "names",
    "read",
    "require_tensor",
    "shown",
]

LARGEST_COUNT = 2**53
"""Counts of steps are below it. Corrections such as ``1 - beta ** step`` are computed in float64, which holds every whole number up to here
and not every one beyond; at a million steps a second it takes 285 years to come to it."""

_FROM_ELSEWHERE = (
    "The checkpoint was made under another policy or for another model; nothing is cast, because that would lose bits."
    " full_state_dict() and load_full_state_dict() carry a run from one policy to another."
)
_TORCHS = frozenset({"exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg"})


@dataclass(frozen=True, slots=True)
class Kind:
    """The requirements on an entry of a state dict.

    Attributes:
        dtype: Exactly.
        shape: Of the whole tensor, if it is sharded.
        count: Whether it is a count of steps.
        positive: Whether it holds running squares, none of which is negative.
        former: What state dicts of version 1 called it, if it was something else.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    count: bool = False
    positive: bool = False
    former: str | None = None

    def __str__(self) -> str:
        return "a count of steps" if self.count else f"{self.dtype} of shape {self.shape}"


@dataclass(slots=True)
class Settings:
    """The new settings of the param groups.

    Attributes:
        groups: For each, the entries to put into its dict.
        arguments: For each, the factory's arguments.
        optimizers: For each, by dtype.
    """

    groups: list[dict[Any, Any]] = field(default_factory=list)
    arguments: list[dict[str, Any]] = field(default_factory=list)
    optimizers: list[dict[torch.dtype, eb.Optimizer[Any]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A state dict that fits.

    Attributes:
        settings: Of the param groups.
        placement: Of the parameters that get state by it.
        own: By id of the parameter, what the optimizer keeps for it; parameters without are as before their first step.
        kept: By id of the parameter, what others keep for it.
        elsewhere: What others keep under keys that are no parameters.
    """

    settings: Settings
    placement: Placement | None
    own: dict[int, dict[str, Tensor]]
    kept: dict[int, dict[Any, Any]]
    elsewhere: dict[Hashable, Any]


# -- hyperparameters ----------------------------------------------------------------------------------------------------------


class Loads(Protocol):
    """The interface of an optimizer whose state dicts are judged: its present state, and its state under other hyperparameters."""

    param_groups: list[dict[str, Any]]
    _groups: list[Group]
    _units: list[Unit]
    _names: dict[str, tuple[str, ...]]

    def factory_arguments(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The factory's keyword arguments for a param group."""
        ...

    def _parameters(self) -> list[Tensor]: ...

    def _is_sharded(self) -> bool: ...

    def _build(self, group: Group, arguments: dict[str, Any]) -> dict[torch.dtype, eb.Optimizer[Any]]: ...

    def _require_cuts(self, optimizers: Sequence[dict[torch.dtype, eb.Optimizer[Any]]]) -> None: ...

    def _require_followable(self) -> None: ...

    def _plan(
        self, wanted: frozenset[int], optimizers: Sequence[dict[torch.dtype, eb.Optimizer[Any]]] | None = None
    ) -> Placement | None: ...


def judge_settings(optimizer: Loads, saved: Saved) -> Settings:
    """The param groups as they will be, and their optimizers; what is missing is as it is now.

    Raises:
        TypeError: A hyperparameter of another kind.
        ValueError: A hyperparameter out of range, or that the policy refuses; the message names group and hyperparameter.
    """
    settings = Settings()
    for index, (group, given) in enumerate(zip(optimizer.param_groups, saved.groups, strict=True)):
        where = f"state_dict['param_groups'][{index}]"
        new = {
            key: copied(value, f"{where}[{shown(key)}]")
            for key, value in given.items()
            if key not in ("params", "policy")
        }
        named = new.get("param_names", [])
        if not isinstance(named, list) or (named and len(named) != len(group["params"])):
            raise ValueError(
                f"{where}['param_names']: got {shown(named)}; accepted is a list of {len(group['params'])} names."
            )
        own = optimizer._groups[index]
        for name in optimizer._names:
            if name in new:
                _require_same_kind(f"{where}[{name!r}]", new[name], group[name])
        try:
            new |= {name: as_python(name, new[name]) for name in optimizer._names if name in new}
            merged = {**group, **new}
            # A tensor's value is judged here as a number's is: loading may wait for a device, as a step may not.
            numbers = {name: _as_number(merged[name], name) for name in optimizer._names}
            optimizer._build(own, optimizer.factory_arguments({**merged, **numbers}))
            arguments = optimizer.factory_arguments(merged)
            optimizers = optimizer._build(own, arguments)
        except Exception as error:
            kind = type(error) if type(error) in (TypeError, ValueError) else ValueError
            raise kind(f"{where}: {error}") from None
        settings.groups.append(new)
        settings.arguments.append(arguments)
        settings.optimizers.append(optimizers)
    optimizer._require_cuts(settings.optimizers)
    return settings


def _require_same_kind(where: str, value: Any, now: Any) -> None:
    """Refuse a container for a number, a number for a pair: what makes transforms looks at values, and would show all of them."""
    if isinstance(now, (tuple, list)):
        fits = isinstance(value, (tuple, list)) and len(value) == len(now) and not any(map(_is_container, value))
        accepted = f"{len(now)} numbers"
    else:
        fits = not _is_container(value) or _is_container(now)
        accepted = "a number, or what the optimizer has there"
    if not fits:
        raise ValueError(f"{where}: got {shown(value)}; accepted is {accepted}.")


def _is_container(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple, set, frozenset, bytes))


def _as_number(value: Any, name: str) -> Any:
    """A hyperparameter, or a pair of them, with numbers in the place of tensors.

    Raises:
        TypeError: A schedule that gives no number.
    """
    if isinstance(value, (tuple, list)):
        return type(value)(_number(one, name) for one in value)
    return _number(value, name)


def _number(value: Any, name: str) -> Any:
    at(value, torch.ones((), dtype=torch.int64), name=name)
    plain = isinstance(value, Tensor) and value.ndim == 0 and value.dtype in (torch.float32, torch.float64)
    return float(value) if plain else value


# -- what is expected ---------------------------------------------------------------------------------------------------------


def expectations(
    optimizer: Loads, settings: Settings, placement: Placement | None, *, full: bool
) -> dict[int, dict[str, Kind]]:
    """Return, by id of the parameter, the entries of every parameter that has a unit or gets one.

    Args:
        optimizer: As it is.
        settings: As its param groups will be.
        placement: Of parameters that have no unit yet.
        full: In full precision: what the stored numbers stand for, and the weights.
    """
    sharded = optimizer._is_sharded()
    units = []
    for unit in optimizer._units:
        dtype = unit.tensors[0].dtype
        old = optimizer._groups[unit.group].optimizer_of(unit)
        new = applied(settings.optimizers[unit.group][dtype], unit.decision)
        same = skeleton(old.transform) == skeleton(new.transform)
        state = unit.state if same else shadow_state(unit.tensors, new, unit.first)
        one = Unit(unit.group, unit.tensors, unit.members, state, unit.first, unit.flat, stored=unit.stored)
        units.append((one, new))
    for run in placement.runs if placement is not None else []:
        tensors = run.shadow(sharded=sharded)
        state = run.optimizer.init(tensors, eb.Context(first_element=run.first))
        stored = run.optimizer.formats(tensors)
        one = Unit(run.group.number, tensors, run.members(), state, run.first, run.flat, stored=stored)
        units.append((one, run.optimizer))
    return {
        id(member.parameter): _kinds(unit, member, new, full=full) for unit, new in units for member in unit.members
    }


def _kinds(unit: Unit, member: Member, optimizer: eb.Optimizer[Any], *, full: bool) -> dict[str, Kind]:
    resolved = resolve_tree(optimizer.policy, unit.tensors)[member.position]
    wide = torch_dtype(resolved.policy.compute)
    kinds: dict[str, Kind] = {}
    found = unit.entries(member)
    former = {new: old for old, new in former_names([entry for entry, _ in found]).items()}
    for entry, value in found:
        whole = is_dtensor(member.parameter) and entry.cut == "element"
        shape = tuple(member.parameter.shape if whole else value.shape)
        # Of several parts the first is the number, rounded; codes of it may be anything.
        positive = entry.field.split("#")[0] == "variance" and entry.leading
        if entry.role == "shared":
            kinds[entry.name] = Kind(value.dtype, shape, count=value.dtype is torch.int64 and not shape)
        elif not full:
            kinds[entry.name] = Kind(
                value.dtype,
                shape,
                positive=positive and value.is_floating_point(),
                former=former.get(entry.name),
            )
        elif entry.role == "slot" and entry.leading:
            own = value.shape if entry.cut == "tensor" else member.parameter.shape
            kinds[entry.name] = Kind(wide, tuple(own), positive=positive)
    if full:
        kinds[WEIGHTS] = Kind(wide, tuple(member.parameter.shape))
    return kinds


# -- entries ------------------------------------------------------------------------------------------------------------------


def judge(
    optimizer: Loads, saved: Saved, settings: Settings, *, full: bool = False, from_torch: bool = False
) -> Loaded:
    """Judge everything that is saved.

    Args:
        optimizer: Whose state dict it should be.
        saved: Its structure, which is right.
        settings: Of its param groups.
        full: Whether it is in full precision.
        from_torch: Whether it was one of ``torch.optim``, which has one count of steps for each parameter.

    Raises:
        TypeError: Something of another kind than it has to be.
        ValueError: Something else that does not fit. Messages name the place; nothing is changed.
    """
    parameters = optimizer._parameters()
    # A parameter that others keep something for, and that was never stepped, has no entries of the optimizer's.
    wanted = frozenset(id(parameters[p]) for p, given in saved.entries.items() if any(map(is_own_name, given)))
    placement = optimizer._plan(wanted, settings.optimizers)
    optimizer._require_followable()
    expected = expectations(optimizer, settings, placement, full=full)
    own: dict[int, dict[str, Tensor]] = {}
    kept: dict[int, dict[Any, Any]] = {}
    for position, given in saved.entries.items():
        parameter = parameters[position]
        kinds = expected.get(id(parameter), {})
        given = _renamed(given, kinds)
        if from_torch and STEP in given:
            given = {name: given[STEP] for name, kind in kinds.items() if kind.count} | dict(given)
        mine = {name for name in given if name in kinds}
        if mine or any(map(is_own_name, given)):
            _require_names(position, given, kinds, full=full)
            own[id(parameter)] = {
                name: _require(f"state_dict: parameter {position}, {name!r}", given[name], kind, parameter, full=full)
                for name, kind in kinds.items()
                if name in given
            }
        elif _TORCHS & {name for name in given if isinstance(name, str)}:
            _require_names(position, given, kinds, full=full)
        where = f"state_dict['state'][{shown(saved.numbers[position])}]"
        kept[id(parameter)] = {
            name.removeprefix(KEPT) if isinstance(name, str) else name: copied(
                value, f"{where}[{shown(name)}]", local(parameter).device
            )
            for name, value in given.items()
            if name not in mine
        }
    elsewhere: dict[Hashable, Any] = {}
    for key, value in saved.elsewhere.items():
        if isinstance(value, Mapping) and (strays := [name for name in value if is_own_name(name)]):
            raise ValueError(
                f"state_dict['state'][{shown(key)}]: has {names(strays)}, which is the state of a parameter, and no param group has"
                " a parameter of that number."
            )
        elsewhere[key] = copied(value, f"state_dict['state'][{shown(key)}]")
    return Loaded(settings, placement, own, kept, elsewhere)


def _renamed(given: Mapping[Any, Any], kinds: Mapping[str, Kind]) -> Mapping[Any, Any]:
    """Entries by their present names, of a state dict in which parts of a value go by their numbers."""
    former = {kind.former: name for name, kind in kinds.items() if kind.former is not None and name not in given}
    return {former.get(name, name) if isinstance(name, str) else name: value for name, value in given.items()}


def _require_names(position: int, given: Mapping[Any, Any], kinds: Mapping[str, Kind], *, full: bool) -> None:
    needed = {name for name in kinds if not (full and name == WEIGHTS)}
    strange = [name for name in given if name not in kinds and is_own_name(name)]
    if needed <= set(given) and not strange:
        return
    accepted = "in full precision" if full else "under this policy"
    told = ""
    if _TORCHS & {name for name in given if isinstance(name, str)}:
        told = " This is a checkpoint of torch.optim: load_torch_state_dict() takes it."
    raise ValueError(
        f"state_dict: parameter {position} has state {names(given)}; accepted {accepted} is {names(needed)}.{told}"
    )


def _require(where: str, value: Any, kind: Kind, parameter: Tensor, *, full: bool) -> Tensor:
    """The value of an entry, as a tensor that may be copied into the optimizer's."""
    if kind.count:
        return torch.tensor(as_count(where, value), dtype=torch.int64)
    why = "It was made by another optimizer or for another model." if full else _FROM_ELSEWHERE
    require_tensor(where, value, kind.dtype, kind.shape, parameter, accepted=f"{kind}. {why}")
    checked: Tensor = value
    if kind.positive and bool((local(checked) < 0).any()):
        raise ValueError(
            f"{where}: holds negative numbers; accepted are running means of squares, which are not negative."
        )
    return checked


def require_tensor(
    where: str,
    value: Any,
    dtype: torch.dtype | Sequence[torch.dtype],
    shape: tuple[int, ...],
    parameter: Tensor,
    *,
    accepted: str,
) -> None:
    """Refuse what cannot be copied into a tensor like ``parameter``, bit for bit.

    Args:
        where: The place, for messages.
        value: Anything.
        dtype: Those that are accepted.
        shape: Of the whole.
        parameter: Which tells how it is sharded, if it is.
        accepted: For messages: what would be.

    Raises:
        ValueError: It is something else.
    """
    dtypes = [dtype] if isinstance(dtype, torch.dtype) else dtype
    fits = (
        isinstance(value, Tensor)
        and not value.is_nested
        and value.layout is torch.strided
        and value.device.type != "meta"
        and any(value.dtype is one for one in dtypes)
        and tuple(value.shape) == shape
        and has_memory(local(value))
    )
    if not fits:
        raise ValueError(f"{where}: got {shown(value)}; accepted is {accepted}")
    if not is_dtensor(parameter):
        if is_dtensor(value):
            raise ValueError(f"{where}: got a DTensor for a parameter that is not sharded; accepted is a whole tensor.")
    elif value.ndim and not is_dtensor(value):
        raise ValueError(
            f"{where}: got a whole tensor for a sharded parameter; accepted are DTensors, as"
            " torch.distributed.checkpoint.state_dict.set_optimizer_state_dict makes of a whole state dict."
        )
    elif is_dtensor(value) and (
        value.placements != parameter.placements or local(value).shape != local(parameter).shape
    ):
        raise ValueError(
            f"{where}: got a DTensor placed as {value.placements}; accepted is {parameter.placements}, as its parameter is."
        )


def as_count(where: str, value: Any) -> int:
    """A count of steps: a whole number, as a number or in a tensor of one.

    Raises:
        ValueError: It is none, or out of range.
    """
    number: Any = value
    if isinstance(value, Tensor) and not value.is_nested and value.layout is torch.strided:
        single = (
            value.numel() == 1 and value.device.type != "meta" and not value.is_complex() and has_memory(local(value))
        )
        number = local(value).item() if single and value.dtype is not torch.bool else None
    elif not isinstance(value, Tensor) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        number = value.item()
    # Comparisons first: what is not in the range may be too large to be converted.
    within = isinstance(number, (int, float)) and not isinstance(number, bool) and 0 <= number < LARGEST_COUNT
    if not within or number != int(number):
        raise ValueError(
            f"{where}: got {shown(value if number is None or number is value else number)}; accepted is a count of steps, a whole number in"
            f" [0, 2**53)."
        )
    return int(number)
