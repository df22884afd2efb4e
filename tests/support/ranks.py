"""Real processes that talk over gloo: run a function on each of several ranks, and get what each returned.

Processes are kept from one call to the next, for starting them and importing torch took most of the time: each test process (each of
pytest-xdist's workers) has a pool of its own, of as many as were ever asked for at once. Every call makes a process group of its own. A
process whose program raised, or that did not end in time, is never used again, and neither are those that it talked to; and none that has
:data:`MOST_THREADS`.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

# Ranks are forked from a process that has imported everything and computed nothing, which takes a tenth of a second each. What a rank would
# import when it first compiles or saves is imported there too, once and not in every rank.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._inductor.compile_fx",
        "setuptools", "pytest", "everybit_torch", "everybit_torch.sharded.stepper",
    ]
)  # fmt: skip

MOST_THREADS = 60
"""Threads after which a process is not used again. torch's caches for DTensors keep meshes, and with them gloo's threads, three for each
group, which wake up a hundred times a second."""

Outcome = tuple[bool, Any]
LATE: Outcome = (False, "did not end in time; standard error has what it was doing")


class RankFailedError(AssertionError):
    """A rank raised; the message is its traceback."""


def run(
    size: int, program: Callable[..., Any], *arguments: Any, timeout: float = 60.0, limit: float = 180.0
) -> list[Any]:
    """``program(*arguments)`` on every rank of a gloo group of ``size``; what they return, by rank.

    Args:
        size: Number of processes.
        program: A function at the top of a module that the processes can import. Rank and size are ``torch.distributed``'s.
        arguments: For it.
        timeout: Of collectives, in seconds.
        limit: For the whole, in seconds.

    Raises:
        RankFailedError: A rank raised, died or did not end.
    """
    outcomes = attempt(size, program, *arguments, timeout=timeout, limit=limit)
    failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
    if failures:
        raise RankFailedError("\n".join(failures))
    return [value for _, value in outcomes]


def attempt(
    size: int, program: Callable[..., Any], *arguments: Any, timeout: float = 60.0, limit: float = 180.0
) -> list[Outcome]:
    """As :func:`run`; for each rank whether it ended well, and what it returned or why not."""
    with tempfile.TemporaryDirectory() as directory:
        workers = _POOL.take(size)
        job = pickle.dumps((f"{directory}/store", size, timeout, program, arguments))
        for rank, worker in enumerate(workers):
            worker.submit(rank, job)
        outcomes = _outcomes(workers, time.monotonic() + limit)
        if all(ok for ok, _ in outcomes):
            _POOL.give_back(workers)
        else:
            # Threads of a group that failed may never end, nor may a peer's: none of these ranks is used again.
            for worker, outcome in zip(workers, outcomes, strict=True):
                if outcome == LATE:
                    worker.show_stack()
                worker.kill()
        return outcomes


def _outcomes(workers: list[_Worker], deadline: float) -> list[Outcome]:
    outcomes = [LATE] * len(workers)
    waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), timeout=left):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                outcomes[rank], workers[rank].is_spent = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                outcomes[rank] = (False, "died")
    return outcomes


class _Worker:
    """A process that runs one program after another."""

    def __init__(self) -> None:
        self.pipe, other = CONTEXT.Pipe()
        self.process: BaseProcess = CONTEXT.Process(target=_serve, args=(other,), daemon=True)
        self.process.start()
        other.close()
        self.is_spent = False

    def submit(self, rank: int, job: bytes) -> None:
        self.pipe.send_bytes(pickle.dumps((rank, job)))

    def show_stack(self) -> None:
        """Have it write what its threads are doing to standard error."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(1.0)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class _Pool:
    """The processes that are free, by the rank that each has: torch keeps what it knows of a mesh, and of the rank's place in it."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[_Worker]] = defaultdict(list)
        self._owner = os.getpid()
        atexit.register(self.close)

    def take(self, size: int) -> list[_Worker]:
        return [self._free[rank].pop() if self._free[rank] else _Worker() for rank in range(size)]

    def give_back(self, workers: list[_Worker]) -> None:
        for rank, worker in enumerate(workers):
            if worker.is_spent:
                worker.kill()
            else:
                self._free[rank].append(worker)

    def close(self) -> None:
        if os.getpid() == self._owner:
            for worker in itertools.chain(*self._free.values()):
                worker.kill()
            self._free.clear()


_POOL = _Pool()


def _serve(pipe: Connection) -> None:
    """What a worker does: one program after another, until nobody asks any more or one fails."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)  # as in tests/conftest.py
    while True:
        try:
            rank, job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        outcome = _perform(rank, job)
        try:
            pipe.send_bytes(outcome)
        except OSError:
            os._exit(0)


def _perform(rank: int, job: bytes) -> bytes:
    try:
        store, size, timeout, program, arguments = pickle.loads(job)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
            )
            # A rank that leaves the group while another is still connecting would break that one's connections.
            dist.barrier()
            value = program(*arguments)
        if dist.is_initialized():
            dist.destroy_process_group()
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.collect()  # steppers and optimizers that nobody has
        gc.freeze()  # what is left are modules and caches, which would be looked at again after every program
        return pickle.dumps(((True, value), len(os.listdir("/proc/self/task")) > MOST_THREADS))
    except BaseException:
        return pickle.dumps(((False, traceback.format_exc()), True))
