"""Names for Hugging Face's Trainer, after ``import everybit_torch.names.trainer``: ``everybit_adamw``, ``everybit_ademamix``, ...

    args = TrainingArguments(..., optim="everybit_adamw", optim_args="policy=LEAN_BF16")

``learning_rate``, ``weight_decay`` and, for AdamW and Adam, ``adam_beta1``, ``adam_beta2`` and ``adam_epsilon`` are those of
TrainingArguments. All other arguments of :mod:`everybit_torch.names.optimizers` go through ``optim_args``; pairs are written
``betas=0.9:0.95``, and None ``none``.

Transformers has no public way to add a name. Where ``TrainingArguments`` should not be touched, Trainer itself takes a class and arguments:
``Trainer(..., optimizer_cls_and_kwargs=(everybit_torch.AdamW, {"lr": 3e-4, "policy": policy}))``.
"""

from __future__ import annotations

import inspect
from functools import partial
from importlib import import_module
from typing import Any

from everybit_torch.creating import CLASSES
from everybit_torch.names.optimizers import OPTIMIZERS

_FLAGS = {"true": True, "false": False}


def member(name: str) -> Any:
    """Return the member of transformers' enum that a name was given."""
    return import_module("transformers.training_args").OptimizerNames(name)


def register() -> None:
    """Add the names to Trainer's; the import of this module does it.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        ImportError: This transformers keeps its optimizers in another way.
    """
    try:
        handlers: dict[Any, Any] = import_module("transformers.trainer_optimizer")._OPTIMIZER_HANDLERS
        names: Any = import_module("transformers.training_args").OptimizerNames
        by_value, by_name, listed = names._value2member_map_, names._member_map_, names._member_names_
    except AttributeError as error:
        raise ImportError(
            "transformers: its table of optimizers is not where 5.23 has it; accepted is Trainer(optimizer_cls_and_kwargs=...)."
        ) from error
    for name in OPTIMIZERS:
        value = f"everybit_{name}"
        if value in by_value:
            continue
        member = str.__new__(names, value)
        member._name_, member._value_ = value.upper(), value
        by_value[value] = by_name[value.upper()] = member
        listed.append(value.upper())  # transformers' parser of command lines goes through these
        handlers[member] = partial(_handler, name)


def _handler(name: str, context: Any) -> tuple[type[Any], dict[str, Any]]:
    """The class and the arguments for Trainer."""
    kind = OPTIMIZERS[name]
    arguments = dict(context.optimizer_kwargs)
    of_arguments = ("params", "lr", "betas") if name in ("adam", "adamw") else ("params", "lr")
    if name in ("adam", "adamw"):
        arguments |= context.adam_kwargs
    parameters = inspect.signature(kind).parameters
    if "weight_decay" not in parameters and context.args.weight_decay:
        raise ValueError(
            f"weight_decay: got {context.args.weight_decay!r} for everybit_{name}, which has none; accepted is 0."
        )
    for key, text in context.optim_args.items():
        if key not in parameters or key in of_arguments:
            accepted = [one for one in parameters if one not in of_arguments]
            raise ValueError(f"optim_args: {key}: there is no such argument; accepted are {', '.join(accepted)}.")
        arguments[key] = _value(f"optim_args: {key}", text, parameters[key].default)
    if name not in CLASSES and context.model is not None:
        # Trainer gives param groups without names, by which optimizers such as Muon know embeddings and heads.
        arguments["names_from"] = context.model
    return kind, arguments


def _value(where: str, text: str, default: object) -> Any:
    """The value that a string stands for, by the kind of an argument's default."""
    if text.lower() in _FLAGS and (isinstance(default, bool) or default == "auto"):
        return _FLAGS[text.lower()]
    if isinstance(default, bool):
        raise ValueError(f"{where}: got {text!r}; accepted are true and false.")
    if isinstance(default, tuple):
        parts = text.split(":")
        if len(parts) != len(default):
            raise ValueError(f"{where}: got {text!r}; accepted are {len(default)} numbers, as in 0.9:0.95.")
        return tuple(_value(where, one, other) for one, other in zip(parts, default, strict=True))
    if default is None and text.lower() == "none":
        return None
    if isinstance(default, (int, float)) or (default is None and not where.endswith(": policy")):
        kind: Any = type(default) if default is not None else int if text.isdigit() else float
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"{where}: got {text!r}; accepted is a number.") from None
    return text


register()
