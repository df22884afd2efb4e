"""Optimizers as they are named on the command line: ``lamb``, or with hyperparameters ``sgd,momentum=0.9,nesterov=true``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from rich.console import Console
from torch import Tensor

import everybit as eb
from everybit.combinators import Partition
from everybit.optimizers import Argument, NamedOptimizer, optimizer_named
from everybit.protocol import transforms_in
from everybit_cli.errors import OptionError
from everybit_torch.drop_ins import create
from everybit_torch.hyperparameter_names import torch_arguments, torch_defaults
from everybit_torch.optim import Params, TorchOptimizer

_WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True, slots=True)
class Chosen:
    """An optimizer with the hyperparameters that were given for it.

    Attributes:
        entry: The optimizer.
        given: Hyperparameters by the names of the core; all others have their defaults.
    """

    entry: NamedOptimizer
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The optimizer's name, without hyperparameters."""
        return self.entry.name

    @property
    def learning_rate(self) -> float | None:
        """That which was given, or the optimizer's default; None: it computes one at each step."""
        given: float | None = self.given.get("learning_rate", self.entry.learning_rate)
        return given

    @property
    def shown(self) -> str:
        """The optimizer as it is typed."""
        return ",".join([self.entry.name, *(f"{name}={_typed(value)}" for name, value in self.given.items())])

    @property
    def code(self) -> str:
        """The optimizer as it is written in Python, in the core."""
        return (
            f"eb.{self.entry.name}({', '.join([*(f'{name}={value!r}' for name, value in self.given.items()), '...'])})"
        )

    @property
    def torch_names(self) -> frozenset[str]:
        """The names of all its hyperparameters, as torch has them."""
        return frozenset(torch_defaults(self.entry.function))

    def given_to_torch(self) -> dict[str, Any]:
        """Return the hyperparameters that were given, by torch's names."""
        everything = {name: one.default for name, one in self.entry.arguments.items()} | dict(self.given)
        found: dict[str, Any] = {}
        for name, cores in torch_arguments(everything).items():
            if any(core in self.given for core in cores):
                values = tuple(everything[core] for core in cores)
                found[name] = values[0] if len(values) == 1 else values
        return found

    def described(self) -> dict[str, Any]:
        """Return what results say of it: name, title, paper, and all hyperparameters but the learning rate, by the core's names."""
        defaults = {name: one.default for name, one in self.entry.arguments.items() if name != "learning_rate"}
        about = {"name": self.name, "title": self.entry.title, "paper": self.entry.paper, "link": self.entry.link}
        values = defaults | dict(self.given)
        # Of code its name.
        return {**about, "hyperparameters": {name: getattr(value, "__name__", value) for name, value in values.items()}}

    def transform(self) -> eb.Transform[Any]:
        """Return a transform, with the optimizer's default learning rate unless another was given."""
        return self.entry.function(**self.given)

    def create(self, params: Params, **settings: Any) -> TorchOptimizer:
        """Return it as a torch optimizer.

        Args:
            params: Parameters, or param groups.
            settings: As for :func:`everybit_torch.create`; hyperparameters that were given are added.
        """
        return create(self.entry.name, params, **(self.given_to_torch() | settings))

    def with_hyperparameters(self, values: Mapping[str, Any], *, option: str) -> Chosen:
        """Return it with further hyperparameters, by the names of the core.

        Raises:
            OptionError: The optimizer does not have a hyperparameter, or refuses its value.
        """
        return _made(self.entry, {**self.given, **values}, option)


def named_optimizer(text: str, option: str = "--optimizer") -> Chosen:
    """Return the optimizer that is meant by an option, or by an item of it.

    Args:
        text: A name of ``everybit.optimizers()``; after it, divided by commas, hyperparameters by the names of its function.
        option: The option as it is typed.

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
            raise OptionError(
                option,
                f"{text} ({pair or 'nothing'} after a comma)",
                "NAME,hyperparameter=value, each hyperparameter once",
            )
        given[key] = _value(entry, key, value, option)
    return _made(entry, given, option)


def show_routing(optimizer: Chosen, params: Mapping[str, Tensor], console: Console) -> None:
    """Print which transform steps which parameter, where an optimizer has several.

    Raises:
        OptionError: A label that no parameter of the model has, such as that of hidden matrices.
    """
    transform = optimizer.transform()
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
            raise OptionError.saying(ValueError(reason), f"{option}: {optimizer.name} refuses {name}")


def refusal(optimizer: Chosen, policy: Any) -> str | None:
    """Why an optimizer cannot work under a policy; None: it can."""
    if not isinstance(policy, eb.Policy):
        return None
    try:
        eb.with_policy(optimizer.transform(), policy)
    except ValueError as error:
        return " ".join(str(error).split()).removesuffix(" (unsafe='warn' runs it all the same.)")
    return None


def _made(entry: NamedOptimizer, given: Mapping[str, Any], option: str) -> Chosen:
    known = entry.arguments
    for name in given:
        if name not in known:
            listed = [one for one in known if one != "learning_rate"]
            close = difflib.get_close_matches(name, listed, n=1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            raise OptionError(option, f"{entry.name} with {name}{meant}", f"{entry.name} with {', '.join(listed)}")
    chosen = Chosen(entry, dict(given))
    try:
        chosen.transform()
    except (TypeError, ValueError) as error:
        raise OptionError.saying(error, f"{option} {chosen.shown}") from None
    return chosen


def _value(entry: NamedOptimizer, name: str, text: str, option: str) -> Any:
    known = entry.arguments.get(name)
    if known is None:
        return text  # refused by its name
    accepted = _accepted(known)
    if text in _choices(known.annotation):
        return text
    word = text.lower()
    if word in _WORDS:
        value: Any = _WORDS[word]
        if word in accepted:
            return value
    else:
        for kind in (int, float):
            try:
                value = kind(text)
            except ValueError:
                continue
            if "a number" in accepted or (kind is int and "a whole number" in accepted):
                return float(value) if "a number" in accepted else value
    raise OptionError(option, f"{entry.name} with {name}={text}", " or ".join(accepted) or f"{name} in a program only")


def _accepted(argument: Argument) -> list[str]:
    """What may be typed for a hyperparameter."""
    kinds = get_args(argument.annotation) or (argument.annotation,)
    if get_origin(argument.annotation) is Literal:
        return list(map(str, kinds))
    choices = _choices(argument.annotation)
    found = choices + (["true", "false"] if bool in kinds else ["a number"] if float in kinds else [])
    if int in kinds and not found:
        found = ["a whole number"]
    return found + (["none"] if NoneType in kinds else [])


def _choices(annotation: Any) -> list[str]:
    """The names among the accepted values of a hyperparameter."""
    kinds = (annotation,) if get_origin(annotation) is Literal else get_args(annotation)
    return [str(name) for kind in kinds if get_origin(kind) is Literal for name in get_args(kind)]


def _typed(value: object) -> str:
    if isinstance(value, str):
        return value
    return str(value).lower() if isinstance(value, bool) or value is None else f"{value:g}"
