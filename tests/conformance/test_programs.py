"""Other people's programs take these optimizers by what is in the room ``names``; each part of a program runs in a process of its own.

``make conformance`` installs the programs into a folder beside the environment, without what they depend on, since their pins exclude
each other. A script stands in for packages that its part of the program imports and does not use.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "programs"
INSTALLED = Path(sys.prefix) / "programs"
SCRIPTS = {
    "axolotl_plugin": "axolotl",
    "le_robot": "lerobot",
    "lit_gpt": "litgpt",
    "ms_swift": "ms-swift",
    "nemo_auto_model": "nemo-automodel",
    "torch_titan": "torchtitan",
    "verl_fsdp": "verl",
}


def completed(*command: str, folder: Path | None = None) -> str:
    """Run Python in the folder of the scripts, and return what it printed."""
    path = os.pathsep.join([str(HERE), str(INSTALLED)])
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def require_installed(program: str) -> None:
    if program not in {found.name.replace("_", "-") for found in distributions(path=[str(INSTALLED)])}:
        pytest.skip(f"{program} is not installed in {INSTALLED}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_program_takes_the_optimizer(script: str) -> None:
    require_installed(SCRIPTS[script])
    completed(str(HERE / f"{script}.py"))


@pytest.mark.parametrize("ranks", [0, 3])
def test_verl_finds_the_changes_that_the_optimizer_names(ranks: int) -> None:
    """Nine runs, compared after each sync with what verl's own snapshot finds; 0 ranks: without FSDP2."""
    require_installed("verl")
    found = completed(str(HERE / "verl_delta.py"), str(ranks))
    assert found.count("of the elements changed in a sync") == 9


def test_trl_trains_from_its_command_line() -> None:
    pytest.importorskip("trl")
    assert "'loss'" in completed(str(HERE / "trl_sft.py"))


def test_kohyas_scripts_take_a_dotted_name() -> None:
    """sd-scripts is not on PyPI: what ``library/train_util.py`` does with its arguments, at 48d368f, lines 4862 and 5119 to 5134."""
    sys.path.insert(0, str(HERE))
    small = import_module("small")
    optimizer_type, optimizer_args = "everybit_torch.AdamW", ["policy='LEAN_BF16'", "betas=(0.9, 0.95)"]
    values = {key: ast.literal_eval(value) for key, value in (one.split("=", 1) for one in optimizer_args)}
    *module, kind = optimizer_type.split(".")
    model = small.model()
    optimizer = getattr(import_module(".".join(module)), kind)(model.parameters(), lr=1e-2, **values)
    small.require_policy(optimizer)
    small.train(model, optimizer)


@pytest.mark.parametrize("given", [(), ("trainer",), ("nobody", "script.py"), ("trainer", "-m")])
def test_the_launcher_names_what_it_accepts(given: tuple[str, ...]) -> None:
    run = import_module("everybit_torch.names.run").run
    with pytest.raises(
        SystemExit, match=r"run: got .*; accepted is lightning, timm, trainer, then script\.py or -m module"
    ):
        run(list(given))


def test_the_launcher_runs_a_script_as_python_does(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 7\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside\nfrom transformers.training_args import OptimizerNames\n"
        "print(__name__, sys.argv[1:], beside.value, OptimizerNames('everybit_adamw').value)\n"
    )
    pytest.importorskip("transformers")
    found = completed("-m", "everybit_torch.names.run", "trainer", str(script), "--flag", "x")
    assert found.strip() == "__main__ ['--flag', 'x'] 7 everybit_adamw"


def test_the_tutorial_on_transformers_shows_what_it_says(tmp_path: Path) -> None:
    """Plain bfloat16 stays far above float32, `LEAN_BF16` does not; the distances on the page are 0.436 and 0.000."""
    pytest.importorskip("transformers")
    page = (Path(__file__).parents[2] / "docs/tutorials/transformers_in_bf16.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join(blocks) + "\nprint('losses', float32[-1], plain[-1], lean[-1])\n", encoding="utf-8")
    printed = completed(str(script), folder=tmp_path)
    assert "Step 50: Updates are lost: " in printed
    assert "Step 50: Nothing is lost" in printed
    found = re.search(r"losses (\S+) (\S+) (\S+)", printed)
    assert found is not None
    float32, plain, lean = map(float, found.groups())
    assert plain - float32 > 0.2
    assert abs(lean - float32) < 0.02
    assert (tmp_path / "transformers.png").exists()
