"""State dicts from and to the 8-bit optimizers of bitsandbytes, which need not be installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from everybit_torch.ambient import in_plain_mode
from everybit_torch.interop.quantized import (
    AGREEING,
    Quantized,
    given_to_peer,
    is_decoupled,
    is_dynamic,
    load_from_peer,
    plain_number,
    quantized,
    require_agrees,
    require_slots,
    widened,
    with_step,
)
from everybit_torch.optim import RoundingLoss, TorchOptimizer, names, shown

BLOCK = 256
_NESTED = "__bnb_optimizer_quant_state__"
_OF_ADEMAMIX = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}


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
    return load_from_peer(optimizer, state_dict, partial(_group_from_bitsandbytes, optimizer), _from_bitsandbytes)


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
    return given_to_peer(
        optimizer, partial(_group_to_bitsandbytes, optimizer), lambda found, count, _: _to_bitsandbytes(found, count)
    )


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
            found[slot] = quantized(here, value, scale, qmap, 8, BLOCK, parameter.shape)
        else:
            found[slot] = widened(value)
    return with_step(where, flat, found)


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
        require_agrees(where, "betas[1] (dampening)", betas[1], 0.0)
        found["momentum"] = betas[0]
    else:
        raise ValueError(f"{where}: accepted are optimizers with 'betas' or 'momentum'; this one has {names(ours)}.")
    if "eps" not in ours:
        found.pop("eps", None)
    if "betas" in ours and "eps" in ours and not is_decoupled(optimizer):
        require_agrees(where, "weight_decay", found.get("weight_decay", 0.0), 0.0)
    return found


def _group_to_bitsandbytes(
    optimizer: TorchOptimizer, number: int, group: Mapping[str, Any], slots: Sequence[str]
) -> dict[str, Any]:
    where = f"param group {number}"
    require_slots(slots, (["momentum"], ["momentum", "variance"]))
    found = {name: value for name, value in group.items() if name not in AGREEING and name != "param_names"}
    for name, agrees in AGREEING.items():
        require_agrees(where, name, group.get(name, agrees), agrees)
    if "eps" in group:
        if not is_decoupled(optimizer):
            require_agrees(where, "weight_decay", group["weight_decay"], 0.0)
        found |= _OF_ADEMAMIX
    else:
        found["eps"] = 0.0
    if "betas" not in group:
        found["betas"] = (found.pop("momentum"), 0.0)
    return found | {"lr": plain_number(group["lr"])}


def _to_bitsandbytes(found: Mapping[str, Tensor | Quantized], count: int) -> dict[str, Any]:
    order = ["momentum", "variance"]
    values = [found[name] for name in order if name in found]
    exact = all(
        isinstance(value, Quantized)
        and (value.bits, value.block) == (8, BLOCK)
        and is_dynamic(value.qmap, 8, signed=index == 0)
        for index, value in enumerate(values)
    )
    nested: dict[str, Tensor] = {}
    for index, value in enumerate(values, 1):
        if isinstance(value, Quantized) and exact:
            nested |= {f"state{index}": value.codes, f"qmap{index}": value.qmap, f"absmax{index}": value.scale}
        else:
            nested[f"state{index}"] = value.decoded() if isinstance(value, Quantized) else value.float()
    return {"step": count, _NESTED: nested}
