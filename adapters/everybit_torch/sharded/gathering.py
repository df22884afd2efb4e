"""Which units' weights are there at which moment, where parameters are shared out.

Units are gathered in the layout's order, forwards, and backwards in the reverse: one ahead of the one that computes. They are given back
as soon as they have computed: after the forward pass, and in the backward pass when it comes to the next unit. The order is that of the
layout on every rank, also on one that skips a unit or a whole pass (it takes part in gathering all the same); only a unit that is used
twice in one pass is gathered again when it is, which all ranks have to do alike.

The model itself, the first unit, keeps what is in no other unit from its forward pass to the end of the backward pass.
"""

from __future__ import annotations

import weakref
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

    def __init__(self, name: str, module: nn.Module, buffers: Sequence[WeightBuffer]) -> None:
        self.name, self.module, self.buffers = name, module, list(buffers)

    @property
    def trained(self) -> bool:
        """Whether it has parameters that are trained."""
        return any(buffer.group.requires_grad for buffer in self.buffers)

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


class ModuleHook:
    """A hook on one module that does not keep its owner alive, and does nothing on a copy of the module.

    Args:
        owner: Whose method it calls.
        method: The method's name; it takes ``number`` and the hook's arguments.
        module: The module it is for.
        number: Of the unit.
        compiled: Whether it has to run in compiled models, too, where it divides what is compiled in two.
    """

    def __init__(self, owner: object, method: str, module: nn.Module, number: int, *, compiled: bool = True) -> None:
        self._compiled = compiled
        self._owner, self._module = weakref.ref(owner), weakref.ref(module)
        self._method, self._number = method, number

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        """Torch calls it."""
        if not self._compiled and torch.compiler.is_compiling():
            return
        owner = self._owner()
        if owner is not None and module is self._module():
            _untraced(getattr(owner, self._method), self._number, *arguments)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        """In copies of the model there is nothing to gather."""
        return _no_hook, ()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _untraced(function: Callable[..., None], *arguments: Any) -> None:
    """Compilers leave it alone: what it does to memory is not for them to order."""
    function(*arguments)


def _ignore(*arguments: object) -> None:
    """A hook that does nothing."""


def _no_hook() -> Callable[..., None]:
    return _ignore


class Gathering:
    """Gathers and gives back units around their forward and backward passes, by hooks on their modules.

    Args:
        units: In the layout's order, the model first.
        communicator: The ranks that share the weights out; nobody else sends over it.
        reshard_after_forward: Give units back after the forward pass, to gather them again for the backward pass. False: keep them.
        on_backward: Called as a backward pass comes to a unit, before anything else.

    Attributes:
        in_backward: Whether a backward pass is going on.
        entered: Units that the backward pass has come to by their outputs, whose weights it may read.
        ran: Units that had a forward pass in this cycle.
        forward_over: Whether the model's forward pass has ended in this microbatch.
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
        self.reshard_after_forward = reshard_after_forward
        self._on_backward = weakref.WeakMethod(on_backward)
        self._next_forward = 0
        self._next_backward = len(self.units) - 1
        self.in_backward = self.forward_over = False
        self.entered: set[int] = set()
        self.ran: set[int] = set()
        self._computed: set[int] = set()
        self._held = self._graph_pending = False
        self._handles = []
        for number, unit in enumerate(self.units):
            before = ModuleHook(self, "_before_forward", unit.module, number)
            after = ModuleHook(self, "_after_forward", unit.module, number)
            self._handles += [unit.module.register_forward_pre_hook(before), unit.module.register_forward_hook(after)]
        self.release_all()

    def close(self) -> None:
        """Gather everything for good, and have no hooks any more."""
        for unit in self.units:
            unit.start(self.communicator)
        for unit in self.units:
            unit.wait()
        self._held = True
        for handle in self._handles:
            handle.remove()

    def release_all(self) -> None:
        """Give everything back, and begin anew: after a step all weights are others."""
        if not self._held:
            for unit in self.units:
                unit.release()
        self._graph_pending = False
        self._computed = set()
        self.begin_forward()

    def begin_cycle(self) -> None:
        """A step is over."""
        self.ran = set()

    @contextmanager
    def everything(self) -> Iterator[None]:
        """All units at once, to look at, evaluate or save; passes in here give nothing back."""
        for unit in self.units:
            unit.start(self.communicator)
        for unit in self.units:
            unit.wait()
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before
            pending = self._graph_pending
            self.release_all()
            self._graph_pending = pending

    def begin_forward(self) -> None:
        """Units are gathered from the first on."""
        self._next_forward = 0
        self._next_backward = len(self.units) - 1

    # -- forward ------------------------------------------------------------------------------------------------------------------

    def _before_forward(self, number: int, arguments: Any) -> None:
        self.ran.add(number)
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

    def _after_forward(self, number: int, arguments: Any, outputs: Any) -> None:
        if self.in_backward:
            return
        gradients_wanted = torch.is_grad_enabled()
        if number == 0:
            self._end_forward(keep=gradients_wanted)
        elif self.reshard_after_forward or not gradients_wanted:
            self._release(number)
        if not gradients_wanted:
            return
        found = [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
        unit = self.units[number]
        if not found and outputs is not None and unit.trained:
            raise TypeError(
                f"{unit.name or 'the model'}: returned a {type(outputs).__name__}, in which no tensor is found. Its weights are gathered"
                " when the backward pass comes to one; accepted are tensors, and dicts, lists, tuples and registered pytrees of them."
            )
        differentiable = [x for x in found if x.requires_grad]
        if differentiable:
            self._graph_pending = True
            reference = weakref.ref(self)

            def enter(_: object) -> None:
                gathering = reference()
                if gathering is not None:
                    gathering._before_backward(number)

            register_multi_grad_hook(differentiable, enter, mode="any")

    def _end_forward(self, *, keep: bool) -> None:
        """The model's forward pass is over: take part in gathering the rest, and give back what is not needed until the backward pass."""
        for unit in self.units[self._next_forward :]:
            unit.start(self.communicator)
        self._next_forward = len(self.units)
        if keep:
            self.forward_over = True
        if self.reshard_after_forward or not keep:
            for number in range(1, len(self.units)):
                self._release(number)
        if not keep and not self._graph_pending:
            self._release(0)

    def skip_forward(self) -> None:
        """Take part in the forward pass of ranks that have one, where this one has not, or has not finished it."""
        while self._next_forward < len(self.units):
            number = self._next_forward
            self.units[number].start(self.communicator)
            self._next_forward += 1
            if number > 0 and self.reshard_after_forward:
                self._release(number)
        self._end_forward(keep=True)

    def _need(self, number: int) -> None:
        unit = self.units[number]
        unit.start(self.communicator)
        unit.wait()

    def _release(self, number: int) -> None:
        if not self._held:
            self.units[number].release()

    # -- backward -----------------------------------------------------------------------------------------------------------------

    def _before_backward(self, number: int) -> None:
        begin = self._on_backward()
        if begin is not None:
            begin()
        self.in_backward = True
        self.entered.add(number)
        if number > 0:
            # The pass has left the units that were computed: nothing of theirs is read any more, frozen weights included.
            for other in self._computed - {number}:
                self._release(other)
            self._computed = set() if self.units[number].trained else {number}
            self.take_part(number)
        self._need(number)

    def take_part(self, number: int) -> None:
        """Begin to gather all units down to the one before ``number``: what a rank does as its backward pass comes to that unit."""
        while self.reshard_after_forward and self._next_backward >= max(number - 1, 1):
            self.units[self._next_backward].start(self.communicator)
            self._next_backward -= 1

    def after_backward(self, number: int) -> None:
        """A unit's gradients are all there: its weights go when the pass comes to the next unit. The model's own stay to the end."""
        if number > 0:
            if number in self.entered:
                self._computed.add(number)
            else:
                self._release(number)

    def end_backward(self) -> None:
        """Take part in gathering what other ranks may have needed, and give everything back."""
        self.take_part(1)
        self.in_backward = self.forward_over = False
        self.entered = set()
        self.release_all()
