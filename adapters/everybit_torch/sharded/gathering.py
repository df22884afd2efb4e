"""Decides when each unit's weights are gathered and freed, where parameters are sharded too.

Units are gathered in the layout's order, forwards, and backwards in the reverse: one ahead of the one that computes. They are given back
as soon as they have computed: after the forward pass, and in the backward pass when it has left them for good. The order is that of the
layout on every rank, also on one that leaves out units, runs them in another order, or has no pass at all: it takes part in gathering
what comes before. So what one rank holds longer than another depends on its own way through the units (see :mod:`.ways`), and what is
sent does not.

Two things all ranks have to do alike: run as many forward passes between two backward passes, and use a unit equally often in each,
because it is gathered again for every further use. That is compared before it is done, and refused by name.

The model itself, the first unit, keeps what is in no other unit from its forward pass to the end of the backward pass.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from everybit_torch.collectives.communicator import Communicator
from everybit_torch.sharded.module_hooks import ModuleHook
from everybit_torch.sharded.ways import Agreement, Comparer, Comparison, Nesting, UseKey, Ways
from everybit_torch.sharded.weights import WeightBuffer
from everybit_torch.torch_internals.autograd import in_a_backward_pass


class Unit:
    """Weights that are gathered together: a module, and the buffers of its groups."""

    def __init__(self, name: str, module: nn.Module, buffers: Sequence[WeightBuffer]) -> None:
        self.name, self.module, self.buffers = name, module, list(buffers)

    def __str__(self) -> str:
        return self.name or "the model"

    @property
    def trained(self) -> bool:
        """Whether it has parameters that are trained."""
        return any(buffer.group.requires_grad for buffer in self.buffers)

    @property
    def gathered(self) -> bool:
        """Whether the weights of the unit are gathered, or being gathered."""
        return all(buffer.gathered for buffer in self.buffers)

    @property
    def shown(self) -> bool:
        """Whether the model's tensors have their values."""
        return False not in [buffer.shown for buffer in self.buffers]  # fast: asked before every module's forward pass

    def start(self, communicator: Communicator) -> None:
        """Start to gather the weights of the unit."""
        for buffer in self.buffers:
            buffer.start_gather(communicator)

    def wait(self) -> None:
        """Wait until the weights of the unit are gathered."""
        for buffer in self.buffers:
            buffer.wait()

    def release(self) -> None:
        """Free all gathered weights of the unit, also if one buffer raises an error."""
        each([buffer.release for buffer in self.buffers])


def each(functions: Sequence[Callable[[], None]]) -> None:
    """Call all of them, and raise what the first that failed raised."""
    first: RuntimeError | None = None
    for function in functions:
        try:
            function()
        except RuntimeError as error:
            first = first or error
    if first is not None:
        raise first


class Gathering:
    """Gathers and gives back units around their forward and backward passes, by hooks on their modules.

    Args:
        units: In the layout's order, the model first.
        communicator: The ranks that share the weights; nobody else sends over it.
        comparer: Of all ranks.
        reshard_after_forward: Give units back after the forward pass, to gather them again for the backward pass. False: keep them.
        on_backward: Called as a backward pass comes to a unit, before anything else.
        on_unit: Called then, when it is known which units the pass has left.

    Attributes:
        in_forward: Whether the model's forward pass is going on, or has failed.
        in_backward: Whether a backward pass is going on.
        entered: Units that the backward pass has come to by their outputs, whose weights it may read.
        ran: Units that had a forward pass in this cycle.
        forward_over: Whether the model's forward pass has ended in this microbatch.
        ways: How units were used.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        communicator: Communicator,
        comparer: Comparer,
        *,
        reshard_after_forward: bool,
        on_backward: Callable[[], None],
        on_unit: Callable[[], None],
    ) -> None:
        self.units, self.communicator = list(units), communicator
        self.reshard_after_forward = reshard_after_forward
        self._comparer = comparer
        self._on_backward, self._on_unit = weakref.WeakMethod(on_backward), weakref.WeakMethod(on_unit)
        self.ways = Ways(Nesting([unit.name for unit in self.units]))
        self.entered: set[int] = set()
        self.ran: set[int] = set()
        self.in_forward = self.in_backward = self.forward_over = False
        self._forward_records = (
            False  # whether the model's forward pass that is going on, or none, is for a backward pass
        )
        self._forwards = 0
        self._next_forward = 0
        self._next_backward = len(self.units) - 1
        self._there: set[int] = set()  # units that are gathered, but for the model's own
        self._running_again: set[int] = set()
        self._comparison: Comparison | None = None
        self._held = self._graph_pending = self._graph_created = False
        self._handles = []
        for number, unit in enumerate(self.units):
            before = ModuleHook(self, "_before_forward", unit.module, number)
            after = ModuleHook(self, "_after_forward", unit.module, number)
            self._handles += [unit.module.register_forward_pre_hook(before), unit.module.register_forward_hook(after)]
        self.release_all()

    def close(self) -> None:
        """Gather everything for good, and have no hooks any more."""
        self.gather_all()
        self._held = True
        for handle in self._handles:
            handle.remove()

    def gather_all(self) -> None:
        """Gather the weights of all units at once."""
        for number in range(len(self.units)):
            self._start(number)
        for unit in self.units:
            unit.wait()

    def release_all(self) -> None:
        """Give everything back, and begin anew: after a step all weights are others."""
        self._graph_pending = False
        self._forwards = 0
        self.begin_forward()
        if not self._held:
            self._there = set()
            each([unit.release for unit in self.units])

    def begin_cycle(self) -> None:
        """Begin a new cycle after a step, and forget the ways of the last one."""
        self.ran = set()
        self.ways.forget()

    @contextmanager
    def everything(self) -> Iterator[None]:
        """Keep all units gathered, to evaluate or save the model; passes in here free no weights."""
        self.gather_all()
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before
            pending, forwards = self._graph_pending, self._forwards
            try:
                self.release_all()
            finally:
                self._graph_pending, self._forwards = pending, forwards

    def begin_forward(self) -> None:
        """Units are gathered from the first on."""
        self._next_forward = 0
        self._next_backward = len(self.units) - 1

    # -- forward ------------------------------------------------------------------------------------------------------------------

    def _before_forward(self, number: int, _arguments: Any) -> None:
        self.ran.add(number)
        if self.in_backward:
            if not in_a_backward_pass():
                raise RuntimeError(
                    f"{self.units[number]}: the backward pass before ended in an error, and its gradients are in part; accepted is"
                    " zero_grad(), on every rank."
                )
            self._run_again(number)
            return
        if number == 0:
            self._begin_model()
        self._forwards = max(self._forwards, 1)
        while self._next_forward <= min(number + 1, len(self.units) - 1):
            self._start(self._next_forward)
            self._next_forward += 1
        self._need(number)

    def _begin_model(self) -> None:
        """The model's own forward pass begins; if it is not the first since the last backward pass, on all ranks or on none."""
        self.in_forward, self._forward_records = True, torch.is_grad_enabled()
        if self._forwards and not self._held:
            for number in sorted(self._there):
                self._release(number)
            there = bytes(unit.gathered for unit in self.units)
            self._comparer.start("forward", zlib.crc32(there)).result()
        self._forwards += 1
        self.begin_forward()

    def _after_forward(self, number: int, _arguments: Any, outputs: Any) -> None:
        gradients_wanted = torch.is_grad_enabled()
        if self.in_backward:
            if gradients_wanted and number in self._running_again:
                self._running_again.discard(number)
                self._follow(number, outputs)
            return
        if number == 0:
            self._end_forward(keep=gradients_wanted)
        elif self.reshard_after_forward or not (gradients_wanted or self._forward_records):
            self._release(number)
        if gradients_wanted:
            self._follow(number, outputs)
        elif self._forward_records:
            self.ways.ran(number, differentiable=False)

    def _follow(self, number: int, outputs: Any) -> None:
        """Have a backward pass tell when it comes to what a unit returned."""
        found = [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
        unit = self.units[number]
        if not found and outputs is not None and unit.trained:
            raise TypeError(
                f"{unit}: returned a {type(outputs).__name__}, in which no tensor is found. Its weights are gathered"
                " when the backward pass comes to one; accepted are tensors, and dicts, lists, tuples and registered pytrees of them."
            )
        differentiable = [x for x in found if x.requires_grad]
        use = self.ways.ran(number, differentiable=bool(differentiable))
        if differentiable:
            self._graph_pending = True
            reference = weakref.ref(self)

            def enter(_: object) -> None:
                gathering = reference()
                if gathering is not None:
                    gathering._before_backward(number, use)

            register_multi_grad_hook(differentiable, enter, mode="any")

    def _end_forward(self, *, keep: bool) -> None:
        """The model's forward pass is over: take part in gathering the rest, and give back what is not needed until the backward pass."""
        self._gather_the_rest(keep=keep)
        self.in_forward = self._forward_records = False
        if keep:
            self.forward_over = True
        if self.reshard_after_forward or not keep:
            for number in range(1, len(self.units)):
                self._release(number)
        if not keep and not self._graph_pending:
            self._release(0)

    def _gather_the_rest(self, *, keep: bool) -> None:
        while self._next_forward < len(self.units):
            number = self._next_forward
            self._start(number)
            self._next_forward += 1
            if number > 1 and (self.reshard_after_forward or not keep):
                self._release(number - 1)

    def skip_forward(self) -> None:
        """Take part in the forward pass of ranks that have one, where this one has not, or has not finished it."""
        self._forwards = max(self._forwards, 1)
        self._end_forward(keep=True)

    def _start(self, number: int) -> None:
        self.units[number].start(self.communicator)
        if number > 0:
            self._there.add(number)

    def _need(self, number: int) -> None:
        unit = self.units[number]
        if number > 0 and not unit.gathered:
            self._require_again(number)
        self._start(number)
        unit.wait()

    def _require_again(self, number: int) -> None:
        """Its turn is over, and it was given back: it is gathered once more if all ranks do so.

        Raises:
            RuntimeError: They do not.
        """
        if not self.in_backward:
            self._comparer.start("again", number).result()
        elif not self.agreement().alike:
            raise RuntimeError(
                f"{self.units[number]}: is needed again in the backward pass after it was given back, and units ran in different orders"
                " on the ranks, so that the others do not gather it. Accepted is reshard_after_forward=False, or another strategy."
            )

    def _release(self, number: int) -> None:
        if not self._held:
            self.units[number].release()
            self._there.discard(number)

    # -- backward -----------------------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """A backward pass begins, for this rank: compare the way it took with the other ranks'."""
        if not self.forward_over:
            self._gather_the_rest(keep=True)
        self._release_for_backward()
        self.ways.begin_backward()
        self._graph_created = False
        self._comparison = self._comparer.start(
            "backward", self.ways.digest, in_order=self.ways.in_the_layouts_order
        )  # fmt: skip

    def _release_for_backward(self) -> None:
        """All ranks gather every unit in the backward pass, so none keeps one from before."""
        if self.reshard_after_forward:
            for number in sorted(self._there):
                self._release(number)

    def agreement(self) -> Agreement:
        """Return what the ranks' ways have in common; it is known soon after their backward passes have begun.

        Raises:
            RuntimeError: Another rank has not begun a backward pass.
        """
        assert self._comparison is not None
        return self._comparison.result()

    def _before_backward(self, number: int, use: UseKey) -> None:
        begin = self._on_backward()
        if begin is not None:
            begin()
        self.in_backward = True
        self._graph_created = self._graph_created or torch.is_grad_enabled()
        self.entered.add(number)
        self.ways.came_to(number, use)
        if number > 0:
            self._come_to()
            self.take_part(number)
        self._need(number)

    def _run_again(self, number: int) -> None:
        """A checkpoint runs a unit again inside the backward pass."""
        if torch.is_grad_enabled() and self.ways.may_run_again(number):
            self._running_again.add(number)
            self.ways.runs_again(number)
            if number > 0:
                self._come_to()
        self.take_part(number + 1)
        self._need(number)

    def _come_to(self) -> None:
        tell = self._on_unit()
        if tell is not None:
            tell()
        self.release_what_is_over()

    def release_what_is_over(self) -> None:
        """Give back what the backward pass has left, or will never come to."""
        for number in sorted(self._there, reverse=True):
            if self.ways.is_over(number):
                self._release(number)

    def take_part(self, number: int) -> None:
        """Begin to gather all units down to the one before ``number``: what a rank does as its backward pass comes to that unit."""
        while self.reshard_after_forward and self._next_backward >= max(number - 1, 1):
            self._start(self._next_backward)
            self._next_backward -= 1
            if self._next_backward >= max(number - 1, 1):
                self.release_what_is_over()

    def before_reduction(self, number: int) -> None:
        """Join the gathers up to this unit before its gradients are sent, so that no other rank waits for this one."""
        self.take_part(self.ways.lowest_beside(number))

    def end_backward(self) -> None:
        """Take part in gathering what other ranks may have needed, and give everything back."""
        self.take_part(1)
        self.agreement()
        self._end_pass()
        self.forward_over = False
        self.ways.end_backward()
        self.release_all()

    def cancel_backward(self) -> None:
        """The pass computed gradients that no parameter receives (``torch.autograd.grad``): there is still one to come.

        Raises:
            RuntimeError: A graph of the gradients was made, which needs weights at times that nothing tells.
        """
        self.take_part(1)
        self.agreement()
        created = self._graph_created and not self._held
        self._end_pass()
        if self.reshard_after_forward or created:
            for number in sorted(self._there):
                self._release(number)
        self._next_backward = len(self.units) - 1
        if created:
            raise RuntimeError(
                "optim_grads_params: torch.autograd.grad(create_graph=True), as a gradient penalty has it, makes a graph that needs weights"
                " when nothing tells that they should be gathered. Accepted are the other strategies; or the forward pass, the penalty and"
                " the backward pass inside `with stepper.full_parameters():`, with room for all weights."
            )

    def _end_pass(self) -> None:
        self.in_backward = False
        self.entered = set()
        self._running_again = set()
        self._comparison = None

    # -- after an error -------------------------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> bool:
        """Whether a pass of the model began and did not end."""
        return self.in_forward or self.in_backward

    def begin_to_recover(self) -> bool:
        """Continue this rank's collectives after an error, without computing; return whether a backward pass is among them."""
        evaluating = self.in_forward and not self._forward_records
        if not self.forward_over:
            self._gather_the_rest(keep=not evaluating)
        if evaluating and not self.in_backward:
            return False
        if not self.in_backward:
            self._release_for_backward()
        self.ways.forget()
        self.ways.begin_backward()
        if self._comparison is not None:
            try:
                self._comparison.result()
            except RuntimeError:
                self._comparison = None  # it was with a rank that was elsewhere, and will come here
        if self._comparison is None:
            self._comparison = self._comparer.start("backward", self.ways.digest)
        return True

    def recover(self) -> None:
        """Recover from an error: end all collectives and the pass, and free all gathered weights, whatever failed."""
        self.communicator.drain()
        self._end_pass()
        self.in_forward = self.forward_over = self._forward_records = False
        self.ways.forget()
        if not self._held:
            for buffer in (buffer for unit in self.units for buffer in unit.buffers):
                buffer.reset()
        self.release_all()
