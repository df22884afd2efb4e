"""Tables that programs write into pages that people write."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def insert(page: Path, name: str, text: str) -> None:
    """Replace what stands between a page's ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.

    Raises:
        SystemExit: The page has no such place.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    held = page.read_text(encoding="utf-8") if page.exists() else ""
    if begin not in held or end not in held:
        raise SystemExit(f"page: {page} has no {begin} with {end} after it")
    before, after = held.split(begin)[0], held.split(end)[1]
    page.write_text(f"{before}{begin}\n{text}{end}{after}", encoding="utf-8")


def table(headings: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    lines += ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def origin(machine: dict[str, Any]) -> str:
    """A sentence on where numbers come from."""
    packages = ", ".join(
        f"{name} {version}" for name, version in machine["packages"].items() if name not in ("everybit", "numpy")
    )
    threads = f"{machine['threads']} thread" + ("s" if machine["threads"] > 1 else "")
    gpu = f"{machine['gpu']}, CUDA {machine['cuda']}; " if machine.get("gpu") else ""
    return (
        f"\n{gpu}{machine['processor']}, {machine['cores']} cores, {machine['vector_instructions']}, {threads}; Python {machine['python']},"
        f" {packages}; commit {(machine['commit'] or 'unknown')[:7]}.\n"
    )
