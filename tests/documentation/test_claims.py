"""Claims of pages that can be read: numbers of optimizers, names of presets, install lines, numbers of decisions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import everybit as eb
import everybit_torch
from everybit_cli.compare.command import CLOSING
from everybit_cli.models import build
from everybit_torch import plan
from tests.support.modules import module_at
from tests.support.pages import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAST = ("changelog.md", "decisions", "releasing.md")
"""Pages about what was so once, or will be."""


def present() -> list[Path]:
    return [page for page in PAGES if not any(part in PAST for part in page.relative_to(ROOT).parts)]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_numbers_of_named_optimizers_are_right() -> None:
    found = {
        (named(page), int(number))
        for page in present()
        for number in re.findall(r"\b(\d+) (?:optimizers )?by name", page.read_text())
    }
    assert found
    assert {number for _, number in found} == {len(eb.optimizers())}, found


def test_presets_that_are_named_are_there_and_nothing_is_installed_from_pypi_before_a_release() -> None:
    for page in present():
        text = page.read_text()
        quoted = re.findall(r"`(?:eb\.policies\.)?\"?([A-Z]+_(?:BF16|8BIT|4BIT))\"?`", text)
        assert [name for name in quoted if not hasattr(eb.policies, name)] == [], page
        assert re.findall(r"pip install ['\"]?everybit", text) == [], page


@pytest.mark.parametrize(
    "name", ["docs/faq.md", "docs/coming-from/eight_bit.md", "docs/how-to/train_with_8_bit_state.md"]
)
def test_pages_about_few_bits_name_every_preset_of_few_bits(name: str) -> None:
    text = (ROOT / name).read_text()
    presets = [preset for preset in dir(eb.policies) if preset.endswith(("_8BIT", "_4BIT"))]
    assert presets
    assert [preset for preset in presets if preset not in text] == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site's generator makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    heads = (re.sub(r"[`*]|\]\([^)]*\)", "", head) for head in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


def test_links_lead_to_pages_and_headings_that_there_are() -> None:
    lost = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for path, anchor in re.findall(r"\]\(([^)\s#:]*)(?:#([^)\s]+))?\)", text):
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                lost.append(f"{named(page)}: {path}#{anchor}")
    assert lost == []


def test_every_decision_begins_with_its_number() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    assert len(pages) > 10
    heads = {page.name: page.read_text().split("\n", 1)[0] for page in pages}
    assert [name for name, head in heads.items() if not head.startswith(f"# {name[:4]}: ")] == []
    assert len({page.name[:4] for page in pages}) == len(pages)


def test_the_map_of_the_tests_names_files_that_exist() -> None:
    named = re.findall(r"`(tests/[a-z_/.]+)`|`(test_[a-z_]+\.py)`", (ROOT / "docs/contributing/tests.md").read_text())
    assert len(named) > 40
    files = {path.name for path in ROOT.glob("tests/**/test_*.py")}
    assert [whole or name for whole, name in named if not ((ROOT / whole).exists() if whole else name in files)] == []


def test_a_name_that_is_gone_says_what_stands_in_its_place_and_so_does_the_changelog() -> None:
    changelog = (ROOT / "docs/changelog.md").read_text()
    for module, name in ((of, name) for of in (eb, everybit_torch) for name in vars(of)["_GONE"]):
        with pytest.raises(ImportError, match=rf"^{module.__name__} has no {name} since version 0\.3; .*\.$"):
            getattr(module, name)
        assert name not in module.__all__
        public = name.removeprefix("scale_by_").removesuffix("_state_dict").removeprefix("load_")
        assert public.replace("AdamMiniBlocks", "adam_mini") in changelog, name


def test_the_readme_is_one_screen_after_another_and_not_many() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_what_plain_bfloat16_loses_is_told_alike_and_as_measured() -> None:
    """On the pages, and in the closing words of ``everybit compare``, from the results of benchmarks/small_updates.py."""
    measured = json.loads((ROOT / "benchmarks/results/small-updates-cpu.json").read_text())["rates"]
    lost = {rate: one["summary"]["PURE_BF16"]["difference"] for rate, one in measured.items()}
    rows = [
        f"| {rate} | {one['summary']['PURE_BF16']['lost_share']:.0%}".replace("%", " %")
        for rate, one in measured.items()
    ]
    for page in (ROOT / "README.md", ROOT / "docs/concepts/lost_updates.md"):
        assert [row for row in rows if row not in page.read_text()] == []
    assert lost == dict(sorted(lost.items(), key=lambda pair: -pair[1])), "it falls as the rate rises"
    for rate in ("3e-5", "1e-4", "3e-4", "1e-3"):
        assert f"{lost[rate]:+.2f} at {rate}" in CLOSING
    assert max(abs(one["summary"]["LEAN_BF16"]["difference"]) for one in measured.values()) < 0.01


def test_the_tables_of_changed_weights_are_of_their_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    changes = module_at(ROOT / "benchmarks/changes.py")
    for text in changes.tables(json.loads(changes.RESULTS.read_text())).values():
        assert text in changes.PAGE.read_text()


def test_the_matrix_begins_with_the_lower_bounds_and_its_table_is_of_its_results() -> None:
    """The table is counted from reports of pytest, also from those of a run that ended early."""
    matrix = module_at(ROOT / "matrix/run.py")
    declared = dict(re.findall(r"\"(torch|optree)>=([\d.]+)", (ROOT / "pyproject.toml").read_text()))
    oldest = dict(re.findall(r"(\w+)==([\d.]+)", matrix.ROWS["oldest"].read_text()))
    assert {name: oldest[name][: len(bound)] for name, bound in declared.items()} == declared
    assert matrix.tables(json.loads(matrix.RESULTS.read_text())) in matrix.PAGE.read_text()
    assert {folder.parent.name for folder in (ROOT / "tests").glob("*/test_*.py")} >= set(matrix.AREAS)


def test_a_report_of_pytest_is_counted(tmp_path: Path) -> None:
    counted = module_at(ROOT / "matrix/run.py").counted
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite tests="9" failures="1" errors="1" skipped="3"/></testsuites>')
    assert counted(report, 1) == "4 passed, **2 failed**, 3 skipped"
    assert counted(report, -9) == "4 passed, **2 failed**, 3 skipped, **ended with code -9**"
    assert counted(tmp_path / "none", -9) == "**ended with code -9, without a report**"


def test_the_plan_of_state_on_the_host_has_the_pages_sizes() -> None:
    """In GB, as `everybit plan` with the page's options plans them."""
    text = " ".join((ROOT / "docs/how-to/offload_to_the_host.md").read_text().split())
    model, _ = build("llama-3-8b", torch.bfloat16)
    found = plan(
        model, eb.adamw(1e-3), policy="LEAN_BF16", strategy="no_shard", ranks=1, device="cuda", offload="state"
    )
    on_the_card = found.persistent["parameters"] + found.persistent["gradients"]
    assert f"weights and gradients have {on_the_card / 1e9:.1f} GB of the card" in text
    assert f"two pieces of state {found.persistent['staging'] / 1e9:.1f} GB" in text
    assert f"all state has {found.host_bytes / 1e9:.1f} GB of the host" in text
