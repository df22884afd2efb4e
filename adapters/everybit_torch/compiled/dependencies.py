"""What compiled code depends on besides its inputs.

The code of a step is made for a factory, a policy and constants. Those of this library cannot change. A function of the user's is followed
to the variables that it reads::

    limit = 1.0

    def clipped(learning_rate):
        return eb.chain(eb.clip_by_global_norm(limit), eb.adamw(learning_rate))

It reads two variables, ``limit`` and ``eb``. While both have the values that they had, the code stays valid.
"""

from __future__ import annotations

import dis
import math
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

_PACKAGES = ("everybit", "everybit_torch")

_BUILTINS = {
    "abs", "bool", "dict", "enumerate", "float", "int", "len", "list", "max", "min", "pow", "range", "round", "tuple", "zip",
}  # fmt: skip
"""Built-in functions that read nothing but their arguments."""

_DOES_MORE = {
    "DELETE_ATTR", "DELETE_GLOBAL", "IMPORT_NAME", "LOAD_BUILD_CLASS", "LOAD_NAME", "STORE_ATTR", "STORE_GLOBAL",
}  # fmt: skip
"""Instructions of functions that are not followed."""

_MISSING = object()


class Variable(NamedTuple):
    """A variable that a function reads.

    Attributes:
        holder: The module's names, or the cell of a closure.
        name: Its name.
        value: The value that it had.
    """

    holder: MutableMapping[str, Any] | CellType
    name: str
    value: object

    def holds(self) -> bool:
        """Whether it has the value that it had."""
        if isinstance(self.holder, CellType):
            return self.holder.cell_contents is self.value
        return self.holder.get(self.name, _MISSING) is self.value


def variables(value: object) -> list[Variable] | None:
    """Return the variables on which code that was made for a value depends; None: it depends on more, which may change unnoticed.

    Args:
        value: Constants of Python, functions, objects of this library, and containers of these.
    """
    reader = _Dependencies()
    return reader.found if reader.reads(value, is_kept=False) else None


class _Dependencies:
    """Follows functions to the variables that they read."""

    def __init__(self) -> None:
        self.found: list[Variable] = []
        self._followed: set[int] = set()

    def reads(self, value: object, *, is_kept: bool) -> bool:
        """Whether a value is followed to its end.

        Args:
            value: The value.
            is_kept: Whether a variable holds it, which may be changed in place without being given another value.
        """
        match value:
            case None | bool() | int() | float() | str() | torch.dtype():
                return True
            case tuple():
                return all(self.reads(one, is_kept=is_kept) for one in value)
            case list():
                return not is_kept and all(self.reads(one, is_kept=False) for one in value)
            case Mapping():
                return not is_kept and all(self.reads(one, is_kept=False) for one in value.values())
            case partial():
                keywords = all(self._variable(value.keywords, name) for name in value.keywords)
                return keywords and self.reads((value.func, value.args), is_kept=True)
            case FunctionType():
                return self._function(value)
            case MethodType():
                return self.reads((value.__self__, value.__func__), is_kept=is_kept)
            case ModuleType():
                return value is math or value.__name__.partition(".")[0] in _PACKAGES
            case _:
                pass
        if is_dataclass(value) and not isinstance(value, type):
            held = [getattr(value, one.name) for one in fields(value)]
            return is_of_library(type(value)) and all(self.reads(one, is_kept=is_kept) for one in held)
        return callable(value) and is_of_library(value)

    def _variable(self, holder: MutableMapping[str, Any], name: str) -> bool:
        value = holder.get(name, _MISSING)
        self.found.append(Variable(holder, name, value))
        return name in _BUILTINS if value is _MISSING else self.reads(value, is_kept=True)

    def _function(self, function: FunctionType) -> bool:
        if id(function) in self._followed:
            return True
        self._followed.add(id(function))
        cells = function.__closure__ or ()
        try:
            held = [cell.cell_contents for cell in cells]
        except ValueError:  # a variable without a value
            return False
        self.found += map(Variable, cells, function.__code__.co_freevars, held)
        if not self.reads(tuple(held), is_kept=True):
            return False
        if is_of_library(function):
            return True
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        steps = [*_instructions(function.__code__)]
        names = {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}
        does_more = not _DOES_MORE.isdisjoint(step.opname for step in steps)
        return (
            not does_more
            and self.reads(defaults, is_kept=True)
            and all(self._variable(function.__globals__, name) for name in sorted(names))
        )


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of a function and of those inside it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)


def is_of_library(value: object) -> bool:
    """Whether a function or class is of this library."""
    return str(getattr(value, "__module__", "")).partition(".")[0] in _PACKAGES
