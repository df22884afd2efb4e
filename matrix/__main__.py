"""``python -m matrix``: run the tests on the oldest torch that is claimed, on the newest, and between."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import tyro

from gpu_codegen.report import write_into
from matrix.environments import environment
from matrix.results import BEGIN, Result, describe, load, merged, save, tables
from matrix.rows import AREAS, CONSTRAINTS, PYTHONS, ROOT, Row, UnavailableError
from matrix.running import commit, live_objects, run


@dataclass(frozen=True)
class Options:
    """Each row gets a virtual environment of its own, of 2 GB. What ran before and is not run now keeps its result."""

    rows: tuple[str, ...] = tuple(CONSTRAINTS)
    """Names of constraints: oldest, 2.12, pinned, newest."""
    python: tuple[str, ...] = PYTHONS
    """Versions of Python, such as 3.12."""
    areas: tuple[str, ...] = AREAS
    """Folders of tests/."""
    pytest: str = "-q -n 2 --dist worksteal"
    """Options of pytest, in one string."""
    cuda: bool = False
    """Install CUDA's libraries and Triton where torch declares them, 4 GB more for each row, in the place of stand-ins."""
    minutes: float = 120
    """How long one area may take in one row."""
    cache: Path = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "everybit-matrix"
    """Where the environments are kept."""
    out: Path = ROOT / "matrix/results.json"
    """The results, as JSON."""
    page: Path = ROOT / "docs/versions.md"
    """The page into which the tables are written."""

    def __post_init__(self) -> None:
        """Refuse names that there are not, before anything is installed."""
        for field, given, known in (("rows", self.rows, tuple(CONSTRAINTS)), ("areas", self.areas, AREAS)):
            if unknown := [name for name in given if name not in known]:
                raise ValueError(f"{field}: got {', '.join(unknown)}; accepted are {', '.join(known)}.")


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if all that was run passed, and 1 if something failed."""
    options = tyro.cli(Options, prog="python -m matrix", description=__doc__, args=arguments)
    results: list[Result] = []
    for result in _results(options):
        results.append(result)
        # After each, so that a run that is interrupted leaves what it found.
        known = merged(load(options.out), [result])
        known.sort(key=lambda one: (list(CONSTRAINTS).index(one.row), *map(int, one.key[1].split(".")), one.area))
        save(options.out, known)
        write_into(options.page, tables(known, AREAS), BEGIN)
    failed = [one for one in results if one.outcome is not None and (one.outcome.failed or one.outcome.broken)]
    print(f"{sum(one.outcome is not None for one in results)} areas run, {len(failed)} of them failed: {options.page}")
    return 1 if failed else 0


def _results(options: Options) -> Iterator[Result]:
    rows = [Row(name, python) for name in options.rows for python in options.python]
    for number, row in enumerate(rows, start=1):
        torch, optree = row.version("torch"), row.version("optree")
        title = f"{number}/{len(rows)} {row.name}: torch {torch}, optree {optree}, Python {row.python}"
        print(f"{title}: environment", flush=True)
        try:
            made = environment(row, options.cache, cuda=options.cuda)
        except UnavailableError as error:
            print(f"{title}: NOT RUN: {error}", flush=True)
            for area in options.areas:
                yield Result(row.name, row.python, torch, optree, area, not_run=str(error))
            continue
        for area in options.areas:
            print(f"{title}: tests/{area}", flush=True)
            tested = commit()
            outcome = run(made, area, options.pytest, options.minutes)
            print(
                f"{title}: tests/{area}: {describe(outcome)} in {outcome.seconds:.0f} s",
                *outcome.failures,
                sep="\n  ",
                flush=True,
            )
            if area == "fsdp2":
                live_objects(made)
            yield Result(
                row.name,
                made.versions["python"],
                made.versions["torch"],
                made.versions["optree"],
                area,
                outcome=outcome,
                arguments=options.pytest,
                commit=tested,
                date=date.today().isoformat(),
                machine=f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
            )


if __name__ == "__main__":
    sys.exit(main())
