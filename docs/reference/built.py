"""Puts decisions last in the built site's search, and checks the site: every public name is found, no markup is raw. `make docs` runs it.

python docs/reference/built.py site
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "everybit": ROOT / "core/everybit/__init__.py",
    "everybit_torch": ROOT / "adapters/everybit_torch/__init__.py",
}
RAW = re.compile(
    r":(?:class|func|meth|mod|attr|data|exc|obj|math):|\.\. math::|&gt;&gt;&gt; .*<br|<blockquote>\s*<blockquote>"
)

DECISION = re.compile(r"decisions/(\d{4})-")


def public_names() -> set[str]:
    """The names in ``__all__`` of both packages; read from their sources, so that torch need not be imported."""
    names = set()
    for package, source in PACKAGES.items():
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
            ):
                names |= {f"{package}.{name}" for name in ast.literal_eval(node.value)}
    return names


def inventory(site: Path) -> set[str]:
    """The names that the site's ``objects.inv`` lists, by which other projects' documentation links to it."""
    packed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split()[0] for line in zlib.decompress(packed).decode().splitlines() if line.strip()}


def problems(site: Path) -> list[str]:
    """What is wrong with the built site, one line each."""
    found = [f"{name}: not in the reference" for name in sorted(public_names() - inventory(site))]
    for page in sorted(site.glob("reference/*/index.html")):
        raw = RAW.findall(page.read_text(encoding="utf-8"))
        found += [f"{page.relative_to(site)}: raw markup {text!r}" for text in sorted(set(raw))]
    return found


def decisions_last(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries of the search with those of decisions at the end, and their titles in their texts: a word in a title counts most."""
    found = [one for one in items if not DECISION.match(one["location"])]
    for one in items:
        if number := DECISION.match(one["location"]):
            title = f"Decision {number[1]}"
            text = one["text"] if one["title"] == title else f"<p>{one['title']}</p> {one['text']}"
            found.append(one | {"title": title, "text": text})
    return found


if __name__ == "__main__":
    index = Path(sys.argv[1]) / "search.json"
    searched = json.loads(index.read_text(encoding="utf-8"))
    searched["items"] = decisions_last(searched["items"])
    index.write_text(json.dumps(searched), encoding="utf-8")
    found = problems(Path(sys.argv[1]))
    sys.exit("\n".join(found) or None)
