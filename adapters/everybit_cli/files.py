"""Files that commands write: JSON that any reader takes, and pictures; whole or not at all."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everybit_cli.errors import OptionError
from everybit_torch.checkpoint.atomic_files import replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def keep_results(folder: Path, name: str, data: dict[str, Any], draw: Callable[[], Figure]) -> str:
    """Write results as JSON, then as a picture, into a folder, and return a sentence that says where they are.

    Numbers are on the disk before the picture is drawn, so that an error in drawing does not lose them.

    Args:
        folder: Is there.
        name: The names of the files, without their endings.
        data: The results.
        draw: Draws the picture.
    """
    numbers, image = folder / f"{name}.json", folder / f"{name}.png"
    text = as_json(data)

    def write(partial: Path) -> None:
        partial.write_text(text, encoding="utf-8")

    replace_file(numbers, write)
    picture = draw()
    replace_file(image, lambda partial: picture.savefig(partial, format="png"))
    return f"Wrote {numbers} and {image}"
