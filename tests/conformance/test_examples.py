"""The programs in docs/examples that need other programs: each runs, and learns."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs/examples"

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "needed"),
    [("with_trainer", "transformers"), ("with_lightning", "lightning"), ("with_accelerate", "accelerate")],
)
def test_a_loop_of_another_program_learns(
    name: str, needed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(needed)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    losses = loaded(name).main(["--steps", "10"])
    assert losses[-1] < losses[0] - 0.1


def test_digits_are_recognized_as_in_float32() -> None:
    pytest.importorskip("sklearn")
    found = loaded("vision_digits").main(["--epochs", "3", "--policies", "FP32", "LEAN_BF16"])
    assert found["FP32"] > 0.8
    assert abs(found["LEAN_BF16"] - found["FP32"]) < 0.05
