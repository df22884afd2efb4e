"""Write licenses.md: what everybit's dependencies are licensed under, from the metadata of the installed packages (``make licenses``)."""

from __future__ import annotations

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

PAGE = Path(__file__).with_name("licenses.md")
EXTRAS = ("", "cli", "config", "safetensors")
HEAD = """# Licences of dependencies

everybit itself is under the BSD 3-Clause licence, and contains no code of others. These are the packages that an installation and
its extras for users bring along, with what their own metadata say; written by `make licenses`. Tools for development are not in the list.

| package | version | licence | needed by |
|---|---|---|---|
"""


def license_of(package: Distribution) -> str:
    """The licence in a package's metadata: its expression, its classifiers, or the first line of its text."""
    found = package.metadata
    if expression := found.get("License-Expression"):
        return expression
    classifiers = [one.split(" :: ")[-1] for one in found.get_all("Classifier") or [] if one.startswith("License ::")]
    if named := [one for one in classifiers if one != "OSI Approved"]:
        return ", ".join(named)
    text = (found.get("License") or "").strip()
    return text.splitlines()[0] if text else "not stated in its metadata"


def required(package: Distribution, extra: str) -> list[str]:
    """The names of the installed packages that a package requires, under an extra or without one."""
    names = []
    for line in package.requires or []:
        name = re.match(r"[\w.-]+", line)
        wanted = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", line)
        if name is not None and (wanted[1] if wanted else "") == extra:
            names.append(name[0])
    return names


def collect() -> dict[str, tuple[Distribution, str]]:
    """Every package that is required, directly or not, with the first extra that asks for it."""
    found: dict[str, tuple[Distribution, str]] = {}
    for extra in EXTRAS:
        waiting = required(distribution("everybit"), extra)
        while waiting:
            name = waiting.pop()
            try:
                package = distribution(name)
            except PackageNotFoundError:  # for another platform or Python
                continue
            key = package.metadata["Name"].lower().replace("_", "-")
            if key not in found:
                found[key] = package, f"`everybit[{extra}]`" if extra else "`everybit`"
                waiting += required(package, "")
    return found


def main() -> None:
    """Write the page."""
    rows = [
        f"| {name} | {package.version} | {license_of(package)} | {extra} |"
        for name, (package, extra) in sorted(collect().items())
    ]
    PAGE.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")
    print(f"{PAGE}: {len(rows)} packages")


if __name__ == "__main__":
    main()
