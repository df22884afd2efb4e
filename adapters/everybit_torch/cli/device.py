"""Where a command works: a device by name, and how many threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from everybit_torch.cli.errors import OptionError


def parsed_device(name: str) -> torch.device:
    """The device of ``--device``.

    Raises:
        OptionError: torch finds none of that name here.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = ["cpu", *(["cuda"] if count else []), *(f"cuda:{index}" for index in range(count))]
    if name not in here:
        found = ", ".join(here) + ("" if count else " (torch finds no CUDA device here)")
        raise OptionError("--device", name, found)
    return torch.device(name)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """CPU threads of torch set to ``count``, unless it is 0, and set back afterwards."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
