"""Files of plain data: TOML, JSON and YAML, by a path's suffix."""

from __future__ import annotations

import json
import re
import reprlib
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

SUFFIXES = (".toml", ".json", ".yaml", ".yml")


def parsed(path: str | Path, read: Callable[[Any], Any]) -> Any:
    """What ``read`` makes of a file's data.

    Raises:
        ValueError: The file is of another kind, cannot be parsed, or is refused by ``read``; the message begins with the path.
        OSError: The file cannot be read.
        ModuleNotFoundError: A YAML file, without PyYAML.
    """
    path = Path(path)
    parser = _require(path, _PARSERS)
    try:
        return read(parser(path.read_text(encoding="utf-8")))
    except RecursionError:
        raise ValueError(f"{path}: is nested too deeply; accepted is a table of fields.") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def written(path: str | Path, data: dict[str, Any]) -> None:
    """Write data to a file.

    Raises:
        ValueError: The path has another suffix.
        ModuleNotFoundError: A YAML file without PyYAML, or a TOML file without tomli-w.
    """
    path = Path(path)
    path.write_text(_require(path, _WRITERS)(data), encoding="utf-8")


def _require(path: Path, known: dict[str, Callable[[Any], Any]]) -> Callable[[Any], Any]:
    if path.suffix not in known:
        raise ValueError(f"{path}: got a {path.suffix or 'nameless'} file; accepted are {', '.join(known)}.")
    return known[path.suffix]


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a table, and refuse a key that comes twice, as TOML does."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(n for n in names if names.count(n) > 1)
        raise ValueError(f"{reprlib.repr(twice)} comes twice in one table; accepted is once.")
    return table


def _imported(name: str, needed: str, package: str) -> Any:
    """Import a module of a package that only some files need."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{needed}: pip install {package}.", name=name) from error


def _pyyaml() -> Any:
    return _imported("yaml", "YAML needs PyYAML", "pyyaml")


def _yaml(text: str) -> Any:
    yaml = _pyyaml()

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        """A SafeLoader that refuses keys that come twice, and reads 3e-4 as a number, as YAML 1.2 does."""

    def table(loader: Any, node: Any) -> dict[str, Any]:
        return _once(loader.construct_pairs(node, deep=True))

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, table)
    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), "-+0123456789"
    )
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, TypeError) as error:  # TypeError: a table as a key
        raise ValueError(" ".join(str(error).split())) from None


def _as_json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"


def _as_yaml(data: dict[str, Any]) -> str:
    text: str = _pyyaml().safe_dump(data, sort_keys=False)
    return text


def _as_toml(data: dict[str, Any]) -> str:
    text: str = _imported("tomli_w", "writing TOML needs tomli-w", "tomli-w").dumps(data)
    return text


_PARSERS: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": _json, ".yaml": _yaml, ".yml": _yaml}
_WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
    ".toml": _as_toml,
    ".json": _as_json,
    ".yaml": _as_yaml,
    ".yml": _as_yaml,
}
