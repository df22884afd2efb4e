"""Files that commands write: JSON that any reader takes, whole or not at all."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from everybit_cli.errors import OptionError
from everybit_torch.checkpoint.single_file import replace_file


def check_out(folder: Path) -> None:
    """Make ``folder`` if need be, and see that a file can be made in it.

    Raises:
        OptionError: It cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OptionError("--out", f"{folder} ({reason})", "a folder that can be made and written to") from None


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it: tuples as lists, paths as strings, numbers that are not finite as null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float)) or value is None else str(value)


def as_json(data: dict[str, Any]) -> str:
    """``data`` as JSON, in lines."""
    return json.dumps(plain(data), indent=1, allow_nan=False) + "\n"


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write ``data`` to ``path``, whole or not at all."""
    write_whole(path, lambda file: file.write(as_json(data).encode()))


def keep_results(folder: Path, name: str, data: dict[str, Any], draw: Callable[[Path], None], console: Console) -> None:
    """Write results as JSON and as a picture, called ``name``, into a folder, and say where they are.

    Args:
        folder: Is there.
        name: The names of the files, without their endings.
        data: The results.
        draw: Draws the picture at a path.
        console: Where to say it.
    """
    numbers, picture = folder / f"{name}.json", folder / f"{name}.png"
    write_json(numbers, data)
    draw(picture)
    console.print(f"Wrote {numbers} and {picture}", highlight=False, soft_wrap=True)


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Have ``write`` fill a file that takes its place at ``path`` only when it is complete: no reader sees half of it."""

    def fill(partial: Path) -> None:
        with open(partial, "r+b") as file:
            write(file)

    replace_file(path, fill)
