"""The one loader of state dicts: each is judged as a whole, refused before anything is changed, and then carried out.

It judges the structure, the hyperparameters (by making the transform that they describe), and for each parameter the entries that
this transform keeps under the policy, with their dtypes, shapes, layouts and devices, and counts of steps. Everything that is kept is
copied here, so that what may fail to be copied fails here, and two optimizers never share a tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from everybit.base import at
from everybit.stepping.entries import STEP, WEIGHTS, field_of
from everybit_torch import notices
from everybit_torch.arguments import as_python, differ
from everybit_torch.optim.common_numbers import spread
from everybit_torch.optim.following import require_same_decisions, require_same_view, start_with
from everybit_torch.optim.groups import Optimizers, require_alike
from everybit_torch.optim.interfaces import Front
from everybit_torch.optim.planned import StatePlan, parameters_of
from everybit_torch.optim.state_dicts import full_precision
from everybit_torch.optim.state_dicts.full_precision import LoadReport
from everybit_torch.optim.state_dicts.saved_structure import FROZEN_REMAINDERS, NOT_SAVED, Saved, copied, names, shown
from everybit_torch.optim.state_dicts.state_schema import EntryKind, expectations, require_entry
from everybit_torch.optim.states import KEPT, is_own_name, keeps_frozen_remainder
from everybit_torch.torch_internals.dtensors import local

_TORCHS = frozenset({"exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg"})


@dataclass(slots=True)
class Settings:
    """The new settings of the param groups.

    Attributes:
        groups: The entries to put into each group's dict.
        arguments: The factory's arguments for each group.
        optimizers: The optimizers by dtype for each group.
    """

    groups: list[dict[Any, Any]] = field(default_factory=list)
    arguments: list[dict[str, Any]] = field(default_factory=list)
    optimizers: list[Optimizers] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A state dict that fits.

    Attributes:
        settings: The new settings of the param groups.
        plan: The plan of the parameters that get state by it.
        own: The optimizer's entries by id of the parameter; without entries it is as before its first step.
        kept: The entries of other code by id of the parameter.
        elsewhere: Entries of other code under keys that are no parameters.
        missing: Names of parameters that were left out, because the state dict does not have them.
        unexpected: Names that were left out, because the optimizer does not have them.
        lacking: Names of parameters that had a part of their weights in their state, which the state dict does not have.
    """

    settings: Settings
    plan: StatePlan | None
    own: dict[int, dict[str, Tensor]]
    kept: dict[int, dict[Any, Any]]
    elsewhere: dict[Hashable, Any]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()


# -- hyperparameters ----------------------------------------------------------------------------------------------------------


def judge_settings(front: Front, saved: Saved) -> Settings:
    """The future param groups and their optimizers; missing values stay as they are.

    Raises:
        TypeError: A hyperparameter of another kind.
        ValueError: A hyperparameter out of range, or that the policy refuses; the message names group and hyperparameter.
    """
    settings = Settings()
    known: dict[int, Any] = {}
    for index, (group, given) in enumerate(zip(front.own_groups, saved.groups, strict=True)):
        where = f"state_dict['param_groups'][{index}]"
        new = {
            key: copied(value, f"{where}[{shown(key)}]", known=known)
            for key, value in given.items()
            if key not in ("params", "policy", FROZEN_REMAINDERS)
            and not (isinstance(value, str) and value.startswith(NOT_SAVED))
        }
        named = new.get("param_names", [])
        if not isinstance(named, list) or (named and len(named) != len(group["params"])):
            raise ValueError(
                f"{where}['param_names']: got {shown(named)}; accepted is a list of {len(group['params'])} names."
            )
        own = front.own.groups[index]
        for name in own.names:
            if name in new:
                _require_same_kind(f"{where}[{name!r}]", new[name], group[name])
        try:
            new |= {name: as_python(name, new[name]) for name in own.names if name in new}
            merged = {**group, **new}
            # A tensor's value is judged here as a number's is: loading may wait for a device, as a step may not.
            numbers = {
                name: merged[name]
                if _is_unchanged_function(merged[name], group[name])
                else _as_number(merged[name], name)
                for name in own.names
            }
            own.build(front.factory_arguments({**merged, **numbers}))
            arguments = front.factory_arguments(merged)
            optimizers = own.build(arguments)
        except Exception as error:
            kind = type(error) if type(error) in (TypeError, ValueError) else ValueError
            raise kind(f"{where}: {error}") from None
        settings.groups.append(new)
        settings.arguments.append(arguments)
        settings.optimizers.append(optimizers)
    require_alike(zip(front.own.groups, settings.optimizers, strict=True))
    for stepped, new_optimizers, values in zip(front.own.groups, settings.optimizers, front.own_groups, strict=True):
        require_same_decisions(front.own, stepped, new_optimizers, values)
        require_same_view(front.own, stepped, new_optimizers)
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


def _is_unchanged_function(value: Any, now: Any) -> bool:
    """Whether a function is the present function. It need be no schedule: it may label parameters, or make another optimizer."""
    return callable(value) and not differ(value, now)


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


# -- entries ------------------------------------------------------------------------------------------------------------------


def judge(front: Front, saved: Saved, settings: Settings, *, full: bool = False, from_torch: bool = False) -> Loaded:
    """Judge everything that is saved.

    Args:
        front: The optimizer that loads.
        saved: Its structure, which is right.
        settings: The future settings of its param groups.
        full: Whether it is in full precision.
        from_torch: Whether it is a state dict of ``torch.optim``, with a count of steps for each parameter.

    Raises:
        TypeError: Something of another kind than it has to be.
        ValueError: Anything else that does not fit. Messages name the place; the optimizer is unchanged.
    """
    parameters = parameters_of(front.own_groups)
    # A parameter that others keep something for, and that was never stepped, has no entries of the optimizer's.
    wanted = frozenset(id(parameters[p]) for p, given in saved.entries.items() if any(map(is_own_name, given)))
    plan = front.own.plan(front.own_groups, wanted, settings.optimizers)
    front.own.require_relocatable(parameters)
    expected = expectations(front.own, settings.optimizers, plan, full=full)
    torchs = front.torch_names.kept if front.torch_names is not None else frozenset()
    own: dict[int, dict[str, Tensor]] = {}
    kept: dict[int, dict[Any, Any]] = {}
    for position, given in saved.entries.items():
        parameter = parameters[position]
        kinds = expected.get(id(parameter), {})
        if from_torch and STEP in given:
            given = {name: given[STEP] for name, kind in kinds.items() if kind.count} | dict(given)
        if from_torch:
            # torch has no paths: what parameters share here goes by the name of its field alone.
            paths = {field_of(name): name for name in kinds if field_of(name) and not kinds[name].count}
            given = {paths.get(name, name): value for name, value in given.items()}
        mine = {name for name in given if name in kinds}
        if mine or any(map(is_own_name, given)):
            _require_names(position, given, kinds, torchs, full=full)
            own[id(parameter)] = {
                name: require_entry(
                    f"state_dict: parameter {position}, {name!r}", given[name], kind, parameter, full=full
                )
                for name, kind in kinds.items()
                if name in given
            }
        elif _TORCHS & {name for name in given if isinstance(name, str)}:
            _require_names(position, given, kinds, torchs, full=full)
        where = f"state_dict['state'][{shown(saved.numbers[position])}]"
        kept[id(parameter)] = {
            _shown_as(name, kinds): copied(value, f"{where}[{shown(name)}]", local(parameter).device)
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
    missing = tuple(saved.missing.values())
    return Loaded(settings, plan, own, kept, elsewhere, missing, saved.unexpected, _lacking(front, saved, own))


def _shown_as(name: Any, own: Iterable[str]) -> Any:
    """The name of an entry of other code in ``state``: without the prefix, unless an entry of the optimizer has that name."""
    plain = name.removeprefix(KEPT) if isinstance(name, str) else name
    return name if plain in own else plain


def _lacking(front: Front, saved: Saved, own: Mapping[int, object]) -> tuple[str, ...]:
    """Name the parameters whose weights the state dict has in part only: their remainder was in state that was left out."""
    if not own:
        return ()  # a state dict without state begins anew
    lacking = []
    for values, given in zip(front.own_groups, saved.groups, strict=True):
        listed = given.get(FROZEN_REMAINDERS, ())
        names_of = values.get("param_names") or [f"parameter {place}" for place in range(len(values["params"]))]
        for place, (name, parameter) in enumerate(zip(names_of, values["params"], strict=True)):
            had = place in listed or keeps_frozen_remainder(front.own.states, parameter)
            if had and id(parameter) not in own:
                lacking.append(str(name))
    return tuple(lacking)


def _require_names(
    position: int, given: Mapping[Any, Any], kinds: Mapping[str, EntryKind], torchs: frozenset[str], *, full: bool
) -> None:
    needed = {name for name in kinds if not (full and name == WEIGHTS)}
    strange = [name for name in given if name not in kinds and is_own_name(name)]
    if needed <= set(given) and not strange:
        return
    accepted = "in full precision" if full else "under this policy"
    told = ""
    if (torchs - kinds.keys()) & given.keys():
        told = " This is a checkpoint of torch.optim: load_torch_state_dict() takes it."
    raise ValueError(
        f"state_dict: parameter {position} has state {names(given)}; accepted {accepted} is {names(needed)}.{told}"
    )


# -- carrying it out -----------------------------------------------------------------------------------------------------------


def restore(front: Front, loaded: Loaded) -> LoadReport:
    """Take over a state dict, as stored."""
    _take_settings(front, loaded)
    if loaded.lacking:
        notices.warn_of_lacking_remainders(loaded.lacking)
    full_precision.load_all(front.own, loaded.own)
    _spread(front, loaded)
    return LoadReport({}, loaded.missing, loaded.unexpected)


def restore_in_full(front: Front, loaded: Loaded) -> LoadReport:
    """Take over a state dict in full precision."""
    _take_settings(front, loaded)
    losses = full_precision.encode_all(front.own, loaded.own)
    _spread(front, loaded)
    return LoadReport(losses, loaded.missing, loaded.unexpected)


def _spread(front: Front, loaded: Loaded) -> None:
    """Give parameters without loaded state the numbers that they share with the others."""
    spread(front.own.stepped, [one for one in front.own.stepped if id(one.of.parameters[0]) in loaded.own])


def _take_settings(front: Front, loaded: Loaded) -> None:
    """Take over hyperparameters and entries of other code, and give state to parameters without state."""
    settings, parameters = loaded.settings, parameters_of(front.own_groups)
    for values, new in zip(front.own_groups, settings.groups, strict=True):
        values.update(new)
    start_with(front.own, settings.arguments, settings.optimizers)
    if loaded.plan is not None:
        front.own.carry_out(loaded.plan)
    front.own.relocate(front.own_groups)
    states = front.own.states
    for key in [key for key in states if not isinstance(key, Tensor)]:
        del states[key]
    states.update(loaded.elsewhere)
    for parameter in parameters:
        kept = loaded.kept.get(id(parameter), {})
        if kept or parameter in states:
            states[parameter].keep(kept)
    # The first step after this that finds no gradient is told of, as if a step had gone before it.
    front.had_gradients = front.had_gradients or bool(loaded.own)
