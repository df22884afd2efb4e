"""Carries out the events of a schedule on the buffers of weights and gradients, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor

from everybit_torch import streams
from everybit_torch.collectives.communicator import Communicator, Pending
from everybit_torch.collectives.reduction import Reduction
from everybit_torch.sharded.gradient_buffers import GradientBuffer
from everybit_torch.sharded.scheduling.events import Event, Kind
from everybit_torch.sharded.weights import WeightBuffer


class Executor:
    """Carries out events, one when the one before it is done.

    Args:
        weights: The buffers of weights, by the number of their group.
        gradients: The buffers of gradients, by the number of their group, in the layout's order.
        divisor: Of sums over all ranks.
        reducing: The communicators that gradients are sent over.

    Attributes:
        observer: Is told of every event that was carried out; None: nobody is.
    """

    def __init__(
        self,
        weights: Mapping[int, WeightBuffer],
        gradients: Mapping[int, GradientBuffer],
        divisor: float,
        reducing: Sequence[Communicator],
    ) -> None:
        self._weights, self._gradients, self._divisor = dict(weights), dict(gradients), divisor
        self._reducing = list(reducing)
        self._device = next((one.whole.device for one in weights.values()), torch.device("cpu"))
        self._home = streams.Home()
        self._under_way: list[Reduction] = []
        self._spreading: dict[int, Pending] = {}
        self._arriving: Tensor | None = None
        self.observer: Callable[[Event], None] | None = None
        self._handlers: dict[Kind, Callable[[Event], None]] = {
            "open bucket": lambda event: self._gradients[event.number].open_bucket(),
            "copy": self._accumulate,
            "add": self._accumulate,
            "zero": lambda event: self._gradients[event.number].zero(event.place),
            "close": lambda event: self._gradients[event.number].close(),
            "reduce": lambda event: self._reduce(event.number, None),
            "reduce last": lambda event: self._reduce(event.number, self._divisor),
            "finalize": lambda event: self._gradients[event.number].finalize(self._divisor),
            "clear": lambda event: self._gradients[event.number].clear(),
            "finish": self._finish,
            "drain": self._drain,
            "spread": self._spread,
            "settle": self._settle,
            "stepped": self._stepped,
        }

    def begin_here(self) -> None:
        """A pass or a step begins: its events are carried out on the present stream, whoever asks for them."""
        self._home.begin(self._device)

    def at_home(self, given: Tensor | None = None) -> AbstractContextManager[None]:
        """Work inside is done where events are carried out; ``given`` is a tensor that is used inside, and may be freed after it."""
        return self._home.entered(self._device, given)

    def on(self, handlers: Mapping[Kind, Callable[[Event], None]]) -> None:
        """Have other events carried out, too."""
        self._handlers.update(handlers)

    def run(self, events: Iterable[Event], gradient: Tensor | None = None) -> None:
        """Carry out events; ``gradient`` is what arrives in them."""
        self._arriving = gradient
        try:
            with self.at_home(gradient):
                for event in events:
                    self._handlers[event.kind](event)
                    if self.observer is not None:
                        self.observer(event)
        finally:
            self._arriving = None

    def drop(self) -> None:
        """Forget what is under way, which has been waited for."""
        self._under_way = []
        self._spreading = {}

    # -- gradients ----------------------------------------------------------------------------------------------------------------

    def _accumulate(self, event: Event) -> None:
        assert self._arriving is not None
        mode: Literal["copy", "add"] = "add" if event.kind == "add" else "copy"
        self._gradients[event.number].accumulate(event.place, self._arriving, mode=mode)

    def _reduce(self, number: int, divisor: float | None) -> None:
        self._under_way.append(self._gradients[number].reduce(divisor))

    def _finish(self, _event: Event) -> None:
        """Wait for what is under way, and put the sums into the main gradients."""
        while self._under_way:
            self._finish_first()

    def _finish_first(self) -> None:
        # It stays in the list until it is finished: what is interrupted is still under way.
        self._under_way[0].finish()
        del self._under_way[0]

    def _drain(self, _event: Event) -> None:
        """Wait for reductions under way, also for one that an error kept from the list: its memory is about to be used, and freed."""
        for communicator in self._reducing:
            communicator.drain()

    # -- a step's weights ---------------------------------------------------------------------------------------------------------

    def _spread(self, event: Event) -> None:
        self._spreading[event.number] = self._weights[event.number].start_spread()

    def _settle(self, event: Event) -> None:
        pending = self._spreading.pop(event.number, None)
        if pending is not None:
            pending.wait()

    def _stepped(self, event: Event) -> None:
        self._weights[event.number].stepped()
