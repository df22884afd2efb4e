"""What is run: versions of torch, each with a file of constraints, and interpreters."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = {
    "oldest": ROOT / "matrix/constraints/oldest.txt",
    "2.12": ROOT / "matrix/constraints/torch-2.12.txt",
    "pinned": ROOT / "constraints.txt",
    "newest": ROOT / "matrix/constraints/newest.txt",
}
PYTHONS = ("3.11", "3.12", "3.13")
AREAS = tuple(
    sorted(
        folder.name
        for folder in (ROOT / "tests").iterdir()
        if folder.name != "conformance" and any(folder.rglob("test_*.py"))
    )
)


class UnavailableError(RuntimeError):
    """A row cannot be run on this machine; the message says why."""


@dataclass(frozen=True)
class Row:
    """One environment: a file of constraints, by name, and a version of Python such as ``3.12``."""

    name: str
    python: str

    @property
    def constraints(self) -> Path:
        """The versions that are installed."""
        return CONSTRAINTS[self.name]

    def version(self, package: str) -> str:
        """The version of a package that the constraints name.

        Raises:
            ValueError: They name none.
        """
        text = self.constraints.read_text(encoding="utf-8")
        found = re.search(rf"^{re.escape(package)}==(\S+)$", text, re.MULTILINE)
        if found is None:
            raise ValueError(
                f"{self.constraints}: got no version of {package}; accepted is a line {package}==<version>."
            )
        return found[1]


def interpreter(version: str, homes: Sequence[Path] = (Path.home() / ".pyenv/versions",)) -> Path:
    """An interpreter of a version such as ``3.12``: on the path, or the newest one of pyenv's.

    Raises:
        UnavailableError: There is none that runs.
    """
    on_path = shutil.which(f"python{version}")
    candidates = [Path(on_path)] if on_path else []
    for home in homes:
        candidates += [folder / "bin/python" for folder in sorted(home.glob(f"{version}.*"), key=_patch, reverse=True)]
    for candidate in candidates:
        # What pyenv puts on the path fails where its version is not chosen.
        says = [str(candidate), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(says, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate
    where = ", ".join(str(home) for home in homes)
    raise UnavailableError(f"Python {version}: there is no python{version} on the path or in {where}.")


def _patch(folder: Path) -> int:
    """The last number of a version's folder: 7 of ``3.11.7``."""
    return int(re.findall(r"\d+", folder.name)[-1])
