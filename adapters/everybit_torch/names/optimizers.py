"""Optimizers with arguments that are plain values, so that other programs can give them from a command line or a file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from everybit.optimizers import NamedOptimizer, OptimizerName, optimizers
from everybit.policies import PolicyName
from everybit_torch import drop_ins
from everybit_torch.creating import CLASSES, for_model
from everybit_torch.hyperparameter_names import torch_defaults
from everybit_torch.optim import Params, TorchOptimizer
from everybit_torch.segments import Compile


class EverybitAdamW(drop_ins.AdamW):
    """:class:`everybit_torch.AdamW`, with the policy by name.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate, at least zero.
        betas: Decay rates of the first and the second moment, in [0, 1).
        eps: Added outside the root.
        weight_decay: A step shrinks a parameter by ``lr * weight_decay`` of itself.
        policy: A preset's name, such as ``"LEAN_BF16"``; None for float32 and float64 models only.
        compile: Compile the step.
        metrics: Measure every step.
        seed: The seed of stochastic rounding.

    Raises:
        ValueError: A name of no preset, or what :class:`everybit_torch.AdamW` refuses.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        policy: PolicyName | None = None,
        compile: Compile = "auto",
        metrics: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, policy=policy,
            compile=compile, metrics=metrics, seed=seed,
        )  # fmt: skip


class EverybitLion(drop_ins.Lion):
    """:class:`everybit_torch.Lion`, with the policy by name; see :class:`EverybitAdamW`."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        policy: PolicyName | None = None,
        compile: Compile = "auto",
        metrics: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, lr, betas, weight_decay, policy=policy,
            compile=compile, metrics=metrics, seed=seed,
        )  # fmt: skip


class EverybitSGD(drop_ins.SGD):
    """:class:`everybit_torch.SGD`, with the policy by name; see :class:`EverybitAdamW`."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        policy: PolicyName | None = None,
        compile: Compile = "auto",
        metrics: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov, policy=policy,
            compile=compile, metrics=metrics, seed=seed,
        )  # fmt: skip


def _generated(entry: NamedOptimizer) -> type[TorchOptimizer]:
    """A class with plain arguments for an optimizer: its hyperparameters by torch's names, and how it is stored and stepped."""
    base: Any = CLASSES.get(entry.name, TorchOptimizer)
    defaults = {name: value for name, value in torch_defaults(entry.function).items() if name not in _CODE}
    known = {**defaults, **_SETTINGS}

    def begin(self: Any, params: Params, names_from: nn.Module | None = None, **given: Any) -> None:
        if "weight_decay" not in known and given.get("weight_decay") == 0:
            del given["weight_decay"]  # which other programs always give
        for name in given:
            if name not in known:
                raise TypeError(f"{title}: {name}: there is no such argument; accepted are {', '.join(known)}.")
        if base is TorchOptimizer:
            params, function = for_model(params, entry.function, names_from)
            base.__init__(self, params, function, **(defaults | given))
        else:
            base.__init__(self, params, **given)

    title = "Everybit" + "".join(part.capitalize() for part in entry.name.split("_"))
    one, keyword = inspect.Parameter("params", inspect.Parameter.POSITIONAL_ONLY), inspect.Parameter.KEYWORD_ONLY
    signature = inspect.Signature([one, *(inspect.Parameter(name, keyword, default=known[name]) for name in known)])
    doc = (
        f":func:`everybit.{entry.name}` as a torch optimizer, with the policy by name; see :class:`EverybitAdamW`. ``names_from`` is the"
        " model, for parameters without names."
    )
    space = {"__init__": begin, "__doc__": doc, "__module__": __name__, "__signature__": signature}
    made: type[TorchOptimizer] = type(title, (base,), space)
    return made


_CODE = ("mask", "labels", "view", "views", "others")
"""Arguments that are no plain values."""

_SETTINGS: Mapping[str, Any] = {
    "policy": None, "compile": "auto", "metrics": False, "seed": 0,
}  # fmt: skip

OPTIMIZERS: dict[str, type[TorchOptimizer]] = {"adamw": EverybitAdamW, "lion": EverybitLion, "sgd": EverybitSGD}
"""By the name that each has in ``everybit.optimizers()``."""

OPTIMIZERS.update({name: _generated(one) for name, one in optimizers().items() if name not in OPTIMIZERS})
_GENERATED = {kind.__name__: kind for kind in OPTIMIZERS.values()}


def __getattr__(name: str) -> type[TorchOptimizer]:
    """Return a generated class by its name, for unpickling."""
    if name not in _GENERATED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _GENERATED[name]


TRAINER_NAMES: Mapping[str, OptimizerName] = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "ademamix": "ademamix", "sgd": "sgd", "adagrad": "adagrad", "rmsprop": "rmsprop",
    "lion_32bit": "lion", "schedule_free_adamw": "schedule_free_adamw", "schedule_free_sgd": "schedule_free_sgd",
    "stable_adamw": "stable_adamw",
}  # fmt: skip
"""Trainer's own names, and ours for the same optimizer."""

TIMM_NAMES: Mapping[str, tuple[OptimizerName, Mapping[str, Any]]] = {
    "sgd": ("sgd", {"nesterov": True}),
    "momentum": ("sgd", {}),
    "adam": ("adam", {}),
    "adamw": ("adamw", {}),
    "nadam": ("nadam", {}),
    "radam": ("radam", {}),
    "adamax": ("adamax", {}),
    "adadelta": ("adadelta", {}),
    "adagrad": ("adagrad", {}),
    "rmsprop": ("rmsprop", {}),
    "adoptw": ("adopt", {"clip_power": 1 / 3}),
    "lamb": ("lamb", {"max_grad_norm": 1.0, "always_adapt": False}),
    "lambc": ("lamb", {"max_grad_norm": 1.0, "always_adapt": False, "max_ratio": 1.0}),
    "lars": ("lars", {}),
    "adan": ("adan", {}),
    "adanw": ("adan", {"proximal": False}),
    "laprop": ("laprop", {}),
    "lion": ("lion", {}),
    "mars": ("mars", {}),
}
"""timm's own names, ours for the same optimizer, and what of ours makes it timm's; where the two still differ is in docs/optimizers.md."""
