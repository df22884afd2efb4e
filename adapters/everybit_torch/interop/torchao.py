"""State dicts from and to the optimizers of torchao with state in 8 or 4 bits.

A saved state dict of theirs holds objects of torchao's classes: import ``torchao.optim`` before ``torch.load``, which then takes it under
``weights_only=True``. The package is not imported to read one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit_torch.ambient import in_plain_mode
from everybit_torch.interop.quantized import (
    AGREEING,
    Quantized,
    given_to_peer,
    is_dynamic,
    load_from_peer,
    plain_number,
    quantized,
    require_agrees,
    require_slots,
    widened,
    with_step,
)
from everybit_torch.optim import RoundingLoss, TorchOptimizer
from everybit_torch.torch_internals.dtensors import is_dtensor

_SLOTS = {"exp_avg": "momentum", "exp_avg_sq": "variance", "max_exp_avg_sq": "max_variance"}


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
    return load_from_peer(optimizer, state_dict, _group_from_torchao, _from_torchao)


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
    return given_to_peer(optimizer, _group_to_torchao, _to_torchao)


def _from_torchao(position: int, given: Mapping[Any, Any], parameter: Tensor) -> dict[Any, Any]:
    """The saved entries of one parameter, by our names. Its quantized tensors have codes, scales and levels."""
    where, flat, found = f"state_dict: parameter {position}", dict(given), dict[Any, Any]()
    for theirs, ours in _SLOTS.items():
        value = flat.pop(theirs, None)
        if value is None:
            continue
        here = f"{where}, {theirs!r}"
        if isinstance(value, Tensor) and is_dtensor(value):
            raise ValueError(f"{here}: got a DTensor; accepted are whole tensors.")
        if not hasattr(value, "codes"):
            found[ours] = widened(value)
            continue
        qmap, codes, scale = (getattr(value, name, None) for name in ("qmap", "codes", "scale"))
        bits = 4 if isinstance(qmap, Tensor) and qmap.numel() == 16 else 8
        blocks = scale.numel() if isinstance(scale, Tensor) else 0
        block = parameter.numel() // blocks if blocks else 0
        if block * blocks != parameter.numel():
            raise ValueError(
                f"{here}: got {blocks} scales for {parameter.numel()} elements; accepted are whole blocks."
            )
        found[ours] = quantized(here, codes, scale, qmap, bits, block, parameter.shape)
    return with_step(where, flat, found)


def _group_from_torchao(_number: int, given: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name: plain_number(value) if name == "lr" else value for name, value in given.items()}


def _group_to_torchao(number: int, group: Mapping[str, Any], slots: Sequence[str]) -> dict[str, Any]:
    require_slots(slots, (["momentum", "variance"], ["momentum", "variance", "max_variance"]))
    for name, agrees in AGREEING.items():
        if name != "amsgrad":
            require_agrees(f"param group {number}", name, group.get(name, agrees), agrees)
    found = {name: value for name, value in group.items() if name == "amsgrad" or name not in AGREEING}
    # It refuses a learning rate that is no tensor.
    return found | {"lr": torch.tensor(plain_number(group["lr"]), dtype=torch.float32)}


def _to_torchao(found: Mapping[str, Tensor | Quantized], count: int, dtype: torch.dtype) -> dict[str, Any]:
    state: dict[str, Any] = {"step": torch.tensor(float(count))}
    for theirs, ours in _SLOTS.items():
        if ours not in found:
            continue
        value = found[ours]
        if not isinstance(value, Quantized):
            state[theirs] = value.float()
            continue
        signed = ours == "momentum"
        known = is_dynamic(value.qmap, value.bits, signed=signed)
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
