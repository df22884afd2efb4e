"""What all tests share."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from everybit_torch.segments import short
from everybit_torch.torch_internals import compiler

# The runner starts a process per core; tensors are small.
torch.set_num_threads(1)

# In the place of ten trial programs, for which every process would wait once.
compiler.trust_in_vectors()

# Compiling inside of a property takes as long as it takes; examples are the same on every machine.
settings.register_profile("everybit", deadline=None, derandomize=True)
settings.load_profile("everybit")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--quick``: of each test the first case alone."""
    parser.addoption("--quick", action="store_true", help="of each test run the first case alone")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test with ``@pytest.mark.sampled(n)`` run one of each n cases; the others are exhaustive.

    A hash of the place says which. A fixed stride would see one value alone of an argument with as many values.

    The tests of types come first: mypy takes 20 seconds for all of them, and at the end a second worker would take some and ask again.
    """
    items.sort(key=lambda item: item.path.parent.name != "typing")
    seen: Counter[tuple[Path, str]] = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None and item.get_closest_marker("exhaustive") is None:
            law = (item.path, getattr(item, "originalname", item.name))
            block, place = divmod(seen[law], sampled.args[0])
            drawn = (block * 0x9E3779B1 % (1 << 32) >> 20) % sampled.args[0]
            if place != drawn:
                item.add_marker(pytest.mark.exhaustive)
            seen[law] += 1
    if config.getoption("--quick"):
        kept = {(item.path, getattr(item, "originalname", item.name)): item for item in reversed(items)}.values()
        chosen = {id(item) for item in kept}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
        items[:] = [item for item in items if id(item) in chosen]


@pytest.fixture
def traced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled steps are traced as always, and then their graphs are run as they are; `make exhaustive` makes code of them.

    For tests of what is compiled, how often, and for which inputs: it takes a second to trace a step, and five more to make code of it.
    """
    if not request.config.getoption("markexpr").startswith("not exhaustive"):
        return
    monkeypatch.setattr(compiler, "compile_graph", lambda graph, inputs: graph)  # the function's names


@pytest.fixture
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether every parameter is stepped by itself; else short ones are stepped together. Tests parametrize it."""
    given: bool = request.param
    if given:
        monkeypatch.setattr(short, "SHORT", 0)
    return given


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave modules and tests, millions of objects, out of garbage collection, and collect less often: compilers make many objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
