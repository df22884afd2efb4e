"""The texts of the troubleshooting page are those of the code: raised by a program of the page, or found in the sources."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
SECTION = re.compile(r"^### (?P<title>.*)\n\n```text\n(?P<message>.*)\n```\n(?P<rest>(?:(?!^##).*\n)*)", re.MULTILINE)
PROGRAM = re.compile(r"    ```python\n(?P<text>(?:(?:    .*)?\n)*?)    ```\n")
SECTIONS = [
    (match["title"], match["message"], program["text"] if (program := PROGRAM.search(match["rest"])) else None)
    for match in SECTION.finditer(PAGE)
]
RAISED = [(title, message, program) for title, message, program in SECTIONS if program is not None]


def pattern(text: str) -> str:
    """A regular expression for a text in which ``…`` stands for anything."""
    return ".*".join(map(re.escape, text.split("…")))


def literals() -> Iterator[str]:
    """Every string of the packages, with ``…`` for each value that is put in."""
    for path in (*ROOT.glob("core/**/*.py"), *ROOT.glob("adapters/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def said_by(program: str) -> str:
    """The error or the warning that a program ends in."""
    setup = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert setup is not None
    names: dict[str, Any] = {}
    exec(setup[1], names)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            exec("\n".join(line[4:] for line in program.splitlines()), names)
        except Exception as error:
            return str(error)
    assert warned, "the program raises nothing"
    return str(warned[-1].message)


@pytest.mark.parametrize(("title", "message", "program"), RAISED, ids=[title for title, _, _ in RAISED])
def test_the_program_of_a_section_raises_its_message(
    title: str, message: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # is put back, whatever the program sets
        monkeypatch.delenv(name)
    said = said_by(program)
    assert re.fullmatch(pattern(message), said, re.DOTALL), f"{title}: {said}"


def test_a_message_without_a_program_stands_in_the_sources() -> None:
    found = list(literals())
    missing = [
        message
        for _, message, program in SECTIONS
        if program is None
        and not any(re.fullmatch(pattern(message), text, re.DOTALL) for text in found if text.strip("… "))
    ]
    assert missing == []


def test_a_title_quotes_its_message() -> None:
    for title, message, _ in SECTIONS:
        quoted = re.findall(r"`([^`]+)`", title)
        assert quoted, title
        assert re.search(pattern(quoted[0]), message, re.IGNORECASE), title


def test_the_page_has_all_its_sections() -> None:
    assert len(SECTIONS) == PAGE.count("\n### ") >= 16
    assert len(RAISED) >= 11
