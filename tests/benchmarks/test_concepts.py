"""The pages about numerics: their tables are what the experiments give, and what their sentences say of them is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import concepts

DOCS = Path(__file__).parents[2] / "docs"


def tables(page: str) -> dict[str, str]:
    """The tables between a page's markers, by name."""
    text = (DOCS / "concepts" / page).read_text(encoding="utf-8")
    return dict(re.findall(r"<!-- begin (\w+) -->\n(.*?)<!-- end \1 -->", text, re.DOTALL))


def test_the_page_about_lost_updates_has_the_numbers_of_its_experiments() -> None:
    assert tables("lost_updates.md")["updates"] == concepts.updates_table(concepts.lost_updates())


def test_the_walks_of_a_weight_are_those_of_the_pages() -> None:
    walked = concepts.walks()
    assert tables("compensation.md")["walks"] == concepts.walks_table(walked)
    chosen: dict[str, Any] = {name: walked[name] for name in ("float32", "Nearest()", "Stochastic()")}
    assert tables("stochastic_rounding.md")["walks"] == concepts.walks_table(chosen)
    chosen.pop("Stochastic()")
    assert tables("lost_updates.md")["walks"] == concepts.walks_table(chosen)
    assert (walked["Nearest()"] == 1).all()
    assert (walked["Split(16)"][-1] - walked["float32"][-1]).abs().max() < 1e-6


def test_the_errors_of_compensation_are_those_of_the_page() -> None:
    arrived = concepts.arrivals()
    assert tables("compensation.md")["arrivals"] == concepts.arrivals_table(arrived)
    errors = {
        name: {exponent: error for exponent, (_, error) in zip(concepts.EXPONENTS, values, strict=True)}
        for name, values in arrived.items()
    }
    assert all(errors["Split(16)"][exponent] == 0 for exponent in range(-9, -24, -1))
    assert errors["Kahan()"][-16] < 0.01
    assert errors["Kahan()"][-17] > 0.5


@pytest.mark.slow
def test_the_second_moments_are_those_of_the_page() -> None:
    assert tables("moments.md")["moments"] == concepts.moments_table(concepts.second_moments())


def test_the_sums_over_ranks_are_those_of_the_page() -> None:
    assert tables("sums.md")["sums"] == concepts.sums_table(concepts.sums())


@pytest.mark.exhaustive
def test_the_compiler_does_to_the_textbook_sum_what_the_page_says() -> None:
    assert tables("compilers.md")["compiled"] == concepts.compiled_table(concepts.compiled_sums())


def test_every_picture_of_the_pages_is_there_in_both_palettes() -> None:
    shown = [
        name
        for page in (DOCS / "concepts").glob("*.md")
        for name in re.findall(r"images/concepts/([\w.-]+\.svg)", page.read_text(encoding="utf-8"))
    ]
    assert sorted(shown) == sorted(path.name for path in (DOCS / "images/concepts").iterdir())
    assert len(shown) == 12
