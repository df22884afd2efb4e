"""The directory of a run's checkpoints: a folder for each save, and a file that names the latest complete save."""

from __future__ import annotations

import os
import re
import shutil
import zlib
from pathlib import Path, PurePath

from everybit_torch.checkpoint import dcp_metadata, inventory
from everybit_torch.checkpoint.atomic_files import replace_file
from everybit_torch.checkpoint.inventory import Inventory
from everybit_torch.checkpoint.reading import overlaps

LATEST = "latest"
"""The file that names the checkpoint that is whole, with a checksum of the name."""

MARK = ".everybit"
"""A file in every folder that a save made. It is empty in those of the first versions, which wrote no checksums."""


def latest_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Return the directory of the newest complete checkpoint under ``path``, for DCP's own functions.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: The file that names it is damaged.
    """
    directory = Path(path)
    if (directory / dcp_metadata.FILE).is_file():
        return directory
    pointer = directory / LATEST
    if not pointer.is_file():
        what = "has no whole checkpoint" if directory.is_dir() else "does not exist"
        raise FileNotFoundError(f"{directory}: {what}; accepted is a directory that save_sharded wrote to.")
    words = pointer.read_bytes().decode("utf-8", "replace").split()
    # The first versions wrote the name alone.
    if len(words) not in (1, 2) or PurePath(words[0]).name != words[0] or words[1:] not in ([], [_check(words[0])]):
        raise ValueError(
            f"{pointer}: bits have changed since it was written; accepted is the name of a checkpoint beside it. One of those can be loaded"
            f" by its own path, such as {directory / '000001'}."
        )
    place = directory / words[0]
    if not (place / dcp_metadata.FILE).is_file():
        raise FileNotFoundError(f"{place}: is what {pointer} names, and is gone or not whole.")
    return place


def read_inventory_of(place: Path, *, is_judged: bool = True) -> Inventory:
    """Read the inventory of a checkpoint, or DCP's metadata if there is no inventory.

    Args:
        place: The checkpoint's folder.
        is_judged: Look for pieces that overlap, in a checkpoint without checksums.

    Raises:
        OSError: Something of it cannot be read.
        ValueError: It is damaged.
    """
    if (place / inventory.FILE).exists():
        return inventory.read_inventory(place)
    mark = place / MARK
    if mark.is_file() and mark.stat().st_size:
        raise FileNotFoundError(f"{place / inventory.FILE}: does not exist, and was written with this checkpoint.")
    found = dcp_metadata.read_dcp_metadata(place)
    if is_judged and (twice := next(overlaps(found), None)) is not None:
        raise ValueError(
            f"{place / dcp_metadata.FILE}: {twice!r}: pieces of it overlap; bits have changed since it was written."
        )
    return found


def next_number(directory: Path) -> int:
    """Return the number of the next save."""
    directory.mkdir(parents=True, exist_ok=True)
    return max((int(one.name) for one in _saves(directory)), default=0) + 1


def make_folder(directory: Path, number: int) -> str:
    """Make the folder of a save; returns its name."""
    name = f"{number:06d}"
    (directory / name).mkdir()
    (directory / name / MARK).write_text(f"{inventory.FILE}\n", encoding="utf-8")
    return name


def _saves(directory: Path) -> list[Path]:
    """The folders that saves made, oldest first."""
    found = [one for one in directory.iterdir() if re.fullmatch(r"\d{6,}", one.name) and (one / MARK).is_file()]
    return sorted(found, key=lambda one: int(one.name))


def remove_unless_named(place: Path) -> None:
    """Remove the files of a save that failed."""
    try:
        named = latest_checkpoint(place.parent) == place
    except (OSError, ValueError):
        named = False
    if not named:
        shutil.rmtree(place, ignore_errors=True)


def remove_old(directory: Path, latest: str, keep: int) -> None:
    """Remove the saves that are older than the ``keep`` before the latest, and those that a killed rank left half-written."""
    older = [one for one in _saves(directory) if int(one.name) < int(latest)]
    whole = [one for one in older if (one / ".metadata").is_file()]
    kept = whole[len(whole) - keep :] if keep else []
    for one in older:
        if one not in kept:
            shutil.rmtree(one, ignore_errors=True)


def point_to(directory: Path, name: str) -> None:
    """Name the checkpoint that is whole."""
    text = f"{name} {_check(name)}\n"
    replace_file(directory / LATEST, lambda partial: _write_text(partial, text))


def _write_text(path: Path, text: str) -> None:
    with open(path, "r+", encoding="utf-8") as file:
        file.write(text)


def _check(name: str) -> str:
    return f"{zlib.crc32(name.encode()):08x}"
