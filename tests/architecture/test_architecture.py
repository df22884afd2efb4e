"""The core's rooms are as the architecture page shows them, small enough to be read, and its names exist."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.broken import FAULTS
from tests.support.modules import module_at

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core"
rooms = module_at(ROOT / "docs/rooms.py")
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def test_the_picture_of_the_rooms_shows_their_imports() -> None:
    assert rooms.PICTURE.read_text(encoding="utf-8") == rooms.picture(), "python docs/rooms.py draws it anew"


def test_the_page_has_a_paragraph_for_each_room() -> None:
    assert set(re.findall(r"^\*\*`(\w+)`\*\*", PAGE, re.MULTILINE)) == set(rooms.imports())


def test_an_import_path_in_the_core_is_at_most_ten_rooms_and_modules_long() -> None:
    """A path goes through modules of one room, and then from room to room: a room's face is what is imported of it."""
    below = rooms.depths(rooms.imports())
    modules = {".".join(path.relative_to(CORE).with_suffix("").parts): path for path in CORE.glob("everybit/*/**/*.py")}

    def imported(name: str) -> set[str]:
        tree = ast.parse(modules[name].read_text(encoding="utf-8"))
        found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        return {node.module or "" for node in found} | {
            f"{node.module}.{one.name}" for node in found for one in node.names
        }

    @cache
    def length(name: str) -> int:
        """Modules of the room of ``name``, and then rooms, on the longest path down from it."""
        others = {other for other in imported(name) if other.startswith("everybit.")} - {name}
        room = rooms.room_of(name)
        inside = [length(other) for other in others if rooms.room_of(other) == room and other in modules]
        outside = [below[rooms.room_of(other)] for other in others if rooms.room_of(other) != room]
        return 1 + max([*inside, *outside], default=0)

    longest = max((name for name in modules if not name.endswith("__init__")), key=length)
    assert length(longest) <= 10, longest


def test_an_import_path_in_the_torch_package_is_at_most_twelve_modules_long() -> None:
    """What is imported of a room's face does not count: a reader need not go on there."""
    root = ROOT / "adapters"
    paths = {
        ".".join(path.relative_to(root).with_suffix("").parts): path for path in root.glob("everybit_torch/**/*.py")
    }
    modules = {
        name: ast.parse(path.read_text(encoding="utf-8")) for name, path in paths.items() if "__init__" not in name
    }

    @cache
    def path_from(name: str) -> tuple[str, ...]:
        found = [node for node in ast.walk(modules[name]) if isinstance(node, ast.ImportFrom)]
        others = {node.module or "" for node in found} | {
            f"{node.module}.{one.name}" for node in found for one in node.names
        }
        return (name, *max((path_from(other) for other in others & modules.keys() - {name}), key=len, default=()))

    longest = max(map(path_from, modules), key=len)
    assert len(longest) <= 12, longest


def test_a_folder_of_the_core_has_at_most_twenty_modules() -> None:
    """But for ``transforms``: one module for each."""
    for folder in [path.parent for path in CORE.glob("everybit/**/__init__.py")]:
        assert len(list(folder.glob("*.py"))) <= 20 + 1 or folder.name == "transforms", folder


@pytest.mark.parametrize("name", ["everybit", "everybit.policies", "everybit.protocol", "everybit_torch"])
def test_public_names_are_what_dir_shows(name: str) -> None:
    face = importlib.import_module(name)
    assert sorted(face.__all__) == [one for one in dir(face) if not one.startswith("_")]
    assert all(hasattr(face, one) for one in face.__all__)


def test_the_modules_classes_and_functions_of_the_walk_exist() -> None:
    walk = PAGE[PAGE.index("## A gradient's way") :]
    names = re.findall(r"`([a-z]\w*(?:\.\w+)+)`", walk)
    assert len(names) > 10
    for name in names:
        found = resolved(name)
        assert found is not None, (
            f"docs/architecture.md: got {name}; accepted are names below everybit_torch or everybit."
        )


def resolved(name: str) -> Any:
    """What `a.b.C.d` is, below one of the packages; None if there is no such thing."""
    for package in ("everybit_torch", "everybit"):
        parts = [package, *name.removeprefix(package + ".").split(".")]
        for end in range(len(parts), 0, -1):
            try:
                found: Any = importlib.import_module(".".join(parts[:end]))
            except ModuleNotFoundError:
                continue
            for part in parts[end:]:
                found = getattr(found, part, None)
            if found is not None:
                return found
    return None


def test_every_seeded_fault_is_a_line_of_the_library_and_has_tests() -> None:
    """``make mutants`` runs them; a line that has changed needs its fault changed."""
    assert len({fault.broken() for fault in FAULTS}) == len(FAULTS) >= 60
    assert all((ROOT / "tests" / fault.law.partition("::")[0]).exists() for fault in FAULTS)


def test_a_type_name_stands_for_one_thing_in_both_packages() -> None:
    """But for the gate of two programs, which is one class for each of them."""
    found: dict[str, set[str]] = {}
    for path in [*CORE.rglob("*.py"), *(ROOT / "adapters/everybit_torch").rglob("*.py")]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            names = [one.id for one in targets if isinstance(one, ast.Name) and re.match("_?[A-Z]+[a-z]", one.id)]
            variable = isinstance(getattr(node, "value", None), ast.Call) and ast.unparse(node).partition("(")[
                0
            ].endswith("TypeVar")
            for name in [node.name] if isinstance(node, ast.ClassDef) else [] if variable else names:
                found.setdefault(name.strip("_"), set()).add(str(path.relative_to(ROOT)))
    twice = {name: sorted(paths) for name, paths in found.items() if len(paths) > 1}
    assert set(twice) == {"PrecisionGate"}, twice


def test_a_module_name_stands_for_one_thing_in_both_packages() -> None:
    """Modules of one name are about one algorithm: its transform, its optimizer, and its drop-in."""
    found: dict[str, set[str]] = {}
    for path in [*CORE.rglob("*.py"), *(ROOT / "adapters/everybit_torch").rglob("*.py")]:
        if path.stem != "__init__":
            found.setdefault(path.stem, set()).add(path.parent.name)
    twice = {name: rooms for name, rooms in found.items() if len(rooms) > 1}
    assert set(twice) == {"adam", "adam_variants", "momentum"}, twice
    assert set().union(*twice.values()) == {"transforms", "optimizers", "drop_ins"}
