"""The structure of a state dict of any optimizer, copies of its values, and their descriptions in messages."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from everybit.stepping.entries import VERSION, VERSION_KEY
from everybit_torch.shared_memory import has_memory

DEEPEST = 32
"""How deep containers may be nested in what others keep in a state dict. Copying and pickling it recurses, and Python ends a recursion
after about a thousand calls, of which each level takes several."""

FROZEN_REMAINDERS = "frozen_remainders"
"""The entry of a param group that lists frozen parameters whose state has a part of their weights. It goes into state dicts alone:
``set_optimizer_state_dict`` of torch leaves out the state of frozen parameters, and a load can tell by it what is missing."""

NOT_SAVED = "not saved: "
"""How an entry of a param group begins that stands for a hyperparameter which is code; a load keeps the present one."""

WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of a name that wrappers of a model add (``torch.compile``, DDP, FSDP, checkpointing); names are compared without them."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A state dict with the right structure.

    Attributes:
        groups: Its param groups.
        numbers: The state dict's number of each parameter, in the optimizer's order; None for a parameter that it does not have.
        entries: The saved entries, by position of the parameter in the optimizer.
        elsewhere: The entries under other keys.
        missing: The names of parameters that it does not have, by position, where names decide.
        unexpected: Names that the optimizer does not have.
    """

    groups: Sequence[Mapping[Any, Any]]
    numbers: list[Any]
    entries: Mapping[int, Mapping[Any, Any]]
    elsewhere: dict[Hashable, Any]
    missing: Mapping[int, str] = field(default_factory=dict)
    unexpected: tuple[str, ...] = ()


# -- structure ----------------------------------------------------------------------------------------------------------------


def read(state_dict: object, own: Sequence[Mapping[str, Any]], *, strict: bool = True) -> Saved:
    """Look at a state dict's structure, and find the optimizer's parameters in it: by name where both have names, else by position.

    Args:
        state_dict: Anything.
        own: The optimizer's param groups.
        strict: Refuse a state dict that has other names.

    Raises:
        ValueError: It is no state dict of an optimizer with such groups; the message says where it differs.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"state_dict: got {shown(state_dict)}; accepted is what state_dict() returns.")
    if absent := [key for key in ("state", "param_groups") if key not in state_dict]:
        raise ValueError(
            f"state_dict: has no {' and no '.join(map(repr, absent))}; accepted is what state_dict() returns."
        )
    state, groups = state_dict["state"], state_dict["param_groups"]
    version = state_dict.get(VERSION_KEY, VERSION)
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"state_dict[{VERSION_KEY!r}]: got {shown(version)}; accepted by this version of everybit is {VERSION}."
        )
    if not isinstance(state, Mapping):
        raise ValueError(f"state_dict['state']: got {shown(state)}; accepted is a mapping from parameter numbers.")
    if not isinstance(groups, (list, tuple)):
        raise ValueError(f"state_dict['param_groups']: got {shown(groups)}; accepted is a list of param groups.")
    numbers: list[Any] = []
    for index, group in enumerate(groups):
        where = f"state_dict['param_groups'][{index}]"
        if not isinstance(group, Mapping):
            raise ValueError(f"{where}: got {shown(group)}; accepted is a mapping.")
        if not isinstance(group.get("params"), (list, tuple)):
            raise ValueError(f"{where}['params']: got {shown(group.get('params'))}; accepted is a list of numbers.")
        for number in group["params"]:
            if not _is_hashable(number) or isinstance(number, (Tensor, float)):
                raise ValueError(f"{where}['params']: got {shown(number)}; accepted are numbers of parameters.")
        numbers += group["params"]
    if len(set(numbers)) != len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise ValueError(
            f"state_dict['param_groups']: parameter {shown(twice)} is in them twice; accepted is each once."
        )
    known = set(numbers)
    missing: dict[int, str] = {}
    unexpected: tuple[str, ...] = ()
    found, sizes = ([len(group["params"]) for group in each] for each in (groups, own))
    theirs, ours = _names(groups), _names(own)
    # Keys that are strings were made of names, by torch.distributed.checkpoint, and are in the optimizer's order.
    in_order = any(isinstance(number, str) for number in numbers)
    if theirs and ours and not in_order and len(groups) == len(own):
        numbers, missing, unexpected = _in_order(dict(zip(theirs, numbers, strict=True)), ours)
        if strict and (missing or unexpected):
            raise _differing_names([*missing.values()], unexpected)
    elif found != sizes:
        raise ValueError(f"state_dict: got param groups of {found} parameters; accepted are {sizes}.")
    if theirs and ours:
        groups = [{key: value for key, value in group.items() if key != "param_names"} for group in groups]
    entries: dict[int, Mapping[Any, Any]] = {}
    for position, number in enumerate(numbers):
        if number not in state or position in missing:
            continue
        if not isinstance(state[number], Mapping):
            raise ValueError(
                f"state_dict: parameter {position} has state {shown(state[number])}; accepted is a mapping."
            )
        entries[position] = state[number]
    elsewhere = {key: value for key, value in state.items() if key not in known}
    return Saved(list(groups), numbers, entries, elsewhere, missing, unexpected)


def _names(groups: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """The names of all parameters of param groups, in order; None if not all have one, or two have the same."""
    found: list[str] = []
    for group in groups:
        given = group.get("param_names", [])
        if not isinstance(given, (list, tuple)) or len(given) != len(group["params"]):
            return None
        found += given
    if not found or not all(isinstance(name, str) for name in found) or len(set(found)) < len(found):
        return None
    plain = [".".join(part for part in name.split(".") if part not in WRAPPERS) for name in found]
    return plain if len(set(plain)) == len(plain) else found


def _in_order(numbers: Mapping[str, Any], own: Sequence[str]) -> tuple[list[Any], dict[int, str], tuple[str, ...]]:
    """Saved numbers in the order of the optimizer's names; the names that are missing by position; and those that it does not have."""
    missing = {position: name for position, name in enumerate(own) if name not in numbers}
    known = set(own)
    return [numbers.get(name) for name in own], missing, tuple(name for name in numbers if name not in known)


def _differing_names(missing: Sequence[str], unexpected: Sequence[str]) -> ValueError:
    told = [f"has no {names(missing)}"] if missing else []
    told += [f"has {names(unexpected)}, which the optimizer has not"] if unexpected else []
    return ValueError(
        f"state_dict['param_groups']: {' and '.join(told)}; accepted are the optimizer's names, in any order. strict=False leaves these"
        " parameters out; without 'param_names' a state dict goes by position."
    )


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except (TypeError, RecursionError):
        return False
    return True


def shown(value: object) -> str:
    """A value in a message: what kind it is, and itself if it is short."""
    if isinstance(value, Tensor):
        return _tensor(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        text = repr(value) if not isinstance(value, int) or abs(value) < 10**60 else "a very large number"
        return text if len(text) <= 60 else f"{text[:60]}..."
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def is_plain(value: object) -> bool:
    """Whether a hyperparameter is data, which ``torch.load(weights_only=True)`` loads: no function, and no value of a class of its own."""
    if isinstance(value, Mapping):
        return type(value) in (dict, OrderedDict) and all(is_plain(one) for pair in value.items() for one in pair)
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, bytes, Tensor, torch.dtype))


def _tensor(value: Tensor) -> str:
    if value.is_nested:
        return "a nested tensor"
    kind = "" if value.layout is torch.strided else f"{value.layout} "
    place = " on meta" if value.device.type == "meta" else ""
    return f"a {kind}tensor, {value.dtype} of shape {tuple(value.shape)}{place}"


def names(keys: Iterable[object]) -> str:
    """Keys in a message, in an order, whatever they are."""
    listed = sorted(map(shown, keys))
    return f"[{', '.join(listed[:12])}{', ...' if len(listed) > 12 else ''}]"


# -- what is copied -----------------------------------------------------------------------------------------------------------


def copied(value: Any, where: str, device: torch.device | None = None, *, known: dict[int, Any] | None = None) -> Any:
    """Return a copy that shares no memory; tensors on ``device``, in their own dtypes.

    Args:
        value: The value to copy.
        where: Its place, for messages.
        device: The device of the copy.
        known: Copies by id of what was copied before, and may be referred to again, such as a learning rate of several groups.

    Raises:
        ValueError: It cannot be copied; the message begins with ``where``.
    """
    return _copied(value, where, device, {} if known is None else known, 0)


def _copied(value: Any, where: str, device: torch.device | None, known: dict[int, Any], depth: int) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    # A value that is referred to twice is copied once, as deepcopy does, so that few containers cannot unfold into many.
    if id(value) in known:
        if known[id(value)] is known:
            raise ValueError(f"{where}: contains itself; accepted are values that do not.")
        return known[id(value)]
    if depth > DEEPEST:
        raise ValueError(f"{where}: is nested more than {DEEPEST} deep; accepted is less.")
    known[id(value)] = known
    new: Any
    if isinstance(value, Tensor):
        new = _copied_tensor(value, where, device)
    elif isinstance(value, dict):
        new = {key: _copied(one, f"{where}[{shown(key)}]", device, known, depth + 1) for key, one in value.items()}
    elif type(value) in (list, tuple, set, frozenset):
        new = type(value)(
            _copied(one, f"{where}[{index}]", device, known, depth + 1) for index, one in enumerate(value)
        )
    else:
        try:
            new = copy.deepcopy(value)
        except Exception as error:
            raise ValueError(f"{where}: got {shown(value)}, which cannot be copied: {type(error).__name__}") from None
    known[id(value)] = new
    return new


def _copied_tensor(value: Tensor, where: str, device: torch.device | None) -> Tensor:
    if value.device.type == "meta":
        raise ValueError(f"{where}: got {_tensor(value)}; accepted are tensors with values.")
    if not has_memory(value):
        raise ValueError(f"{where}: got {_tensor(value)} whose memory was freed; accepted are tensors with values.")
    try:
        with torch.no_grad():
            return value.detach().to(device=device or value.device, copy=True)
    except Exception as error:
        raise ValueError(f"{where}: got {_tensor(value)}, which cannot be copied: {error}") from None
