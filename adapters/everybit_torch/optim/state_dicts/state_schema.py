"""The requirements on entries of a state dict: dtype, shape and layout, and for a count of steps its range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.base import DTYPES
from everybit.policies import Resolved
from everybit.stepping.entries import WEIGHTS, Entry
from everybit_torch.label_resolution import applied
from everybit_torch.optim.groups import Optimizers
from everybit_torch.optim.parameters import Parameters
from everybit_torch.optim.planned import StatePlan
from everybit_torch.optim.skeletons import skeleton
from everybit_torch.optim.state_dicts.saved_structure import shown
from everybit_torch.placements import fits_in, is_cut_evenly, saved_dtypes
from everybit_torch.segments import Segment
from everybit_torch.shared_memory import has_memory
from everybit_torch.torch_internals.dtensors import is_dtensor, local

LARGEST_COUNT = 2**53
"""Counts of steps are below it. Corrections such as ``1 - beta ** step`` are computed in float64, which holds every whole number up to here
and not every one beyond; at a million steps a second it takes 285 years to come to it."""

_FROM_ELSEWHERE = (
    "The checkpoint was made under another policy or for another model; nothing is cast, because that would lose bits."
    " full_state_dict() and load_full_state_dict() carry a run from one policy to another."
)


@dataclass(frozen=True, slots=True)
class EntryKind:
    """The requirements on an entry of a state dict.

    Attributes:
        dtype: Exactly.
        shape: The whole tensor's shape, if it is sharded.
        count: Whether it is a count of steps.
        positive: Whether it holds running squares, which are not negative.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    count: bool = False
    positive: bool = False

    def __str__(self) -> str:
        return "a count of steps" if self.count else f"{self.dtype} of shape {self.shape}"


def expectations(
    parameters: Parameters, optimizers: Sequence[Optimizers], plan: StatePlan | None, *, full: bool
) -> dict[int, dict[str, EntryKind]]:
    """Return, by id of the parameter, the entries of every parameter that is stepped, or will be.

    Args:
        parameters: The present parameters.
        optimizers: The future optimizers of each group.
        plan: The plan of parameters that have no state yet.
        full: Whether in full precision: decoded state, and the weights.
    """
    found: dict[int, dict[str, EntryKind]] = {}
    known: dict[Any, dict[str, EntryKind]] = {}
    made: dict[Any, eb.Optimizer[Any]] = {}
    wanted: list[tuple[Tensor, eb.Optimizer[Any]]] = []
    for stepped in parameters.stepped:
        base = optimizers[stepped.group.number][stepped.dtype]
        key = (id(base), stepped.decision)
        if key not in made:
            made[key] = applied(base, stepped.decision)
        if skeleton(made[key].transform) != skeleton(stepped.optimizer.transform):
            wanted += [(parameter, made[key]) for parameter in stepped.of.parameters]
            continue
        for number, parameter in enumerate(stepped.of.parameters):
            found[id(parameter)] = _kinds(parameter, stepped.of.segment.stored, stepped.of.entries(number), full=full)
    for member in parameters.visited():
        base = optimizers[member.group.number][member.parameter.dtype]
        wanted.append((member.parameter, applied(base, member.decision)))
    wanted += [(new.parameter, new.optimizer) for new in plan.new] if plan is not None else []
    for parameter, optimizer in wanted:
        kind = (id(optimizer), parameter.shape, parameter.dtype)
        if kind not in known:
            like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            segment = Segment.new(optimizer, like if optimizer.needs_whole else like.view(-1))
            known[kind] = _kinds(parameter, segment.stored, segment.entries(), full=full)
        found[id(parameter)] = known[kind]
    return found


def _kinds(
    parameter: Tensor, stored: Resolved, listed: list[tuple[Entry, Tensor]], *, full: bool
) -> dict[str, EntryKind]:
    wide = DTYPES[stored.policy.compute]
    kinds: dict[str, EntryKind] = {}
    for entry, value in listed:
        shape = entry.shape(parameter.shape, value.shape)
        # Of several parts the first is the number, rounded; codes of it may be anything.
        positive = entry.field.split("#")[0] == "variance" and entry.leading
        if entry.role == "shared":
            kinds[entry.name] = EntryKind(value.dtype, shape, count=value.dtype is torch.int64 and not shape)
        elif not full:
            kinds[entry.name] = EntryKind(value.dtype, shape, positive=positive and value.is_floating_point())
        elif entry.role == "slot" and entry.leading:
            own = shape if entry.cut == "tensor" else parameter.shape
            kinds[entry.name] = EntryKind(wide, tuple(own), positive=positive)
    if full:
        kinds[WEIGHTS] = EntryKind(wide, tuple(parameter.shape))
    return kinds


def require_entry(where: str, value: Any, kind: EntryKind, parameter: Tensor, *, full: bool) -> Tensor:
    """The value of an entry, as a tensor that may be copied into the optimizer's."""
    if kind.count:
        return torch.tensor(as_count(where, value), dtype=torch.int64)
    why = "It was made by another optimizer or for another model." if full else _FROM_ELSEWHERE
    require_tensor(where, value, saved_dtypes(kind.dtype), kind.shape, parameter, accepted=f"{kind}. {why}")
    checked: Tensor = value.to(kind.dtype)
    if not fits_in(local(value), kind.dtype):
        raise ValueError(f"{where}: holds numbers beyond int16; accepted are those of a remainder, in [-32768, 32767].")
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
        shape: The whole tensor's shape.
        parameter: Which tells how it is sharded, if it is.
        accepted: The accepted value, for messages.

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
        value.placements != parameter.placements
        or not is_cut_evenly(value)
        or (value.shape == parameter.shape and local(value).shape != local(parameter).shape)
    ):
        raise ValueError(
            f"{where}: got a DTensor placed as {value.placements}; accepted is {parameter.placements}, as its parameter is."
        )


def as_count(where: str, value: Any) -> int:
    """A count of steps: a whole number, as a number or in a tensor of one.

    Raises:
        ValueError: It is no count, or out of range.
    """
    number: Any = value
    if isinstance(value, Tensor) and not value.is_nested and value.layout is torch.strided:
        single = (
            value.numel() == 1 and value.device.type != "meta" and not value.is_complex() and has_memory(local(value))
        )
        number = local(value).item() if single and value.dtype is not torch.bool else None
    elif not isinstance(value, Tensor) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        number = value.item()
    # Comparisons first: a value out of range may be too large to be converted.
    within = isinstance(number, (int, float)) and not isinstance(number, bool) and 0 <= number < LARGEST_COUNT
    if not within or number != int(number):
        raise ValueError(
            f"{where}: got {shown(value if number is None or number is value else number)}; accepted is a count of steps, a whole number in"
            f" [0, 2**53)."
        )
    return int(number)
