"""Torch optimizers by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

from torch import Tensor, nn

from everybit.base import Hyperparameter
from everybit.linalg import Kronecker, MatrixView, NewtonSchulz
from everybit.optimizers import Matrices, OptimizerName, optimizer_named
from everybit.policies import PolicyOrName
from everybit.protocol import Transform
from everybit.stepping import Unsafe
from everybit.transforms import Grafting
from everybit_torch.arguments import torch_defaults
from everybit_torch.compiled import Factory
from everybit_torch.drop_ins import adam, adaptive, momentum
from everybit_torch.embeddings import FactoryForModel, embeddings_of, policy_with_embeddings
from everybit_torch.optim import Params, TorchOptimizer, named_by
from everybit_torch.segments import Compile, Offload, WatchedDType

Choice = Literal[
    "alone", "both", "cautious", "columns", "columns_then_rows", "corrected", "coupled", "decoupled", "directions", "exact",
    "independent", "kept", "kl", "largest", "last", "learning_rate", "longer", "match_rms_adamw", "none", "original", "root", "rows",
    "rows_then_columns", "spectral_unclamped", "start", "step", "steps",
]  # fmt: skip
"""The words that choose among variants of an optimizer."""

Option = (
    Hyperparameter
    | bool
    | Choice
    | tuple[Hyperparameter | tuple[float, ...] | None, ...]
    | Callable[[str, Tensor], bool | str]
    | Callable[[Hyperparameter], Transform[Any]]
    | Callable[[MatrixView | None], Transform[Any]]
    | Grafting
    | Kronecker
    | Matrices
    | NewtonSchulz
    | None
)
"""What a hyperparameter may be: a number or a schedule, a choice by name, a mask or labels, another optimizer, or a value of options."""

CLASSES: Mapping[OptimizerName, type[TorchOptimizer]] = {
    "sgd": momentum.SGD,
    "adam": adam.Adam,
    "adamw": adam.AdamW,
    "lion": momentum.Lion,
    "rmsprop": momentum.RMSprop,
    "adagrad": adaptive.Adagrad,
    "torch_adafactor": adaptive.Adafactor,
}
"""The optimizers that have a class with torch's signature; all others are a :class:`TorchOptimizer` of their function."""


def create(
    name: OptimizerName,
    model_or_params: nn.Module | Params,
    *,
    model: nn.Module | None = None,
    policy: PolicyOrName | None = None,
    lr: float | Tensor | None = None,
    compile: Compile = "auto",
    metrics: bool = False,
    seed: int = 0,
    unsafe: Unsafe = "refuse",
    average: float | Tensor | None = None,
    watch: WatchedDType | None = None,
    offload: Offload | None = None,
    **options: Option,
) -> TorchOptimizer:
    """Return the torch optimizer of this name: of its own class where it has one (``"adamw"`` is :class:`AdamW`).

    All its hyperparameters are in ``param_groups``, so that groups and schedulers can have values of their own; of a class with torch's
    signature torch's, and those that are given.

    Args:
        name: One of :func:`everybit.optimizers`.
        model_or_params: A model, which stands for its ``named_parameters()``; or parameters, or param groups. Optimizers that treat
            embeddings and heads in another way, such as Muon, know a model's ``nn.Embedding`` modules; of named parameters they look at
            the names, and matrices without names they refuse.
        model: The model of parameters or param groups that are given apart from it, with its names of them.
        policy: How parameters and state are stored: a policy, or the name of one in :mod:`everybit.policies`; None for float32 and
            float64 models only.
        lr: Learning rate; None: the optimizer's default.
        compile: See there.
        metrics: See there.
        seed: See there.
        unsafe: See there.
        average: See there.
        watch: See there.
        offload: See there.
        options: Other hyperparameters, by torch's names: ``betas``, ``eps``, ``weight_decay``. Others have the default of the
            function of this name in ``everybit``.

    Raises:
        TypeError: A hyperparameter that this optimizer does not have; the message lists those that it has.
        ValueError: A name of no optimizer, with the nearest one and all others; a hyperparameter or policy that cannot work.

    Examples:
        >>> import torch
        >>> from everybit_torch import create
        >>> model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
        >>> optimizer = create("ademamix", model, policy="LEAN_BF16", lr=3e-4, betas=(0.9, 0.95))
        >>> optimizer.param_groups[0]["b3"]
        0.9999
    """
    found = optimizer_named(name, field="create: name")
    if isinstance(model_or_params, nn.Module):
        if model is not None:
            raise TypeError("create: got a model twice; accepted with model= are parameters or param groups.")
        model, params = model_or_params, cast(Params, model_or_params.named_parameters())
    else:
        params = model_or_params
    params, function = for_model(params, found.function, model)
    if model is not None:
        policy = policy_with_embeddings(policy, embeddings_of(model))
    given: dict[str, Any] = {} if lr is None else {"lr": lr}
    given |= options
    settings: dict[str, Any] = {
        "policy": policy, "compile": compile, "metrics": metrics, "seed": seed,
        "unsafe": unsafe, "average": average, "watch": watch, "offload": offload,
    }  # fmt: skip
    kind: Any = CLASSES.get(found.name)
    made: TorchOptimizer = (
        TorchOptimizer(params, function, **settings, **(torch_defaults(function) | given))
        if kind is None
        else kind(params, **settings, **given)
    )
    return made


def for_model(params: Params, factory: Factory, model: nn.Module | None) -> tuple[Params, Factory]:
    """Return parameters with the model's names for them, and a factory of transforms that know the model's embeddings."""
    if model is None:
        return params, factory
    return named_by(params, model), FactoryForModel(factory, embeddings_of(model))
