"""Checkpoints that are whole or not there: a process killed while it saves leaves the previous one.

A file is written beside its place, brought to the disk, read back and renamed, which file systems do at once or not at all (POSIX
``rename``); then the directory is brought to the disk as well.
"""

from __future__ import annotations

import io
import os
import secrets
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

try:
    import fcntl
except ImportError:  # not on POSIX
    fcntl = None  # type: ignore[assignment]

SUFFIX = ".partial"
"""Of files that are being written. One that nobody writes any more is removed at the next save to the same place."""


def save_checkpoint(contents: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write ``contents``, such as ``{"model": model.state_dict(), "optimizer": optimizer.state_dict()}``, to a file, atomically.

    At every moment ``path`` is the previous checkpoint or this one, whole: also if the process is killed, the machine stops or the disk
    is full. Several processes may save to one place; one of theirs is there then. A symbolic link stays one, and its target is replaced.

    Args:
        contents: Nested dicts and lists of tensors, numbers and strings: what ``torch.load(weights_only=True)`` reads.
        path: The file. Its directory has to exist.

    Raises:
        TypeError: ``contents`` holds what could not be loaded; the message names where. Nothing is changed.
        OSError: The file cannot be written; the previous one is as it was.
    """
    if not isinstance(contents, Mapping):
        raise TypeError(
            f"contents: got a {type(contents).__name__}; accepted is a dict, such as {{'model': ..., 'optimizer': ...}}."
        )

    def write(partial: Path) -> None:
        before = torch.serialization.get_crc32_options()
        if not before:
            torch.serialization.set_crc32_options(True)  # load_checkpoint compares them
        try:
            torch.save(contents, partial)
        except OSError:
            raise
        except Exception as error:
            _refuse_what_cannot_be_saved(contents, error)
            raise OSError(f"{os.fspath(path)}: writing the checkpoint failed: {error}") from error
        finally:
            if not before:
                torch.serialization.set_crc32_options(False)

    def check(partial: Path) -> None:
        try:
            torch.load(partial, weights_only=True, mmap=True, map_location="cpu")
        except Exception as error:
            _refuse_what_cannot_be_saved(contents, error)
            raise OSError(
                f"{os.fspath(path)}: what was written does not load ({error}); the previous file is as it was."
            ) from error

    replace_file(path, write, check)


def load_checkpoint(
    path: str | os.PathLike[str], *, map_location: str | torch.device | dict[str, str] | None = None
) -> dict[str, Any]:
    """Read what :func:`save_checkpoint` wrote, after comparing its checksums. Runs no code from the file (``weights_only=True``).

    Args:
        path: The file.
        map_location: Where tensors go, as in ``torch.load``.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no checkpoint, or not whole: cut off, or bits have changed. The message says which.
    """
    path = Path(path)
    if not path.is_file():
        why = "is a directory" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"{path}: {why}; accepted is a file that save_checkpoint wrote.")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # zipfile says what it finds in many ways, and has no list of them
        raise ValueError(f"{path}: is no checkpoint, or was cut off ({error}).") from error
    if damaged is not None:
        raise ValueError(f"{path}: bits have changed since it was written: the checksum of {damaged!r} differs.")
    try:
        contents = torch.load(path, weights_only=True, map_location=map_location)
    except Exception as error:
        raise ValueError(f"{path}: does not load under weights_only=True: {error}") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path}: holds a {type(contents).__name__}; accepted is a dict.")
    return contents


def replace_file(
    path: str | os.PathLike[str],
    write: Callable[[Path], None],
    check: Callable[[Path], None] = lambda partial: None,
) -> None:
    """Write a file atomically: ``write`` into a new one, bring it to the disk, ``check`` it, and put it into the old one's place.

    Raises:
        FileNotFoundError: The directory does not exist.
        IsADirectoryError: ``path`` is a directory.
        OSError: The file cannot be written; the previous one is as it was.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(f"{target}: is a directory; accepted is the path of a file.")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent}: does not exist; make the directory before saving into it.")
    _remove_abandoned(target)
    with _new_file_beside(target) as (partial, descriptor):
        if target.exists():
            os.chmod(partial, stat.S_IMODE(target.stat().st_mode))
        write(partial)
        if os.stat(partial).st_ino != os.fstat(descriptor).st_ino:
            raise RuntimeError(
                f"{partial}: was replaced by its writer; what is written has to go into the file that is there."
            )
        os.fsync(descriptor)
        check(partial)
        os.replace(partial, target)
    if os.name == "posix":
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


@contextmanager
def _new_file_beside(target: Path) -> Iterator[tuple[Path, int]]:
    """A new file in the same directory, locked for as long as it is written, and gone afterwards unless it was renamed."""
    while True:
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}{SUFFIX}")
        descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0), 0o666)
        if fcntl is None:
            break
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)  # Somebody took it for abandoned before it was locked.
    try:
        yield partial, descriptor
    finally:
        os.close(descriptor)
        partial.unlink(missing_ok=True)


def _remove_abandoned(target: Path) -> None:
    """Remove what killed processes left behind: a lock ends with its process, so whatever can be locked is nobody's."""
    if fcntl is None:
        return
    for partial in target.parent.iterdir():
        if not (partial.name.startswith(f".{target.name}.") and partial.name.endswith(SUFFIX)):
            continue
        with suppress(OSError):
            descriptor = os.open(partial, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                partial.unlink()
            finally:
                os.close(descriptor)


def _refuse_what_cannot_be_saved(contents: Mapping[str, Any], error: Exception) -> None:
    for where, value in _leaves(contents, "contents"):
        file = io.BytesIO()
        try:
            torch.save(value, file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except Exception:
            raise TypeError(
                f"{where}: got a {type(value).__module__}.{type(value).__qualname__}, which torch.load(weights_only=True) does not"
                " read; accepted are tensors, numbers, strings, and dicts, lists and tuples of them."
            ) from error


def _leaves(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    if type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{where}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(key, f"{where}: a key")
            yield from _leaves(item, f"{where}[{key!r}]")
        yield where, type(value)()
    else:
        yield where, value
