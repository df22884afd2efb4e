"""Convert state dicts from and to the optimizers of bitsandbytes and torchao that keep their state in 8 or 4 bits.

Where a slot's format here has their levels, their block and float32 scales, codes and scales are copied, bit for bit. Everything else is
decoded, and stored again under the policy on the way in, or given as float32 on the way out, which both of them step with.

Neither package is imported to read a state dict. A saved state dict of torchao's holds objects of its classes: import ``torchao.optim``
before ``torch.load``, which then takes it under ``weights_only=True``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.formats.blockwise import spread, unpacked
from everybit.stepping.entries import STEP, WEIGHTS
from everybit_torch.ambient import in_plain_mode
from everybit_torch.dtensors import is_dtensor
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

BITSANDBYTES_BLOCK = 256
_NESTED = "__bnb_optimizer_quant_state__"
_SLOTS_OF_TORCHAO = {"exp_avg": "momentum", "exp_avg_sq": "variance", "max_exp_avg_sq": "max_variance"}


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


@in_plain_mode
@torch.no_grad()
def load_bitsandbytes_state_dict(optimizer: TorchOptimizer, state_dict: Mapping[str, Any]) -> dict[str, RoundingLoss]:
    """Continue from the state dict of an 8-bit optimizer of bitsandbytes: AdamW, Adam, Lion, or SGD with momentum.

    The slots of ``Blockwise("dynamic", block=256)`` are taken bit for bit. The weights are the model's: load them there, before.

    bitsandbytes' Adam decays weights as AdamW does, so that a weight decay other than zero is refused by ``Adam`` here.

    Args:
        optimizer: Over the same parameters in the same order, with the slots of the saved one. Its policy stays.
        state_dict: What ``state_dict()`` of the other one returned.

    Returns:
        The loss of each slot by rounding to the policy's formats; empty where all bits were taken over.

    Raises:
        ValueError: An entry that does not fit; the message names the place, and the optimizer is unchanged.
    """
    saved = _read(optimizer, state_dict)
    groups = [_group_from_bitsandbytes(optimizer, number, group) for number, group in enumerate(saved.groups)]
    entries = {
        position: _from_bitsandbytes(position, parameter_entries, _parameters(optimizer)[position])
        for position, parameter_entries in saved.entries.items()
    }
    return _load(optimizer, Saved(groups, saved.numbers, entries, saved.elsewhere))


@in_plain_mode
@torch.no_grad()
def load_torchao_state_dict(optimizer: TorchOptimizer, state_dict: Mapping[str, Any]) -> dict[str, RoundingLoss]:
    """Continue from the state dict of an optimizer of torchao in 8 or 4 bits: Adam or AdamW.

    The slots of ``Blockwise("dynamic", block=256)`` are taken bit for bit from 8 bits; from 4 bits those of
    ``Blockwise("dynamic", 4, 128)`` as momentum, and of ``Blockwise("linear", 4, 128)`` as variance.

    Args:
        optimizer: The optimizer, as for :func:`load_bitsandbytes_state_dict`.
        state_dict: The result of the other optimizer's ``state_dict()``.

    Returns:
        The same as :func:`load_bitsandbytes_state_dict`.

    Raises:
        ValueError: An entry that does not fit; the message names the place, and the optimizer is unchanged.
    """
    saved = _read(optimizer, state_dict)
    groups = [
        {name: _plain(value) if name == "lr" else value for name, value in group.items()} for group in saved.groups
    ]
    entries = {
        position: _from_torchao(position, parameter_entries, _parameters(optimizer)[position])
        for position, parameter_entries in saved.entries.items()
    }
    return _load(optimizer, Saved(groups, saved.numbers, entries, saved.elsewhere))


@in_plain_mode
@torch.no_grad()
def bitsandbytes_state_dict(optimizer: TorchOptimizer) -> dict[str, Any]:
    """Return the state as bitsandbytes' 8-bit optimizer of the same algorithm loads it.

    A parameter with all slots in ``Blockwise("dynamic", block=256)`` is given in 8 bits, bit for bit, however small it is. Others are
    given in float32, exactly, and bitsandbytes goes on with them in 32 bits.

    Args:
        optimizer: An AdamW, Adam without weight decay, Lion or SGD with momentum.

    Raises:
        ValueError: The optimizer has other slots, or options that bitsandbytes does not have; the message names them.
    """
    return _given(
        optimizer, partial(_group_to_bitsandbytes, optimizer), lambda found, count, _: _to_bitsandbytes(found, count)
    )


@in_plain_mode
@torch.no_grad()
def torchao_state_dict(optimizer: TorchOptimizer) -> dict[str, Any]:
    """Return the state as torchao's optimizer of the same algorithm loads it; the package ``torchao`` has to be installed.

    A slot in the format that :func:`load_torchao_state_dict` takes bit for bit is given so, if the parameter has whole blocks, which
    torchao needs. Others are given in float32, exactly; ``load_state_dict`` of torch casts those to the dtype of the parameter.

    Args:
        optimizer: An AdamW or Adam.

    Raises:
        ValueError: The optimizer has other slots, or options that torchao does not have; the message names them.
        ModuleNotFoundError: torchao is not installed.
    """
    return _given(optimizer, _group_to_torchao, _to_torchao)


# -- the parts of both directions -----------------------------------------------------------------------------------------------


def _parameters(optimizer: TorchOptimizer) -> list[Tensor]:
    return parameters_of(optimizer.param_groups)


def _read(optimizer: TorchOptimizer, state_dict: Mapping[str, Any]) -> Saved:
    _require_whole(optimizer)
    saved = read(state_dict, optimizer.own_groups)
    options = ("params", "param_names")
    groups = [{name: value for name, value in group.items() if name not in options} for group in saved.groups]
    return replace(saved, groups=groups)


def _require_whole(optimizer: TorchOptimizer) -> None:
    for number, parameter in enumerate(_parameters(optimizer)):
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
    parameters, formats = _parameters(optimizer), _formats(optimizer)
    stored = optimizer.state_dict()
    for position, parameter_entries in saved.entries.items():
        format_of = formats.get(id(parameters[position]))
        for name, value in parameter_entries.items():
            if isinstance(value, Quantized) and format_of is not None and _is_of(format_of(name), value):
                own = stored["state"][position]
                own[name], own[f"{name}.scale"] = value.codes.view(own[name].shape), value.scale
    optimizer.load_state_dict(stored)
    now = optimizer.full_state_dict()["state"]
    losses: dict[str, RoundingLoss] = {}
    for position, parameter_entries in wide.items():
        for name, value in parameter_entries.items():
            if name != STEP and id(parameters[position]) in loaded.own and name in now[position]:
                loss = rounding_loss(value.to(now[position][name].device), now[position][name])
                losses[name] = losses[name] + loss if name in losses else loss
    return losses


def _given(
    optimizer: TorchOptimizer,
    group_of: Callable[[int, Mapping[str, Any], Sequence[str]], dict[str, Any]],
    state_of: Callable[[Mapping[str, Tensor | Quantized], int, torch.dtype], dict[str, Any]],
) -> dict[str, Any]:
    """The state in the names of a peer, without the entries of other code in ``state``."""
    _require_whole(optimizer)
    stored = optimizer.state_dict()
    optimizer.place()
    parameters, formats = _parameters(optimizer), _formats(optimizer)
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


# -- bitsandbytes ---------------------------------------------------------------------------------------------------------------

_OF_ADEMAMIX = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}


def _from_bitsandbytes(position: int, given: Mapping[Any, Any], parameter: Tensor) -> dict[Any, Any]:
    """The saved entries of one parameter, by our names."""
    nested = given.get(_NESTED, {})
    flat = {name: value for name, value in given.items() if name != _NESTED} | dict(nested)
    where = f"state_dict: parameter {position}"
    if strange := {"max1", "max2", "new_max1", "new_max2", "unorm_vec", "gnorm_vec"} & flat.keys():
        raise ValueError(
            f"{where}: has {names(strange)}; accepted is state in blocks, without bounds on the norms of updates or gradients."
        )
    found: dict[Any, Any] = {}
    for number, slot in (("1", "momentum"), ("2", "variance")):
        value = flat.pop(f"state{number}", None)
        scale, qmap = (flat.pop(f"{part}{number}", None) for part in ("absmax", "qmap"))
        if value is None:
            continue
        if isinstance(value, Tensor) and value.dtype is torch.uint8:
            here = f"{where}, 'state{number}'"
            found[slot] = _quantized(here, value, scale, qmap, 8, BITSANDBYTES_BLOCK, parameter.shape)
        else:
            found[slot] = _widened(value)
    return _with_step(where, flat, found)


def _group_from_bitsandbytes(optimizer: TorchOptimizer, number: int, given: Mapping[Any, Any]) -> dict[Any, Any]:
    where, ours = f"state_dict: param group {number}", optimizer.param_groups[number]
    found = dict(given)
    for name, agrees in _OF_ADEMAMIX.items():
        if found.pop(name, agrees) != agrees:
            raise ValueError(f"{where}, {name!r}: got {shown(given[name])}; accepted is {agrees!r} (AdEMAMix is not).")
    betas = found.pop("betas", None)
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"{where}, 'betas': got {shown(betas)}; accepted are two numbers.")
    if "betas" in ours:
        found["betas"] = tuple(betas)
    elif "momentum" in ours:
        _require_agrees(where, "betas[1] (dampening)", betas[1], 0.0)
        found["momentum"] = betas[0]
    else:
        raise ValueError(f"{where}: accepted are optimizers with 'betas' or 'momentum'; this one has {names(ours)}.")
    if "eps" not in ours:
        found.pop("eps", None)
    if "betas" in ours and "eps" in ours and not _is_decoupled(optimizer):
        _require_agrees(where, "weight_decay", found.get("weight_decay", 0.0), 0.0)
    return found


def _group_to_bitsandbytes(
    optimizer: TorchOptimizer, number: int, group: Mapping[str, Any], slots: Sequence[str]
) -> dict[str, Any]:
    where = f"param group {number}"
    _require_slots(slots, (["momentum"], ["momentum", "variance"]))
    found = {name: value for name, value in group.items() if name not in _AGREEING and name != "param_names"}
    for name, agrees in _AGREEING.items():
        _require_agrees(where, name, group.get(name, agrees), agrees)
    if "eps" in group:
        if not _is_decoupled(optimizer):
            _require_agrees(where, "weight_decay", group["weight_decay"], 0.0)
        found |= _OF_ADEMAMIX
    else:
        found["eps"] = 0.0
    if "betas" not in group:
        found["betas"] = (found.pop("momentum"), 0.0)
    return found | {"lr": _plain(group["lr"])}


def _to_bitsandbytes(found: Mapping[str, Tensor | Quantized], count: int) -> dict[str, Any]:
    order = ["momentum", "variance"]
    values = [found[name] for name in order if name in found]
    exact = all(
        isinstance(value, Quantized)
        and (value.bits, value.block) == (8, BITSANDBYTES_BLOCK)
        and _is_dynamic(value.qmap, 8, signed=index == 0)
        for index, value in enumerate(values)
    )
    nested: dict[str, Tensor] = {}
    for index, value in enumerate(values, 1):
        if isinstance(value, Quantized) and exact:
            nested |= {f"state{index}": value.codes, f"qmap{index}": value.qmap, f"absmax{index}": value.scale}
        else:
            nested[f"state{index}"] = value.decoded() if isinstance(value, Quantized) else value.float()
    return {"step": count, _NESTED: nested}


# -- torchao --------------------------------------------------------------------------------------------------------------------


def _from_torchao(position: int, given: Mapping[Any, Any], parameter: Tensor) -> dict[Any, Any]:
    """The saved entries of one parameter, by our names. Its quantized tensors have codes, scales and levels."""
    where, flat, found = f"state_dict: parameter {position}", dict(given), dict[Any, Any]()
    for theirs, ours in _SLOTS_OF_TORCHAO.items():
        value = flat.pop(theirs, None)
        if value is None:
            continue
        here = f"{where}, {theirs!r}"
        if isinstance(value, Tensor) and is_dtensor(value):
            raise ValueError(f"{here}: got a DTensor; accepted are whole tensors.")
        if not hasattr(value, "codes"):
            found[ours] = _widened(value)
            continue
        qmap, codes, scale = (getattr(value, name, None) for name in ("qmap", "codes", "scale"))
        bits = 4 if isinstance(qmap, Tensor) and qmap.numel() == 16 else 8
        blocks = scale.numel() if isinstance(scale, Tensor) else 0
        block = parameter.numel() // blocks if blocks else 0
        if block * blocks != parameter.numel():
            raise ValueError(
                f"{here}: got {blocks} scales for {parameter.numel()} elements; accepted are whole blocks."
            )
        found[ours] = _quantized(here, codes, scale, qmap, bits, block, parameter.shape)
    return _with_step(where, flat, found)


def _group_to_torchao(number: int, group: Mapping[str, Any], slots: Sequence[str]) -> dict[str, Any]:
    _require_slots(slots, (["momentum", "variance"], ["momentum", "variance", "max_variance"]))
    for name, agrees in _AGREEING.items():
        if name != "amsgrad":
            _require_agrees(f"param group {number}", name, group.get(name, agrees), agrees)
    found = {name: value for name, value in group.items() if name == "amsgrad" or name not in _AGREEING}
    # It refuses a learning rate that is no tensor.
    return found | {"lr": torch.tensor(_plain(group["lr"]), dtype=torch.float32)}


def _to_torchao(found: Mapping[str, Tensor | Quantized], count: int, dtype: torch.dtype) -> dict[str, Any]:
    state: dict[str, Any] = {"step": torch.tensor(float(count))}
    for theirs, ours in _SLOTS_OF_TORCHAO.items():
        if ours not in found:
            continue
        value = found[ours]
        if not isinstance(value, Quantized):
            state[theirs] = value.float()
            continue
        signed = ours == "momentum"
        known = _is_dynamic(value.qmap, value.bits, signed=signed)
        if value.bits == 4 and not signed:
            known = torch.equal(value.qmap.cpu(), eb.Blockwise("linear", 4, kind="non-negative").levels())
        if not known or value.shape.numel() % value.block:
            state[theirs] = value.decoded()
            continue
        parts = [value.codes, value.scale, value.qmap, signed]
        module = import_module(f"torchao.optim.subclass_{value.bits}bit")
        if value.bits == 8:
            state[theirs] = module.OptimState8bit(*parts, dtype=dtype)
        else:
            state[theirs] = module.OptimState4bit(*parts, value.shape, dtype=dtype)
    return state


# -- what both need --------------------------------------------------------------------------------------------------------------

_AGREEING: Mapping[str, Any] = {
    "amsgrad": False, "maximize": False, "nesterov": False, "dampening": 0.0, "fully_decoupled": False, "max_learning_rate": None,
}  # fmt: skip
"""Options of ours that neither has, with the values that change nothing."""


def _is_decoupled(optimizer: TorchOptimizer) -> bool:
    """Whether weight decay is AdamW's; an optimizer that torch does not have by this name is taken for one."""
    known = optimizer.torch_names
    return known is None or known.options.get("decoupled_weight_decay", True) is not False


def _is_dynamic(qmap: Tensor, bits: Any, *, signed: bool) -> bool:
    kind: eb.SlotKind = "signed" if signed else "non-negative"
    return torch.equal(qmap.cpu(), eb.Blockwise(bits=bits, kind=kind).levels())


def _require_agrees(where: str, name: str, value: Any, agrees: Any) -> None:
    if value != agrees:
        raise ValueError(f"{where}, {name}: got {shown(value)}; accepted here is {agrees!r}.")


def _require_slots(slots: Sequence[str], accepted: Sequence[list[str]]) -> None:
    if slots and sorted(slots) not in [sorted(one) for one in accepted]:
        listed = " or ".join(map(str, accepted))
        raise ValueError(f"optimizer: keeps {names(slots)}; accepted are optimizers that keep {listed}.")


def _plain(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        raise ValueError(f"lr: got {shown(value)}; accepted is a number.")
    return float(value)


def _quantized(where: str, codes: Any, scale: Any, qmap: Any, bits: int, block: int, shape: torch.Size) -> Quantized:
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


def _widened(value: Any) -> Any:
    plain = type(value) is Tensor and value.layout is torch.strided and value.is_floating_point()
    return value.detach().float() if plain and value.device.type != "meta" else value


def _with_step(where: str, flat: dict[Any, Any], found: dict[Any, Any]) -> dict[Any, Any]:
    if not found:
        return flat
    if STEP not in flat:
        raise ValueError(f"{where}: has state {names(found)} and no 'step'; accepted is state with its count of steps.")
    return flat | found
