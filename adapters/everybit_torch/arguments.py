"""The arguments of a torch optimizer: torch's names and the core's, what only torch has, and how mistakes in them are called.

torch's name stands for the core's only where no argument has torch's name itself: an argument ``lr`` or ``alpha`` of a user's factory, or a
field ``alpha`` of a user's transform, keeps its own meaning.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from types import FunctionType
from typing import Any, TypedDict

from torch import Tensor

import everybit as eb
from everybit.protocol import PARTS
from everybit_torch import notices

FIELDS: Mapping[str, tuple[str, ...]] = {"lr": ("learning_rate",), "betas": ("b1", "b2")}
"""torch's names, and the fields of transforms that they stand for."""

ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    **FIELDS,
    "alpha": ("decay",),
    "eps": ("eps1", "eps2"),
    "etas": ("shrink", "grow"),
    "step_sizes": ("min_step", "max_step"),
}
"""torch's names, and the arguments of factories. ``decay`` is RMSprop's ``alpha`` there; as a field it may be a momentum's as well.
The pairs are Adafactor's and Rprop's."""


def argument_names(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a factory's arguments; empty if it has no signature."""
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


def core_names(name: str, table: Mapping[str, tuple[str, ...]], known: Collection[str]) -> tuple[str, ...]:
    """Return ``name`` itself if it is known, or the names for which it stands in ``table``."""
    return (name,) if name in known else table.get(name, (name,))


def spread(name: str, value: Any, targets: tuple[str, ...]) -> dict[str, Any]:
    """A hyperparameter's value under the core's names.

    Raises:
        ValueError: It stands for several numbers, and is another number of them.
    """
    if len(targets) == 1:
        return {targets[0]: value}
    if not isinstance(value, (tuple, list)) or len(value) != len(targets):
        raise ValueError(f"{name}: got {value!r}; accepted are {len(targets)} numbers.")
    return dict(zip(targets, value, strict=True))


def torch_arguments(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return a factory's arguments by torch's names, where torch has one for them, each with the arguments that it stands for."""
    own = dict.fromkeys(names)
    table = {name: cores for name, cores in ARGUMENTS.items() if name not in own and own.keys() >= set(cores)}
    by_core = {core: name for name, cores in table.items() for core in cores}
    return {name: table.get(name, (name,)) for name in dict.fromkeys(by_core.get(one, one) for one in own)}


def torch_defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the defaults of a factory's arguments, by torch's names."""
    defaults = {name: one.default for name, one in inspect.signature(function).parameters.items()}
    found: dict[str, Any] = {}
    for name, cores in torch_arguments(defaults).items():
        values = tuple(defaults[core] for core in cores)
        found[name] = values[0] if len(values) == 1 else values
    return found


class ImplementationArguments(TypedDict, total=False):
    """Arguments of torch's optimizers that choose among its implementations. They have no effect; ``differentiable`` has to be False."""

    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool


class TorchArguments(ImplementationArguments, total=False):
    """The same, and an argument that torch's Adam and AdamW have in common, and that tells them apart."""

    decoupled_weight_decay: bool


_CHOICE = (None, False, True)

# Argument -> accepted values, which have no effect here, and what stands in its place.
_TORCH_ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "foreach": (_CHOICE, "short parameters of a group are stepped at once, and compile=True makes a step one loop"),
    "fused": (_CHOICE, "compile=True makes the step one loop"),
    "amsgrad": ((False,), "Adam and AdamW have AMSGrad, and this optimizer has not"),
    "capturable": ((False, True), "every step here can be captured in a CUDA graph, with or without it"),
    "differentiable": (
        (False,),
        "everybit.with_policy(...) gives an optimizer whose step is a pure function, which torch.func differentiates",
    ),
}  # fmt: skip


_WORDS: Mapping[str, Any] = {"true": True, "false": False, "none": None}


def value_in(text: str) -> Any:
    """Return the value that a text means: a number, ``true``, ``false``, ``none``, or numbers as in ``0.9:0.95``; else the text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    with suppress(ValueError, SyntaxError):
        return ast.literal_eval(text.replace(":", ","))
    return text


def require_factory(factory: object) -> None:
    """Refuse a value that is no function from hyperparameters to a transform.

    Raises:
        TypeError: The message says what to write.
    """
    if isinstance(factory, type) or (callable(factory) and not isinstance(factory, eb.Optimizer)):
        return
    made = all(hasattr(factory, name) for name in PARTS) or isinstance(factory, eb.Optimizer)
    got = f"the {type(factory).__name__} that such a function has made" if made else repr(factory)
    raise TypeError(
        f"factory: got {got}; accepted is a function from hyperparameters to a transform, which is called again when a param group's"
        " hyperparameters change: TorchOptimizer(params, everybit.adamw, lr=1e-3), not TorchOptimizer(params, everybit.adamw(1e-3))."
    )


class WithAverage:
    """A factory that adds a moving average of the weights, with the decay rate ``average``, to what another factory makes.

    Args:
        factory: The other factory; it has no argument of this name.
    """

    def __init__(self, factory: Callable[..., eb.Transform[Any]]) -> None:
        self.factory = factory
        own = [*_parameters(factory).values(), inspect.Parameter("average", inspect.Parameter.KEYWORD_ONLY)]
        self.__signature__ = inspect.Signature(sorted(own, key=lambda one: one.kind))
        self.__name__ = _name(factory)

    def __call__(self, *args: Any, average: Any, **arguments: Any) -> eb.Transform[Any]:
        """Return the other factory's transform, and the average after it."""
        return eb.chain(self.factory(*args, **arguments), eb.average_weights(average))


def flags_of(factory: Callable[..., Any]) -> frozenset[str]:
    """The arguments of a factory that are True or False by default."""
    return frozenset(name for name, one in _parameters(factory).items() if isinstance(one.default, bool))


def settled(
    kind: str,
    constructor: Callable[..., Any],
    factory: Callable[..., Any],
    given: Mapping[str, Any],
    decoupled: bool | None,
) -> dict[str, Any]:
    """The hyperparameters among the arguments of an optimizer's constructor.

    Args:
        kind: The optimizer's name, for messages.
        constructor: Its constructor, with the arguments that it has beside hyperparameters.
        factory: Which has to take them.
        given: The arguments by name.
        decoupled: Whether the optimizer's weight decay is decoupled, where torch has an argument for that; else None.

    Raises:
        TypeError: An argument that the factory does not have, or that goes by another name.
        ValueError: An argument of torch's that has no meaning here, at a value that would have one.
    """
    parameters = _parameters(factory)
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    kept: dict[str, Any] = {}
    for name, value in given.items():
        if name not in parameters and _is_torchs(kind, name, value, decoupled):
            continue
        if not takes_all:
            require_own_name(kind, name, given, parameters)
        wanted = core_names(name, ARGUMENTS, parameters)
        if not takes_all and not all(one in parameters for one in wanted):
            own = [key for key, one in _parameters(constructor).items() if one.kind is one.KEYWORD_ONLY]
            accepted = [*dict.fromkeys([*torch_arguments(parameters), *own])]
            close = difflib.get_close_matches(name, accepted, n=1)
            raise TypeError(
                f"{kind}: {name}: {_name(factory)} has no such argument{f', did you mean {close[0]!r}?' if close else ';'} accepted are"
                f" {', '.join(accepted)}."
            )
        kept[name] = as_python(name, value)
    return kept


def is_frozen(value: object) -> bool:
    """Whether a hyperparameter can only be replaced, or is a tensor. A step reads a tensor's number anew."""
    if type(value) in (float, int, bool, str, type(None), FunctionType) or isinstance(value, Tensor):
        return True
    if type(value) is tuple:
        return all(map(is_frozen, value))
    settings: Any = getattr(type(value), "__dataclass_params__", None)
    return settings is not None and settings.frozen and all(is_frozen(getattr(value, f.name)) for f in fields(value))  # type: ignore[arg-type]


def differ(new: object, old: object) -> bool:
    """Whether hyperparameters take the place of others. Tensors are the same if they are one object: their values are not read."""
    if new is old:
        return False
    if isinstance(new, Tensor) or isinstance(old, Tensor):
        return True
    if isinstance(new, Mapping) and isinstance(old, Mapping):
        return new.keys() != old.keys() or any(differ(value, old[name]) for name, value in new.items())
    if isinstance(new, (tuple, list)) and isinstance(old, (tuple, list)):
        return type(new) is not type(old) or len(new) != len(old) or any(map(differ, new, old))
    return bool(new != old)


def require_known_options(
    kind: str, names: Mapping[str, tuple[str, ...]], group: Mapping[str, Any], decoupled: bool | None
) -> None:
    """Refuse entries of a param group that look like hyperparameters but are not this optimizer's; other keys are the user's.

    ``names`` are the optimizer's hyperparameters, with the factory's arguments that they stand for.

    Raises:
        TypeError: A hyperparameter under the core's name.
        ValueError: An argument of torch's that has no meaning here, at a value that would have one.
    """
    for name, value in group.items():
        if name not in names and not _is_torchs(kind, name, value, decoupled):
            own = {one for one, targets in names.items() if targets == (one,)}
            require_own_name(kind, name, dict.fromkeys(names) | {name: value}, own)


def require_own_name(kind: str, name: str, given: Mapping[str, Any], own: Collection[str]) -> None:
    """Refuse the core's name of a hyperparameter where torch's is meant; ``own`` are names that the factory itself has.

    Raises:
        TypeError: The message says which.
    """
    for torchs, cores in ARGUMENTS.items():
        if torchs not in own and name in cores and (torchs in given or name == "learning_rate"):
            shown = torchs if len(cores) == 1 else f"{torchs}=({', '.join(cores)})"
            why = ", which schedulers change" if torchs == "lr" else ""
            raise TypeError(f"{kind}: {name}: got {given[name]!r}; accepted is {shown}, torch's name for it{why}.")


def _is_torchs(kind: str, name: str, value: Any, decoupled: bool | None) -> bool:
    """Whether an argument of torch's may be left out.

    Raises:
        ValueError: Its value requests something.
    """
    if name == "decoupled_weight_decay" and decoupled is not None:
        neutral: tuple[Any, ...] = (decoupled,)
        advice = "AdamW is Adam with decoupled decay, and Adam has the L2 penalty"
    elif name in _TORCH_ONLY:
        neutral, advice = _TORCH_ONLY[name]
    else:
        return False
    if not any(value is one for one in neutral):
        raise ValueError(
            f"{kind}: {name}: got {value!r}; accepted {'is' if len(neutral) == 1 else 'are'} {' and '.join(map(repr, neutral))}: {advice}."
        )
    if value is True and name in ("foreach", "fused") and name not in _NOTICED:
        _NOTICED.add(name)
        notices.warn(f"{kind}: {name}=True has no effect: {advice}. This is said once.")
    return True


_NOTICED: set[str] = set()
"""The arguments of which was said that they have no effect."""


def as_python(name: str, value: Any) -> Any:
    """A hyperparameter with numpy's scalars, and other numbers that are not Python's own, as Python's.

    Raises:
        ValueError: A whole number that no float holds.
    """
    if type(value) is float or value is None or isinstance(value, (bool, str, Tensor)):
        return value
    if type(value) in (tuple, list):
        values = [one if isinstance(one, (tuple, list)) else as_python(name, one) for one in value]
        return value if all(a is b for a, b in zip(values, value, strict=True)) else type(value)(values)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    elif isinstance(value, numbers.Real) and not isinstance(value, int):
        value = float(value)
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            float(value)
        except OverflowError:
            raise ValueError(
                f"{name}: got a whole number of {value.bit_length()} bits; accepted is a finite number."
            ) from None
    return value


def by_given_name(message: str, names: Mapping[str, tuple[str, ...]], arguments: Mapping[str, Any]) -> str:
    """A transform's complaint about a field, under the name of the argument that the user gave.

    ``names`` are those of the user, with the factory's arguments that they stand for; ``arguments`` are the factory's.

    A field has its name in the transform, such as ``decay`` in the momentum of SGD. It is the user's argument of that name, or that with
    the value the message quotes.
    """
    match = re.match(r"(\w+): got (.*)", message, re.DOTALL)
    if match is None:
        return message
    field, rest = match.groups()
    spelled = [*_spelled(names, arguments)]
    exact = [(theirs, value) for theirs, ours, value in spelled if ours == field]
    quoted = [theirs for theirs, _, value in spelled if re.match(re.escape(repr(value)) + r"(?![\w.])", rest)]
    if len(exact) == 1 and (not quoted or exact[0][0] in quoted):
        name = exact[0][0]
    elif len(quoted) == 1:
        name = quoted[0]
    else:
        name = exact[0][0] if len(exact) == 1 else field
    return f"{name}: got {rest}"


def _spelled(names: Mapping[str, tuple[str, ...]], arguments: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(the user's name, the factory's argument, its value) for each hyperparameter."""
    for name, targets in names.items():
        for index, target in enumerate(targets):
            yield name if len(targets) == 1 else f"{name}[{index}]", target, arguments.get(target)


def _parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):  # written in C, say
        return {"arguments": inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)}


def _name(factory: object) -> str:
    return getattr(factory, "__name__", None) or repr(factory)
