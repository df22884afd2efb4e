"""The optimizers of ``torch.optim``: ours, torch's, and arguments that every one of their options is in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import optim

from everybit_torch import (
    SGD,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    RMSprop,
    TorchOptimizer,
    create,
)
from everybit_torch.drop_ins.drop_in import DropIn

# Whose state and arguments follow from the drop-ins' table.
CLOSED: list[tuple[type[DropIn], type[optim.Optimizer], dict[str, Any]]] = [
    (AdamW, optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True, "betas": (0.9, 0.9)}),
    (Adam, optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    (Adagrad, optim.Adagrad, {"lr": 1e-2, "weight_decay": 0.1}),
    (Adagrad, optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.05, "initial_accumulator_value": 0.1, "maximize": True}),
    (Adafactor, optim.Adafactor, {"lr": 1e-2, "weight_decay": 0.1}),
    (Adafactor, optim.Adafactor, {"lr": 0.1, "eps": (0.3, 0.1), "d": 1.5, "beta2_decay": -0.5, "maximize": True}),
]

PAIRS: list[tuple[type[TorchOptimizer], type[optim.Optimizer], dict[str, Any]]] = [
    (AdamW, optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    (Adam, optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    (SGD, optim.SGD, {"lr": 1e-2}),
    (SGD, optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    (SGD, optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3}),
    (SGD, optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "maximize": True}),
    (RMSprop, optim.RMSprop, {"lr": 1e-3}),
    (RMSprop, optim.RMSprop, {"lr": 1e-3, "centered": True, "momentum": 0.5, "weight_decay": 0.1}),
    *CLOSED,
]
"""All drop-ins with torch's."""

BY_NAME: list[tuple[Callable[..., TorchOptimizer], type[optim.Optimizer], dict[str, Any]]] = [
    (partial(create, "nadam"), optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    (
        partial(create, "nadam"),
        optim.NAdam,
        {"lr": 1e-2, "weight_decay": 0.1, "momentum_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
    ),
    (partial(create, "radam"), optim.RAdam, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    (
        partial(create, "radam"),
        optim.RAdam,
        {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
    ),
    (partial(create, "adamax"), optim.Adamax, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    (partial(create, "adadelta"), optim.Adadelta, {"lr": 0.5, "rho": 0.8, "weight_decay": 0.1}),
    (partial(create, "rprop"), optim.Rprop, {"lr": 1e-2, "etas": (0.6, 1.3), "step_sizes": (1e-3, 0.1)}),
    (partial(create, "asgd"), optim.ASGD, {"lr": 1e-2, "lambd": 0.1, "alpha": 0.5, "t0": 20.0, "weight_decay": 0.1}),
]
"""Optimizers of torch's that have a name here, and no class."""


@contextmanager
def wide_numbers() -> Iterator[None]:
    """torch keeps NAdam's product and ASGD's learning rate in the default dtype: float64 while this lasts."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def lacks_gradient(kind: object, name: str) -> bool:
    """Whether a parameter gets no gradient: torch's Adafactor divides by the number of its elements, which is zero."""
    return kind is Adafactor and name == "empty"
