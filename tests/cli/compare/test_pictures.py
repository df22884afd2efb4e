"""A picture is drawn whatever the numbers are."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import everybit as eb
from everybit_cli.compare.pictures import draw, policy_colours, smooth
from everybit_cli.compare.results import Point, Record
from everybit_cli.files import keep_results

MakeRecord = Callable[..., Record]


def size_of_png(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.parametrize("steps", [1, 2, 40])
def test_a_run_of_any_length_is_drawn(steps: int, make_record: MakeRecord, tmp_path: Path) -> None:
    records = [make_record(name, seed, steps=steps) for seed in (0, 1) for name in ("FP32", "LEAN_BF16")]
    keep_results(tmp_path, "p", {}, lambda: draw(records, reference="FP32", title="title"))
    assert size_of_png(tmp_path / "p.png") == (1950, 1020)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "p.json", tmp_path / "p.png"]


def test_a_diverged_run_and_an_unheard_of_slot_are_drawn_too(make_record: MakeRecord, tmp_path: Path) -> None:
    good, bad = make_record("FP32"), make_record("custom")
    bad = replace(
        bad,
        losses=bad.losses[:5] + (float("nan"),) * 35,
        validation=(Point(20, float("inf")), Point(40, float("nan"))),
        bytes_measured=bad.bytes_measured | {"trace": 4.0, "counters": 1e-5},
    )
    keep_results(tmp_path, "p", {}, lambda: draw([good, bad], reference="FP32", title="title"))
    assert size_of_png(tmp_path / "p.png") == (1950, 1020)


def test_every_preset_has_a_colour_of_its_own_and_the_reference_is_black() -> None:
    names = list(eb.policies.PRESETS)
    colours = policy_colours(names, "FP32")
    assert colours["FP32"] == "#000000"
    assert len(set(colours.values())) == len(names)


def test_smoothing_keeps_a_line_a_line_and_puts_means_in_the_middle() -> None:
    steps = np.arange(1, 101, dtype=np.float64)
    at, means = smooth(2 * steps)
    assert len(at) == 96  # five steps a point
    np.testing.assert_allclose(means, 2 * at, rtol=1e-12)
