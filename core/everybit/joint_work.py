"""Work that is done for several matrices at once: by a transform for those that it is given, or by who steps several tensors one by one.

A transform that has such work asks ``ctx.joint`` for it. In a front end that steps each tensor by itself the answer is found before, in a
first run of every transform up to that question (:class:`Asking`), and given in the step (:class:`Answers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Work = Callable[[Tensor], Tensor]
"""From a batch (count, rows, columns) of matrices to as many results of their shape."""


class JointWork(Protocol):
    """Who does the work."""

    def results(self, batches: Sequence[Tensor], work: Work) -> list[Tensor]:
        """Return the results of batches (..., rows, columns) of matrices, each of the shape of its batch."""
        ...


class AtOnce:
    """Does the work at once, for all matrices of one shape, dtype and device together. The class itself serves, as :class:`Local` does."""

    @staticmethod
    def results(batches: Sequence[Tensor], work: Work) -> list[Tensor]:
        """Return the results, batch by batch."""
        alike: dict[object, list[int]] = {}
        for number, batch in enumerate(batches):
            alike.setdefault((batch.shape[-2:], batch.dtype, batch.device), []).append(number)
        found: dict[int, Tensor] = {}
        for numbers in alike.values():
            flat = [batches[number].reshape(-1, *batches[number].shape[-2:]) for number in numbers]
            parts = torch.split(work(torch.cat(flat) if len(flat) > 1 else flat[0]), [len(one) for one in flat])
            found |= {number: part.reshape(batches[number].shape) for number, part in zip(numbers, parts, strict=True)}
        return [found[number] for number in range(len(batches))]


class NeedsJointWorkError(Exception):
    """A transform asked for work whose results are not known yet.

    Args:
        batches: Of which matrices.
        work: Which.
    """

    def __init__(self, batches: Sequence[Tensor], work: Work) -> None:
        super().__init__("joint work")
        self.batches, self.work = list(batches), work


class Asking:
    """Takes note of the first question."""

    def results(self, batches: Sequence[Tensor], work: Work) -> list[Tensor]:
        """Raise :class:`NeedsJointWorkError`."""
        raise NeedsJointWorkError(batches, work)


class Answers:
    """Answers the first question by results that were found before, and does further work at once.

    Args:
        found: The results.
    """

    def __init__(self, found: Sequence[Tensor]) -> None:
        self._found: list[Tensor] | None = list(found)

    def results(self, batches: Sequence[Tensor], work: Work) -> list[Tensor]:
        """Return what was found."""
        if self._found is None:
            return AtOnce.results(batches, work)
        found, self._found = self._found, None
        return found
