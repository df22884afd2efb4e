"""Work on several matrices at once, such as the orthogonal updates of all matrices of one shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from everybit.protocol.requests import Request

Work = Callable[[Tensor], Tensor]
"""From a batch (count, rows, columns) of matrices to as many results of their shape."""


@dataclass(frozen=True)
class JointWork(Request[list[Tensor]]):
    """The results of one function for batches of matrices. A driver may call it once for alike batches of several parameters.

    Attributes:
        batches: Matrices (..., rows, columns).
        work: The function. Each result depends on its matrix alone, but for the bits by which batched products differ.
    """

    joint: ClassVar[bool] = True
    batches: Sequence[Tensor]
    work: Work

    def here(self) -> list[Tensor]:
        """Return the results, batch by batch."""
        return worked(self.batches, self.work)


def worked(batches: Sequence[Tensor], work: Work) -> list[Tensor]:
    """Return the results of batches, each in the shape of its batch; those of one shape, dtype and device are computed together."""
    alike: dict[object, list[int]] = {}
    for number, batch in enumerate(batches):
        alike.setdefault((batch.shape[-2:], batch.dtype, batch.device), []).append(number)
    found: dict[int, Tensor] = {}
    for numbers in alike.values():
        flat = [batches[number].reshape(-1, *batches[number].shape[-2:]) for number in numbers]
        parts = torch.split(work(torch.cat(flat) if len(flat) > 1 else flat[0]), [len(one) for one in flat])
        found |= {number: part.reshape(batches[number].shape) for number, part in zip(numbers, parts, strict=True)}
    return [found[number] for number in range(len(batches))]
