"""Draws the rooms of the core from their imports: docs/images/rooms.svg, and with ``--check`` compares it.

python docs/rooms.py
"""

from __future__ import annotations

import ast
import sys
import textwrap
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core/everybit"
PICTURE = ROOT / "docs/images/rooms.svg"

WIDTH, GAP, BOX, LINE = 860, 30, 262, 15
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #444 }
  .name { font: 600 14px ui-monospace, monospace; fill: #111 }
  rect { fill: #f4f6fa; stroke: #8794ab }
  path { stroke: #8794ab; fill: none }
  .head { fill: #8794ab; stroke: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #b8c0cc }
    .name { fill: #eef1f6 }
    rect { fill: #1d2430; stroke: #6b7890 }
    path { stroke: #6b7890 }
    .head { fill: #6b7890 }
  }
"""


def room_of(module: str) -> str:
    """The room of ``everybit.formats.split``: ``formats``; empty for ``everybit`` itself."""
    return ".".join(module.split(".")[1:2])


def imports() -> dict[str, set[str]]:
    """The rooms that each room imports."""
    found: dict[str, set[str]] = {folder.parent.name: set() for folder in CORE.glob("*/__init__.py")}
    for path in CORE.glob("*/**/*.py"):
        room = path.relative_to(CORE).parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("everybit."):
                found[room].add(room_of(node.module or ""))
    return {room: others - {room} for room, others in found.items()}


def depths(graph: dict[str, set[str]]) -> dict[str, int]:
    """The number of rooms on the longest way down from each room, itself included."""
    found: dict[str, int] = {}

    def depth(room: str) -> int:
        if room not in found:
            found[room] = 1 + max(map(depth, graph[room]), default=0)
        return found[room]

    for room in graph:
        depth(room)
    return found


def direct(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """The imports that no other way of imports implies."""

    def below(room: str) -> set[str]:
        return graph[room].union(*map(below, graph[room]))

    return {
        (room, other)
        for room, others in graph.items()
        for other in others
        if not any(other in below(between) for between in others - {other})
    }


def sentence(room: str) -> str:
    """The first sentence of a room's docstring, without its markup."""
    text = ast.get_docstring(ast.parse((CORE / room / "__init__.py").read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("``", "").replace("\n", " ").split(". ")[0].rstrip(".")


def picture() -> str:
    """The drawing: a row for each depth, the ground at the bottom, and an arrow for each import that no other implies."""
    graph = imports()
    rows: dict[int, list[str]] = {}
    for room, depth in sorted(depths(graph).items()):
        rows.setdefault(depth, []).append(room)
    places: dict[str, tuple[float, float, float]] = {}
    drawn: list[str] = []
    top = 10.0
    for depth in sorted(rows, reverse=True):
        lines = {room: textwrap.wrap(sentence(room), 37) for room in rows[depth]}
        height = 30 + LINE * max(map(len, lines.values()))
        left = (WIDTH - len(lines) * BOX - (len(lines) - 1) * GAP / 2) / 2
        for room, words in lines.items():
            places[room] = (left + BOX / 2, top, top + height)
            drawn.append(f'<rect x="{left:g}" y="{top:g}" width="{BOX}" height="{height}" rx="6"/>')
            drawn.append(f'<text class="name" x="{left + 10:g}" y="{top + 18:g}">{room}</text>')
            drawn += [
                f'<text x="{left + 10:g}" y="{top + 34 + LINE * number:g}">{escape(line)}</text>'
                for number, line in enumerate(words)
            ]
            left += BOX + GAP / 2
        top += height + GAP
    arrows = []
    for upper, lower in sorted(direct(graph)):
        (x, _, begin), (to, end, _) = places[upper], places[lower]
        # An import that passes rows by goes around their boxes.
        passed = [room for room, (_, low, high) in places.items() if begin < low and high < end]
        side = 0 if not passed else (-1 if x + to <= WIDTH else 1)
        bend = x + side * (BOX / 2 + 40 * len(passed))
        way = f"C {bend:g} {begin + GAP:g} {bend:g} {end - GAP:g}" if passed else "L"
        arrows.append(f'<path d="M {x:g} {begin:g} {way} {to:g} {end - 6:g}"/>')
        arrows.append(f'<path class="head" d="M {to - 4:g} {end - 8:g} L {to + 4:g} {end - 8:g} L {to:g} {end:g} Z"/>')
    inside = "\n  ".join([*arrows, *drawn])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top - GAP + 10:g}" role="img" style="color-scheme: light dark">\n'
        f"  <title>The rooms of everybit, and which room imports which</title>\n  <style>{STYLE}  </style>\n  {inside}\n</svg>\n"
    )


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PICTURE.write_text(picture(), encoding="utf-8")
    elif PICTURE.read_text(encoding="utf-8") != picture():
        sys.exit(f"{PICTURE.relative_to(ROOT)}: imports have changed; draw it anew with python docs/rooms.py.")
