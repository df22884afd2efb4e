"""Hyperparameters of the optimizers here, as data; one dataclass for each, with the names and defaults of its class.

Five are written out. Those of all other optimizers are generated of their functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import partial
from types import NoneType
from typing import Any, ClassVar, Literal, Self, get_args, get_origin

from torch import nn

import everybit as eb
from everybit.optimizers import NamedOptimizer, OptimizerName, optimizer_named
from everybit_torch import drop_ins
from everybit_torch.arguments import (
    ARGUMENTS,
    argument_names,
    by_given_name,
    core_names,
    spread,
    torch_arguments,
    torch_defaults,
)
from everybit_torch.config.reader import TableChoice, meanings, require_fields
from everybit_torch.drop_ins import CLASSES, for_model
from everybit_torch.embeddings import embeddings_of, policy_with_embeddings
from everybit_torch.optim import Params, TorchOptimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """An optimizer's hyperparameters. A subclass names its function, and has the hyperparameters as fields, by torch's names.

    Attributes:
        factory: A function from hyperparameters to a transform; in a subclass ``factory = staticmethod(my_optimizer)``.
        optimizer: The torch optimizer with these arguments; None: a :class:`everybit_torch.TorchOptimizer` of the function.
        meant: The field to propose for a name that is no field, such as the core's ``learning_rate``.

    Args:
        lr: Learning rate, at least zero.
        weight_decay: Weight decay, at least zero.
        maximize: Ascend instead.
    """

    optimizer: ClassVar[type[TorchOptimizer] | None] = None
    factory: ClassVar[Callable[..., eb.Transform[Any]]]
    meant: ClassVar[Mapping[str, str]] = {core: name for name, cores in ARGUMENTS.items() for core in cores}
    lr: float = 1e-3
    weight_decay: float = 0.0
    maximize: bool = False

    def __post_init__(self) -> None:
        self.transform()

    def hyperparameters(self) -> dict[str, Any]:
        """The arguments of the torch optimizer, by torch's names."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.init}

    def without_decay(self) -> Self:
        """The same without weight decay.

        Raises:
            ValueError: There is no weight decay.
        """
        if "weight_decay" not in self.hyperparameters():
            raise ValueError(
                f"no_decay: got patterns for {type(self).__name__}, which has no weight_decay; accepted is nothing."
            )
        return replace(self, weight_decay=0.0)

    def build(self, params: Params, model: nn.Module | None = None, **options: Any) -> TorchOptimizer:
        """Return the torch optimizer with these hyperparameters.

        Args:
            params: Parameters, or param groups.
            model: The parameters' model. Its modules tell which parameters are embeddings; None: their names alone do.
            options: Other arguments of :class:`everybit_torch.TorchOptimizer`, such as ``policy``.
        """
        params, factory = for_model(params, type(self).factory, model)
        if model is not None:
            options["policy"] = policy_with_embeddings(options.get("policy"), embeddings_of(model))
        kind: Any = type(self).optimizer or partial(TorchOptimizer, factory=factory)
        made: TorchOptimizer = kind(params, **options, **self.hyperparameters())
        return made

    def transform(self) -> eb.Transform[Any]:
        """Return the transform of a stepper.

        Raises:
            TypeError: There is no factory, or it does not take a field of the configuration.
            ValueError: A hyperparameter out of range, by its field's name.
        """
        factory: Callable[..., eb.Transform[Any]] | None = getattr(type(self), "factory", None)
        if factory is None:
            raise TypeError(f"{type(self).__name__}: has no factory; write factory = staticmethod(my_optimizer).")
        known = argument_names(factory)
        names = {name: core_names(name, ARGUMENTS, known) for name in self.hyperparameters()}
        arguments: dict[str, Any] = {}
        for name, value in self.hyperparameters().items():
            arguments |= spread(name, value, names[name])
        _require_taken(type(self).__name__, factory, arguments)
        if arguments.get("momentum") == 0:
            arguments["momentum"] = None  # keeps none, as torch's 0
        try:
            return factory(**arguments)
        except ValueError as error:
            raise ValueError(by_given_name(str(error), names, arguments)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig(Algorithm):
    """Hyperparameters of :class:`everybit_torch.AdamW`.

    Args:
        betas: Decay rates of the first and the second moment, in [0, 1).
        eps: Added outside the root.
        amsgrad: Divide by the root of the largest second moment so far.
        fully_decoupled: A step shrinks a parameter by ``weight_decay`` of itself, not by ``lr * weight_decay``.
        max_learning_rate: The schedule's greatest value; only with ``fully_decoupled``.
    """

    optimizer = drop_ins.AdamW
    factory = staticmethod(eb.adamw)
    weight_decay: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False
    fully_decoupled: bool = False
    max_learning_rate: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamConfig(Algorithm):
    """Hyperparameters of :class:`everybit_torch.Adam`.

    Args:
        betas: Decay rates of the first and the second moment, in [0, 1).
        eps: Added outside the root.
        amsgrad: Divide by the root of the largest second moment so far.
    """

    optimizer = drop_ins.Adam
    factory = staticmethod(eb.adam)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LionConfig(Algorithm):
    """Hyperparameters of :class:`everybit_torch.Lion`.

    Args:
        betas: Weight of the momentum in the direction, and its decay rate, in [0, 1).
        fully_decoupled: A step shrinks a parameter by ``weight_decay`` of itself, not by ``lr * weight_decay``.
        max_learning_rate: The schedule's greatest value; only with ``fully_decoupled``.
    """

    optimizer = drop_ins.Lion
    factory = staticmethod(drop_ins.lion)
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    fully_decoupled: bool = False
    max_learning_rate: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SGDConfig(Algorithm):
    """Hyperparameters of :class:`everybit_torch.SGD`.

    Args:
        momentum: Decay of the momentum; 0: no momentum.
        dampening: Not applied to the first gradient.
        nesterov: Look ahead; needs momentum, and zero dampening.
    """

    optimizer = drop_ins.SGD
    factory = staticmethod(eb.sgd)
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RMSpropConfig(Algorithm):
    """Hyperparameters of :class:`everybit_torch.RMSprop`.

    Args:
        alpha: Decay rate of the running square, in [0, 1).
        eps: Added outside the root.
        momentum: Decay of the momentum; 0: no momentum.
        centered: Divide by the root of the variance instead of the square.
    """

    optimizer = drop_ins.RMSprop
    factory = staticmethod(eb.rmsprop)
    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False


def _require_taken(title: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse a factory that does not take an argument which the configuration has, with a TypeError."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    if absent := [name for name in arguments if name not in parameters]:
        raise TypeError(
            f"{title}.factory: write it with an argument {' and '.join(map(repr, absent))}, which the configuration has. It takes"
            f" {', '.join(parameters) or 'none'}."
        )


def _generated(entry: NamedOptimizer) -> type[Algorithm]:
    """A dataclass of an optimizer's hyperparameters, by torch's names."""
    own: list[tuple[str, Any, Any]] = []
    lines: list[str] = []
    described = meanings(entry.function.__doc__ or "")
    defaults = torch_defaults(entry.function)
    for name, cores in torch_arguments(entry.arguments).items():
        kinds = [_plain(entry.arguments[core].annotation) for core in cores]
        if None in kinds:
            continue  # what a file cannot hold: a mask
        own.append((name, kinds[0] if len(kinds) == 1 else tuple[tuple(kinds)], defaults[name]))  # type: ignore[misc]
        lines.append(f"    {name}: {' '.join(described.get(core, '') for core in cores).strip()}")
    # Fields of the base that this optimizer does not have are left out of files and flags.
    known = {name for name, _, _ in own}
    absent = [
        (one.name, bool if one.name == "maximize" else float, one) for one in fields(Algorithm) if one.name not in known
    ]
    own += [(name, kind, field(default=one.default, init=False)) for name, kind, one in absent]
    doc = "\n".join([f"Hyperparameters of :func:`everybit.{entry.name}`.", "", "Args:", *lines])
    space = {
        "factory": staticmethod(entry.function), "optimizer": CLASSES.get(entry.name), "__doc__": doc, "__module__": __name__,
    }  # fmt: skip
    title = "".join(part.capitalize() for part in entry.name.split("_"))
    made: type[Algorithm] = make_dataclass(
        f"{title}Config", own, bases=(Algorithm,), namespace=space, frozen=True, slots=True, kw_only=True
    )
    return made


_TABLES = (eb.NewtonSchulz, eb.Grafting, eb.Kronecker, eb.Matrices)
"""Hyperparameters that are tables in a file."""


def _plain(annotation: Any) -> Any:
    """The type of a hyperparameter in a file; None: it cannot be in one."""
    if get_origin(annotation) is Literal:
        return annotation
    kinds = get_args(annotation) or (annotation,)
    if annotation in _TABLES:
        return annotation
    for kind in kinds:
        if get_origin(kind) is Literal:  # of names and other values the names
            return kind | None if NoneType in kinds else kind
    for kind in (bool, float, int):
        if kind in kinds:
            return kind | None if NoneType in kinds else kind
    return None


ALGORITHMS: dict[str, type[Algorithm]] = {
    "adamw": AdamWConfig,
    "adam": AdamConfig,
    "lion": LionConfig,
    "sgd": SGDConfig,
    "rmsprop": RMSpropConfig,
}
"""By the name that a file has for each."""

ALGORITHMS.update({name: _generated(one) for name, one in eb.optimizers().items() if name not in ALGORITHMS})
_GENERATED = {kind.__name__: kind for kind in ALGORITHMS.values()}


def __getattr__(name: str) -> type[Algorithm]:
    """Return a generated dataclass by its name, for unpickling."""
    if name not in _GENERATED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _GENERATED[name]


def algorithm(name: OptimizerName, **hyperparameters: Any) -> Algorithm:
    """Return the hyperparameters of the optimizer of this name.

    Args:
        name: One of :func:`everybit.optimizers`.
        hyperparameters: Hyperparameters by torch's names; others have their defaults.

    Raises:
        TypeError: A hyperparameter that it does not have.
        ValueError: A name of no optimizer, or a hyperparameter out of range.

    Examples:
        >>> from everybit_torch.config import OptimizerConfig, algorithm
        >>> config = OptimizerConfig(algorithm=algorithm("ademamix", lr=1e-3, betas=(0.9, 0.95)), policy="LEAN_BF16")
    """
    kind = ALGORITHMS[optimizer_named(name, field="algorithm: name").name]
    require_fields(kind, hyperparameters, "", TypeError)
    return kind(**hyperparameters)


def register_algorithm(name: str, kind: type[Algorithm]) -> None:
    """Let files and flags name an optimizer of your own; call it before they are read.

    Args:
        name: What ``algorithm.name`` is for it.
        kind: A frozen dataclass that subclasses :class:`Algorithm`, with a ``factory``.

    Raises:
        ValueError: The name is taken.
    """
    if ALGORITHMS.get(name, kind) is not kind:
        raise ValueError(
            f"register_algorithm: name: got {name!r}, which is {ALGORITHMS[name].__name__}; accepted is a name that is not taken."
        )
    ALGORITHMS[name] = kind


ALGORITHM = TableChoice(
    "name",
    ALGORITHMS,
    f"hyperparameters of your own, which a file cannot name; accepted are {', '.join(ALGORITHMS)}, and what register_algorithm was given.",
)
