"""``everybit plan --memory``: the most precise policy that fits, under the strategy that sends least; why; and what would be enough."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from torch import nn

import everybit as eb
import everybit_cli as cli
from everybit_cli.compare.model import SIZES, Block, Transformer
from everybit_cli.errors import BAD_OPTION, FAILED, OptionError
from everybit_cli.plan.advice import parsed_size
from everybit_torch import plan
from everybit_torch.sharded.strategies import STRATEGIES

POLICIES = ("EXACT_BF16", "FLOOR_BF16")


def mixed_dtypes() -> nn.Module:
    """For --model: no preset is for it."""
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16))


def advised(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object], str]:
    code = cli.main(["plan", "--model", "tiny", "--json", *arguments])
    printed = capsys.readouterr()
    return code, json.loads(printed.out), " ".join(printed.err.split())


def test_it_is_the_first_policy_that_fits_under_the_strategy_that_sends_least(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By another way: from the plans of all, over the range of budgets in which the answer changes."""
    with torch.device("meta"):
        model = Transformer(SIZES["tiny"]).to(torch.bfloat16)
    common: dict[str, Any] = {"ranks": 4, "units": [Block], "device": "cuda"}
    sizes = {
        (name, strategy): plan(model, eb.adamw(1e-3), policy=eb.policies.PRESETS[name], strategy=strategy, **common)
        for name in POLICIES
        for strategy in STRATEGIES
    }
    peaks = sorted(one.peak_bytes for one in sizes.values())
    answers = set()
    for budget in (peaks[0] - 1, peaks[1], peaks[-1]):
        code, found, said = advised(capsys, "--ranks", "4", "--memory", f"{budget}B", "--policies", *POLICIES)
        fitting = [key for key, one in sizes.items() if one.peak_bytes <= budget]
        if not fitting:
            assert code == FAILED
            assert found["advice"] is None
            assert "Nothing fits" in said
            continue
        name = min((name for name, _ in fitting), key=POLICIES.index)
        strategy = min(
            (s for n, s in fitting if n == name), key=lambda s: (sizes[name, s].wire_bytes, STRATEGIES.index(s))
        )
        assert code == 0
        assert found["advice"] == {"policy": name, "strategy": strategy}
        assert f"{name} under {strategy}: " in said
        for better in POLICIES[: POLICIES.index(name)]:
            assert f"{better} does not fit" in said
        answers.add((name, strategy))
    assert len(answers) == 2


def test_what_is_reserved_is_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    _, found, _ = advised(capsys, "--memory", "1GiB", "--reserve", "512MiB", "--policies", "LEAN_BF16")
    assert found["budget"] == 512 * 2**20


def test_too_little_memory_says_how_many_ranks_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    code, found, said = advised(capsys, "--ranks", "1", "--memory", "300kB", "--policies", "LEAN_BF16")
    assert code == FAILED
    enough = found["enough_ranks"]
    assert isinstance(enough, dict)
    ranks = enough["LEAN_BF16"]
    assert f"LEAN_BF16 fits from {ranks} ranks on" in said
    for number, fits in ((ranks // 2, False), (ranks, True)):
        with torch.device("meta"):
            model = Transformer(SIZES["tiny"]).to(torch.bfloat16)
        arguments: dict[str, Any] = {
            "policy": eb.policies.LEAN_BF16,
            "ranks": number,
            "units": [Block],
            "device": "cuda",
        }
        peaks = [plan(model, eb.adamw(1e-3), strategy=one, **arguments).peak_bytes for one in STRATEGIES]
        assert (min(peaks) <= 300_000) == fits
    code, _, said = advised(capsys, "--ranks", "4096", "--memory", "1kB", "--policies", "LEAN_BF16")
    assert code == FAILED
    assert "LEAN_BF16 fits on no number of ranks" in said


def test_state_on_the_host_leaves_room_on_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--ranks", "1", "--policies", "EXACT_BF16", "--memory", "1GiB")
    _, plain, _ = advised(capsys, *common)
    _, offloaded, said = advised(capsys, *common, "--offload", "state")
    assert "As code: AdamW(model.parameters(), policy=eb.policies.EXACT_BF16, offload='state')" in said
    (before,), (after,) = ([*one["plans"]] for one in (plain, offloaded))  # type: ignore[misc]
    moved = {name: before["persistent"][name] for name in ("compensation", "momentum", "variance")}
    assert after["host"] == moved
    kept = {name: size for name, size in before["persistent"].items() if name not in moved}
    staging = after["persistent"].pop("staging")
    assert after["persistent"] == kept
    with torch.device("meta"):
        model = Transformer(SIZES["tiny"])
    units = [sum(p.numel() for p in block.parameters()) for block in model.modules() if isinstance(block, Block)]
    largest = max(*units, sum(p.numel() for p in model.parameters()) - sum(units))
    assert staging == 2 * 10 * largest  # each unit is a piece
    assert before["host"] == {}


def test_the_advice_is_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", "tiny", "--ranks", "1", "--memory", "1GB", "--out", str(tmp_path)]) == 0
    held = json.loads((tmp_path / "plan.json").read_text())
    assert held["advice"] == {"policy": "EXACT_BF16", "strategy": "no_shard"}
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    shown = " ".join(capsys.readouterr().out.split())
    assert "AdamW(model.parameters(), policy=eb.policies.EXACT_BF16)" in shown


def test_the_line_of_the_budget_stands_in_the_legend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []
    legend = Figure.legend

    def noted(figure: Figure, handles: Any, labels: list[str], **options: Any) -> Any:
        named.extend(labels)
        return legend(figure, handles, labels, **options)

    monkeypatch.setattr(Figure, "legend", noted)
    plan = [
        "plan",
        "--model",
        "tiny",
        "--policies",
        "LEAN_BF16",
        "--strategies",
        "optim",
        "--out",
        str(tmp_path),
        "--quiet",
    ]
    assert cli.main([*plan, "--memory", "1GB"]) == 0
    assert named[-2:] == ["transient", "budget"]
    named.clear()
    assert cli.main(plan) == 0
    assert named[-1] == "transient"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "much"], "--memory: got much; accepted: a number with a unit, such as 80GB"),
        (["--memory", "80"], "--memory: got 80 (did you mean 80GB?); accepted: a number with a unit; without one it is a number of bytes"),
        (["--reserve", "0.5"], "--reserve: got 0.5 (did you mean 0.5GB?); accepted: a number with a unit; without one"),
        (["--memory", "1GB", "--reserve", "2GB"], "--reserve: got 2GB; accepted: less than --memory, which is 1GB"),
        (["--policies", "LEAN"], "--policies: got LEAN (did you mean LEAN_BF16?)"),
        (["--model", f"{__name__}:mixed_dtypes", "--dtype", "model"], "--policies: got nothing, for parameters in bfloat16, float32"),
        (["--ranks", "0"], "--ranks: got 0; accepted: a whole number, at least 1"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_used_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "--model", "tiny", "--memory", "1GB", *arguments]) == BAD_OPTION
    assert message in capsys.readouterr().err


@settings(max_examples=50, deadline=None)
@given(
    number=st.integers(0, 10**6),
    unit=st.sampled_from(["B", "kB", "KiB", "MB", "MiB", "GB", "gib", "TB", "TiB", " GB"]),
)
def test_sizes_are_read_as_they_are_written(number: int, unit: str) -> None:
    letter = unit.strip().lower().removesuffix("b")
    base = 1024 if letter.endswith("i") else 1000
    power = "kmgt".index(letter[0]) + 1 if letter else 0
    assert parsed_size("--memory", f"{number}{unit}") == number * base**power
    for wrong in (f"-{number}{unit}", f"{number}{unit}x", unit or "GB"):
        with pytest.raises(OptionError, match="--memory: got"):
            parsed_size("--memory", wrong)


def test_a_number_without_a_unit_is_a_number_of_bytes_where_it_can_be_one() -> None:
    assert parsed_size("--memory", "85899345920") == 80 * 2**30
    assert parsed_size("--reserve", "0") == 0


def test_sizes_are_shown_in_units_of_which_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, said = advised(capsys, "--ranks", "1", "--memory", "2MB", "--policies", "LEAN_BF16")
    assert code == 0
    assert "Bytes of one rank. The budget is 1.9 MiB." in said
    peak = re.search(
        r"LEAN_BF16 under no_shard: ([\d.]+) MiB at the peak, [\d.]+ KiB of the budget are left; 0 bytes are sent", said
    )
    assert peak is not None, said
    assert float(peak[1]) > 2 * 28_768 / 2**20  # more than the weights of the model
