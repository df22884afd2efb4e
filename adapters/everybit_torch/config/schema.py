"""JSON Schema of configuration files, for editors and other programs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from everybit_torch.config.reader import NONE, Named, Reader, TableChoice, fields, is_empty, meanings

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schema_of(kind: type[Any], reader: Reader) -> dict[str, Any]:
    """A JSON Schema (draft 2020-12) that accepts what ``reader`` reads as ``kind``, but for what values say of each other."""
    definitions: dict[str, Any] = {}

    def one(hint: Any, *, none: bool = False) -> dict[str, Any]:
        """Return the schema of a value; ``none``: None has to be written, since leaving the value out means something else."""
        special = reader.special(hint)
        if isinstance(special, TableChoice):
            return {
                "anyOf": [
                    {"enum": list(special.members)},
                    *(member(special.key, name, of) for name, of in special.members.items()),
                ]
            }
        if isinstance(special, Named):
            return {"anyOf": [{"enum": list(special.values)}, *map(reference, special.tables)]}
        if dataclasses.is_dataclass(hint):
            return reference(hint)
        origin, inner = get_origin(hint), get_args(hint)
        if origin in (Union, UnionType):
            found = [one(each) for each in inner if each is not NoneType]
            found += [{"const": NONE}] if none and NoneType in inner else []
            return found[0] if len(found) == 1 else {"anyOf": found}
        if origin is Literal:
            return {"enum": list(inner)}
        if origin is Sequence or (origin is tuple and inner[-1] is Ellipsis):
            return {"type": "array", "items": one(inner[0])}
        if origin is tuple:
            return {
                "type": "array",
                "prefixItems": [one(each, none=True) for each in inner],
                "minItems": len(inner),
                "maxItems": len(inner),
            }
        if origin is not None and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": one(inner[1])}
        return {"type": {bool: "boolean", int: "integer", float: "number", str: "string"}[hint]}

    def reference(of: Any) -> dict[str, Any]:
        if of.__name__ not in definitions:
            definitions[of.__name__] = {}  # first, for a class that has itself as a field
            definitions[of.__name__] = table(of)
        return {"$ref": f"#/$defs/{of.__name__}"}

    def member(key: str, name: str, of: Any) -> dict[str, Any]:
        found = table(of)
        found["properties"] = {key: {"const": name}, **found["properties"]}
        found["required"] = [key, *found.get("required", [])]
        return found

    def table(of: Any) -> dict[str, Any]:
        hints, meanings = get_type_hints(of), _meanings(of)
        properties: dict[str, Any] = {}
        required: list[str] = []
        for field in fields(of):
            properties[field.name] = one(hints[field.name], none=field.default is not None)
            if field.name in meanings:
                properties[field.name]["description"] = meanings[field.name]
            if field.default is not MISSING:
                if not is_empty(field.default):
                    properties[field.name]["default"] = reader.write(field.default, field.name)
            elif field.default_factory is MISSING:
                required.append(field.name)
        found: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
        return found | ({"required": required} if required else {})

    return {"$schema": DRAFT, "title": kind.__name__, **table(kind), "$defs": definitions}


def _meanings(kind: type[Any]) -> dict[str, str]:
    """The descriptions of fields in the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        found |= meanings(one.__dict__.get("__doc__") or "")
    return {name: re.sub(r":\w+:`~?(.*?)`", r"\1", text).replace("``", "") for name, text in found.items()}
