"""One step of one unit: the pure step of the core, written over what went in; at once, piece by piece, or compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

import everybit as eb
from everybit.entries import fields as named_fields
from everybit.metrics import Metrics, measure
from everybit.optimizer import OptimizerState
from everybit.policy import AnyPolicy
from everybit_torch.choosing import Decision
from everybit_torch.compiling import can_compile
from everybit_torch.probing import Factory, fits, is_number
from everybit_torch.units import Unit, map_state
from everybit_torch.variants import Inputs, Variants

P = TypeVar("P")

# Elements stepped at a time without a compiler: the temporaries of one operation fit into a core's cache.
PIECE = 1 << 17
# On an accelerator: large enough for kernels to be worth their launch, small enough to be no second copy of a model.
DEVICE_PIECE = 1 << 24


def piece_size(device: torch.device) -> int:
    """Elements stepped at a time on a device without a compiler."""
    return PIECE if device.type in ("cpu", "meta") else DEVICE_PIECE


class Group:
    """What a param group needs beside its dict: policies, optimizers with the present hyperparameters, compiled steps."""

    def __init__(self, number: int, factory: Factory, policies: dict[torch.dtype, AnyPolicy], seed: int) -> None:
        self.number = number
        self.factory = factory
        self.policies = policies
        self.seed = seed
        self.optimizers: dict[torch.dtype, eb.Optimizer[Any]] = {}
        # Parameters whose elements are numbered, and those of them that are frozen, with the number of their first element.
        self.known: list[Tensor] = []
        self.waiting: list[tuple[Tensor, int]] = []
        self.uninitialized: list[Tensor] = []  # of lazy modules, without a shape yet
        self._arguments: dict[str, Any] = {}
        self._by_decision: list[tuple[eb.Optimizer[Any], Decision, eb.Optimizer[Any]]] = []
        self._variants = Variants(number, factory, seed, step_in_place)
        self._numbers: dict[torch.device, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_variants": Variants(self.number, self.factory, self.seed, step_in_place)}

    @property
    def arguments(self) -> dict[str, Any]:
        """The factory's keyword arguments."""
        return self._arguments

    def follow(self, arguments: dict[str, Any], optimizers: dict[torch.dtype, eb.Optimizer[Any]]) -> None:
        """Step with other hyperparameters from here on; see to it before that the state is what they need."""
        self.optimizers = optimizers
        self._arguments = arguments
        self._variants.follow()
        for device in list(self._numbers):
            self._fill(device)

    def optimizer_of(self, unit: Unit) -> eb.Optimizer[Any]:
        """The optimizer of a unit: the group's for its dtype, as its masks and labels came out."""
        optimizer = self.optimizers[unit.tensors[0].dtype]
        return optimizer if unit.decision is None else self._decided(optimizer, unit.decision)

    def _decided(self, optimizer: eb.Optimizer[Any], decision: Decision) -> eb.Optimizer[Any]:
        for before, what, known in self._by_decision:
            if before is optimizer and what == decision:
                return known
        self._by_decision = [one for one in self._by_decision if any(one[0] is now for now in self.optimizers.values())]
        self._by_decision.append((optimizer, decision, made := decision.applied(optimizer)))
        return made

    def step(
        self,
        unit: Unit,
        grads: list[Any],
        present: list[bool],
        *,
        compile: bool,
        metrics: bool,
        totals: Sequence[Tensor] = (),
    ) -> Metrics | None:
        """Step a unit in place; ``grads`` in the shapes of its tensors, with None where ``present`` is False.

        ``totals`` answer the transform's reductions, in order, where a unit is a part of what they go over; see :class:`Replay`.
        """
        first = unit.tensors[0]
        tensors, state = unit.tensors, unit.state
        if not all(present):
            # Only where a group is one tree: what has no gradient becomes a hole in parameters, gradients and state alike.
            tensors = [x if here else None for x, here in zip(tensors, present, strict=True)]  # type: ignore[misc]
            state = _with_holes(state, present)
        optimizer = self.optimizer_of(unit)

        def uncompiled() -> Metrics | None:
            if unit.flat and first.numel() > piece_size(first.device):
                return step_in_pieces(optimizer, unit, grads[0], metrics=metrics, totals=totals)
            return step_in_place(optimizer, tensors, grads, state, unit.first, metrics=metrics, totals=totals)

        nothing = len(unit.tensors) == 1 and not first.numel()
        # Inductor (torch 2.13, CPU) splits a loop in which an index is divided by a constant, such as that of a block, and leaves out the
        # elements after the last multiple of it (CppScheduling.try_loop_split).
        short = unit.block > 1 and any(x.numel() % unit.block for x in unit.tensors)
        if not (compile and can_compile(first.device)) or nothing or short:
            return uncompiled()
        inputs = Inputs(
            tensors, grads, state, unit.first_tensor, list(totals), self.policies[first.dtype], metrics, unit.decision
        )
        if optimizer.transform.scope == "element":
            inputs = _as_vectors(inputs)
        measured = self._variants.step(inputs, self._arguments, self.numbers(first.device), uncompiled)
        if inputs.tensors is not tensors:
            # Autograd does not see that writing to a vector changes the tensor.
            torch.autograd.graph.increment_version(tensors)
        return measured

    def numbers(self, device: torch.device) -> Tensor:
        """The numeric hyperparameters, in order, as one float64 tensor, so that a new value is new data and not new code."""
        held = self._numbers.get(device)
        return self._fill(device) if held is None else held

    def _fill(self, device: torch.device) -> Tensor:
        # The tensor is filled again, so that it stays the same object. What float64 does not hold is part of the code.
        values = [float(value) if fits(value) else 0.0 for value in self._arguments.values() if is_number(value)]
        held = self._numbers.get(device)
        if held is None or held.numel() != len(values):
            held = self._numbers[device] = torch.empty(len(values), dtype=torch.float64, device=device)
        held.copy_(torch.tensor(values, dtype=torch.float64))
        return held


def step_in_place(
    optimizer: eb.Optimizer[Any],
    tensors: list[Tensor],
    grads: list[Tensor],
    state: OptimizerState[Any],
    first: int | Tensor,
    *,
    metrics: bool,
    totals: Sequence[Tensor] = (),
) -> Metrics | None:
    """The pure step, and its results written over what went in; compiled, the writes become in-place stores."""
    ctx = eb.Context(first_element=first)
    # Who measures adds up what is measured of the parts.
    advance = optimizer.advance(tensors, grads, state, replace(ctx, axis=Replay(totals)) if totals else ctx)
    measured = measure(optimizer, advance, ctx) if metrics else None
    write((tensors, state), (advance.params, advance.state))
    return measured


class UnansweredError(Exception):
    """A transform asked for a reduction that is not known yet.

    Args:
        kind: ``"sum"`` or ``"max"``.
        value: What the part that was looked at contributes.
    """

    def __init__(self, kind: Literal["sum", "max"], value: Tensor) -> None:
        super().__init__(kind)
        self.kind, self.value = kind, value


class Replay:
    """An axis that answers a transform's reductions, in order, with totals that were found before.

    A transform of scope ``"tree"`` works element by element, but for what it asks of the axis. So it is run on every part of the tree until
    it asks, the answers are added up, and it is run again with the total: as often as it asks. No part needs to see another.
    """

    def __init__(self, totals: Sequence[Tensor], *, counted: bool = True) -> None:
        self._totals, self._counted = totals, counted
        self._asked = 0

    def sum(self, value: Tensor) -> Tensor:
        """The total, if it is known."""
        return self._answer("sum", value)

    def max(self, value: Tensor) -> Tensor:
        """The greatest, if it is known."""
        return self._answer("max", value)

    def owned(self, tree: P) -> P:
        """``tree``; zeros, if another process counts this part."""
        return tree if self._counted else eb.tree.zeros_like(tree)

    def _answer(self, kind: Literal["sum", "max"], value: Tensor) -> Tensor:
        if self._asked == len(self._totals):
            raise UnansweredError(kind, value)
        self._asked += 1
        return self._totals[self._asked - 1]


def contributions(
    optimizer: eb.Optimizer[Any], unit: Unit, grad: Tensor, totals: Sequence[Tensor], *, counted: bool = True
) -> Iterator[UnansweredError]:
    """What a unit of one tensor contributes to the first reduction that ``totals`` do not answer, piece by piece; at least one, if empty.

    Nothing comes if the transform asks for no more. ``counted`` is False where another process counts this unit.
    """
    (tensor,) = unit.tensors
    in_pieces, size = tensor.ndim == 1, unit.piece_size(piece_size(tensor.device))
    for start in range(0, max(tensor.numel(), 1) if in_pieces else 1, size):
        part = slice(start, start + size if in_pieces else None)
        state = unit.cut_state(start, min(start + size, tensor.numel()), lambda x: x) if in_pieces else unit.state
        ctx = eb.Context(first_element=unit.first + start, axis=Replay(totals, counted=counted))
        try:
            given = (tensor[part], grad[part]) if tensor.ndim else (tensor, grad)
            optimizer.advance([given[0]], [given[1]], state, ctx)
        except UnansweredError as question:
            yield question
        else:
            return


class Part(NamedTuple):
    """A unit of one tensor that takes part in reductions.

    Attributes:
        optimizer: Its own.
        unit: The unit.
        grad: In the shape of its tensor; None if it only takes part in asking.
        counted: Whether this process is the one that counts it.
    """

    optimizer: eb.Optimizer[Any]
    unit: Unit
    grad: Tensor | None
    counted: bool = True


def find_totals(parts: Sequence[Part], axis: eb.Axis) -> list[Tensor]:
    """The totals, over all parts and processes, of what a transform asks of its axis, in order; none if it works element by element.

    Every process has to call it, with one part at least: all ask the same, in the same order, also one that has nothing to step.

    Raises:
        RuntimeError: Parts that reduce differently.
    """
    totals: list[Tensor] = []
    while (question := _next_question(parts[0], totals)) is not None:
        total = question.value.double()
        for part in parts:
            if part.grad is None:
                continue
            for one in contributions(part.optimizer, part.unit, part.grad, totals, counted=part.counted):
                if one.kind != question.kind:
                    raise RuntimeError(
                        f"{part.optimizer.transform}: reduces differently for different parameters; accepted is a transform whose"
                        " reductions go over all of its parameters."
                    )
                value = one.value.double()
                total = total + value if one.kind == "sum" else torch.maximum(total, value)
        total = axis.sum(total) if question.kind == "sum" else axis.max(total)
        totals.append(total.to(question.value.dtype))
    return totals


def _next_question(part: Part, totals: Sequence[Tensor]) -> UnansweredError | None:
    """What a transform asks for next, and what nothing contributes to it."""
    if part.optimizer.scope == "element":
        return None
    tensor = part.unit.tensors[0].reshape(-1)[:0]
    state = map_state(part.unit.state, lambda x: x.reshape(-1)[:0], lambda x: x)
    empty = Unit(part.unit.group, [tensor], [], state, part.unit.first, flat=True, stored=part.unit.stored)
    return next(contributions(part.optimizer, empty, torch.empty_like(tensor, dtype=torch.float32), totals), None)


def step_in_pieces(
    optimizer: eb.Optimizer[Any], unit: Unit, grad: Tensor, *, metrics: bool, totals: Sequence[Tensor] = ()
) -> Metrics | None:
    """The step of a long buffer without a compiler: piece by piece, so that what is computed on the way stays in the cache.

    The pieces' results are the whole's, bit for bit: that is what the scope ``"element"`` promises.
    """
    total: Metrics | None = None
    counters: list[Tensor] = []
    size = unit.piece_size(piece_size(grad.device))
    for start in range(0, grad.numel(), size):
        stop = start + size
        # Counters are copied in, so that every piece counts from the same step; the last one's are kept.
        state = unit.cut_state(start, min(stop, grad.numel()), torch.clone)
        measured = step_in_place(
            optimizer,
            [unit.tensors[0][start:stop]],
            [grad[start:stop]],
            state,
            unit.first + start,
            metrics=metrics,
            totals=totals,
        )
        if measured is not None:
            total = measured if total is None else total + measured
        counters = [value for _, value, is_slot in named_fields(state) if not is_slot]
    for counter, value in zip([v for _, v, is_slot in named_fields(unit.state) if not is_slot], counters, strict=True):
        counter.copy_(value)
    return total


def write(into: object, values: object) -> None:
    """Copy the tensors of one tree over those of another."""
    for old, new in zip(eb.tree.leaves(into), eb.tree.leaves(values), strict=True):
        old.copy_(new)


def _as_vectors(inputs: Inputs) -> Inputs:
    """One tensor of any shape as a vector: the compiler then sees one code for all shapes.

    A transform of scope ``"element"`` does not see the difference. Where memory is in another order, the inputs are what they were.
    """
    tensor = inputs.tensors[0]
    if len(inputs.tensors) > 1 or tensor is None or tensor.ndim == 1:
        return inputs
    leaves = eb.tree.leaves((tensor, inputs.state))
    if not all(x.is_contiguous() for x in leaves):
        return inputs
    return replace(
        inputs,
        tensors=[_vector(tensor)],
        grads=[_vector(inputs.grads[0].contiguous())],
        state=map_state(inputs.state, _vector, lambda x: x),
    )


def _vector(x: Tensor) -> Tensor:
    # No view of a tensor of this shape to the compiler, which would make code for the shape after all.
    return x.view(-1).data


def _with_holes(state: OptimizerState[Any], present: list[bool]) -> OptimizerState[Any]:
    def hide(slot: Any) -> Any:
        return [value if here else None for value, here in zip(slot, present, strict=True)]

    return OptimizerState(state.step, hide(state.extra), eb.tree.map_slots(lambda name, slot: hide(slot), state.inner))
