"""The error for a bad option, errors of memory that ran out, and the exit codes that a command returns to the shell."""

from __future__ import annotations

import torch

FAILED = 1
BAD_OPTION = 2
INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended


class OptionError(ValueError):
    """An option with a value that cannot be used; commands raise it before they do any work.

    Args:
        option: As it is typed, e.g. ``"--steps"``.
        got: What stood there.
        accepted: What would do.
    """

    def __init__(self, option: str, got: object, accepted: str) -> None:
        super().__init__(f"{option}: got {got}; accepted: {accepted}")

    @classmethod
    def saying(cls, error: Exception | str, where: str = "") -> OptionError:
        """Return an OptionError with the message of another error, in one line; ``where`` is the option, if it has none."""
        made = cls("", "", "")
        made.args = (" ".join(f"{where}: {error}".removeprefix(": ").split()),)
        return made


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out. torch has an exception for that on accelerators, and on the CPU a message alone."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
