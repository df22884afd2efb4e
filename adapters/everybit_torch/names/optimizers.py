"""Optimizers with arguments that are plain values, so that other programs can give them from a command line or a file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from everybit.optimizers import NamedOptimizer, optimizers
from everybit.policies import PolicyName
from everybit_torch.creating import CLASSES, for_model
from everybit_torch.hyperparameter_names import torch_defaults
from everybit_torch.optim import Params, TorchOptimizer
from everybit_torch.segments import Compile


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

    words = "".join(part.capitalize() for part in entry.name.split("_"))
    title = "Everybit" + (base.__name__ if base.__name__.lower() == entry.name else words)  # AdamW, and not Adamw
    signature = _signature(known)
    doc = (
        f":func:`everybit.{entry.name}` as a torch optimizer, with the policy by a preset's name. ``names_from`` is the model, for"
        " parameters without names."
    )
    space = {"__init__": begin, "__doc__": doc, "__module__": __name__, "__signature__": signature}
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    begin.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
    begin.__annotations__ = {name: one.annotation for name, one in signature.parameters.items()}
    made: type[TorchOptimizer] = type(title, (base,), space)
    return made


def _signature(known: Mapping[str, Any]) -> inspect.Signature:
    """Return the signature of a class, with annotations by which command lines read values."""
    parameters = [inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Params)]
    for name, default in known.items():
        kind: Any = _KINDS.get(name, type(default))
        if isinstance(default, tuple):
            kind = tuple[(float,) * len(default)]  # type: ignore[misc]
        elif default is None and name not in _KINDS:
            kind = int | float | None
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    return inspect.Signature(parameters)


_CODE = ("mask", "labels", "view", "views", "others")
"""Arguments that are no plain values."""

_SETTINGS: Mapping[str, Any] = {"policy": None, "compile": "auto", "metrics": False, "seed": 0}
_KINDS: Mapping[str, Any] = {"policy": PolicyName | None, "compile": Compile}

OPTIMIZERS: dict[str, type[TorchOptimizer]] = {name: _generated(one) for name, one in optimizers().items()}
"""By the name that each has in ``everybit.optimizers()``."""

_GENERATED = {kind.__name__: kind for kind in OPTIMIZERS.values()}


def __getattr__(name: str) -> type[TorchOptimizer]:
    """Return a generated class by its name, for unpickling."""
    if name not in _GENERATED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _GENERATED[name]
