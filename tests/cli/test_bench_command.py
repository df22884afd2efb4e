"""``everybit bench``: torch's steps and ours in turn, with the bytes that each keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from everybit_torch import cli
from everybit_torch.cli.errors import BAD_OPTION


def frozen_model() -> nn.Module:
    """For --model: nothing to train."""
    return nn.Linear(2, 2).requires_grad_(False)


def test_every_optimizer_is_timed_and_its_bytes_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "bench",
        "--model",
        "tiny",
        "--no-compile",
        "--seconds",
        "0.1",
        "--threads",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert cli.main([*arguments, "--policies", "LEAN_BF16", "FP32"]) == 0
    held = json.loads((tmp_path / "bench.json").read_text())
    found = {one["name"]: one for one in held["timings"]}
    # Weights, gradients and state as the formats say; two floats of Adam, and torch's step counters, which are a few bytes a tensor.
    expected = {
        "torch fused, float32": (4, 4, 8), "torch foreach, float32": (4, 4, 8), "torch fused, bfloat16": (2, 2, 4),
        "LEAN_BF16": (2, 2, 6), "FP32": (4, 4, 8),
    }  # fmt: skip
    assert list(found) == list(expected)
    counters = 8 * held["tensors"] / held["parameters"]
    for name, sizes in expected.items():
        one = found[name]
        assert (one["weight_bytes"], one["gradient_bytes"]) == sizes[:2]
        assert sizes[2] <= one["state_bytes"] <= sizes[2] + counters
        assert one["turns"] >= 5
        assert one["ratio"] == one["seconds"] / one["baseline_seconds"]
    assert (tmp_path / "bench.png").stat().st_size > 10_000
    shown = capsys.readouterr().out
    for name in expected:
        assert name.split(",")[0] in shown


@pytest.mark.parametrize(
    ("name", "theirs", "slots"), [("lion", (), 2), ("novograd", (), 2), ("adagrad", ("torch Adagrad",), 4)]
)
def test_another_optimizer_is_timed_beside_torchs(
    name: str, theirs: tuple[str, ...], slots: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--model",
        "tiny",
        "--no-compile",
        "--seconds",
        "0.05",
        "--threads",
        "1",
        "--json",
        "--optimizer",
        name,
    ]
    assert cli.main(["bench", *arguments, "--policies", "LEAN_BF16"]) == 0
    printed = capsys.readouterr()
    held = json.loads(printed.out)
    own = [f"{one}, {dtype}" for one in theirs for dtype in ("float32", "bfloat16")]
    assert [one["name"] for one in held["timings"]] == ["torch AdamW fused, float32", *own, "LEAN_BF16"]
    assert held["optimizer"]["name"] == name
    assert held["timings"][-1]["state_bytes"] == pytest.approx(2 + slots, abs=0.02)
    assert "ratio: to torch AdamW fused, float32" in " ".join(printed.err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer", "lien"], "--optimizer: got lien (did you mean lion?); accepted: sgd, adam"),
        (
            ["--optimizer", "lion", "--policies", "PURE_BF16"],
            "--policies: lion refuses PURE_BF16: Policy.momentum",
        ),
        (["--seconds", "0"], "--seconds: got 0.0; accepted: a number above 0"),
        (["--device", "gpu"], "--device: got gpu; accepted: cpu"),
        (["--model", f"{__name__}:frozen_model"], "accepted: a model with parameters that require gradients"),
        (["--policies", "LEAN"], "did you mean LEAN_BF16?"),
        (["--threads", "-1"], "--threads: got -1; accepted: a whole number"),
    ],
)
def test_options_that_cannot_be_used_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--model", "tiny", *arguments]) == BAD_OPTION
    assert message in capsys.readouterr().err
