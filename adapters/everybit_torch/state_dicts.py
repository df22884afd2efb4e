"""What checkpoints hold: checked before anything is changed, and carried over between policies and from and to ``torch.optim``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import everybit as eb
from everybit.dtypes import torch_dtype
from everybit.policy import resolve_tree
from everybit_torch.dtensors import like, local
from everybit_torch.stepping import write
from everybit_torch.units import Member, Unit, init_state, named_fields

if TYPE_CHECKING:
    from everybit_torch.optimizer import TorchOptimizer

WEIGHTS = "param"
"""Under which a parameter's full-precision weights stand in a full state dict."""


@dataclass(frozen=True, slots=True)
class RoundingLoss:
    """What storing values in a coarser format changed.

    Attributes:
        largest: The greatest absolute difference.
        error: Sum of the squared differences.
        total: Sum of the squared values.
    """

    largest: float
    error: float
    total: float

    @property
    def relative(self) -> float:
        """Root of the mean squared difference, relative to that of the values; 0 if nothing was lost."""
        return (self.error / self.total) ** 0.5 if self.error else 0.0

    def __add__(self, other: RoundingLoss) -> RoundingLoss:
        return RoundingLoss(max(self.largest, other.largest), self.error + other.error, self.total + other.total)

    def __str__(self) -> str:
        return f"largest {self.largest:.3g}, relative {self.relative:.3g}" if self.error else "exact"


@dataclass(frozen=True, slots=True)
class TorchNames:
    """How an optimizer of ``torch.optim`` calls what ours keeps.

    Attributes:
        slots: Our slot names, and torch's.
        counts: Whether it counts steps.
        options: Options of torch's param groups that ours does not have, with the values that agree with it.
    """

    slots: Mapping[str, str]
    counts: bool
    options: Mapping[str, Any]


class _Kind(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]


def parameter_numbers(state_dict: Mapping[str, Any], counts: list[int]) -> list[int]:
    """The numbers by which a checkpoint calls its parameters, group after group.

    Raises:
        ValueError: It has no ``state`` or ``param_groups``, or groups of other sizes than ``counts``.
    """
    absent = [key for key in ("state", "param_groups") if key not in state_dict]
    if absent:
        raise ValueError(
            f"state_dict: has no {' and no '.join(map(repr, absent))}; accepted is what state_dict() returns."
        )
    found = [len(group["params"]) for group in state_dict["param_groups"]]
    if found != counts:
        raise ValueError(f"state_dict: got param groups of {found} parameters; accepted are {counts}.")
    return [number for group in state_dict["param_groups"] for number in group["params"]]


def require_entries(index: int, saved: Mapping[str, Any], own: Mapping[str, Tensor]) -> None:
    """Refuse a parameter's saved state unless it has the names, dtypes and shapes of this optimizer's.

    Raises:
        ValueError: The message names the parameter and the entry.
    """
    expected = {name: _Kind(tensor.dtype, tuple(tensor.shape)) for name, tensor in own.items()}
    _require(
        index, saved, expected, "under this policy",
        "The checkpoint was made under another policy or for another model; nothing is cast, because that would lose bits."
        " full_state_dict() and load_full_state_dict() carry a run from one policy to another.",
    )  # fmt: skip


def require_full_entries(
    index: int, saved: Mapping[str, Any], parameter: Tensor, unit: Unit, optimizer: eb.Optimizer[Any]
) -> None:
    """Refuse a parameter's full-precision state unless it has the names of this optimizer's slots, its shape and compute dtype.

    Raises:
        ValueError: The message names the parameter and the entry.
    """
    position = next(m.position for m in unit.members if m.parameter is parameter)
    (resolved,) = resolve_tree(optimizer.policy, [unit.tensors[position]])
    wide = _Kind(torch_dtype(resolved.policy.compute), tuple(parameter.shape))
    expected = {
        name: wide if is_slot else _Kind(value.dtype, tuple(value.shape))
        for name, value, is_slot in named_fields(unit.state)
        if name != WEIGHTS
    }
    if WEIGHTS in saved:
        expected[WEIGHTS] = wide
    _require(index, saved, expected, "in full precision", "It was made by another optimizer or for another model.")


def _require(index: int, saved: object, expected: Mapping[str, _Kind], accepted: str, why: str) -> None:
    if not isinstance(saved, Mapping) or set(saved) != set(expected):
        names = sorted(saved) if isinstance(saved, Mapping) else saved
        hint = ""
        if isinstance(saved, Mapping) and {"exp_avg", "momentum_buffer", "square_avg"} & set(saved):
            hint = " This is a checkpoint of torch.optim: load_torch_state_dict() takes it."
        raise ValueError(
            f"state_dict: parameter {index} has state {names}; accepted {accepted} is {sorted(expected)}.{hint}"
        )
    for name, kind in expected.items():
        value = saved[name]
        got = _Kind(value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else value
        if got != kind:
            raise ValueError(f"state_dict: parameter {index}, {name!r}: got {got}; accepted is {kind}. {why}")


def counts(saved: Mapping[str, Any], own: Mapping[str, Tensor]) -> tuple[int, ...]:
    """The 0-d integers of a parameter's state, which all members of a unit share; zeros where nothing is saved."""
    return tuple(int(saved[name]) if name in saved else 0 for name, x in own.items() if x.dtype is torch.int64)


# -- full precision -----------------------------------------------------------------------------------------------------------


def decoded(unit: Unit, optimizer: eb.Optimizer[Any]) -> dict[int, dict[str, Tensor]]:
    """For each of a unit's parameters, by id, its state and weights in the compute dtype, in its shape."""
    weights, wide = _decoded_unit(unit, optimizer)
    return {
        id(m.parameter): {
            name: like(m.parameter, value)
            for name, value in (wide.named_state(m) | {WEIGHTS: _weights(m, weights)}).items()
        }
        for m in unit.members
    }


def encode(
    unit: Unit, optimizer: eb.Optimizer[Any], given: Mapping[int, Mapping[str, Tensor]]
) -> dict[str, RoundingLoss]:
    """Store full-precision state, and weights where there are any, in a unit; members without are as before their first step.

    Returns:
        By name, what rounding lost.
    """
    if any(id(parameter) not in given for parameter in unit.parameters):
        write(unit.state, init_state(optimizer, unit.tensors, unit.first))
    here = [member for member in unit.members if id(member.parameter) in given]
    if not here:
        return {}
    weights, wide = _decoded_unit(unit, optimizer)
    for member in here:
        into = wide.named_state(member) | {WEIGHTS: _weights(member, weights)}
        for name, value in given[id(member.parameter)].items():
            into[name].copy_(local(value))
    params, state = optimizer.encode(weights, wide.state, unit.tensors, eb.Context(first_element=unit.first))
    moved = any(WEIGHTS in given[id(member.parameter)] for member in here)
    if moved:
        write((unit.tensors, unit.state), (params, state))
    else:
        write((unit.state.step, unit.state.inner), (state.step, state.inner))
    now, after = _decoded_unit(unit, optimizer)
    losses: dict[str, RoundingLoss] = {}
    for member in here:
        stored = after.named_state(member) | {WEIGHTS: _weights(member, now)}
        for name, value in given[id(member.parameter)].items():
            if value.is_floating_point():
                loss = rounding_loss(local(value).to(stored[name].device), stored[name])
                losses[name] = losses[name] + loss if name in losses else loss
    return losses


def _decoded_unit(unit: Unit, optimizer: eb.Optimizer[Any]) -> tuple[list[Tensor], Unit]:
    weights, state = optimizer.decode(unit.tensors, unit.state)
    return weights, Unit(unit.group, unit.tensors, unit.members, state, unit.first, unit.flat)


def _weights(member: Member, weights: list[Tensor]) -> Tensor:
    value = weights[member.position]
    return value[member.start : member.stop].view(local(member.parameter).shape) if value.ndim == 1 else value


def rounding_loss(value: Tensor, stored: Tensor) -> RoundingLoss:
    """What became of ``value``."""
    difference = stored.double() - value.double()
    # Infinities and NaN that were carried over are no loss.
    difference = torch.where((stored == value) | (stored.isnan() & value.isnan()), 0.0, difference)
    largest = float(difference.abs().max()) if value.numel() else 0.0
    return RoundingLoss(largest, float(difference.square().sum()), float(value.double().square().sum()))


# -- torch.optim --------------------------------------------------------------------------------------------------------------


def to_torch(optimizer: TorchOptimizer, full: Mapping[str, Any]) -> dict[str, Any]:
    """A full state dict in the words of ``torch.optim``."""
    names = _names_of(optimizer)
    state: dict[int, dict[str, Any]] = {}
    for number, entry in full["state"].items():
        if int(entry["step"]) == 0:
            continue
        state[number] = {"step": entry["step"].to(torch.float32)} if names.counts else {}
        state[number] |= {theirs: entry[ours] for ours, theirs in names.slots.items() if ours in entry}
    groups = [dict(names.options) | group for group in full["param_groups"]]
    return {"state": {number: entry for number, entry in state.items() if entry}, "param_groups": groups}


def from_torch(optimizer: TorchOptimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint of ``torch.optim`` as a full state dict without weights."""
    names = _names_of(optimizer)
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    numbers = parameter_numbers(state_dict, sizes)
    for number, group in enumerate(state_dict["param_groups"]):
        for option, agrees in names.options.items():
            # Which implementation torch ran (foreach, fused, capturable) does not change the state.
            if isinstance(agrees, bool) and option not in _IMPLEMENTATIONS and group.get(option, agrees) != agrees:
                raise ValueError(
                    f"state_dict: param group {number}, {option!r}: got {group[option]!r}; accepted by {type(optimizer).__name__} is"
                    f" {agrees!r}."
                )
    given = optimizer._given_state(state_dict)
    state: dict[int, dict[str, Tensor]] = {}
    for index, (number, parameter) in enumerate(zip(numbers, optimizer._parameters(), strict=True)):
        entry = {name: value for name, value in given.get(id(parameter), {}).items() if value is not None}
        if not entry:
            continue
        known = {"step", *names.slots.values()} if names.counts else set(names.slots.values())
        if strange := sorted(set(entry) - known):
            raise ValueError(
                f"state_dict: parameter {index} has state {sorted(entry)}; of these {type(optimizer).__name__} has no {strange}."
                f" Accepted is what torch.optim.{type(optimizer).__name__} saves."
            )
        step = torch.as_tensor(entry["step"] if names.counts else 1).to(torch.int64)
        own = optimizer.state[parameter]
        state[number] = {name: step for name, tensor in own.items() if tensor.dtype is torch.int64}
        for ours, theirs in names.slots.items():
            if theirs in entry:
                # Wider is exact; what is too wide for the policy is refused where it is loaded.
                state[number][ours] = entry[theirs].to(torch.promote_types(entry[theirs].dtype, torch.float32))
    groups = [
        {key: value for key, value in group.items() if key not in names.options} for group in state_dict["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


_IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")


def _names_of(optimizer: TorchOptimizer) -> TorchNames:
    names = optimizer.torch_names
    if names is None:
        raise TypeError(
            f"{type(optimizer).__name__}: torch.optim has no optimizer that keeps the same state; accepted are everybit_torch's"
            " AdamW, Adam, SGD and RMSprop."
        )
    return names
