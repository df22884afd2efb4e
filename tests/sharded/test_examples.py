"""The programs of the documentation: they run, the same model comes of each, and one that was killed goes on as if it had not been."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from everybit_torch import AdamW, latest_checkpoint
from tests.support.ranks import run

DOCS = Path(__file__).parents[2] / "docs"


def program(path: str) -> Any:
    """A program of the documentation, as a module."""
    file = DOCS / path
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(path: str, checkpoint: Path, same_optimizer: bool) -> list[float]:
    """The losses of one of the programs; with everybit's AdamW where it takes torch's, so that all of them have one optimizer."""
    before = torch.optim.AdamW
    if same_optimizer:
        torch.optim.AdamW = AdamW  # type: ignore[misc, assignment]
    try:
        losses: list[float] = program(path).train(4, str(checkpoint))
    finally:
        torch.optim.AdamW = before  # type: ignore[misc]
    return losses


@pytest.mark.slow
def test_the_same_program_for_three_systems_has_the_same_losses(tmp_path: Path) -> None:
    """Bit for bit: DDP and FSDP2 with torch's optimizer, and all three with the same one."""
    paths = {name: f"coming-from/with_{name}.py" for name in ("stepper", "fsdp2", "ddp")}
    mine = run(2, trained, paths["stepper"], tmp_path / "stepper", False)
    theirs = [run(2, trained, paths[name], tmp_path / name, False) for name in ("fsdp2", "ddp")]
    with_ours = [run(2, trained, paths[name], tmp_path / f"{name} again", True) for name in ("fsdp2", "ddp")]
    assert theirs[0] == theirs[1]
    assert with_ours == [mine, mine]
    for losses in (*mine, *theirs[0]):
        assert losses[-1] < losses[0]
    assert mine[0][0] == theirs[0][0][0]
    assert latest_checkpoint(tmp_path / "stepper").is_dir()
    assert (tmp_path / "fsdp2" / ".metadata").is_file()
    assert set(torch.load(tmp_path / "ddp", weights_only=True)) == {"model", "optimizer"}


def test_the_program_for_deepspeed_is_python() -> None:
    """DeepSpeed is not installed for the tests; the page says what came of running it by hand."""
    source = (DOCS / "coming-from/with_deepspeed.py").read_text()
    compile(source, "with_deepspeed.py", "exec")


def uninterrupted(out: Path, steps: int) -> None:
    program("examples/elastic.py").train(out, steps, 3)


def launched(size: int, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the example with ``torchrun``."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={size}",
        "--monitor-interval=0.1",
    ]
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [*command, str(DOCS / "examples/elastic.py"), f"--out={out}", "--steps=7", "--every=3", *arguments],
        capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip


@pytest.mark.parametrize(
    "resumed_on", [3, pytest.param(1, marks=pytest.mark.exhaustive), pytest.param(2, marks=pytest.mark.exhaustive)]
)
@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_with_other_ranks_and_the_same_losses(resumed_on: int, tmp_path: Path) -> None:
    """Bit for bit as one that was never interrupted, on two ranks."""
    run(2, uninterrupted, tmp_path / "whole", 7)
    expected = (tmp_path / "whole" / "losses.txt").read_text().split()
    killed = launched(2, tmp_path / "killed", "--die-at=5")
    assert killed.returncode != 0
    assert "Signal 9 (SIGKILL)" in killed.stderr, killed.stderr[-2000:]
    log = tmp_path / "killed" / "losses.txt"
    assert 3 <= len(log.read_text().split()) <= 5
    resumed = launched(resumed_on, tmp_path / "killed")
    assert resumed.returncode == 0, resumed.stderr[:6000]
    assert log.read_text().split() == expected
    assert len(expected) == 7
