"""The pages for contributors: their files run, and keep the promises that need no compiler; versions and lists agree."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import everybit
from everybit import testing
from everybit.base import Key

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    return re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/contributing" / page).read_text(encoding="utf-8"), re.DOTALL
    )


def run(page: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the blocks of a page define, run in order as one module."""
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # where dataclasses look up their annotations
    names: dict[str, Any] = module.__dict__
    for number, block in enumerate(blocks(page), 1):
        exec(compile(block, f"{page}, block {number}", "exec", dont_inherit=True), names)
    return names


CHEAP = ["pure", "state is a fixed point", "cut", "meta init"]


def test_the_optimizer_of_the_page_keeps_its_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    names = run("add-an-optimizer.md", monkeypatch)
    for name in CHEAP:
        testing.CHECKS[name](names["adabelief"])
    assert names["optimizer"].param_groups[0]["betas"] == (0.9, 0.99)


def test_the_format_of_the_page_keeps_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    names = run("add-a-format.md", monkeypatch)
    one = names["Float24"]()
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).exp()
    x = torch.cat([x, -x, torch.zeros(1)])
    back = one.decode(one.encode(x, Key(0, torch.tensor(1), 0, 0)), x.shape, "float32")
    assert ((back - x).abs() <= one.resolution("float32") * x.abs()).all()
    assert torch.equal(one.decode(one.encode(back, Key(0, torch.tensor(1), 0, 0)), x.shape, "float32"), back)


def test_the_first_entry_of_the_changelog_is_the_version() -> None:
    text = (ROOT / "docs/changelog.md").read_text(encoding="utf-8")
    first = re.search(r"^## (\d+\.\d+\.\d+)( \(unreleased\))?", text, re.MULTILINE)
    assert first is not None
    version, _, development = everybit.__version__.partition(".dev")
    assert version == first[1]
    assert bool(development) == bool(first[2]), "a version for development is unreleased, and no other is"


def test_the_citation_has_the_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {everybit.__version__.partition('.dev')[0]}\n" in text


@pytest.mark.parametrize(
    "file",
    [
        "CONTRIBUTING.md",
        "docs/releasing.md",
        *sorted(str(f.relative_to(ROOT)) for f in ROOT.glob(".github/workflows/*.yml")),
    ],
)
def test_every_make_target_that_is_named_exists(file: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = (ROOT / file).read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|run: |\n)make ([a-z-]+)", text))
    for listed in re.findall(r"target: \[(.*)\]", text):  # of a workflow's matrix
        named |= set(listed.split(", "))
    assert named
    assert named <= targets
