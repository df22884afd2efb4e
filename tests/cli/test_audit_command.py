"""``everybit audit``: a table, a picture, a verdict and an exit code, of what an audit saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import everybit as eb
import everybit_cli as cli
from everybit_cli.errors import BAD_OPTION, FAILED
from everybit_torch import AdamW, Audit


def audited(path: Path, dtype: torch.dtype, lr: float) -> list[str]:
    """Train a little, and save the audit; the names of the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    audit = Audit(model, optimizer, every=10)
    for _ in range(21):
        optimizer.zero_grad()
        model(torch.randn(8, 16).to(dtype)).float().square().mean().backward()
        for parameter, state in optimizer.state.items():  # as late in a run, when the mean has come near
            assert parameter.grad is not None
            state["exp_avg_sq"].copy_(1.5 * parameter.grad.square())
        optimizer.step()
    audit.save(path)
    return [name for name, _ in model.named_parameters()]


def test_lost_updates_and_frozen_moments_are_shown_with_what_would_mend_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = audited(tmp_path / "run.json", torch.bfloat16, 1e-5)
    assert cli.main(["audit", str(tmp_path / "run.json"), "--out", str(tmp_path / "out")]) == FAILED
    shown = " ".join(capsys.readouterr().out.split())
    for name in names:
        assert name in shown
    assert "Updates are lost: " in shown
    assert "exp_avg_sq is frozen" in shown
    assert "LEAN_BF16 would mend it" in shown
    held = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert {layer["step"] for layer in held["layers"]} == {1, 11, 21}
    assert held["advice"].startswith("LEAN_BF16")
    assert (tmp_path / "out" / "audit.png").stat().st_size > 10_000


def test_float32_has_nothing_to_mend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audited(tmp_path / "run.json", torch.float32, 1e-3)
    assert cli.main(["audit", str(tmp_path / "run.json")]) == 0
    assert "Nothing is lost" in capsys.readouterr().out


def test_the_worst_come_first_and_the_rest_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audited(tmp_path / "run.json", torch.bfloat16, 1e-5)
    cli.main(["audit", str(tmp_path / "run.json"), "--rows", "1", "--json"])
    printed = capsys.readouterr()
    worst = min(json.loads(printed.out)["layers"], key=lambda layer: layer["edq"])
    assert f"{worst['name']} " in printed.err
    assert "3 more parameters: --rows 0." in " ".join(printed.err.split())


def test_what_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "train.py").write_text("import torch")
    (tmp_path / "empty.json").write_text(json.dumps({"kind": "everybit audit", "format": 1, "layers": []}))
    for name, message in (
        ("absent.json", "path: got {path} (no such file or directory); accepted: a file that can be read"),
        ("other.json", "path: got {path}: something else; accepted: what Audit.save wrote, or a checkpoint\n"),
        (
            "train.py",
            "path: got {path}: no JSON (Expecting value: line 1 column 1 (char 0)); accepted: what Audit.save wrote, or",
        ),
        ("empty.json", "in which no step was audited; accepted: an audit of one step or more"),
    ):
        assert cli.main(["audit", str(tmp_path / name)]) == BAD_OPTION
        said = capsys.readouterr().err
        assert message.format(path=tmp_path / name) in said
        assert said.count("accepted") == 1
    assert cli.main(["audit", "x.json", "--rows", "-1"]) == BAD_OPTION
    assert "--rows: got -1" in capsys.readouterr().err
    (tmp_path / "folder").mkdir()
    for arguments, message in (
        (["empty.json", "--policy", "LEAN_BF16"], "--policy: got given for {path}/empty.json, which is no checkpoint"),
        (
            ["empty.json", "--policy", "LEEN_BF16"],
            "--policy: got LEEN_BF16 (did you mean LEAN_BF16?); accepted: FP64, FP32,",
        ),
        (["empty.json", "--policy", "AMP"], "--policy: got AMP; accepted: FP64, FP32,"),
        (["folder"], "path: got {path}/folder (is a directory)"),
    ):
        assert cli.main(["audit", str(tmp_path / arguments[0]), *arguments[1:]]) == BAD_OPTION
        assert message.format(path=tmp_path) in capsys.readouterr().err


def test_a_checkpoint_is_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 16, dtype=torch.bfloat16)
    for policy, found, shown in (
        (None, FAILED, "Updates are lost: "),
        ("FLOOR_BF16", 0, "Weights are rounded stochastically: "),
        ("LEAN_BF16", 0, "Nothing is lost"),
    ):
        make = (
            torch.optim.AdamW(model.parameters(), lr=1e-5)
            if policy is None
            else AdamW(model.parameters(), lr=1e-5, policy=eb.policies.PRESETS[policy], compile=False)
        )
        for _ in range(3):
            make.zero_grad()
            model(torch.randn(8, 16).bfloat16()).float().square().mean().backward()
            make.step()
        torch.save({"model": model.state_dict(), "optimizer": make.state_dict()}, tmp_path / "checkpoint.pt")
        options = [] if policy is None else ["--policy", policy.lower()]
        assert cli.main(["audit", str(tmp_path / "checkpoint.pt"), *options]) == found
        printed = capsys.readouterr().out
        assert "checkpoint.pt:2parameters,1auditedstep(4to4)" in "".join(printed.split())  # a long path is cut anywhere
        assert shown in " ".join(printed.split())
    assert cli.main(["audit", str(tmp_path / "checkpoint.pt")]) == BAD_OPTION
    said = capsys.readouterr().err
    assert said.endswith("checkpoint.pt: policy: got None for an optimizer of everybit; accepted is that of the run.\n")
