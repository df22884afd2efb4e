"""The calls of a model's initializers: which, in which order, and how long the tensors that they use have to be there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from everybit_torch.sharded.construction.sources import FromInitializers, ModuleFunction
from everybit_torch.sharded.construction.tensors import ModelTensor
from everybit_torch.sharded.scheduling.construction import Call

METHODS = ("reset_parameters", "_reset_parameters", "init_weights")
"""Names of methods that initialize a module, in the order in which they are looked for."""


@dataclass(frozen=True, slots=True)
class Initializer:
    """One call.

    Attributes:
        name: Of the module.
        module: It.
        call: What is called.
        shown: What is called, for a message.
        uses: The numbers of the tensors that it may use.
    """

    name: str
    module: nn.Module
    call: Callable[[], object]
    shown: str
    uses: frozenset[int]

    def __str__(self) -> str:
        return f"{self.shown} of {self.name or 'the model'}"


def initializers_of(
    model: nn.Module, units: Sequence[tuple[str, nn.Module]], tensors: Sequence[ModelTensor], values: FromInitializers
) -> list[Initializer]:
    """The calls of the model's initializers, children before their parent.

    Raises:
        ValueError: A module with tensors of its own has no initializer, or a tensor belongs to several modules that have one; the message
            names all of them.
    """
    absent = {id(one.tensor): number for number, one in enumerate(tensors) if one.is_absent}
    homes = _homes(model, [module for _, module in units])
    below: dict[int, set[int]] = {}  # by module: the tensors of it and of modules below it in the same unit
    found: list[Initializer] = []
    without: list[str] = []
    owners: dict[int, list[Initializer]] = {}
    for name, module in children_first(model):
        own = _own(module, absent)
        below[id(module)] = own.union(
            *(below[id(child)] for child in module.children() if homes[id(child)] == homes[id(module)])
        )
        if values.function is not None:
            uses = below[id(module)] if values.whole_units else own
            found.append(_function(values.function, name, module, uses))
        elif (method := _method(module)) is not None:
            shown = f"{type(module).__name__}.{method}()"
            found.append(Initializer(name, module, getattr(module, method), shown, frozenset(below[id(module)])))
            for number in own:
                owners.setdefault(number, []).append(found[-1])
        elif own:
            without.append(f"{name or 'the model'} ({type(module).__name__}: {', '.join(_names(own, tensors))})")
    if without:
        raise ValueError(
            f"values: {'; '.join(without)}: has tensors of its own and no initializer ({', '.join(METHODS)}, without"
            f" arguments). Accepted is a model whose"
            " modules have one, or FromInitializers(function), which is called for each module."
        )
    for number, several in owners.items():
        if len(several) > 1:
            raise ValueError(
                f"values: {' and '.join(tensors[number].names)} are one tensor, and {' and '.join(map(str, several))} would both"
                " initialize it: which of the two a model has that is constructed whole depends on its code. Accepted is"
                " FromInitializers(function), where the last call that writes to it decides, as in model.apply(function)."
            )
    return found


def buffer_initializers(
    model: nn.Module, tensors: Sequence[ModelTensor], function: ModuleFunction | None, source: str
) -> list[Initializer]:
    """The calls that write the buffers which no ``state_dict`` holds.

    Raises:
        ValueError: There are some on the meta device, and no function.
    """
    absent = {id(one.tensor): number for number, one in enumerate(tensors) if one.is_absent and not one.is_saved}
    if absent and function is None:
        raise ValueError(
            f"values: {', '.join(_names(absent.values(), tensors))}: on the meta device, and no checkpoint holds buffers that are"
            f" registered with persistent=False. Accepted is a model in which they have values, or {source}(..., buffers=function), where"
            " function(module) writes those of a module."
        )
    found = []
    for name, module in children_first(model):
        own = _own(module, absent)
        if own and function is not None:
            found.append(_function(function, name, module, own))
    return found


def calls_of(initializers: Sequence[Initializer]) -> list[Call]:
    """The calls as a schedule sees them: where tensors come, and where they may go."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for call, one in enumerate(initializers):
        for number in one.uses:
            first.setdefault(number, call)
            last[number] = call
    return [
        Call(
            sorted(n for n in one.uses if first[n] == call),
            sorted(n for n in one.uses if last[n] == call),
        )
        for call, one in enumerate(initializers)
    ]


def children_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules by name, each once: those below a module come before it, in the order in which they were registered."""
    seen: set[int] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}" if name else child_name, child)
        yield name, module

    yield from walk("", model)


def _function(function: ModuleFunction, name: str, module: nn.Module, uses: set[int]) -> Initializer:
    shown = getattr(function, "__qualname__", repr(function))
    return Initializer(name, module, lambda: function(module), f"{shown}(module)", frozenset(uses))


def _method(module: nn.Module) -> str | None:
    return next((name for name in METHODS if _can_be_called(getattr(module, name, None))), None)


def _can_be_called(method: object) -> bool:
    """Whether it can be called with nothing."""
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind()
    except (TypeError, ValueError):
        return False
    return True


def _own(module: nn.Module, absent: Mapping[int, int]) -> set[int]:
    mine = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return {absent[id(one)] for one in mine if id(one) in absent}


def _names(numbers: Iterable[int], tensors: Sequence[ModelTensor]) -> list[str]:
    return [tensors[number].name for number in sorted(numbers)]


def _homes(model: nn.Module, units: Sequence[nn.Module]) -> dict[int, int]:
    """The innermost unit of each module, by id; of one that several units share, the first."""
    numbers = {id(module): number for number, module in enumerate(units)}
    homes: dict[int, int] = {}

    def walk(module: nn.Module, unit: int) -> None:
        if id(module) in homes:
            return
        homes[id(module)] = numbers.get(id(module), unit)
        for child in module.children():
            walk(child, homes[id(module)])

    walk(model, 0)
    return homes
