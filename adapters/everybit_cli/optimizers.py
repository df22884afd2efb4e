"""Optimizers as they are named on the command line: ``lamb``, or with hyperparameters ``sgd,momentum=0.9,nesterov=true``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from torch import Tensor

import everybit as eb
from everybit.combinators import Partition
from everybit.optimizers import NamedOptimizer, optimizer_named
from everybit.protocol import transforms_in
from everybit_cli.errors import OptionError
from everybit_torch.arguments import ARGUMENTS, core_names, spread, value_in
from everybit_torch.config import Algorithm
from everybit_torch.config.algorithms import ALGORITHMS
from everybit_torch.config.trees import READER


@dataclass(frozen=True, slots=True)
class Chosen:
    """An optimizer with the hyperparameters that were given for it.

    Attributes:
        entry: The optimizer.
        algorithm: All its hyperparameters, by torch's names.
        given: Those that were given; all others have their defaults.
    """

    entry: NamedOptimizer
    algorithm: Algorithm
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The optimizer as it is typed."""
        return ",".join([self.entry.name, *(f"{name}={_typed(value)}" for name, value in self.given.items())])

    @property
    def code(self) -> str:
        """The optimizer as it is written in Python, in the core."""
        arguments: dict[str, Any] = {}
        for name, value in self.given.items():
            arguments |= spread(name, value, core_names(name, ARGUMENTS, self.entry.arguments))
        return (
            f"eb.{self.entry.name}({', '.join([*(f'{name}={value!r}' for name, value in arguments.items()), '...'])})"
        )

    @property
    def others(self) -> dict[str, Any]:
        """The hyperparameters, but the learning rate, that are not the optimizer's defaults."""
        defaults = type(self.algorithm)().hyperparameters()
        values = self.algorithm.hyperparameters()
        return {name: value for name, value in values.items() if name != "lr" and value != defaults[name]}

    def described(self) -> dict[str, Any]:
        """Return what results say of it: name, title, paper, and all hyperparameters but the learning rate."""
        values = {name: value for name, value in self.algorithm.hyperparameters().items() if name != "lr"}
        about = self.entry
        return {
            "name": about.name, "title": about.title, "paper": about.paper, "link": about.link, "hyperparameters": values,
        }  # fmt: skip

    def with_given(self, values: Mapping[str, Any], option: str) -> Chosen:
        """Return it with further hyperparameters.

        Raises:
            OptionError: The optimizer does not have a hyperparameter, or refuses its value; or it was given before.
        """
        if again := [name for name in values if name in self.given]:
            raise OptionError(option, f"{again[0]} with --optimizer {self.shown}", "each hyperparameter once")
        try:
            given = {**self.given, **values}
            algorithm = READER.read_table(type(self.algorithm), given, f"--optimizer {self.entry.name}")
        except ValueError as error:
            raise OptionError.saying(error) from None
        return Chosen(self.entry, algorithm, given)


def named_optimizer(
    text: str, option: str = "--optimizer", usual: Mapping[str, Mapping[str, Any]] | None = None
) -> Chosen:
    """Return the optimizer that is meant by an option.

    Args:
        text: A name of ``everybit.optimizers()``; after it, divided by commas, hyperparameters by torch's names: ``lr=1e-3``,
            ``betas=0.9:0.95``.
        option: The option as it is typed.
        usual: Hyperparameters for an optimizer, by its name, in the place of its defaults.

    Raises:
        OptionError: There is no such optimizer or hyperparameter, or it refuses a value.
    """
    name, *pairs = text.split(",")
    try:
        entry = optimizer_named(name)
    except ValueError as error:
        said = str(error).removeprefix("name: got ")
        got, _, accepted = said.partition("; accepted are ")
        raise OptionError(option, got.replace("'", ""), accepted.removesuffix(".")) from None
    given: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key in given:
            got = f"{text} ({pair or 'nothing'} after a comma)"
            raise OptionError(option, got, "NAME,hyperparameter=value, each hyperparameter once")
        given[key] = value_in(value)
    standard = (usual or {}).get(entry.name, {})
    return Chosen(entry, ALGORITHMS[entry.name]()).with_given({**standard, **given}, option)


def show_routing(optimizer: Chosen, params: Mapping[str, Tensor], console: Console) -> None:
    """Print which transform steps which parameter, where an optimizer has several.

    Raises:
        OptionError: A label that no parameter of the model has, such as that of hidden matrices.
    """
    transform = optimizer.algorithm.transform()
    if any(isinstance(node, Partition) for node in transforms_in(transform)):
        try:
            console.print(eb.routing(transform, dict(params)), highlight=False, markup=False)
        except ValueError as error:
            raise OptionError.saying(error, f"--optimizer {optimizer.shown}") from None


def require_policies(optimizer: Chosen, policies: Mapping[str, Any], option: str = "--policies") -> None:
    """Refuse policies under which a slot of the optimizer would stop moving.

    Raises:
        OptionError: The first of them, with the optimizer's reason, which names the slot.
    """
    for name, policy in policies.items():
        if (reason := refusal(optimizer, policy)) is not None:
            raise OptionError.saying(reason, f"{option}: {optimizer.entry.name} refuses {name}")


def refusal(optimizer: Chosen, policy: Any) -> str | None:
    """Why an optimizer cannot work under a policy; None: it can."""
    if not isinstance(policy, eb.Policy):
        return None
    try:
        eb.with_policy(optimizer.algorithm.transform(), policy)
    except ValueError as error:
        return " ".join(str(error).split()).removesuffix(" (unsafe='warn' runs it all the same.)")
    return None


def _typed(value: object) -> str:
    if isinstance(value, tuple):
        return ":".join(map(_typed, value))
    if isinstance(value, str):
        return value
    return str(value).lower() if isinstance(value, bool) or value is None else f"{value:g}"
