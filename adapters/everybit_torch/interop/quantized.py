"""State in 8 or 4 bits as bitsandbytes and torchao keep it, stored under a policy and given back; what both of them need.

Where a slot's format here has their levels, their block and float32 scales, codes and scales are copied, bit for bit. Everything else is
decoded, and stored again under the policy on the way in, or given as float32 on the way out, which both of them step with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.formats.blockwise import spread, unpacked
from everybit.stepping.entries import STEP, WEIGHTS
from everybit_torch.optim import (
    RoundingLoss,
    Saved,
    TorchOptimizer,
    decoded_all,
    names,
    parameters_of,
    read,
    rounding_loss,
    shown,
)
from everybit_torch.optim.state_dicts import loading
from everybit_torch.torch_internals.dtensors import is_dtensor


@dataclass(frozen=True, slots=True)
class Quantized:
    """State of one parameter in 8 or 4 bits, as a peer keeps it.

    Attributes:
        codes: uint8; of 4 bits two in a byte, the first in its upper half.
        scale: float32, one for each block.
        qmap: What codes stand for: float32, 256 or 16 numbers.
        block: Elements with a common scale.
        shape: The shape of the parameter.
    """

    codes: Tensor
    scale: Tensor
    qmap: Tensor
    block: int
    shape: torch.Size

    @property
    def bits(self) -> int:
        """The values of the codes."""
        return 8 if self.qmap.numel() == 256 else 4

    def decoded(self) -> Tensor:
        """The numbers, in float32 and of the parameter's shape."""
        flat = self.codes.reshape(-1)
        codes = unpacked(flat, self.shape) if self.bits == 4 else flat.int().view(self.shape)
        return self.qmap[codes] * spread(self.scale.reshape(-1), self.block, self.shape)


def _require_whole(optimizer: TorchOptimizer) -> None:
    for number, parameter in enumerate(parameters_of(optimizer.param_groups)):
        if is_dtensor(parameter):
            raise ValueError(f"parameter {number}: got a DTensor; accepted are optimizers of whole tensors.")


def _formats(optimizer: TorchOptimizer) -> dict[int, Callable[[str], Any]]:
    """The format of each slot by its name, by id of the parameter."""
    return {
        id(parameter): one.of.segment.stored.slot for one in optimizer.own.stepped for parameter in one.of.parameters
    }


def _is_of(format: Any, value: Quantized) -> bool:
    """Whether the format has these levels, this block and these scales."""
    return (
        isinstance(format, eb.Blockwise)
        and (format.bits, format.block, format.scale) == (value.bits, value.block, "float32")
        and torch.equal(format.levels(), value.qmap.cpu())
    )


def load_from_peer(
    optimizer: TorchOptimizer,
    state_dict: Mapping[str, Any],
    group_of: Callable[[int, Mapping[Any, Any]], dict[Any, Any]],
    entries_of: Callable[[int, Mapping[Any, Any], Tensor], dict[Any, Any]],
) -> dict[str, RoundingLoss]:
    """Load a peer's state dict, of which the two functions convert a param group, and the entries of a parameter.

    Raises:
        ValueError: The optimizer has sharded parameters, or something does not fit; the optimizer is unchanged.
    """
    _require_whole(optimizer)
    saved = read(state_dict, optimizer.own_groups)
    options, parameters = ("params", "param_names"), parameters_of(optimizer.param_groups)
    groups = [
        group_of(number, {name: value for name, value in group.items() if name not in options})
        for number, group in enumerate(saved.groups)
    ]
    entries = {position: entries_of(position, own, parameters[position]) for position, own in saved.entries.items()}
    return _load(optimizer, replace(saved, groups=groups, entries=entries))


def _load(optimizer: TorchOptimizer, saved: Saved) -> dict[str, RoundingLoss]:
    """Store all decoded values, and put the codes of slots with the same format in their place."""
    wide = {
        position: {
            name: value.decoded() if isinstance(value, Quantized) else value
            for name, value in parameter_entries.items()
        }
        for position, parameter_entries in saved.entries.items()
    }
    in_full = Saved(saved.groups, saved.numbers, wide, saved.elsewhere)
    settings = loading.judge_settings(optimizer, in_full)
    loaded = loading.judge(optimizer, in_full, settings, full=True, from_torch=True)
    loading.restore_in_full(optimizer, loaded)
    parameters, formats = parameters_of(optimizer.param_groups), _formats(optimizer)
    stored = optimizer.state_dict()
    for position, parameter_entries in saved.entries.items():
        format_of = formats.get(id(parameters[position]))
        for name, value in parameter_entries.items():
            if isinstance(value, Quantized) and format_of is not None and _is_of(format_of(name), value):
                own = stored["state"][position]
                own[name], own[f"{name}.scale"] = value.codes.reshape(own[name].shape), value.scale
    optimizer.load_state_dict(stored)
    now = optimizer.full_state_dict()["state"]
    losses: dict[str, RoundingLoss] = {}
    for position, parameter_entries in wide.items():
        for name, value in parameter_entries.items():
            if name != STEP and id(parameters[position]) in loaded.own and name in now[position]:
                loss = rounding_loss(value.to(now[position][name].device), now[position][name])
                losses[name] = losses[name] + loss if name in losses else loss
    return losses


def given_to_peer(
    optimizer: TorchOptimizer,
    group_of: Callable[[int, Mapping[str, Any], Sequence[str]], dict[str, Any]],
    state_of: Callable[[Mapping[str, Tensor | Quantized], int, torch.dtype], dict[str, Any]],
) -> dict[str, Any]:
    """The state in the names of a peer, without the entries of other code in ``state``."""
    _require_whole(optimizer)
    stored = optimizer.state_dict()
    optimizer.place()
    parameters, formats = parameters_of(optimizer.param_groups), _formats(optimizer)
    wide = decoded_all(optimizer.own)
    state: dict[int, dict[str, Any]] = {}
    slots: dict[str, None] = {}
    for number, parameter in enumerate(parameters):
        values = wide.get(id(parameter), {})
        found: dict[str, Tensor | Quantized] = {}
        for name, value in values.items():
            if name != WEIGHTS and value.is_floating_point():
                slots[name] = None
                own = stored["state"].get(number, {})
                exact = _as_stored(name, formats[id(parameter)](name), own, parameter.shape)
                found[name] = value.clone() if exact is None else exact
        if values and int(values[STEP]):
            state[number] = state_of(found, int(values[STEP]), parameter.dtype)
    groups = [
        group_of(number, group, list(slots)) | {"params": group["params"]}
        for number, group in enumerate(stored["param_groups"])
    ]
    return {"state": state, "param_groups": groups}


def _as_stored(name: str, format: Any, own: Mapping[str, Tensor], shape: torch.Size) -> Quantized | None:
    """The codes and scales of a slot, if it is in blocks with float32 scales and codes that count the levels of its map."""
    if not isinstance(format, eb.Blockwise) or format.scale != "float32" or name not in own:
        return None
    codes, qmap = own[name].clone(), format.levels()
    if codes.dtype is not torch.uint8 or qmap.numel() != 1 << format.bits:
        return None
    return Quantized(codes, own[f"{name}.scale"].clone(), qmap.to(codes.device), format.block, shape)


AGREEING: Mapping[str, Any] = {
    "amsgrad": False, "maximize": False, "nesterov": False, "dampening": 0.0, "fully_decoupled": False, "max_learning_rate": None,
}  # fmt: skip
"""Options of ours that neither has, with the values that change nothing."""


def is_decoupled(optimizer: TorchOptimizer) -> bool:
    """Whether weight decay is AdamW's; an optimizer that torch does not have by this name is taken for one."""
    known = optimizer.torch_names
    return known is None or known.options.get("decoupled_weight_decay", True) is not False


def is_dynamic(qmap: Tensor, bits: Any, *, signed: bool) -> bool:
    """Whether levels are those of the map ``"dynamic"``."""
    kind: eb.SlotKind = "signed" if signed else "non-negative"
    return torch.equal(qmap.cpu(), eb.Blockwise(bits=bits, kind=kind).levels())


def require_agrees(where: str, name: str, value: Any, agrees: Any) -> None:
    """Refuse an option whose value would change something, by a ValueError."""
    if value != agrees:
        raise ValueError(f"{where}, {name}: got {shown(value)}; accepted here is {agrees!r}.")


def require_slots(slots: Sequence[str], accepted: Sequence[list[str]]) -> None:
    """Refuse an optimizer with other slots than one of the accepted lists, by a ValueError."""
    if slots and sorted(slots) not in [sorted(one) for one in accepted]:
        listed = " or ".join(map(str, accepted))
        raise ValueError(f"optimizer: keeps {names(slots)}; accepted are optimizers that keep {listed}.")


def plain_number(value: Any) -> float:
    """Return a learning rate as a float.

    Raises:
        ValueError: It is no number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        raise ValueError(f"lr: got {shown(value)}; accepted is a number.")
    return float(value)


def quantized(where: str, codes: Any, scale: Any, qmap: Any, bits: int, block: int, shape: torch.Size) -> Quantized:
    """Parts that belong together.

    Raises:
        ValueError: They do not.
    """
    numbers = shape.numel()
    expected = {
        "codes": (codes, torch.uint8, numbers if bits == 8 else -(-numbers // 2)),
        "scales": (scale, torch.float32, -(-numbers // block) if block else 0),
        "levels": (qmap, torch.float32, 1 << bits),
    }
    for name, (value, dtype, count) in expected.items():
        if not isinstance(value, Tensor) or value.dtype is not dtype or value.numel() != count:
            raise ValueError(f"{where}, {name}: got {shown(value)}; accepted are {count} numbers in {dtype}.")
    return Quantized(codes.detach(), scale.detach(), qmap.detach(), block, shape)


def widened(value: Any) -> Any:
    """Return a plain floating-point tensor in float32; other values as they are, for the reader to refuse."""
    plain = type(value) is Tensor and value.layout is torch.strided and value.is_floating_point()
    return value.detach().float() if plain and value.device.type != "meta" else value


def with_step(where: str, flat: dict[Any, Any], found: dict[Any, Any]) -> dict[Any, Any]:
    """Join a parameter's converted state and its other entries.

    Raises:
        ValueError: There is state without a count of steps.
    """
    if not found:
        return flat
    if STEP not in flat:
        raise ValueError(f"{where}: has state {names(found)} and no 'step'; accepted is state with its count of steps.")
    return flat | found
