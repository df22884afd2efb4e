"""Real processes that talk over gloo: run a function on each of several ranks, and get what each returned."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

# Ranks are forked from a process that has imported everything and computed nothing, which takes a tenth of a second each.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "everybit_torch", "everybit_torch.sharded.stepper", "ranks"])


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
) -> list[tuple[bool, Any]]:
    """As :func:`run`; for each rank whether it ended well, and what it returned or why not."""
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes = [], []
        for rank in range(size):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_rank, args=(rank, size, f"{directory}/store", timeout, program, arguments, sender), daemon=True
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        outcomes: list[tuple[bool, Any]] = [(False, "did not end in time")] * size
        open_pipes = dict(zip(pipes, range(size), strict=True))
        deadline = limit
        while open_pipes:
            ready = wait(list(open_pipes), timeout=deadline)
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = open_pipes.pop(pipe)
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    outcomes[rank] = (False, "died")
        for process in processes:
            if open_pipes:
                process.kill()
            process.join()
        return outcomes


def _rank(
    rank: int, size: int, store: str, timeout: float, program: Callable[..., Any], arguments: Any, sender: Connection
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
        )
        value = program(*arguments)
        if dist.is_initialized():
            dist.destroy_process_group()
        sender.send_bytes(pickle.dumps((True, value)))  # by value: shared memory would end with this process
    except BaseException:
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        sender.close()
        os._exit(0)  # threads of a group that failed may never end
