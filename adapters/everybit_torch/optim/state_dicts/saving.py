"""Make state dicts of an optimizer, in torch's form: as stored, and in full precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from everybit.stepping.entries import VERSION, VERSION_KEY
from everybit_torch.optim.interfaces import Front
from everybit_torch.optim.planned import parameters_of
from everybit_torch.optim.state_dicts import full_precision
from everybit_torch.optim.state_dicts.saved_structure import FROZEN_REMAINDERS, NOT_SAVED, copied, is_plain, shown
from everybit_torch.optim.states import ParameterState, keeps_frozen_remainder
from everybit_torch.optim.visits import entries_of
from everybit_torch.placements import sendable
from everybit_torch.torch_internals.dtensors import is_dtensor, local


def packed(front: Front) -> dict[str, Any]:
    """Return the state of each parameter as stored, and the entries of other code.

    Raises:
        ValueError: State of a tensor that is no parameter of the optimizer.
    """
    numbers = _numbers(front)
    # All parameters of a sharded model: torch sends those that are whole on every rank, too.
    is_sharded = any(map(is_dtensor, parameters_of(front.own_groups)))
    state: dict[Any, Any] = {}
    handed = {
        id(member.parameter): found
        for visiting in front.own.visiting
        for member, found in visiting.hand_out(entries_of, weights=False)
    }
    for key, value in front.state.items():
        if not isinstance(key, Tensor):
            state[key] = dict(value) if isinstance(value, ParameterState) else value
        elif value:
            own: dict[str, Tensor] = value.own
            own = handed.get(id(key), own)
            state[_number(numbers, key)] = value.packed(
                {name: _apart(sendable(x)) for name, x in own.items()} if is_sharded else None
            )
    return {"state": state, "param_groups": _packed_groups(front, numbers), VERSION_KEY: VERSION}


def _apart(value: Tensor) -> Tensor:
    """A DTensor over the beginning of its memory: torch cannot copy others (``copy.deepcopy``)."""
    return value.clone() if is_dtensor(value) and local(value).storage_offset() else value


def packed_in_full(front: Front) -> dict[str, Any]:
    """Return the decoded state of each parameter with its weights, and copies of the entries that other code keeps.

    Raises:
        ValueError: The state cannot be packed, as for :func:`packed`.
    """
    full = full_precision.decoded_all(front.own)
    numbers = _numbers(front)
    state: dict[Any, Any] = {}
    for key, entries in front.state.items():
        if not isinstance(key, Tensor):
            state[key] = copied(entries, f"state[{shown(key)}]")
            continue
        number = _number(numbers, key)
        if entry := full.get(id(key), {}) | copied(entries.packed({}), f"state[{number}]"):
            state[number] = entry
    return {"state": state, "param_groups": _packed_groups(front, numbers), VERSION_KEY: VERSION}


def _numbers(front: Front) -> dict[int, int]:
    """Return the number of each parameter in checkpoints, by its id."""
    numbers: dict[int, int] = {}
    for number, parameter in enumerate(parameters_of(front.param_groups)):
        numbers.setdefault(id(parameter), number)
    return numbers


def _packed_groups(front: Front, numbers: Mapping[int, int]) -> list[dict[str, Any]]:
    """Return the param groups, so that a checkpoint holds data alone: with a word in the place of a hyperparameter that is code.

    torch's flattened form needs an entry for each key of the optimizer's param groups.
    """
    packed = []
    owners = {id(group): own for group, own in zip(front.own_groups, front.own.groups, strict=True)}
    for group in front.param_groups:
        own = owners[id(group)]
        kept = {
            name: value if name not in own.names or is_plain(value) else f"{NOT_SAVED}{type(value).__name__}"
            for name, value in group.items()
        }
        if frozen := [place for place, p in enumerate(group["params"]) if keeps_frozen_remainder(front.own.states, p)]:
            kept[FROZEN_REMAINDERS] = frozen
        packed.append(kept | {"params": [numbers[id(p)] for p in group["params"]]})
    return packed


def _number(numbers: Mapping[int, int], parameter: Tensor) -> int:
    """Return the number of a parameter in checkpoints.

    Raises:
        ValueError: It is no parameter of the optimizer.
    """
    if id(parameter) not in numbers:
        raise ValueError(
            f"state: has entries for a tensor of shape {tuple(parameter.shape)} that is in no param group, which a checkpoint has no number"
            " for; accepted are the optimizer's parameters, and keys that are no tensors."
        )
    return numbers[id(parameter)]
