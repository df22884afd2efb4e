"""AdamW by everyone: ours under each policy, and the peers', at their documented settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}

Params = list[nn.Parameter]
Make = Callable[..., Any]
"""From parameters, and hyperparameters other than the usual ones, to an optimizer."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to run AdamW.

    Attributes:
        name: In tables.
        dtype: Of the weights and gradients.
        make: The optimizer of some parameters.
        error: How far five updates may be from float64's, relative, root of the mean square: what the rounding of its formats explains.
            Moments in bfloat16 are wrong by 2**-9 to 2**-8 each, weights in bfloat16 by half a unit in the last place of each step's
            result, blocks of 8 bits by 1/127 of their largest element and of 4 bits by 1/15. Faults are smaller than that, and told from
            rounding by what they have in common over all elements; see speed.py.
        tensors: It is not run on models of more, because it compiles each tensor.
        is_adamw: Whether it is the algorithm that it is compared with.
    """

    name: str
    dtype: torch.dtype
    make: Make
    error: float
    tensors: int = 1_000_000
    is_adamw: bool = True


FLOAT32, BFLOAT16_STATE, BFLOAT16_WEIGHTS, BITS_8, BITS_4 = 5e-4, 2e-2, 1e-1, 1e-1, 5e-1


def _torch(**arguments: Any) -> Make:
    return lambda params, **others: torch.optim.AdamW(params, **HYPERPARAMETERS | others, **arguments)


def _torch_compiled(params: Params, **others: Any) -> Any:
    optimizer = torch.optim.AdamW(params, **HYPERPARAMETERS | {"lr": torch.tensor(1e-3)} | others)
    optimizer.step = torch.compile(optimizer.step, fullgraph=False)  # type: ignore[method-assign]
    return optimizer


def _ours(policy: str, **arguments: Any) -> Make:
    def make(params: Params, **others: Any) -> Any:
        import everybit as eb
        from everybit_torch import AdamW

        return AdamW(params, **HYPERPARAMETERS | others, policy=eb.policies.PRESETS[policy], **arguments)

    return make


def _from(module: str, name: str, **arguments: Any) -> Make:
    return lambda params, **others: getattr(import_module(module), name)(
        params, **HYPERPARAMETERS | others, **arguments
    )


def _published(params: Params, **others: Any) -> Any:
    return import_module("any_precision_published").PublishedAnyPrecisionAdamW(params, **HYPERPARAMETERS | others)


_F, _B = torch.float32, torch.bfloat16

CONTESTANTS: tuple[Contestant, ...] = (
    Contestant("torch fused", _F, _torch(fused=True), FLOAT32),
    Contestant("torch foreach", _F, _torch(foreach=True), FLOAT32),
    Contestant("torch loop", _F, _torch(foreach=False), FLOAT32),
    Contestant("torch compiled", _F, _torch_compiled, FLOAT32, tensors=200),
    Contestant("torch fused, bfloat16", _B, _torch(fused=True), BFLOAT16_WEIGHTS),
    Contestant("optimi", _F, _from("optimi", "AdamW"), FLOAT32),
    Contestant("optimi, Kahan", _B, _from("optimi", "AdamW", kahan_sum=True), BFLOAT16_STATE),
    Contestant("torchao, stochastic", _B, _from("torchao.optim.adam", "_AdamW", bf16_stochastic_round=True), BFLOAT16_WEIGHTS, 200),
    Contestant("torchao 8 bit", _F, _from("torchao.optim", "AdamW8bit"), BITS_8, 200),
    Contestant("torchao 4 bit", _F, _from("torchao.optim", "AdamW4bit"), BITS_4, 200),
    Contestant("HeavyBall", _F, _from("heavyball", "AdamW"), FLOAT32, 200),
    Contestant("HeavyBall, bfloat16", _B, _from("heavyball", "AdamW", storage_dtype="bfloat16"), BFLOAT16_WEIGHTS, 200),
    # It clips its updates.
    Contestant("pytorch_optimizer StableAdamW, Kahan", _B, _from("pytorch_optimizer", "StableAdamW", kahan_sum=True), BFLOAT16_STATE,
               is_adamw=False),
    Contestant(
        "HeavyBall, bfloat16 and 8 bits",
        _B,
        _from("heavyball", "AdamW", ecc="bf16+8", param_ecc="bf16+8"),
        BFLOAT16_WEIGHTS,
        20,
    ),
    Contestant("TorchOpt", _F, _from("torchopt", "AdamW"), FLOAT32),
    Contestant("AnyPrecisionAdamW as published", _B, _published, BFLOAT16_STATE),
    Contestant("everybit FP32, not compiled", _F, _ours("FP32", compile=False), FLOAT32),
    Contestant("everybit FP32", _F, _ours("FP32", compile=True), FLOAT32),
    Contestant("everybit EXACT_BF16", _B, _ours("EXACT_BF16", compile=True), FLOAT32),
    Contestant("everybit MIXED_BF16", _B, _ours("MIXED_BF16", compile=True), FLOAT32),
    Contestant("everybit LEAN_BF16", _B, _ours("LEAN_BF16", compile=True), BFLOAT16_STATE),
    Contestant("everybit KAHAN_BF16", _B, _ours("KAHAN_BF16", compile=True), BFLOAT16_STATE),
    Contestant("everybit TIGHT_BF16", _B, _ours("TIGHT_BF16", compile=True), BFLOAT16_STATE),
    Contestant("everybit FLOOR_BF16", _B, _ours("FLOOR_BF16", compile=True), BFLOAT16_WEIGHTS),
)  # fmt: skip

GPU_CONTESTANTS: tuple[Contestant, ...] = (
    Contestant("optimi, Triton", _F, _from("optimi", "AdamW", triton=True), FLOAT32),
    Contestant("optimi, Triton, Kahan", _B, _from("optimi", "AdamW", triton=True, kahan_sum=True), BFLOAT16_STATE),
    Contestant("bitsandbytes", _F, _from("bitsandbytes.optim", "AdamW"), FLOAT32),
    Contestant("bitsandbytes 8 bit", _F, _from("bitsandbytes.optim", "AdamW8bit"), BITS_8),
    # Its correction of the weights, which it keeps as integers, is not read here: what is compared are the 16-bit weights.
    Contestant("FlashOptim, 24 bit weights", _B, _from("flashoptim", "FlashAdamW", master_weight_bits=24), BITS_8),
    Contestant("Apex FusedAdam", _F, _from("apex.optimizers", "FusedAdam", adam_w_mode=True), FLOAT32),
)
"""Optimizers that have code for a GPU only, and are not run without one."""

BASELINE = CONTESTANTS[0]


def named(name: str) -> Contestant:
    """The contestant of that name."""
    known = (*CONTESTANTS, *GPU_CONTESTANTS)
    for contestant in known:
        if contestant.name == name:
            return contestant
    raise SystemExit(f"contestant: got {name!r}; accepted are {', '.join(repr(c.name) for c in known)}.")


def contestants_on(device: str) -> list[Contestant]:
    """Those that are run on a device if nobody chooses."""
    return [one for one in (CONTESTANTS + (GPU_CONTESTANTS if device == "cuda" else ())) if one.is_adamw]


def full_precision(optimizer: Any, params: Params) -> list[Tensor]:
    """The weights with what compensation an optimizer keeps beside them, in float64."""
    if hasattr(optimizer, "export_fp32"):
        (weights,) = optimizer.export_fp32()
        return [w.double() for w in weights]
    weights = []
    for p in params:
        state = optimizer.state[p] if p in getattr(optimizer, "state", {}) else {}
        if any("param::ecc" in view for view in state.values() if isinstance(view, dict)):
            (view,) = state.values()  # HeavyBall's state of a parameter that it has not merged or split
            weights.append(corrected(p.detach(), view["param::ecc"]).double())
            continue
        extra = next((state[key] for key in ("kahan_comp", "compensation") if state.get(key) is not None), None)
        weights.append(p.detach().double() if extra is None else p.detach().double() + extra.double())
    return weights


def corrected(held: Tensor, correction: Tensor | None) -> Tensor:
    """A tensor of 16 bits with the correction that HeavyBall keeps beside it as integers, decoded by HeavyBall's own code."""
    if correction is None:
        return held
    ulp = import_module("heavyball.utils")._ULPState
    decoded: Tensor = ulp(correction, ulp._SMAX[correction.dtype]).decode(held)
    return decoded


def state_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Every tensor that an optimizer keeps, however it nests them; of quantized ones, what they are made of."""
    seen: set[int] = set()

    def walk(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            if hasattr(value, "__tensor_flatten__"):
                for name in value.__tensor_flatten__()[0]:
                    yield from walk(getattr(value, name))
            elif (key := value.data_ptr()) not in seen or value.numel() == 0:
                seen.add(key)
                yield value
        elif isinstance(value, dict):
            for item in value.values():
                yield from walk(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from walk(item)

    yield from walk(dict(getattr(optimizer, "state", {})))
    yield from walk(getattr(optimizer, "state_groups", []) or [])
    for transform in getattr(optimizer, "states", []) or []:
        yield from walk(transform)
