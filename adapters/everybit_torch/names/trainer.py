"""Names for Hugging Face's Trainer, after ``import everybit_torch.names.trainer``: ``everybit_adamw``, ``everybit_ademamix``, ...

    args = TrainingArguments(..., optim="everybit_adamw", optim_args="policy=LEAN_BF16")

``learning_rate``, ``weight_decay`` and, for AdamW and Adam, the betas and epsilon are those of TrainingArguments. All other arguments of
:mod:`everybit_torch.names.optimizers` go through ``optim_args``; pairs are written ``betas=0.9:0.95``, and None ``none``.

Without a name: ``Trainer(..., optimizer_cls_and_kwargs=(everybit_torch.AdamW, {"lr": 3e-4, "policy": policy}))``.
"""

import inspect
from functools import partial
from importlib import import_module
from typing import Any

from everybit_torch.drop_ins import CLASSES
from everybit_torch.names.optimizers import OPTIMIZERS, value_of


def register() -> None:
    """Add the names to Trainer's, which has no public way to do it; the import of this module calls it.

    Raises:
        ImportError: There is no transformers, or one that keeps its optimizers in another way.
    """
    names: Any = import_module("transformers.training_args").OptimizerNames
    try:
        handlers: Any = import_module("transformers.trainer_optimizer")._OPTIMIZER_HANDLERS
        listed = names._member_names_
    except AttributeError:
        raise ImportError("transformers: has no table of names; accepted is optimizer_cls_and_kwargs=.") from None
    for name in OPTIMIZERS:
        value = f"everybit_{name}"
        if value not in names._value2member_map_:
            member = str.__new__(names, value)
            member._name_, member._value_ = value.upper(), value
            names._value2member_map_[value] = names._member_map_[value.upper()] = member
            listed.append(value.upper())  # transformers' parser of command lines goes through these
            handlers[member] = partial(_handler, name)


def _handler(name: str, context: Any) -> tuple[type[Any], dict[str, Any]]:
    """The class and the arguments for Trainer."""
    parameters = inspect.signature(OPTIMIZERS[name]).parameters
    has_betas = name in ("adam", "adamw")
    arguments = context.optimizer_kwargs | (context.adam_kwargs if has_betas else {})
    if "weight_decay" not in parameters and (decay := context.args.weight_decay):
        raise ValueError(f"weight_decay: got {decay!r} for everybit_{name}, which has none; accepted is 0.")
    accepted = [one for one in parameters if one not in ("params", "lr", "betas" if has_betas else "")]
    for key, text in context.optim_args.items():
        if key not in accepted:
            raise ValueError(f"optim_args: {key}: there is no such argument; accepted are {', '.join(accepted)}.")
        arguments[key] = value_of(f"optim_args: {key}", text, parameters[key].default)
    if name not in CLASSES and context.model is not None:
        arguments["names_from"] = context.model  # by names Muon and others know embeddings; Trainer's groups have none
    return OPTIMIZERS[name], arguments


register()
