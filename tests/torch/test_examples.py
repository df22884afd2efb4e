"""The programs in docs/examples that need torch alone: each runs, and shows what it says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from everybit_torch import latest_checkpoint

EXAMPLES = Path(__file__).parents[2] / "docs/examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load a program by name; modules and paths that it brings go with the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "language_model", raising=False)
    monkeypatch.delenv("RANK", raising=False)

    def load(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_the_loop_in_the_style_of_nanogpt_learns(example: Any) -> None:
    losses = example("nanogpt").main(["--steps", "8", "--batch", "4"])
    assert losses[-1] < losses[0] - 0.5


def test_adapters_in_bfloat16_follow_float32_under_a_policy_and_not_without(example: Any) -> None:
    left = example("lora").main(["--steps", "150", "--lr", "2e-4"])
    assert abs(left["LEAN_BF16"] - left["FP32"]) < 0.02
    assert left["PURE_BF16"] > left["FP32"] + 0.05


@pytest.mark.slow
def test_an_agent_in_bfloat16_learns_under_a_policy_and_not_without(example: Any) -> None:
    found = example("reinforcement").main(["--updates", "100", "--policies", "LEAN_BF16", "PURE_BF16"])
    assert found["LEAN_BF16"] > 1.5 * found["PURE_BF16"]


@pytest.mark.parametrize("policy", ["FP32", "LEAN_BF16"])
def test_a_population_has_the_bits_of_its_members_alone(policy: str, example: Any) -> None:
    losses = example("population").main(["--steps", "15", "--check", "2", "--policy", policy])
    assert len(losses) == 32
    assert min(losses.values()) < 0.1 * losses[min(losses)]


def test_the_sharded_programs_learn_in_one_process(example: Any, tmp_path: Path) -> None:
    for name, arguments in (("sharded_fsdp2", []), ("sharded_stepper", ["--out", str(tmp_path)])):
        losses = example(name).main(["--steps", "5", *arguments])
        assert losses[-1] < losses[0] - 0.5, name
    assert latest_checkpoint(tmp_path).is_dir()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_a_program_is_listed_and_fits_on_one_page(path: Path) -> None:
    assert f"[{path.name}]({path.name})" in (EXAMPLES / "README.md").read_text()
    source = path.read_text()
    assert len(source.splitlines()) <= 120
    assert "argparse" in source
    assert 'if __name__ == "__main__":' in source


@pytest.mark.parametrize("name", ["nanogpt", "lora", "population", "reinforcement", "sharded_fsdp2", "sharded_stepper"])
def test_a_program_explains_its_options(name: str, example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        example(name).main(["--help"])
    assert f"docs/examples/{name}.py" in capsys.readouterr().out
