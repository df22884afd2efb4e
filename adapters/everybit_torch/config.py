"""Policies as plain data: dicts, JSON, TOML. Needs cattrs (``pip install everybit[cli]``).

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
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import cattrs
from cattrs.errors import ForbiddenExtraKeysError

import everybit as eb
from everybit.formats import Format

_FORMATS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(eb.ParamFormat)}


def policy_to_dict(policy: eb.Policy) -> dict[str, Any]:
    """A policy as nested dicts of strings and numbers; fields that hold None are left out, as TOML has no word for it."""
    data: dict[str, Any] = {"compute": policy.compute}
    for name in ("params", "momentum", "variance", "state"):
        data[name] = _format_to_dict(getattr(policy, name))
    if policy.slots:
        data["slots"] = {name: _format_to_dict(format) for name, format in policy.slots.items()}
    data["grads"] = {
        field.name: value for field in fields(policy.grads) if (value := getattr(policy.grads, field.name)) is not None
    }
    return data


def policy_from_dict(data: Mapping[str, Any]) -> eb.Policy:
    """A policy from what :func:`policy_to_dict` gives, or from a part of it: what is left out has its default.

    Raises:
        ValueError: A field that does not exist, or a value that it does not accept; the message names the field.
    """
    known = [field.name for field in fields(eb.Policy)]
    _require_known("Policy", data, known)
    arguments: dict[str, Any] = {}
    for name, value in data.items():
        if name == "slots":
            if not isinstance(value, Mapping):
                raise ValueError(f"Policy.slots: got {value!r}; accepted is a table of formats by slot name.")
            arguments[name] = {slot: _format_from(f"Policy.slots[{slot!r}]", format) for slot, format in value.items()}
        elif name == "grads":
            arguments[name] = _structure("Policy.grads", value, eb.Grads)
        elif name == "compute":
            arguments[name] = value
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
    parsers = {".toml": tomllib.loads, ".json": json.loads}
    if path.suffix not in parsers:
        raise ValueError(f"{path}: got a {path.suffix or 'nameless'} file; accepted are .toml and .json.")
    try:
        data = parsers[path.suffix](path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"got {type(data).__name__}; accepted is a table of a policy's fields.")
        return policy_from_dict(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def save_policy(policy: eb.Policy, path: str | Path) -> None:
    """Write a policy as JSON, to be read by :func:`load_policy`.

    Raises:
        ValueError: ``path`` does not end in ``.json``.
    """
    path = Path(path)
    if path.suffix != ".json":
        raise ValueError(
            f"{path}: got a {path.suffix or 'nameless'} file; accepted is .json (the standard library writes no TOML)."
        )
    path.write_text(json.dumps(policy_to_dict(policy), indent=2) + "\n", encoding="utf-8")


def _format_to_dict(format: Any) -> dict[str, Any]:
    data = {"format": type(format).__name__}
    data |= {field.name: value for field in fields(format) if (value := getattr(format, field.name)) is not None}
    return data


def _format_from(name: str, value: object) -> Format:
    if isinstance(value, str):
        value = {"format": value}
    if not isinstance(value, Mapping) or value.get("format") not in _FORMATS:
        raise ValueError(
            f"{name}: got {value!r}; accepted is a table with format = one of {', '.join(_FORMATS)}, or one of these names alone."
        )
    built: Format = _structure(name, {k: v for k, v in value.items() if k != "format"}, _FORMATS[value["format"]])
    return built


def _structure(name: str, value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: got {value!r}; accepted is a table with {', '.join(f.name for f in fields(kind))}.")
    _require_known(name, value, [field.name for field in fields(kind)])
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=False)
    try:
        return converter.structure(value, kind)
    except (ValueError, TypeError, ForbiddenExtraKeysError) as error:
        raise ValueError(f"{name}: {error}") from None
    except Exception as error:
        # cattrs says "'x' not in literal ..." with a bare Exception; the class itself says what it accepts.
        try:
            kind(**value)
        except (ValueError, TypeError) as better:
            raise ValueError(f"{name}: {better}") from None
        raise ValueError(f"{name}: {error}") from None


def _require_known(name: str, value: Mapping[str, Any], known: list[str]) -> None:
    unknown = [key for key in value if key not in known]
    if unknown:
        raise ValueError(f"{name}: no field is called {', '.join(map(repr, unknown))}; fields are {', '.join(known)}.")
