"""Files that are replaced as a whole: a process killed while it writes leaves the previous one.

A file is written beside its place, brought to the disk, read back and renamed, which file systems do at once or not at all (POSIX
``rename``); then the directory is brought to the disk as well.

A half-written file of a killed process is removed at the next save to the same place. Whether a partial file is still being written is
told by a lock (``flock``), which ends with its process. On file systems without such locks (Lustre mounted without them, some NFS and
FUSE) it is told by its age: see :data:`ABANDONED_AFTER`.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # not on POSIX
    fcntl = None  # type: ignore[assignment]

SUFFIX = ".partial"
"""The suffix of files that are being written. An abandoned one is removed at the next save to the same place."""

ABANDONED_AFTER = 3600.0
"""Seconds without a write, by the file system's own clock, after which a partial file is taken for abandoned where there are no locks.
A writer that was only slow gets an error then, and the previous file is as it was."""


def replace_file(
    path: str | os.PathLike[str],
    write: Callable[[Path], None],
    check: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write a file atomically: ``write`` into a new one, bring it to the disk, ``check`` it, and put it into the old one's place.

    Raises:
        FileNotFoundError: The directory does not exist.
        IsADirectoryError: ``path`` is a directory.
        OSError: ``path`` is a device, a pipe, a socket or a loop of symbolic links; or the file cannot be written. The file is then as
            it was.
    """
    target = _target(path)
    try:
        with _new_file_beside(target) as (partial, descriptor):
            _remove_abandoned(target, partial, now=os.fstat(descriptor).st_mtime)
            if target.exists():
                os.chmod(partial, stat.S_IMODE(target.stat().st_mode))
            write(partial)
            _require_own(partial, descriptor)
            os.fsync(descriptor)
            check(partial)
            os.replace(partial, target)
        if os.name == "posix":
            directory = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
    except OSError as error:
        if error.errno is None:
            raise
        reason = os.strerror(error.errno)
        raise with_message(error, f"{target}: writing it failed: {reason}; what was there is as it was.") from error


def read_whole(path: Path) -> bytes:
    """A file's bytes.

    Raises:
        OSError: It cannot be read; the message names it.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise with_message(error, f"{path}: cannot be read: {os.strerror(error.errno or 0)}.") from error


def with_message(error: OSError, message: str) -> OSError:
    """An error of the same kind, with the same ``errno``, that says ``message``."""
    explained = type(error)(message)
    explained.errno = error.errno
    return explained


class FailingStream:
    """A file to write to that remembers why a write failed: ``torch.save`` reports some other consequence of it.

    Args:
        file: Open for writing.

    Attributes:
        error: The error of a failed write; None if every write succeeded.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write ``data`` as a whole, and keep the error if that fails."""
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Hand everything to the operating system."""
        try:
            self._file.flush()
        except OSError as error:
            self.error = error
            raise


def _target(path: str | os.PathLike[str]) -> Path:
    """The file that is to be replaced: a symbolic link's target.

    Raises:
        OSError: The path cannot be replaced; the message says why.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = None
    except OSError as error:
        if error.errno == errno.ELOOP:
            why = "is a loop of symbolic links; accepted is the path of a file"
        else:
            why = f"cannot be looked at: {os.strerror(error.errno or 0)}"
        raise with_message(error, f"{os.fspath(path)}: {why}.") from error
    if mode is not None and stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{os.fspath(path)}: is a directory; accepted is the path of a file.")
    if mode is not None and not stat.S_ISREG(mode):
        raise OSError(
            f"{os.fspath(path)}: {_kind_of(Path(path))}, which no file can replace; accepted is the path of a file."
        )
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent}: does not exist; make the directory before saving into it.")
    return target


_KINDS = {
    stat.S_IFDIR: "is a directory", stat.S_IFREG: "is a file", stat.S_IFCHR: "is a character device", stat.S_IFBLK: "is a block device",
    stat.S_IFIFO: "is a pipe", stat.S_IFSOCK: "is a socket",
}  # fmt: skip


def _kind_of(path: Path) -> str:
    try:
        return _KINDS.get(stat.S_IFMT(path.stat().st_mode), "is no file")
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be looked at ({os.strerror(error.errno or 0)})"


@contextmanager
def _new_file_beside(target: Path) -> Iterator[tuple[Path, int]]:
    """A new file in the same directory, locked for as long as it is written, and gone afterwards unless it was renamed."""
    partial, descriptor = _locked_file(target)
    try:
        yield partial, descriptor
    finally:
        os.close(descriptor)
        partial.unlink(missing_ok=True)


def _locked_file(target: Path) -> tuple[Path, int]:
    while True:
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}{SUFFIX}")
        descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0), 0o666)
        try:
            _lock(descriptor, wait=True)
            if os.fstat(descriptor).st_nlink or fcntl is None:
                return partial, descriptor
        except BaseException:
            os.close(descriptor)
            partial.unlink(missing_ok=True)
            raise
        os.close(descriptor)  # Somebody took it for abandoned before it was locked.


def _lock(descriptor: int, *, wait: bool) -> bool | None:
    """Whether a file could be locked: False if another process has the lock, None where the file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # ENOSYS, ENOLCK, EOPNOTSUPP, EINVAL: file systems say it in several ways
        return None
    return True


def _require_own(partial: Path, descriptor: int) -> None:
    try:
        same = os.stat(partial).st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        raise OSError(
            f"{partial}: was removed while it was written; another process that saves to the same place took it for abandoned."
        ) from None
    if not same:
        raise RuntimeError(
            f"{partial}: was replaced by its writer; what is written has to go into the file that is there."
        )


def _remove_abandoned(target: Path, own: Path, *, now: float) -> None:
    """Remove files of killed processes: those that can be locked, or that are old where the file system has no locks.

    ``now`` is the file system's.
    """
    partials: list[Path] = []
    with suppress(OSError):  # a directory that may be written to, and not looked at
        partials += target.parent.iterdir()
    for partial in partials:
        if partial == own or not (partial.name.startswith(f".{target.name}.") and partial.name.endswith(SUFFIX)):
            continue
        with suppress(OSError):
            descriptor = os.open(partial, os.O_RDWR)
            try:
                locked = _lock(descriptor, wait=False)
                age = now - os.fstat(descriptor).st_mtime
                if locked or (locked is None and age > ABANDONED_AFTER):
                    partial.unlink()
            finally:
                os.close(descriptor)
