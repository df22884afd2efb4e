"""Which units' weights are there at which moment, where parameters are shared out.

Units are gathered in the layout's order, forwards, and backwards in the reverse: one ahead of the one that computes, and given back as
soon as it has computed. The order is that of the layout on every rank, also on one that skips a unit (it takes part in gathering it all
the same); only a unit that is used twice in one pass is gathered again when it is, which all ranks have to do alike.

The model itself, the first unit, keeps what is in no other unit from its forward pass to the end of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from everybit_torch.sharded.communicator import Communicator
from everybit_torch.sharded.weights import WeightBuffer


class Unit:
    """Weights that are gathered together: a module, and the buffers of its groups."""

    def __init__(self, module: nn.Module, buffers: Sequence[WeightBuffer]) -> None:
        self.module, self.buffers = module, list(buffers)

    @property
    def gathered(self) -> bool:
        """Whether all of it is there, or under way."""
        return all(buffer.gathered for buffer in self.buffers)

    def start(self, communicator: Communicator) -> None:
        """Begin to gather."""
        for buffer in self.buffers:
            buffer.start_gather(communicator)

    def wait(self) -> None:
        """Until it is there."""
        for buffer in self.buffers:
            buffer.wait()

    def release(self) -> None:
        """Give it back."""
        for buffer in self.buffers:
            buffer.release()


class Gathering:
    """Gathers and gives back units around their forward and backward passes, by hooks on their modules.

    Args:
        units: In the layout's order, the model first.
        communicator: The ranks that share the weights out; nobody else sends over it.
        reshard_after_forward: Give units back after the forward pass, to gather them again for the backward pass. False: keep them.
        on_backward: Called as a backward pass comes to a unit, before anything else.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        communicator: Communicator,
        *,
        reshard_after_forward: bool,
        on_backward: Callable[[], None],
    ) -> None:
        self.units, self.communicator = list(units), communicator
        self.reshard_after_forward, self._on_backward = reshard_after_forward, on_backward
        self._next_forward = 0
        self._next_backward = len(self.units) - 1
        self.in_backward = False
        self._held = False
        for number, unit in enumerate(self.units):
            unit.module.register_forward_pre_hook(self._before_forward(number))
            unit.module.register_forward_hook(self._after_forward(number))
        self.release_all()

    def release_all(self) -> None:
        """Give everything back, and begin anew: after a step all weights are others."""
        if not self._held:
            for unit in self.units:
                unit.release()
        self.begin_forward()

    @contextmanager
    def everything(self) -> Iterator[None]:
        """All units at once, to look at, evaluate or save; passes in here gather and give back nothing."""
        for unit in self.units:
            unit.start(self.communicator)
        for unit in self.units:
            unit.wait()
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before
            self.release_all()

    def begin_forward(self) -> None:
        """Units are gathered from the first on."""
        self._next_forward = 0
        self._next_backward = len(self.units) - 1

    # -- forward ------------------------------------------------------------------------------------------------------------------

    def _before_forward(self, number: int) -> Callable[..., None]:
        def before(module: nn.Module, arguments: Any) -> None:
            if self._held:
                return
            if self.in_backward:
                # Recomputing what was not kept; the unit is there for its backward pass, or has to be.
                self._need(number)
                return
            if number == 0:
                self.begin_forward()
            while self._next_forward <= min(number + 1, len(self.units) - 1):
                self.units[self._next_forward].start(self.communicator)
                self._next_forward += 1
            self._need(number)

        return before

    def _after_forward(self, number: int) -> Callable[..., None]:
        def after(module: nn.Module, arguments: Any, outputs: Any) -> None:
            if self.in_backward or self._held:
                return
            gradients_wanted = torch.is_grad_enabled()
            if number == 0:
                for unit in self.units[self._next_forward :]:
                    unit.start(self.communicator)
                self._next_forward = len(self.units)
                released = self.units if not gradients_wanted else self.units[1:] if self.reshard_after_forward else []
                for unit in released:
                    unit.release()
            elif self.reshard_after_forward or not gradients_wanted:
                self.units[number].release()
            tensors = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
            if tensors:
                register_multi_grad_hook(tensors, lambda _: self._before_backward(number), mode="any")

        return after

    def _need(self, number: int) -> None:
        unit = self.units[number]
        unit.start(self.communicator)
        unit.wait()

    # -- backward -----------------------------------------------------------------------------------------------------------------

    def _before_backward(self, number: int) -> None:
        self._on_backward()
        self.in_backward = True
        if number > 0:
            self.take_part(number)
        self._need(number)

    def take_part(self, number: int) -> None:
        """Begin to gather all units down to the one before ``number``: what a rank does as its backward pass comes to that unit."""
        while self.reshard_after_forward and not self._held and self._next_backward >= max(number - 1, 1):
            self.units[self._next_backward].start(self.communicator)
            self._next_backward -= 1

    def after_backward(self, number: int) -> None:
        """A unit's gradients are all there: its weights are not needed any more. The model's own are kept to the end."""
        if number > 0 and not self._held:
            self.units[number].release()

    def end_backward(self) -> None:
        """Take part in gathering what other ranks may have needed, and give everything back."""
        self.take_part(1)
        self.in_backward = False
        self.release_all()
