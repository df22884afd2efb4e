"""A checkpoint is whole or not there, whenever the process that writes it dies."""

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
import torch

import everybit as eb
from everybit_torch import AdamW, load_checkpoint, save_checkpoint
from everybit_torch.checkpoint.single_file import replace_file
from tests.support.ranks import CONTEXT
from tests.support.small_models import Awkward, same_bits, train

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8,
    torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64,
]  # fmt: skip


def partials(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.endswith(".partial")]


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.arange(5).to(dtype) for dtype in DTYPES}
    contents = {"step": 3, "name": "a run", "nothing": None, "losses": [1.5, 2.5], "flags": (True,), "tensors": tensors}
    save_checkpoint(contents, tmp_path / "run.pt")
    loaded = load_checkpoint(str(tmp_path / "run.pt"))
    assert {k: v for k, v in loaded.items() if k != "tensors"} == {k: v for k, v in contents.items() if k != "tensors"}
    for name, tensor in tensors.items():
        assert loaded["tensors"][name].dtype is tensor.dtype
        assert torch.equal(loaded["tensors"][name].view(torch.uint8), tensor.view(torch.uint8))
    assert not partials(tmp_path)
    # And torch reads it as its own.
    assert torch.load(tmp_path / "run.pt", weights_only=True)["step"] == 3


def test_a_run_goes_on_from_it_bit_for_bit(tmp_path: Path) -> None:
    def make() -> tuple[Awkward, AdamW]:
        model = Awkward(torch.bfloat16)
        return model, AdamW(model.parameters(), lr=1e-2, policy=eb.policies.LEAN_BF16)

    model, optimizer = make()
    train(model, optimizer, 3)
    save_checkpoint({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    other, resumed = make()
    saved = load_checkpoint(tmp_path / "run.pt")
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert same_bits(train(model, optimizer, 3, start=3), train(other, resumed, 3, start=3))


class Foreign:
    """Something that would need code to load."""


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"a": {"b": [0, Foreign()]}}, r"contents\['a'\]\['b'\]\[1\]: got a .*Foreign, which .* accepted are tensors"),
        ({"f": lambda: 0}, r"contents\['f'\]: got a builtins.function"),
        ({Foreign(): 1}, r"contents: a key: got a .*Foreign"),
        ([1, 2], r"contents: got a list; accepted is a dict"),
    ],
)
def test_what_would_not_load_is_refused_and_the_previous_file_stays(
    tmp_path: Path, contents: Any, message: str
) -> None:
    path = tmp_path / "run.pt"
    save_checkpoint({"step": 1}, path)
    with pytest.raises(TypeError, match=message):
        save_checkpoint(contents, path)
    assert load_checkpoint(path) == {"step": 1}
    assert not partials(tmp_path)


def test_a_full_disk_leaves_the_previous_file(tmp_path: Path) -> None:
    """A file may grow to 64 KiB here, which is where the disk would be full."""
    path = tmp_path / "run.pt"
    save_checkpoint({"step": 1}, path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(
            OSError, match=r"run.pt: writing it failed: File too large; what was there is as it was"
        ) as raised:
            save_checkpoint({"step": 2, "weights": torch.zeros(1 << 20)}, path)
        assert raised.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert load_checkpoint(path) == {"step": 1}
    assert not partials(tmp_path)


def test_places_where_nothing_can_be_saved_or_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent: does not exist; make the directory"):
        save_checkpoint({}, tmp_path / "absent" / "run.pt")
    with pytest.raises(IsADirectoryError, match=r"is a directory; accepted is the path of a file"):
        save_checkpoint({}, tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"run.pt: does not exist; accepted is a file that save_checkpoint wrote"
    ):
        load_checkpoint(tmp_path / "run.pt")
    with pytest.raises(FileNotFoundError, match=r"is a directory"):
        load_checkpoint(tmp_path)


def test_damage_is_found(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    weights = torch.arange(1000.0)
    save_checkpoint({"weights": weights}, path)
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"run.pt: is no checkpoint, or was cut off"):
            load_checkpoint(path)
    # One bit of a weight.
    at = whole.index(weights.numpy().tobytes()) + 401
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(ValueError, match=r"bits have changed since it was written: the checksum of '.*data/0' differs"):
        load_checkpoint(path)
    # The way a part is packed, in the directory at the end.
    at = whole.rindex(b"PK\x01\x02") + 10
    path.write_bytes(whole[:at] + b"\x63" + whole[at + 1 :])
    with pytest.raises(ValueError, match=r"run.pt: is no checkpoint, or was cut off"):
        load_checkpoint(path)
    torch.save([1, 2], path)
    with pytest.raises(ValueError, match=r"holds a list; accepted is a dict"):
        load_checkpoint(path)
    torch.save({"x": Foreign()}, path)
    with pytest.raises(ValueError, match=r"does not load under weights_only=True"):
        load_checkpoint(path)


def test_checksums_are_written_whatever_torch_was_told(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        save_checkpoint({"weights": torch.ones(4)}, tmp_path / "run.pt")
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(load_checkpoint(tmp_path / "run.pt")["weights"], torch.ones(4))


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
    save_checkpoint({"step": 1}, target)
    target.chmod(0o640)
    link.symlink_to(target)
    save_checkpoint({"step": 2}, link)
    assert link.is_symlink()
    assert load_checkpoint(target) == load_checkpoint(link) == {"step": 2}
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    mask = os.umask(0o027)
    try:
        save_checkpoint({"step": 1}, tmp_path / "new.pt")
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
        save_checkpoint({"step": 1}, tmp_path / "run.pt")
        assert sorted(partials(tmp_path)) == sorted([written.name, other.name])


def test_several_writers_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    failures: list[BaseException] = []

    def write(number: int) -> None:
        try:
            for _ in range(5):
                save_checkpoint({"number": number, "weights": torch.full((1000,), float(number))}, path)
                loaded = load_checkpoint(path)
                assert bool((loaded["weights"] == loaded["number"]).all())
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
        save_checkpoint({"step": step}, path)
        assert load_checkpoint(path) == {"step": step}
    # Nobody knows of the new one whether it is still written.
    assert sorted(partials(tmp_path)) == sorted([new.name, other.name])
    for contents in ({"f": lambda: 0}, {"deep": nested(30_000)}):
        with pytest.raises((TypeError, ValueError)):
            save_checkpoint(contents, path)
    assert sorted(partials(tmp_path)) == sorted([new.name, other.name])
    assert load_checkpoint(path) == {"step": 2}


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
                save_checkpoint({"step": 1}, path)
            with pytest.raises(
                FileNotFoundError, match=f"{path.name}: {kind}; accepted is a file that save_checkpoint wrote"
            ):
                load_checkpoint(path)
        assert os.stat(tmp_path / name).st_mode == mode
        assert (tmp_path / f"to-{name}").is_symlink()
    assert not partials(tmp_path)


def test_a_loop_of_links_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for path in (tmp_path / "a", tmp_path / "a" / "run.pt"):
        with pytest.raises(OSError, match=r"is a loop of symbolic links; accepted is the path of a file") as raised:
            save_checkpoint({"step": 1}, path)
        assert raised.value.errno == errno.ELOOP
    assert (tmp_path / "a").is_symlink()
    assert (tmp_path / "b").is_symlink()
    with pytest.raises(FileNotFoundError, match=r"cannot be looked at \(Too many levels of symbolic links\)"):
        load_checkpoint(tmp_path / "a")


def test_a_file_that_cannot_be_read_is_not_called_damaged() -> None:
    with pytest.raises(OSError, match=r"/proc/self/mem: cannot be read: Input/output error") as raised:
        load_checkpoint("/proc/self/mem")  # a regular file, of which even the superuser cannot read the first byte
    assert raised.value.errno == errno.EIO


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("depth", [30_000, 100_000])
def test_what_is_nested_too_deeply_is_named(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "run.pt"
    save_checkpoint({"step": 1}, path)
    with pytest.raises(ValueError, match=rf"contents\['run'\]\['a'\]\['a'\].*: got a value {depth + 1} levels deep"):
        save_checkpoint({"step": 2, "run": nested(depth)}, path)
    assert load_checkpoint(path) == {"step": 1}
    assert not partials(tmp_path)


def test_a_list_that_holds_itself_is_saved(tmp_path: Path) -> None:
    values: list[Any] = [1]
    values.append(values)
    save_checkpoint({"values": values}, tmp_path / "run.pt")
    loaded = load_checkpoint(tmp_path / "run.pt")["values"]
    assert loaded[0] == 1
    assert loaded[1] is loaded
    with pytest.raises(TypeError, match=r"contents\['f'\]"):
        save_checkpoint({"values": values, "f": lambda: 0}, tmp_path / "run.pt")


# Saves step after step and says so afterwards. `slow` names the moment at which it dwells, so that kills hit it.
def save_for_ever(path: Path, slow: str, told: Connection) -> None:
    """Train and save, and say which step was saved; with ``slow`` functions that take longer than the others."""

    def dwelling(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            time.sleep(0.04)
            result = function(*arguments, **named)
            time.sleep(0.04)
            return result

        return call

    for name in ("fsync", "replace", "chmod"):
        if slow == name:
            setattr(os, name, dwelling(getattr(os, name)))
    if slow == "check":
        torch.load = dwelling(torch.load)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64).bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-2, policy=eb.policies.LEAN_BF16)
    for step in itertools.count(1):
        optimizer.zero_grad()
        model(torch.ones(1, 64, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        copies = [torch.full((1 << 16,), float(step)) for _ in range(4)]
        saved = {"step": step, "copies": copies, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save_checkpoint(saved, path)
        told.send(step)


@pytest.mark.parametrize(
    "slow",
    ["replace", *(pytest.param(slow, marks=pytest.mark.exhaustive) for slow in ("nothing", "fsync", "chmod", "check"))],
)
@pytest.mark.slow
def test_killed_at_any_moment_the_last_checkpoint_loads(tmp_path: Path, slow: str) -> None:
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
        saved = load_checkpoint(path)
        # What was reported as saved is saved; at most the one that was being written is newer.
        assert saved["step"] in (said[-1], said[-1] + 1)
        assert all(bool((copy == saved["step"]).all()) for copy in saved["copies"])
        assert int(saved["optimizer"]["state"][0]["step"]) == saved["step"]
        model = torch.nn.Linear(64, 64).bfloat16()
        optimizer = AdamW(model.parameters(), lr=1e-2, policy=eb.policies.LEAN_BF16)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert len(partials(tmp_path)) <= 1  # the next save cleans up after the last
    if slow in ("fsync", "chmod", "check"):
        assert interrupted, "no kill came in the middle of a save"
    save_checkpoint({"step": 0}, path)
    assert not partials(tmp_path)
