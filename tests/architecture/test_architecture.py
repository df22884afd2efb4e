"""The page about the architecture says what is so: its floors are the import contracts', and its names exist."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
CONTRACTS: dict[str, list[str]] = {
    contract["containers"][0]: contract["layers"]
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    if "containers" in contract
}
SHOWN = ("everybit_torch", "everybit_torch.sharded")


def table(layers: list[str]) -> str:
    """The floors of one package, the highest first, as Markdown."""
    rows = [
        f"| {len(layers) - number} | {', '.join(f'`{name.strip()}`' for name in layer.split('|'))} |"
        for number, layer in enumerate(layers)
    ]
    return "\n".join(["| Floor | Modules |", "|---|---|", *rows])


@pytest.mark.parametrize("package", SHOWN)
def test_the_floors_on_the_page_are_those_of_the_import_contract(package: str) -> None:
    (shown,) = re.findall(rf"<!-- floors of {re.escape(package)} -->\n(.*?)\n\n", PAGE, re.DOTALL)
    assert shown == table(CONTRACTS[package]), f"it has to be:\n{table(CONTRACTS[package])}"


def test_every_package_with_several_modules_has_floors_that_name_all_of_them() -> None:
    root = ROOT / "adapters"
    packages = {
        ".".join(folder.parent.relative_to(root).parts)
        for folder in root.rglob("__init__.py")
        if len(list(folder.parent.glob("*.py"))) > 1
    }
    assert set(CONTRACTS) == packages
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    exhaustive: list[Any] = [
        contract.get("exhaustive")
        for contract in config["tool"]["importlinter"]["contracts"]
        if "containers" in contract
    ]
    assert all(exhaustive)


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
