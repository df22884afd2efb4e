"""Hyperparameters in a sharded checkpoint: a float64 tensor for each label and name, and the label of each parameter.

=============================  ======================================================================================================
``hyperparameters.<label>/lr``  the values of a hyperparameter of the label's transform
``options.<label>/initial_lr``  the values of another number in the param group, which somebody else keeps there: torch's schedulers
``groups.<label>``              for each parameter that is trained, in the order of the names, whether it is of this label: uint8
=============================  ======================================================================================================

A param group takes over the values saved under its label. Where there is no such label, because the run that loads calls or divides its
parameters otherwise, it takes over the values saved for its parameters, if these are the same for all of them. A value that is left out
is reported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote, unquote

import torch
from torch import Tensor

from everybit_torch.checkpoint.inventory import Inventory
from everybit_torch.optim import Group, TorchOptimizer
from everybit_torch.sharded.numbers_inside import RESERVED, hyperparameters

HYPERPARAMETERS, OPTIONS, GROUPS = "hyperparameters.", "options.", "groups."

KEEP = "hyperparameters=False keeps those that are here."

_MOST = 64
"""The largest number of values of one hyperparameter."""

Values = tuple[float, ...]


class LabelledOptimizer(Protocol):
    """An optimizer with a param group for each label.

    Attributes:
        param_groups: As ``torch.optim``'s.
        fields: The hyperparameters in the param group of each label, and the fields of its transform that they set.
    """

    param_groups: list[dict[str, Any]]
    fields: dict[str, dict[str, tuple[str, ...]]]

    def require_hyperparameters(self, number: int, group: Mapping[str, Any]) -> None:
        """Refuse values of a param group that cannot work, by a TypeError or ValueError; the present values stay."""
        ...

    def factory_arguments(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a label's transform, from its param group."""
        ...


class _SavedValues(NamedTuple):
    """The values that a checkpoint has for one label."""

    own: dict[str, Values]
    options: dict[str, Values]


def tensors(optimizer: LabelledOptimizer, labels: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the hyperparameters as the tensors that are saved.

    Args:
        optimizer: The optimizer of the stepper.
        labels: The label of each parameter that is trained, on any rank, by name.
    """
    found: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        label = group["label"]
        own = optimizer.fields[label]
        for name, value in group.items():
            values = _values(value)
            if isinstance(name, str) and name not in RESERVED and values:
                key = f"{HYPERPARAMETERS if name in own else OPTIONS}{label}/{quote(name, safe='')}"
                found[key] = torch.tensor(values, dtype=torch.float64)
        members = [labels[name] == label for name in sorted(labels)]
        found[f"{GROUPS}{label}"] = torch.tensor(members, dtype=torch.uint8)
    return found


def _values(value: object) -> Values:
    """A hyperparameter's values; empty if it is neither a number nor a tuple of numbers."""
    several: list[Any] = list(value) if isinstance(value, (tuple, list)) else [value]
    good = all(
        (isinstance(one, (int, float)) and not isinstance(one, bool)) or (isinstance(one, Tensor) and one.ndim == 0)
        for one in several
    )
    return tuple(float(one) for one in several) if good else ()


def empty(found: Inventory, labels: Mapping[str, str] | None) -> dict[str, Tensor]:
    """Allocate tensors for the hyperparameters in a checkpoint, to load into.

    Args:
        found: What the checkpoint has.
        labels: The labels as for :func:`tensors`; None: of an optimizer without labels.

    Raises:
        ValueError: Something of these names that is not of this kind.
    """
    into: dict[str, Tensor] = {}
    for key, saved in found.tensors.items():
        if key.startswith(GROUPS):
            fits = saved.dtype is torch.uint8 and len(saved.shape) == 1
            accepted = "a uint8 for each parameter that is trained"
            if labels is not None:
                fits = fits and saved.shape == (len(labels),)
                accepted = f"a uint8 for each of {len(labels)} parameters that are trained"
        elif key.startswith((HYPERPARAMETERS, OPTIONS)):
            fits = saved.dtype is torch.float64 and len(saved.shape) == 1 and 1 <= saved.shape[0] <= _MOST
            fits = fits and "/" in key
            accepted = f"at most {_MOST} numbers of float64, by label and name"
        else:
            continue
        if not fits:
            raise ValueError(
                f"{found.folder}: {key!r} is {saved.dtype} of shape {saved.shape}; accepted is {accepted}."
            )
        into[key] = torch.empty(saved.shape, dtype=saved.dtype)
    return into


def restored(
    optimizer: LabelledOptimizer, loaded: Mapping[str, Tensor], labels: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return for each param group the values to put into it.

    Args:
        optimizer: The optimizer of the stepper.
        loaded: What :func:`empty` made, with its values.
        labels: The labels as for :func:`tensors`.

    Raises:
        ValueError: A hyperparameter that is missing, that the transform here has not, or that it refuses; or parameters of one group here
            with different values there. The message names them.
    """
    names, there = sorted(labels), _by_label(loaded)
    problems: list[str] = []
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        members = [number for number, name in enumerate(names) if labels[name] == group["label"]]
        try:
            saved = _of_group(group["label"], members, names, there, loaded, set(labels.values()))
            groups.append(_entries(group, saved, optimizer.fields[group["label"]]))
        except ValueError as error:
            problems.append(f"param group {group['label']!r}: {error}")
    if not problems:
        for number, (group, new) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            if all(name in group and value == group[name] for name, value in new.items()):
                continue  # it steps with these already
            try:
                optimizer.require_hyperparameters(number, {**group, **new})
            except (TypeError, ValueError) as error:
                problems.append(str(error))
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            f"the checkpoint's hyperparameters do not fit: {'; '.join(problems[:5]).removesuffix('.')}{more}. Nothing was changed; {KEEP}"
        )
    return groups


class Unlabelled(NamedTuple):
    """What a checkpoint has for the param groups of an optimizer without labels.

    Attributes:
        groups: The values to put into each param group.
        left: What its factory sets by itself, to another value than there, in words.
    """

    groups: list[dict[str, Any]]
    left: list[str]


def restored_without_labels(
    optimizer: TorchOptimizer, loaded: Mapping[str, Tensor], names: Mapping[int, str], trained: Collection[str]
) -> Unlabelled:
    """Return the values for the param groups of a plain or FSDP2 model's optimizer: those that were saved for their parameters.

    Args:
        optimizer: The optimizer.
        loaded: What :func:`empty` made, with its values.
        names: The name of each parameter, by id.
        trained: The names of the parameters that the checkpoint has state of.

    Raises:
        ValueError: A value is refused. The message names it.
    """
    there, found, order = _by_label(loaded), Unlabelled([], []), {name: n for n, name in enumerate(sorted(trained))}
    masks = {label: loaded[f"{GROUPS}{label}"].tolist() for label in there if f"{GROUPS}{label}" in loaded}
    for group, own in zip(optimizer.param_groups, optimizer.own.groups, strict=True):
        where, several = f"param group {own.number}", list(there.values())
        if len(there) > 1 and all(len(mask) == len(order) for mask in masks.values()):
            members = [order[names[id(p)]] for p in group["params"] if names[id(p)] in order]
            several = [there[label] for label, mask in masks.items() if any(mask[number] for number in members)]
        values = [one.own | one.options for one in several]
        in_all = [name for name in (values[0] if values else ()) if all(name in one for one in values)]
        here = _of_transform(own)
        kept = {name for one in several for name in one.own if name not in own.names}
        new: dict[str, Any] = {}
        for name in in_all:
            saved = list(dict.fromkeys(one[name] for one in values))
            if name in kept or (name in own.names and len(saved) > 1):
                mine = _values(group[name]) if name in own.names else here.get(name, saved[0])
                if saved != [mine]:
                    found.left.append(f"{where}: {name} is {' and '.join(map(str, saved))} there, and {mine} here")
            elif len(saved) == 1:
                new[name] = _like(group.get(name), saved[0])
                if new[name] is None:
                    raise ValueError(
                        f"{where}: {name} is {saved[0]} there, and {group[name]!r} here. Nothing was changed; {KEEP}"
                    )
        try:
            own.build(optimizer.factory_arguments({**group, **new}))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {str(error).removesuffix('.')}. Nothing was changed; {KEEP}") from None
        found.groups.append(new)
    return found


def _of_transform(group: Group) -> dict[str, Values]:
    """The numbers that a group's transform has now, by name."""
    optimizer = next(iter(group.optimizers.values()), None)
    return {} if optimizer is None else {k: _values(x) for k, x in hyperparameters(optimizer.transform).items()}


def _by_label(loaded: Mapping[str, Tensor]) -> dict[str, _SavedValues]:
    there: dict[str, _SavedValues] = {}
    for key, values in loaded.items():
        if key.startswith(GROUPS):
            there.setdefault(key.removeprefix(GROUPS), _SavedValues({}, {}))
            continue
        kind = HYPERPARAMETERS if key.startswith(HYPERPARAMETERS) else OPTIONS
        label, _, name = key.removeprefix(kind).rpartition("/")
        saved = there.setdefault(label, _SavedValues({}, {}))
        (saved.own if kind is HYPERPARAMETERS else saved.options)[unquote(name)] = tuple(values.tolist())
    return there


def _of_group(
    label: str,
    members: list[int],
    names: list[str],
    there: Mapping[str, _SavedValues],
    loaded: Mapping[str, Tensor],
    here: Collection[str],
) -> _SavedValues:
    """Return the values that were saved under a group's label, or for its parameters; ``here`` are all labels of this run."""
    masks = {one: loaded[f"{GROUPS}{one}"].tolist() for one in there if f"{GROUPS}{one}" in loaded}
    if label in there:
        for number in members:
            # A label that is none here may have had other values.
            of = next((one for one, mask in masks.items() if mask[number] == 1 and one not in here), None)
            if of is not None and not _same(there[of], there[label]):
                raise ValueError(
                    f"{names[number]} was of {of!r} there, which is no label here, with other hyperparameters ({_shown(there[of])};"
                    f" {_shown(there[label])})"
                )
        return there[label]
    first: tuple[str, _SavedValues] | None = None
    for number in members:
        of = next((one for one, mask in masks.items() if mask[number] == 1), None)
        if of is None:
            raise ValueError(f"there is no such label there, and it is not said of which {names[number]} was")
        if first is None:
            first = names[number], there[of]
        elif not _same(first[1], there[of]):
            raise ValueError(
                f"there is no such label there, and {first[0]} and {names[number]} had different hyperparameters"
                f" ({_shown(first[1])}; {_shown(there[of])})"
            )
    return _SavedValues({}, {}) if first is None else first[1]


def _entries(group: Mapping[str, Any], saved: _SavedValues, own: Mapping[str, Any]) -> dict[str, Any]:
    new: dict[str, Any] = {}
    if strange := sorted(set(saved.own) - set(own)):
        raise ValueError(f"{', '.join(strange)} is there, and its transform has none")
    if missing := sorted(set(own) - set(saved.own)):
        raise ValueError(f"{', '.join(missing)} is not there")
    for name, values in (saved.own | saved.options).items():
        new[name] = _like(group.get(name), values)
        if new[name] is None:
            raise ValueError(f"{name} is {values if len(values) != 1 else values[0]!r} there, and {group[name]!r} here")
    return new


def _same(one: _SavedValues, other: _SavedValues) -> bool:
    """Whether two labels have the same values, in whatever order. NaN equals NaN."""
    return all(repr(sorted(mine.items())) == repr(sorted(its.items())) for mine, its in zip(one, other, strict=True))


def _shown(saved: _SavedValues) -> str:
    return ", ".join(f"{name}={values[0] if len(values) == 1 else values!r}" for name, values in saved.own.items())


def _like(present: Any, values: Values) -> Any:
    """Return saved values in the type of the present values; None if they cannot be converted."""
    if isinstance(present, (tuple, list)):
        return type(present)(values) if len(present) == len(values) else None
    if present is None:
        return values[0] if len(values) == 1 else values
    if len(values) != 1 or isinstance(present, bool):
        return None
    (value,) = values
    if isinstance(present, int) and value.is_integer():
        return int(value)
    return value if isinstance(present, (int, float, Tensor)) else None


def take(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Put them into a param group; a user's tensor stays the same object."""
    for name, value in values.items():
        if isinstance(group.get(name), Tensor):
            group[name].fill_(value)
        else:
            group[name] = value
