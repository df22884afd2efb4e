"""The reports of steps, and the count of elements that are not finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from everybit_torch.collectives import chunk_size, chunks

NanCheck = Literal["off", "step", "param"]
Stage = Literal["backward", "reduction"]


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A parameter with infinite or NaN elements in its gradient.

    Attributes:
        name: The parameter's name.
        rank: The rank on which they were found, in the process group of the whole mesh.
        count: The number of such elements.
        stage: ``"backward"``: in the gradients of this rank's backward passes; ``"reduction"``: in the sum over the ranks only, which
            overflowed in the dtype in which gradients are sent.
    """

    name: str
    rank: int
    count: int
    stage: Stage

    def __str__(self) -> str:
        where = "after the reduction" if self.stage == "reduction" else "before it"
        return f"{self.name}: {self.count} non-finite gradient elements on rank {self.rank}, {where}"


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of a step.

    Attributes:
        grad_norm: Euclidean norm of the gradient over all parameters and ranks, after dividing and before any clipping; 0-d, on the
            device; the host waits for it only when it is read (``float(report.grad_norm)``).
        skipped: Whether the step was skipped, on all ranks, because a gradient was not finite.
        nonfinite: The parameters with gradients that were not finite, under ``nan="param"``.
        untouched: Parameters that received no gradient on any rank in this cycle: they were neither decayed nor moved.
    """

    grad_norm: Tensor
    skipped: bool = False
    nonfinite: tuple[NonFinite, ...] = ()
    untouched: tuple[str, ...] = ()


def count_nonfinite(x: Tensor) -> Tensor:
    """Number of infinite and NaN elements: int64, 0-d, on the device. A norm would overflow on large finite elements."""
    count = torch.zeros((), dtype=torch.int64, device=x.device)
    flat = x.reshape(-1)
    for low, high in chunks(flat.numel(), chunk_size(x.device)):
        part = flat[low:high]
        count += part.numel() - torch.isfinite(part).sum()
    return count
