"""The virtual environment of a row: made once, and again when what goes into it has changed."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matrix.rows import ROOT, Row, UnavailableError, interpreter
from matrix.without_cuda import stand_in

CUDA = re.compile(r"(nvidia|cuda|triton)\b")
NEEDED_GIGABYTES = {False: 3, True: 9}


@dataclass(frozen=True)
class Environment:
    """Where a row's tests run, and the versions that were installed."""

    folder: Path
    versions: dict[str, str]

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin/python"


def environment(row: Row, cache: Path, *, cuda: bool) -> Environment:
    """A row's environment, made if there is none; ``cuda`` installs CUDA's libraries where torch declares them.

    Raises:
        UnavailableError: There is no such interpreter, too little room, or pip fails.
    """
    base = interpreter(row.python)
    wanted = json.dumps(
        [
            str(base),
            row.constraints.read_text(encoding="utf-8"),
            requirements(),
            cuda,
            _hash("environments.py"),
            _hash("without_cuda.py"),
        ]
    )
    folder = cache / f"{row.name}-{row.python}"
    made = folder / "everybit-matrix.json"
    if not made.exists() or made.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        free = shutil.disk_usage(folder).free / 2**30
        if free < NEEDED_GIGABYTES[cuda]:
            raise UnavailableError(f"{folder}: got {free:.1f} GiB of free disk; needed are {NEEDED_GIGABYTES[cuda]}.")
        _make(row, base, folder, cuda=cuda)
        made.write_text(wanted, encoding="utf-8")
    return Environment(folder, _versions(folder / "bin/python"))


def requirements() -> list[str]:
    """What the tests need beside torch: of pyproject.toml, without torch, Triton, and this project itself."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *extras["cli"], *extras["safetensors"], *extras["config"], *extras["dev"]]
    return [one for one in named if not re.match(r"(everybit|torch|ruff|import-linter)\b", one)]


def _make(row: Row, base: Path, folder: Path, *, cuda: bool) -> None:
    python = folder / "bin/python"
    _run([str(base), "-m", "venv", str(folder)], f"Python {row.python}")
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--constraint",
        str(row.constraints),
    ]
    whole = ["torch", *requirements()]
    if cuda:
        _run([*install, *whole], "pip")
        return
    _run([*install, "--no-deps", "torch"], "pip")
    declared: list[str] = json.loads(
        _run(
            [
                str(python),
                "-c",
                "import json; from importlib.metadata import requires; print(json.dumps(requires('torch')))",
            ],
            "torch",
        )
    )
    of_torch = [one for one in declared if "extra ==" not in one and not CUDA.match(one)]
    # pip says on stderr that torch lacks CUDA's packages, which is what is wanted.
    _run([*install, *of_torch, *requirements()], "pip")
    if sys.platform == "linux":
        (library,) = folder.glob("lib/python*/site-packages/torch/lib")
        try:
            stand_in(library)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            raise UnavailableError(
                f"stand-ins for CUDA's libraries: {error}. --cuda installs the libraries."
            ) from error


def _versions(python: Path) -> dict[str, str]:
    says = "import json, platform, optree, torch; print(json.dumps([platform.python_version(), torch.__version__, optree.__version__]))"
    found = json.loads(_run([str(python), "-W", "ignore", "-c", says], "import torch").splitlines()[-1])
    return dict(zip(("python", "torch", "optree"), found, strict=True))


def _run(command: list[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"{what}: {' '.join(command[-3:])} failed: {done.stderr.strip()[-600:]}")
    return done.stdout


def _hash(module: str) -> str:
    return hashlib.sha256((ROOT / "matrix" / module).read_bytes()).hexdigest()
