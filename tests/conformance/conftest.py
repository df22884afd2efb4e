"""Programs of others, offline and on small machines."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what takes longest first: programs in processes of their own, and pyright."""
    items.sort(key=lambda item: item.path.name not in ("test_programs.py", "test_pyright.py"))


@pytest.fixture
def noted(record_testsuite_property: Callable[[str, object], None]) -> Callable[[str, str, float], None]:
    """Note the largest deviation from an oracle; ``--junitxml`` writes it, and ``benchmarks/vocabulary.py`` makes a table of it."""
    return lambda oracle, name, apart: record_testsuite_property(f"{name}; {oracle}", apart)
