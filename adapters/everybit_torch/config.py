"""Policies as plain data: dicts, JSON, TOML.

A format is written as a table with its name under ``format``, every other key a field of its dataclass; a bare name stands for its
defaults::

    params   = { format = "Kahan", residual = "bfloat16", rounding = "stochastic" }
    momentum = { format = "Nearest", dtype = "bfloat16" }
    variance = "Stochastic"
    [grads]
    main = "float32"
"""

from __future__ import annotations

import json
import reprlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import everybit as eb
from everybit.formats import BUILT_IN, Format

_FORMATS: dict[str, type[Any]] = {kind.__name__: kind for kind in BUILT_IN}


def policy_to_dict(policy: eb.Policy) -> dict[str, Any]:
    """A policy as nested dicts of strings and numbers; fields that hold None are left out, as TOML has no word for it.

    Raises:
        ValueError: A field holds a format of the user's own, which no file can name.
    """
    data: dict[str, Any] = {"compute": policy.compute}
    for name in ("params", "momentum", "variance", "state"):
        data[name] = _format_to_dict(f"Policy.{name}", getattr(policy, name))
    if policy.slots:
        data["slots"] = {
            name: _format_to_dict(f"Policy.slots[{name!r}]", format) for name, format in policy.slots.items()
        }
    data["grads"] = {
        field.name: value for field in fields(policy.grads) if (value := getattr(policy.grads, field.name)) is not None
    }
    return data


def policy_from_dict(data: Mapping[str, Any]) -> eb.Policy:
    """A policy from what :func:`policy_to_dict` gives, or from a part of it: what is left out has its default.

    Raises:
        ValueError: No table, a field that does not exist, or a value that it does not accept, of whatever type; the message names the
            field.
    """
    known = [field.name for field in fields(eb.Policy)]
    _require_table("Policy", data, known)
    arguments: dict[str, Any] = {}
    for name, value in data.items():
        if name == "slots":
            if not isinstance(value, Mapping):
                raise ValueError(
                    f"Policy.slots: got {reprlib.repr(value)}; accepted is a table of formats by slot name."
                )
            for slot in value:
                if not isinstance(slot, str):
                    raise ValueError(f"Policy.slots: got {reprlib.repr(slot)} as a name; accepted are names of slots.")
            arguments[name] = {slot: _format_from(f"Policy.slots[{slot!r}]", format) for slot, format in value.items()}
        elif name == "grads":
            arguments[name] = _structure("Policy.grads", value, eb.Grads)
        elif name == "compute":
            arguments[name] = _member("Policy.compute", value, get_type_hints(eb.Policy)["compute"])
        else:
            arguments[name] = _format_from(f"Policy.{name}", value)
    try:
        return eb.Policy(**arguments)
    except TypeError as error:
        raise ValueError(str(error)) from None


def load_policy(path: str | Path) -> eb.Policy:
    """Read a policy from a ``.toml`` or ``.json`` file.

    Raises:
        ValueError: The file is of another kind, cannot be parsed, or holds no policy; the message names the file.
        OSError: The file cannot be read.
    """
    path = Path(path)
    parsers: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": _parse_json}
    if path.suffix not in parsers:
        raise ValueError(f"{path}: got a {path.suffix or 'nameless'} file; accepted are .toml and .json.")
    try:
        return policy_from_dict(parsers[path.suffix](path.read_text(encoding="utf-8")))
    except RecursionError:
        raise ValueError(f"{path}: is nested too deeply; accepted is a table of a policy's fields.") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _parse_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table, whose keys come once; TOML asks that by itself."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"{reprlib.repr(next(n for n in names if names.count(n) > 1))} comes twice in one table; accepted is once."
        )
    return table


def save_policy(policy: eb.Policy, path: str | Path) -> None:
    """Write a policy as JSON, to be read by :func:`load_policy`.

    Raises:
        ValueError: ``path`` does not end in ``.json``, or the policy has a format of the user's own, which no file can name.
    """
    path = Path(path)
    if path.suffix != ".json":
        raise ValueError(
            f"{path}: got a {path.suffix or 'nameless'} file; accepted is .json (the standard library writes no TOML)."
        )
    path.write_text(json.dumps(policy_to_dict(policy), indent=2) + "\n", encoding="utf-8")


def _format_to_dict(name: str, format: Any) -> dict[str, Any]:
    if type(format) not in BUILT_IN:
        raise ValueError(
            f"{name}: got {format!r}, a format of your own, which a file cannot name; accepted are {', '.join(_FORMATS)}. Keep a policy"
            " with formats of your own in code."
        )
    data = {"format": type(format).__name__}
    data |= {field.name: value for field in fields(format) if (value := getattr(format, field.name)) is not None}
    return data


def _format_from(name: str, value: object) -> Format:
    if isinstance(value, str):
        value = {"format": value}
    kind = value.get("format") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(kind, str) or kind not in _FORMATS:
        raise ValueError(
            f"{name}: got {reprlib.repr(value)}; accepted is a table with format = one of {', '.join(_FORMATS)}, or one of these names"
            " alone."
        )
    built: Format = _structure(name, {k: v for k, v in value.items() if k != "format"}, _FORMATS[kind])
    return built


def _structure(name: str, value: Any, kind: type[Any]) -> Any:
    """A dataclass whose fields are annotated with the values that they accept."""
    _require_table(name, value, [field.name for field in fields(kind)])
    hints = get_type_hints(kind)
    given = {key: _member(f"{name}: {kind.__name__}.{key}", one, hints[key]) for key, one in value.items()}
    try:
        return kind(**given)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from None


def _member(name: str, value: object, hint: Any) -> Any:
    """``value``, if a field with this annotation accepts it: a ``Literal``, perhaps with None."""
    accepted: list[Any] = []
    for one in (hint,) if get_origin(hint) is Literal else get_args(hint):
        accepted += [None] if one is NoneType else get_args(one)
    # By type too: 8.0 equals 8, and is none of its bits.
    if not any(type(value) is type(one) and value == one for one in accepted):
        raise ValueError(f"{name}: got {reprlib.repr(value)}; accepted are {', '.join(map(repr, accepted))}.")
    return value


def _require_table(name: str, value: Any, known: list[str]) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: got {reprlib.repr(value)}; accepted is a table with {', '.join(known)}.")
    unknown = [key for key in value if not isinstance(key, str) or key not in known]
    if unknown:
        raise ValueError(
            f"{name}: no field is called {', '.join(map(reprlib.repr, unknown[:3]))}; fields are {', '.join(known)}."
        )
