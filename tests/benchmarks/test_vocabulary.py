"""The table of all optimizers says what the list of optimizers says."""

from __future__ import annotations

import re
from pathlib import Path

import everybit as eb
import vocabulary

PAGE = vocabulary.PAGE.read_text(encoding="utf-8")


def test_a_row_of_the_page_is_what_follows_from_the_optimizer() -> None:
    rows = vocabulary.rows_of(PAGE)
    for name in eb.optimizers():
        row = rows[name]
        assert row[:-1] == vocabulary.derived(name), "run: python benchmarks/vocabulary.py --write"
        assert re.fullmatch(r"(torch|[\w-]+)( \(float32\))?: \d+e[-+]\d+.*|the formula only", row[-1])


def test_the_rows_are_the_optimizers_in_order() -> None:
    assert list(vocabulary.rows_of(PAGE)) == list(eb.optimizers())


def test_deviations_are_found_by_the_beginning_of_their_names(tmp_path: Path) -> None:
    noted = [
        ("lamb; timm", 1e-16),
        ("lambc; timm", 3e-16),
        ("schedule-free sgd, warm; schedulefree", 2e-15),
        ("lamb; optax", 4e-16),
    ]
    lines = "".join(f'<property name="{name}" value="{value}"/>' for name, value in noted)
    (tmp_path / "found.xml").write_text(f"<testsuite><properties>{lines}</properties></testsuite>")
    assert vocabulary.measured(str(tmp_path / "found.xml")) == {
        "lamb": "timm: 3e-16; optax: 4e-16",
        "schedule_free_sgd": "schedulefree: 2e-15",
    }
