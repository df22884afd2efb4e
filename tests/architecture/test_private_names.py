"""What a module's names with an underscore mean is that module's own business: no other module of the adapters uses them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "adapters/everybit_torch"

# Of Python and torch, outside of `torch_internals`, which is where private interfaces of torch are used.
OF_OTHERS = {
    ("collectives/communicator.py", "_device_types"),
    ("checkpoint/shard_tensor.py", "_to_copy"),  # an operator of ATen
    ("notices.py", "_getframe"),
    # Of transformers and of the enum of its names, which has no public way to add one.
    ("names/trainer.py", "_OPTIMIZER_HANDLERS"),
    ("names/trainer.py", "_value2member_map_"),
    ("names/trainer.py", "_member_map_"),
    ("names/trainer.py", "_member_names_"),
    ("names/trainer.py", "_name_"),
    ("names/trainer.py", "_value_"),
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(module: ast.Module) -> set[str]:
    """The private names that a module defines: of functions, classes, variables, and attributes of its own objects."""
    found: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # of __slots__
    return {name for name in found if is_private(name)}


def uses(source: str) -> Iterator[tuple[int, str]]:
    """The private names of other modules that a module uses, with their lines."""
    module = ast.parse(source)
    own = own_names(module)
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("everybit"):
            yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))


@pytest.mark.parametrize(
    "source",
    [
        "from everybit_torch.optimizer import _number",
        "def cut(optimizer):\n    return optimizer._units",
        "class A:\n    def f(self, other):\n        self.x = 1\n        other.inner._y = 2",
    ],
)
def test_a_private_name_of_another_module_is_found(source: str) -> None:
    assert len(list(uses(source))) == 1


def test_no_module_uses_private_names_of_another() -> None:
    found = [
        (path.relative_to(ROOT).as_posix(), line, name)
        for path in ROOT.rglob("*.py")
        if path.relative_to(ROOT).parts[0] != "torch_internals"
        for line, name in uses(path.read_text(encoding="utf-8"))
    ]
    assert [one for one in found if (one[0], one[2]) not in OF_OTHERS] == []
    assert {(path, name) for path, _, name in found} == OF_OTHERS
