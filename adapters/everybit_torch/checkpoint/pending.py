"""A save that is written in the background. Its error is raised once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path


class PendingSave(Future[Path]):
    """The future of an asynchronous save: its result is the directory, its exception the error of the save."""

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # a collective is not cancelled
        self._asked = False

    def result(self, timeout: float | None = None) -> Path:
        """The directory, when every rank has written.

        Raises:
            BaseException: What went wrong; the next save does not raise it then.
        """
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error, or None; once it was returned, the next save does not raise it."""
        error = super().exception(timeout)
        self._asked = True
        return error

    def carry_out(self, write: Callable[[], Path]) -> None:
        """Set the result or the exception of a function."""
        try:
            path = write()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(path)

    def unseen(self) -> BaseException | None:
        """Wait for the save, and return its error unless the error was read before."""
        asked = self._asked
        error = self.exception()
        return None if asked else error
