"""A file is replaced as a whole or not at all, whenever the process that writes it dies."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from everybit_torch.checkpoint.atomic_files import replace_file
from tests.support.ranks import CONTEXT


def partials(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.endswith(".partial")]


def save(contents: bytes, path: Path) -> None:
    """Written in two parts, so that half of it can be there."""

    def write(partial: Path) -> None:
        with open(partial, "r+b") as file:
            file.write(contents[: len(contents) // 2])
            file.flush()
            file.write(contents[len(contents) // 2 :])

    replace_file(path, write)


def test_a_full_disk_leaves_the_previous_file(tmp_path: Path) -> None:
    """A file may grow to 64 KiB here, which is where the disk would be full."""
    path = tmp_path / "run.pt"
    save(b"old", path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(
            OSError, match=r"run.pt: writing it failed: File too large; what was there is as it was"
        ) as raised:
            save(bytes(1 << 20), path)
        assert raised.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert path.read_bytes() == b"old"
    assert not partials(tmp_path)


def test_places_where_nothing_can_be_saved(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent: does not exist; make the directory"):
        save(b"", tmp_path / "absent" / "run.pt")
    with pytest.raises(IsADirectoryError, match=r"is a directory; accepted is the path of a file"):
        save(b"", tmp_path)


def test_what_a_check_refuses_leaves_the_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    save(b"old", path)

    def write(partial: Path) -> None:
        partial.write_bytes(b"new")

    def refuse(partial: Path) -> None:
        assert partial.read_bytes() == b"new"
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        replace_file(path, write, refuse)
    assert path.read_bytes() == b"old"
    assert not partials(tmp_path)


def test_a_writer_that_puts_another_file_in_place_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "run.pt").write_bytes(b"old")

    def write(partial: Path) -> None:
        (tmp_path / "other").write_bytes(b"new")
        os.replace(tmp_path / "other", partial)

    with pytest.raises(RuntimeError, match=r"was replaced by its writer"):
        replace_file(tmp_path / "run.pt", write)
    assert os.listdir(tmp_path) == ["run.pt"]
    assert (tmp_path / "run.pt").read_bytes() == b"old"


def test_links_stay_links_and_permissions_stay(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "step-1.pt", tmp_path / "latest.pt"
    save(b"1", target)
    target.chmod(0o640)
    link.symlink_to(target)
    save(b"2", link)
    assert link.is_symlink()
    assert target.read_bytes() == link.read_bytes() == b"2"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    mask = os.umask(0o027)
    try:
        save(b"1", tmp_path / "new.pt")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "new.pt").stat().st_mode) == 0o640


def test_what_a_dead_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    import fcntl

    abandoned, written, other = (
        tmp_path / name for name in (".run.pt.1.partial", ".run.pt.2.partial", ".else.pt.3.partial")
    )
    for file in (abandoned, written, other):
        file.write_bytes(b"half")
    with open(written, "rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        save(b"1", tmp_path / "run.pt")
        assert sorted(partials(tmp_path)) == sorted([written.name, other.name])


def test_several_writers_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    failures: list[BaseException] = []

    def write(number: int) -> None:
        try:
            for _ in range(5):
                save(bytes([number]) * 4000, path)
                found = path.read_bytes()
                assert len(found) == 4000
                assert len(set(found)) == 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert not partials(tmp_path)


# -- file systems without locks, and targets that are no files ---------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_without_locks_saving_works_and_what_is_old_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    import fcntl

    def refused(*arguments: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refused)
    path, old, new, other = (
        tmp_path / name for name in ("run.pt", ".run.pt.1.partial", ".run.pt.2.partial", ".else.pt.3.partial")
    )
    for file in (old, new, other):
        file.write_bytes(b"half")
    for file in (old, other):
        os.utime(file, (time.time() - 2 * 3600,) * 2)
    for step in range(3):
        save(bytes([step]), path)
        assert path.read_bytes() == bytes([step])
    # Nobody knows of the new one whether it is still written.
    assert sorted(partials(tmp_path)) == sorted([new.name, other.name])


def test_a_writer_whose_partial_file_was_taken_for_abandoned_says_so(tmp_path: Path) -> None:
    (tmp_path / "run.pt").write_bytes(b"old")
    with pytest.raises(OSError, match=r"\.partial: was removed while it was written; another process"):
        replace_file(tmp_path / "run.pt", lambda partial: partial.unlink())
    assert (tmp_path / "run.pt").read_bytes() == b"old"


def test_what_is_no_file_is_refused_by_name_and_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    kinds = {"pipe": "is a pipe", "socket": "is a socket"}
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
    with suppress(PermissionError):  # making devices is for the superuser, who could replace /dev/null
        os.mknod(tmp_path / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        kinds["null"] = "is a character device"
    for name, kind in kinds.items():
        (tmp_path / f"to-{name}").symlink_to(tmp_path / name)
        mode = os.stat(tmp_path / name).st_mode
        for path in (tmp_path / name, tmp_path / f"to-{name}"):
            with pytest.raises(
                OSError, match=f"{path.name}: {kind}, which no file can replace; accepted is the path of a file"
            ):
                save(b"", path)
        assert os.stat(tmp_path / name).st_mode == mode
        assert (tmp_path / f"to-{name}").is_symlink()
    assert not partials(tmp_path)


def test_a_loop_of_links_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for path in (tmp_path / "a", tmp_path / "a" / "run.pt"):
        with pytest.raises(OSError, match=r"is a loop of symbolic links; accepted is the path of a file") as raised:
            save(b"", path)
        assert raised.value.errno == errno.ELOOP
    assert (tmp_path / "a").is_symlink()
    assert (tmp_path / "b").is_symlink()


def save_for_ever(path: Path, slow: str, told: Connection) -> None:
    """Save step after step, and say which step was saved; with ``slow`` functions that take longer than the others."""

    def dwelling(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            time.sleep(0.04)
            result = function(*arguments, **named)
            time.sleep(0.04)
            return result

        return call

    if slow != "nothing":
        setattr(os, slow, dwelling(getattr(os, slow)))
    for step in itertools.count(1):
        save(step.to_bytes(4, "big") * (1 << 18), path)
        told.send(step)


@pytest.mark.parametrize(
    "slow", ["replace", *(pytest.param(slow, marks=pytest.mark.exhaustive) for slow in ("nothing", "fsync", "chmod"))]
)
@pytest.mark.slow
def test_killed_at_any_moment_the_last_file_is_whole(tmp_path: Path, slow: str) -> None:
    path = tmp_path / "run.pt"
    moments = random.Random(slow)
    interrupted = 0
    for attempt in range(5):
        pipe, other = CONTEXT.Pipe(duplex=False)
        child = CONTEXT.Process(target=save_for_ever, args=(path, slow, other), daemon=True)
        child.start()
        other.close()
        said = [pipe.recv()]
        assert said == [1]
        while attempt % 2 and not partials(tmp_path):
            pass  # every second kill comes in the middle of a save; the others anywhere
        time.sleep(moments.uniform(0.0, 0.02 if attempt % 2 else 0.15))
        child.kill()
        with suppress(EOFError):
            while True:
                said.append(pipe.recv())
        pipe.close()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        interrupted += bool(partials(tmp_path))
        found = path.read_bytes()
        # What was reported as saved is saved; at most the one that was being written is newer.
        step = int.from_bytes(found[:4], "big")
        assert step in (said[-1], said[-1] + 1)
        assert found == step.to_bytes(4, "big") * (1 << 18)
        assert len(partials(tmp_path)) <= 1  # the next save cleans up after the last
    if slow in ("fsync", "chmod"):
        assert interrupted, "no kill came in the middle of a save"
    save(b"", path)
    assert not partials(tmp_path)
