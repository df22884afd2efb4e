"""All weights on every rank for a while, to look at, evaluate or save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from everybit_torch.sharded.gathering import Gathering
from everybit_torch.sharded.unit_weights import each
from everybit_torch.sharded.weights import WeightBuffer


class FullParameters:
    """Shows all weights of a model whose parameters are sharded, and keeps what is written to them.

    Args:
        gathering: Gathers them.
        weights: The buffers.

    Attributes:
        shown: Whether all weights are shown now.
    """

    def __init__(self, gathering: Gathering, weights: Sequence[WeightBuffer]) -> None:
        self._gathering, self._weights = gathering, list(weights)
        self.shown = False

    @contextmanager
    def show(self) -> Iterator[None]:
        """All weights are shown inside."""
        if self.shown:
            yield
            return
        with self._gathering.everything():
            self.shown = True
            try:
                yield
            finally:
                try:
                    self.keep()
                finally:
                    self.shown = False

    def keep(self) -> None:
        """This rank's shards are what the model's tensors are now, if they are shown."""
        if self.shown:
            each([weights.keep_what_was_written for weights in self._weights])

    def renew(self) -> None:
        """The model's tensors are what the shards are now, if they are shown."""
        if self.shown:
            for one in [weights.gather_again(self._gathering.communicator) for weights in self._weights]:
                one.wait()
