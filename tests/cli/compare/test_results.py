"""Numbers are summed up as documented and kept whole or not at all."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from everybit_cli.compare.results import Record, summarize
from everybit_cli.files import keep_results, plain

MakeRecord = Callable[..., Record]


def test_differences_are_between_runs_of_the_same_seed(make_record: MakeRecord) -> None:
    # The reference varies by 1 from seed to seed; the difference to it hardly.
    finals = {0: (2.0, 2.10), 1: (3.0, 3.12), 2: (4.0, 4.11)}
    records = [
        make_record(name, seed, final=both[index])
        for seed, both in finals.items()
        for index, name in enumerate(("FP32", "PURE_BF16"))
    ]
    reference, other = summarize(records, "FP32")
    assert (reference.policy, reference.difference, reference.difference_spread) == ("FP32", 0.0, 0.0)
    assert other.validation_loss == pytest.approx(statistics.fmean([2.10, 3.12, 4.11]))
    assert other.difference == pytest.approx(0.11)
    assert other.difference_spread == pytest.approx(0.01)


def test_one_seed_has_no_spread(make_record: MakeRecord) -> None:
    row = summarize([make_record("FP32")], "FP32")[0]
    assert row.difference_spread is None
    assert row.validation_spread is None


def test_metrics_are_the_second_halfs_and_time_is_a_median(make_record: MakeRecord) -> None:
    row = summarize([make_record("FP32", steps=40)], "FP32")[0]
    assert (row.lost_share, row.edq) == (0.25, 0.75)  # the probe of step 20 belongs to the first half
    assert row.optimizer_milliseconds == pytest.approx(1.0)  # one slow step out of three does not count
    assert row.training_milliseconds == pytest.approx(4.0)
    assert row.bytes_measured == row.bytes_predicted == 10.0
    untimed = replace(make_record("FP32"), optimizer_seconds=(), training_seconds=())
    assert summarize([untimed], "FP32")[0].optimizer_milliseconds is None
    assert summarize([untimed], "FP32")[0].training_milliseconds is None


def test_json_holds_a_diverged_run_without_words_json_does_not_have(tmp_path: Path) -> None:
    data = {"losses": (1.5, float("nan"), float("inf")), "out": Path("runs"), "fine": True, "none": None}
    assert keep_results(tmp_path, "r", data, Figure) == f"Wrote {tmp_path / 'r.json'} and {tmp_path / 'r.png'}"

    def refuse(word: str) -> None:
        raise AssertionError(f"not JSON: {word}")

    read = json.loads((tmp_path / "r.json").read_text(), parse_constant=refuse)
    assert read == {"losses": [1.5, None, None], "out": "runs", "fine": True, "none": None}
    assert plain((1, 2)) == [1, 2]


def test_numbers_are_kept_if_the_picture_cannot_be_drawn(tmp_path: Path) -> None:
    def broken() -> Figure:
        raise RuntimeError("no font")

    with pytest.raises(RuntimeError, match="no font"):
        keep_results(tmp_path, "r", {"losses": [1.5]}, broken)
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    assert json.loads((tmp_path / "r.json").read_text()) == {"losses": [1.5]}
