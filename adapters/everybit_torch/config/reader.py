"""Frozen dataclasses from plain data and back, by their annotations: one description for reading, writing and JSON Schema.

An annotation may be: bool, int, float, str, a ``Literal``, a dataclass, a tuple, a sequence, a mapping from names, a union of these
with None, and the keys of ``kinds``: unions of dataclasses that a key of the table chooses among, and classes with named values.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from everybit.base import spelled

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TableChoice:
    """A union of dataclasses, of which a table's key chooses one; the name alone stands for its defaults.

    Attributes:
        key: The key.
        members: Dataclass by name.
        foreign: What to say of a value of another class, which no file can name.
    """

    key: str
    members: Mapping[str, type[Any]]
    foreign: str


@dataclass(frozen=True, slots=True)
class Named:
    """Values of which some have names, such as presets; the others are written as tables.

    Attributes:
        values: Values by name.
        tables: The dataclasses that a table may be: the first with a required field that the table has, else the last.
    """

    values: Mapping[str, Any]
    tables: tuple[type[Any], ...]


NONE = "none"
"""None in a file, where leaving a field out means something else."""

Kinds = Mapping[Any, "TableChoice | Named"]


class Reader:
    """Reads and writes dataclasses.

    Args:
        kinds: How annotations that are no plain dataclasses are written.
    """

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds

    # -- in --------------------------------------------------------------------------------------------------------------------------

    def read(self, kind: type[T], data: object, path: str) -> T:
        """A dataclass from a table.

        Args:
            kind: The dataclass.
            data: Nested mappings, lists, strings, numbers, bools and None.
            path: What messages call the table; empty for that of a file.

        Raises:
            ValueError: A field that there is not, or a value that is not accepted; the message begins with its dotted path.
        """
        found: T = self._value(kind, data, path)
        return found

    def read_as(self, hint: Any, data: object, path: str) -> Any:
        """Read any annotation, as :meth:`read` does."""
        return self._value(hint, data, path)

    def read_table(self, kind: type[T], data: object, path: str) -> T:
        """Read a table alone, where a name would do as well."""
        found: T = self._table(kind, data, path)
        return found

    def table_of(self, value: object, path: str) -> dict[str, Any]:
        """Write a table, where a name would do as well."""
        return self._fields(value, path)

    def special(self, hint: Any) -> TableChoice | Named | None:
        """How values with this annotation are written, if it is not as their class says; the classes of a union count together."""
        classes = [one for one in get_args(hint) if isinstance(one, type) and one is not NoneType]
        if get_origin(hint) not in (Union, UnionType):
            return self.kinds.get(hint) if isinstance(hint, type) else None
        return self.kinds.get(classes[0] if len(classes) == 1 else frozenset(classes))

    def _value(self, hint: Any, data: object, path: str) -> Any:
        if data is None and NoneType in get_args(hint):
            return None
        special = self.special(hint)
        if isinstance(special, TableChoice):
            return self._choice(special, data, path)
        if isinstance(special, Named):
            return self._named(special, data, path)
        if data == NONE and NoneType in get_args(hint):
            return None
        if dataclasses.is_dataclass(hint):
            return self._table(hint, data, path)
        origin = get_origin(hint)
        if origin in (Union, UnionType):
            return self._union(get_args(hint), data, path)
        if origin is Literal:
            return _member(get_args(hint), data, path)
        if origin is tuple:
            return self._tuple(get_args(hint), data, path)
        if origin is Sequence:
            return self._tuple((*get_args(hint), Ellipsis), data, path)
        if origin is not None and issubclass(origin, Mapping):
            if not isinstance(data, Mapping):
                raise _refusal(path, data, "a table of names")
            return {_name(key, path): self._value(get_args(hint)[1], one, join(path, key)) for key, one in data.items()}
        return _scalar(hint, data, path)

    def _table(self, kind: Any, data: object, path: str) -> Any:
        known = {field.name: field for field in fields(kind)}
        if not isinstance(data, Mapping):
            raise _refusal(path, data, f"a table with {', '.join(known)}")
        require_fields(kind, data, path)
        hints = _hints(kind)
        given = {key: self._value(hints[key], one, join(path, key)) for key, one in data.items()}
        absent = [name for name, field in known.items() if name not in given and not _has_default(field)]
        if absent:
            raise ValueError(f"{join(path, absent[0])}: got nothing; accepted is {accepted_of(hints[absent[0]])}.")
        return made(kind, given, path)

    def _choice(self, choice: TableChoice, data: object, path: str) -> Any:
        table = {choice.key: data} if isinstance(data, str) else data
        name = table.get(choice.key) if isinstance(table, Mapping) else None
        if not isinstance(table, Mapping) or not isinstance(name, str) or name not in choice.members:
            listed = ", ".join(choice.members)
            raise _refusal(
                path, data, f"a table with {choice.key} = one of {listed}, or one of these names alone", meant=_meant(name, choice.members)
            )  # fmt: skip
        return self._table(choice.members[name], {k: v for k, v in table.items() if k != choice.key}, path)

    def _named(self, named: Named, data: object, path: str) -> Any:
        if isinstance(data, Mapping):
            *others, last = named.tables
            for kind in others:
                if any(not _has_default(field) and field.name in data for field in fields(kind)):
                    return self._table(kind, data, path)
            return self._table(last, data, path)
        if not isinstance(data, str) or data not in named.values:
            raise _refusal(
                path, data, f"a table, or one of {', '.join(named.values)}", meant=_meant(data, named.values)
            )
        return named.values[data]

    def _union(self, hints: tuple[Any, ...], data: object, path: str) -> Any:
        hints = tuple(hint for hint in hints if hint is not NoneType)
        if len(hints) == 1:
            return self._value(hints[0], data, path)
        for hint in hints:
            try:
                return self._value(hint, data, path)
            except ValueError:
                pass
        raise _refusal(path, data, " or ".join(map(accepted_of, hints)))

    def _tuple(self, hints: tuple[Any, ...], data: object, path: str) -> tuple[Any, ...]:
        if not isinstance(data, (list, tuple)):
            raise _refusal(path, data, "a list")
        if hints[-1] is Ellipsis:
            hints = (hints[0],) * len(data)
        if len(hints) != len(data):
            raise _refusal(path, data, f"a list of {len(hints)}")
        return tuple(
            self._value(hint, one, f"{path}[{number}]")
            for number, (hint, one) in enumerate(zip(hints, data, strict=True))
        )

    # -- out -------------------------------------------------------------------------------------------------------------------------

    def write(self, value: Any, path: str) -> Any:
        """Return data that :meth:`read` reads back.

        TOML has no None. So a field with None is left out, or has the text "none" where None is not its default.

        Raises:
            ValueError: A value of a class that no file can name.
        """
        hint = type(value)
        return self._plain(hint, value, path)

    def _plain(self, hint: Any, value: Any, path: str) -> Any:
        special = self.special(hint)
        if isinstance(special, TableChoice):
            name = next((name for name, kind in special.members.items() if kind is type(value)), None)
            if name is None:
                raise ValueError(f"{path}: got {value!r}, {special.foreign}")
            return {special.key: name, **self._fields(value, path)}
        if isinstance(special, Named):
            preset = next((name for name, one in special.values.items() if one == value), None)
            return preset if preset is not None else self._fields(value, path)
        if dataclasses.is_dataclass(value):
            return self._fields(value, path)
        if isinstance(value, tuple):
            hints = get_args(hint) or (Any,)
            return [
                NONE if one is None else self._plain(hints[0], one, f"{path}[{number}]")
                for number, one in enumerate(value)
            ]
        if isinstance(value, Mapping):
            return {key: self._plain(get_args(hint)[1], one, join(path, key)) for key, one in value.items()}
        return value

    def _fields(self, value: Any, path: str) -> dict[str, Any]:
        kind: Any = type(value)
        hints = _hints(kind)
        found: dict[str, Any] = {}
        for field in fields(kind):
            one = getattr(value, field.name)
            if not is_empty(one):
                found[field.name] = self._plain(hints[field.name], one, join(path, field.name))
            elif one is None and field.default is not None:
                found[field.name] = NONE
        return found


def require_fields(kind: Any, given: Iterable[object], path: str, error: type[Exception] = ValueError) -> None:
    """Refuse a name that is no field. The error proposes a field with a similar name."""
    known = [field.name for field in fields(kind)]
    for key in given:
        if key not in known:
            other = getattr(kind, "meant", {}).get(key)  # a field that goes by another name elsewhere
            meant = f" (did you mean {other!r}?)" if other in known else _meant(key, known)
            raise error(f"{join(path, key)}: there is no such field{meant}; fields are {', '.join(known)}.")


def is_empty(value: object) -> bool:
    """Whether a field's value is that of a missing field: None, or an empty mapping."""
    return value is None or (isinstance(value, Mapping) and not value)


def fields(kind: Any) -> list[Field[Any]]:
    """The fields that a file may have: not those that only Python can say, such as functions."""
    return [field for field in dataclasses.fields(kind) if field.init and field.metadata.get("in_files", True)]


def meanings(docstring: str) -> dict[str, str]:
    """The descriptions of arguments in a docstring, by name."""
    arguments = re.search(r"^Args:\n((?:    .*\n?|\n)+)", inspect.cleandoc(docstring), re.MULTILINE)
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", arguments[1] if arguments else "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def made(kind: Callable[..., T], given: Mapping[str, Any], path: str) -> T:
    """An instance; what its class says against the values is said of their paths.

    Raises:
        ValueError: An error that the class raises.
    """
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        name = getattr(kind, "__name__", "")
        text = re.sub(rf"^{name}\.", "", str(error))
        known = {field.name for field in fields(kind)}
        is_field = re.match(r"\w+", text)
        separator = "." if is_field is not None and is_field[0] in known and path else (": " if path else "")
        raise ValueError(f"{path}{separator}{text}") from None


def join(path: str, key: object) -> str:
    """The path of a table's key."""
    name = key if isinstance(key, str) and len(key) < 100 and key.isprintable() and key else reprlib.repr(key)
    return f"{path}.{name}" if path else name


def accepted_of(hint: Any) -> str:
    """Describe the values that an annotation accepts, in a few words."""
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    return names.get(hint, "a list" if get_origin(hint) in (tuple, Sequence) else "a table")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _member(values: tuple[Any, ...], data: object, path: str) -> Any:
    own = spelled(data)
    if own is not data and own in values:
        return own  # a dtype by another name
    # By type too: 8.0 equals 8, but is no accepted number of bits.
    if not any(type(data) is type(one) and data == one for one in values):
        meant = _meant(data, [one for one in values if isinstance(one, str)], cutoff=0.82)  # bfloat16 is not float64
        raise _refusal(path, data, ", ".join(map(repr, values)), meant=meant)
    return data


def _scalar(hint: Any, data: object, path: str) -> Any:
    if hint is float and type(data) is int and abs(data) < 2**53:
        return float(data)
    if type(data) is not hint:
        raise _refusal(path, data, accepted_of(hint))
    return data


def _name(key: object, path: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{path or 'table'}: got {reprlib.repr(key)} as a name; accepted are strings.")
    return key


def _meant(given: object, known: Iterable[str], cutoff: float = 0.7) -> str:
    close = difflib.get_close_matches(given[:100], list(known), n=1, cutoff=cutoff) if isinstance(given, str) else []
    return f" (did you mean {close[0]!r}?)" if close else ""


def _refusal(path: str, data: object, accepted: str, *, meant: str = "") -> ValueError:
    return ValueError(f"{path or 'configuration'}: got {reprlib.repr(data)}{meant}; accepted is {accepted}.")
