"""Whether all ranks had the same number of backward passes in a cycle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from everybit_torch import streams

NUMBERS = 2
"""Numbers that are summed over the ranks: of the counts, and of their squares."""


class PassCounts:
    """Compares the ranks' numbers of backward passes, where each pass is summed over the ranks.

    A count that differs means that some ranks' sums are of more gradients than others'. The sums over the ranks are on the device. Where
    the host reads other numbers of a step too, they are compared at once (:meth:`require_equal`). Else they are copied to the host's
    memory without waiting (:meth:`begin`), and compared before the next step (:meth:`finish`), when the device is done with them. All
    ranks compare at the same place, so that all of them raise, or none.

    Args:
        ranks: How many there are.
        device: Where the sums are.
    """

    def __init__(self, ranks: int, device: torch.device) -> None:
        self._ranks = ranks
        pinned = streams.has_streams(device)
        # On devices without streams copies to the host wait: there the copy stays on the device until it is read.
        self.numbers = torch.zeros(NUMBERS, dtype=torch.float64, device="cpu" if pinned else device, pin_memory=pinned)
        self._copied: Any = None
        self._passes: int | None = None

    @staticmethod
    def of(passes: int) -> tuple[int, int]:
        """Return this rank's contribution to the sums."""
        return passes, passes**2

    def require_equal(self, sums: list[float], passes: int) -> None:
        """Compare what was read.

        Args:
            sums: Over the ranks.
            passes: This rank's.

        Raises:
            RuntimeError: They are different.
        """
        if not self._are_equal(sums):
            raise RuntimeError(_different("step", "in this cycle", passes))

    def begin(self, sums: Tensor, passes: int) -> None:
        """Have the sums copied to the host's memory, without waiting for them.

        Args:
            sums: Over the ranks, on the device.
            passes: This rank's.
        """
        self.numbers.copy_(sums, non_blocking=True)
        self._copied = streams.mark(sums.device)
        self._passes = passes

    def finish(self, name: str) -> None:
        """Compare what :meth:`begin` had copied, if there is something; it is looked at once.

        Args:
            name: What is refused.

        Raises:
            RuntimeError: They were different.
        """
        passes, self._passes = self._passes, None
        if passes is None:
            return
        if self._copied is not None:
            self._copied.synchronize()
        if not self._are_equal(self.numbers.tolist()):
            raise RuntimeError(
                _different(name, "in the cycle of the last step", passes)
                + " That step was taken with sums of different numbers of gradients; load_sharded(stepper, path) goes back to weights"
                " from before."
            )

    def forget(self) -> None:
        """Drop the counts without comparing them, because the stepped weights were replaced."""
        self._passes = None

    def _are_equal(self, sums: list[float]) -> bool:
        total, squares = sums
        return self._ranks * squares == total**2  # exactly if all counts are equal


def _different(name: str, when: str, passes: int) -> str:
    return (
        f"{name}: ranks had different numbers of backward passes {when}, this one {passes}: zero_grad() was called on some of them only."
        " Accepted next is zero_grad(), on every rank."
    )
