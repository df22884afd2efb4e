"""Count phrases that make a reader read twice: ``python docs/words.py`` lists their numbers in 1,000 lines, and fails above a limit.

It counts the words of all pages, too.
Each pattern has good uses, so a few are allowed. ``--show core`` lists the lines of a part.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

PATTERNS = {
    "who, whose": r"\b[Ww]ho(?:ever|se)?\b",
    "a fragment": r"^(?:\w+: )?(?:Of|With|For|From|By|As|To|In|At) [^.]*\.$",
    "what for a noun": r"\b[Ww]hat (?:is|was|were|are|has|have|comes?|goes|they|it|a|an|the|each|others?|ranks?|this)\b",
    "one for a noun": r"\b(?:one (?:that|of|with|without|which|to|is|has)|this one|the one|that one|(?<!\.)ones\b(?!\())",
    "ask, answer": r"\b(?:asks?|asked|asking|questions?|answers?|answered)\b",
    "nothing, none": r"\b(?:[Nn]obody|[Nn]othing|none)\b",
}

LIMITS = {"core": 15, "adapters": 15, "pages": 25, "decisions": 60}
"""The greatest number in 1,000 lines of prose, by part."""

MOST_WORDS = 55_000
"""Of all pages below docs/: words with a letter, in prose, code and tables."""

Line = tuple[Path, int, str]


def prose_of(path: Path) -> Iterator[Line]:
    """The lines of docstrings and comments of a module."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            first = node.body[0]
            assert isinstance(first, ast.Expr)
            assert isinstance(first.value, ast.Constant)
            for number, line in enumerate(str(first.value.value).split("\n"), start=first.lineno):
                yield path, number, line.strip()
    for number, line in enumerate(source.split("\n"), start=1):
        if line.strip().startswith("#") and "noqa" not in line and "# --" not in line:
            yield path, number, line.strip()


def prose_of_page(path: Path) -> Iterator[Line]:
    """The lines of a page outside of code and tables."""
    is_code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("|"):
            yield path, number, line.strip()


def parts() -> dict[str, list[Line]]:
    """The lines of prose of each part."""
    pages = [
        *ROOT.glob("*.md"),
        *(path for path in ROOT.glob("docs/**/*.md") if path.name not in ("licenses.md", "changelog.md")),
    ]
    lines = {
        "core": [line for path in ROOT.glob("core/**/*.py") for line in prose_of(path)],
        "adapters": [line for path in ROOT.glob("adapters/**/*.py") for line in prose_of(path)],
        "pages": [line for path in pages if "decisions" not in path.parts for line in prose_of_page(path)],
        "decisions": [line for path in pages if "decisions" in path.parts for line in prose_of_page(path)],
    }
    return {part: [line for line in found if line[2]] for part, found in lines.items()}


def found_in(lines: list[Line]) -> dict[str, list[Line]]:
    """The lines with each pattern."""
    return {name: [line for line in lines if re.search(pattern, line[2])] for name, pattern in PATTERNS.items()}


def numbers() -> dict[str, float]:
    """The patterns found in 1,000 lines of each part."""
    return {part: 1000 * sum(map(len, found_in(lines).values())) / len(lines) for part, lines in parts().items()}


def words() -> int:
    """The words of all pages."""
    texts = [path.read_text(encoding="utf-8") for path in ROOT.glob("docs/**/*.md")]
    return sum(bool(re.search("[A-Za-z]", word)) for text in texts for word in text.split())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--show"]:
        for name, lines in found_in(parts()[sys.argv[2]]).items():
            for path, number, line in lines:
                print(f"{path.relative_to(ROOT)}:{number}: {name}: {line}")
    else:
        counted = numbers()
        for part, number in counted.items():
            print(f"{part}: {number:.0f} in 1,000 lines, at most {LIMITS[part]}")
        written = words()
        print(f"pages: {written:,} words, at most {MOST_WORDS:,}")
        sys.exit(written > MOST_WORDS or any(counted[part] > LIMITS[part] for part in LIMITS))
