"""Examples in docstrings and in the guide run, and say what they print."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

import everybit
import everybit_torch

# Their import is what they are for; tests/conformance imports them where these programs are installed.
FOR_OTHER_PROGRAMS = {"everybit_torch.names.trainer", "everybit_torch.names.timm"}
MODULES = sorted(
    module.name
    for package in (everybit, everybit_torch)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    if not module.name.endswith("__main__") and module.name not in FOR_OTHER_PROGRAMS
)
WITH_EXAMPLES = {
    "everybit.optimizer",
    "everybit.metrics",
    "everybit.combinators.chain",
    "everybit_torch.drop_ins",
    "everybit_torch.gradient_release",
}


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_do_what_they_say(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert result.attempted > 0 or name not in WITH_EXAMPLES


def test_the_transform_of_the_guide_keeps_every_promise_that_needs_no_compiler() -> None:
    guide = (Path(__file__).parents[2] / "docs/transforms.md").read_text(encoding="utf-8")
    program = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(compile(program, "docs/transforms.md", "exec", dont_inherit=True), names)
    build = lambda rate: everybit.chain(names["ScaleBySignum"](0.95), everybit.scale_by_learning_rate(rate))  # noqa: E731
    from everybit import testing

    checks = [
        testing.check_pure,
        testing.check_state_is_a_fixed_point,
        testing.check_vmap,
        testing.check_cut,
        testing.check_meta_init,
    ]
    for check in checks:
        check(build)
    assert names["opt"].cut == "element"


def test_the_page_about_checkpoints_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    program = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    exec(compile(program, "docs/checkpoints.md", "exec", dont_inherit=True), {})
    assert {path.name for path in tmp_path.iterdir()} == {"run.pt", "model.safetensors", "checkpoints"}


def test_the_blocks_of_the_readme_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a newcomer pastes them; each may use what the ones before it made."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(blocks) == 4
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"README.md, block {number}", "exec", dont_inherit=True), names)
    assert names["loss"].item() < 0.1
    assert not names["report"].skipped
    assert (tmp_path / "run.pt").is_file()
    printed = capsys.readouterr().out
    assert "'parameter': 2.0, 'compensation': 2.0, 'gradient': 2.0" in printed


def test_the_tutorial_about_one_line_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs/tutorials/swap_one_line.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page, re.DOTALL), 1):
        exec(compile(block, f"docs/tutorials/swap_one_line.md, block {number}", "exec", dont_inherit=True), names)
    # Its claims: most updates are lost, and the policy is nearer to float32 than plain bfloat16 is.
    last = names["audits"][0].layers[-8:]
    elements = sum(layer.elements for layer in last)
    assert sum(layer.lost_share * layer.elements for layer in last) > 0.5 * elements
    assert abs(names["lean_loss"] - names["float32_loss"]) < abs(names["plain_loss"] - names["float32_loss"]) / 4
    assert "LEAN_BF16" in capsys.readouterr().out
