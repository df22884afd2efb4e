"""Optimizers with arguments that are plain values, so that other programs can give them from a command line or a file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import nn

from everybit.optimizers import NamedOptimizer, optimizers
from everybit.policies import PolicyName
from everybit_torch.arguments import torch_defaults, value_in
from everybit_torch.drop_ins import CLASSES, for_model
from everybit_torch.optim import Params, TorchOptimizer
from everybit_torch.segments import Compile


def _generated(entry: NamedOptimizer) -> type[TorchOptimizer]:
    """A class with plain arguments for an optimizer: its hyperparameters by torch's names, and how it is stored and stepped."""
    base: Any = CLASSES.get(entry.name, TorchOptimizer)
    defaults = {name: value for name, value in torch_defaults(entry.function).items() if name not in _CODE}
    options = {name: defaults.pop(name) for name in list(defaults) if is_dataclass(defaults[name])}
    parts = {name: [one.name for one in fields(own) if one.name not in _CODE] for name, own in options.items()}
    of_options = {f"{name}_{part}": getattr(own, part) for name, own in options.items() for part in parts[name]}
    known = {**defaults, **of_options, **_SETTINGS}

    def begin(self: Any, params: Params, names_from: nn.Module | None = None, **given: Any) -> None:
        if "weight_decay" not in known and given.get("weight_decay") == 0:
            del given["weight_decay"]  # which other programs always give
        for name in given:
            if name not in known:
                raise TypeError(f"{title}: {name}: there is no such argument; accepted are {', '.join(known)}.")
        for name, own in options.items():
            changed = {part: given.pop(f"{name}_{part}") for part in parts[name] if f"{name}_{part}" in given}
            if changed:
                given[name] = replace(own, **changed)
        if base is TorchOptimizer:
            params, function = for_model(params, entry.function, names_from)
            base.__init__(self, params, function, **(defaults | given))
        else:
            base.__init__(self, params, **given)

    words = "".join(part.capitalize() for part in entry.name.split("_"))
    title = "Everybit" + (base.__name__ if base.__name__.lower() == entry.name else words)  # AdamW, and not Adamw
    doc = f":func:`everybit.{entry.name}` with plain arguments. ``names_from`` is the model, for parameters without names."
    given = [_parameter(name, default) for name, default in known.items()]
    params = inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Params)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    begin.__signature__ = inspect.Signature([own, params, *given])  # type: ignore[attr-defined]
    begin.__annotations__ = {one.name: one.annotation for one in (params, *given)}
    made: type[TorchOptimizer] = type(title, (base,), {"__init__": begin, "__doc__": doc, "__module__": __name__})
    return made


def _parameter(name: str, default: Any) -> inspect.Parameter:
    """Return an argument, with an annotation by which command lines read values."""
    kind: Any = _KINDS.get(name, type(default))
    if isinstance(default, tuple):
        kind = tuple[(float,) * len(default)]  # type: ignore[misc]
    elif default is None and name not in _KINDS:
        kind = int | float | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


_CODE = ("mask", "labels", "matrices", "view", "others")
"""Arguments that are no plain values. Options are plain by field: ``where_max_dimension`` is ``where=Kronecker(max_dimension=...)``."""

_SETTINGS: Mapping[str, Any] = {"policy": None, "compile": "auto", "metrics": False, "seed": 0}
_KINDS: Mapping[str, Any] = {"policy": PolicyName | None, "compile": Compile}

OPTIMIZERS: dict[str, type[TorchOptimizer]] = {name: _generated(one) for name, one in optimizers().items()}
"""By the name that each has in ``everybit.optimizers()``."""

globals().update({kind.__name__: kind for kind in OPTIMIZERS.values()})  # where pickle looks for them


def value_of(where: str, text: str, default: object) -> Any:
    """Return the value of a text, as :func:`~everybit_torch.arguments.value_in` reads it; ``default`` says of which kind."""
    found = value_in(text)
    if isinstance(default, str) or where.endswith("policy"):
        return found if found is None or isinstance(found, bool) else text
    kind: Any = type(default)
    fits = type(found) is kind or (kind in (float, type(None)) and type(found) in (int, float))
    if not fits or (isinstance(default, tuple) and len(found) != len(default)):
        accepted: dict[Any, str] = {bool: "true or false", tuple: "as many numbers as the default has, as in 0.9:0.95"}
        raise ValueError(f"{where}: got {text!r}; accepted is {accepted.get(kind, 'a number')}.")
    return float(found) if kind is float else found
