"""All weights, or those of some units, on every rank for a while, to look at, evaluate or save."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from everybit_torch.dtensors import local
from everybit_torch.sharded.gathering import Gathering
from everybit_torch.sharded.unit_weights import each
from everybit_torch.sharded.weights import WeightBuffer
from everybit_torch.torch_internals.tensors import version


class FullParameters:
    """Shows weights of a model whose parameters are sharded, and keeps what is written to them.

    Args:
        gathering: Gathers them.
        weights: The buffers.

    Attributes:
        shown: Whether weights are shown now.
    """

    def __init__(self, gathering: Gathering, weights: Sequence[WeightBuffer]) -> None:
        self._gathering, self._weights = gathering, list(weights)
        self._units: set[int] = set()
        self._all = set(range(len(gathering.units)))

    @property
    def shown(self) -> bool:
        """Whether weights are shown now."""
        return bool(self._units)

    @property
    def gathered(self) -> str:
        """The units that are gathered now, by name."""
        names = [str(self._gathering.units[number]) for number in sorted(self._gathering.scheduled.gathered)]
        return ", ".join(names)

    @contextmanager
    def show(self, units: Collection[int] | None = None, *, writeback: bool = True) -> Iterator[None]:
        """Weights are shown inside.

        Args:
            units: Numbers of units; None: all weights.
            writeback: Keep what is written to them.
        """
        new = (self._all if units is None else set(units)) - self._units
        if not new:
            yield
            return
        with self._gathering.everything() if new == self._all else self._gathering.keeping(new):
            self._units |= new
            try:
                yield
            finally:
                try:
                    if writeback:
                        self._keep(new)
                    else:
                        each([weights.drop_writes for weights in self._weights if weights.group.unit in new])
                finally:
                    self._units -= new

    def keep(self) -> None:
        """This rank's shards are what the model's tensors are now, where they are shown."""
        self._keep(self._units)

    def _keep(self, units: Collection[int]) -> None:
        each([weights.keep_what_was_written for weights in self._weights if weights.group.unit in units])

    def renew(self) -> None:
        """The model's tensors are what the shards are now, where they are shown."""
        shown = [weights for weights in self._weights if weights.group.unit in self._units]
        for one in [weights.gather_again(self._gathering.communicator) for weights in shown]:
            one.wait()


@contextmanager
def read_only(parameters: Sequence[tuple[str, nn.Parameter]]) -> Iterator[None]:
    """Refuse, at the end, that parameters were written to inside.

    Raises:
        RuntimeError: One was; the message names it.
    """
    before = [_versions(parameter) for _, parameter in parameters]
    yield
    for (name, parameter), known in zip(parameters, before, strict=True):
        if _versions(parameter) != known:
            raise RuntimeError(
                f"{name}: was written to, or stepped, inside full_parameters(writeback=False), which is for reading only; where weights are"
                " sharded it was not kept. Accepted is full_parameters()."
            )


def _versions(parameter: nn.Parameter) -> tuple[int, int]:
    """Of a parameter, and of the memory of a DTensor's part, which may be written to by itself."""
    return version(parameter), version(local(parameter))
