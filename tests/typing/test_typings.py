"""Type-level promises: programs that must type-check, and programs that must not."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from mypy import api

from tests.support.pages import blocks

pytestmark = pytest.mark.slow  # mypy takes 20 seconds for all of them together

ROOT = Path(__file__).parents[2]
# Pages whose programs type-check, up to and including so many blocks of Python: what authors of transforms take over.
PAGES = {"docs/transforms.md": 1, "docs/tutorials/write_an_optimizer.md": 1}
EXPECTED = re.compile(r'# E: (?P<code>[a-z-]+) "(?P<message>[^"]*)"\s*$')
REPORTED = re.compile(r"^(?P<file>[^:]+):(?P<line>\d+): error: (?P<message>.*)  \[(?P<code>[a-z-]+)\]$")


def program_of(page: str) -> str:
    """The blocks of a page's program, files that it has its reader save included."""
    sources = [block.source for block in blocks(page) if block.language == "python"]
    return "\n".join(sources[: PAGES[page]])


def file_of(page: str) -> str:
    return re.sub(r"\W", "_", page.removesuffix(".md")) + ".py"


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[tuple[str, str]]]:
    """What mypy says of all programs: (file, line) -> [(code, message)]."""
    programs = tmp_path_factory.mktemp("pages")
    for page in PAGES:
        (programs / file_of(page)).write_text(program_of(page), encoding="utf-8")
    limit = sys.getrecursionlimit()
    try:
        output, problems, _ = api.run(
            [
                "--config-file",
                str(ROOT / "pyproject.toml"),
                "--strict",
                "--no-pretty",
                "--hide-error-context",
                str(ROOT / "typings"),
                *(str(programs / file_of(page)) for page in PAGES),
            ]
        )
    finally:
        sys.setrecursionlimit(limit)  # mypy raises it for the whole process, where other tests exceed it on purpose
    assert not problems, problems
    found: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for line in output.splitlines():
        match = REPORTED.match(line)
        if match:
            key = Path(match["file"]).name, int(match["line"])
            found.setdefault(key, []).append((match["code"], match["message"]))
    assert found, output
    return found


@pytest.mark.parametrize("program", sorted((ROOT / "typings/passes").glob("*.py")), ids=lambda path: path.stem)
def test_programs_that_must_type_check_do(
    program: Path, reported: dict[tuple[str, int], list[tuple[str, str]]]
) -> None:
    assert {key: errors for key, errors in reported.items() if key[0] == program.name} == {}


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_tells_authors_to_write_type_checks(
    page: str, reported: dict[tuple[str, int], list[tuple[str, str]]]
) -> None:
    assert "eb.Slot[P]" in program_of(page)
    assert {key: errors for key, errors in reported.items() if key[0] == file_of(page)} == {}


@pytest.mark.parametrize("program", sorted((ROOT / "typings/fails").glob("*.py")), ids=lambda path: path.stem)
def test_programs_that_must_not_type_check_fail_where_and_as_they_say(
    program: Path, reported: dict[tuple[str, int], list[tuple[str, str]]]
) -> None:
    expected = {
        number: (match["code"], match["message"])
        for number, line in enumerate(program.read_text().splitlines(), start=1)
        if (match := EXPECTED.search(line))
    }
    got = {line: errors for (name, line), errors in reported.items() if name == program.name}
    assert len(expected) >= 5
    assert set(got) == set(expected)
    for line, (code, fragment) in expected.items():
        ((got_code, message),) = got[line]
        assert got_code == code, f"{program.name}:{line}: {message}"
        assert fragment in message.replace('"', ""), f"{program.name}:{line}: {message}"
