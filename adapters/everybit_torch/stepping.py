"""One step of one unit: the pure step of the core, written over what went in; at once, piece by piece, or compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

import everybit as eb
from everybit.entries import fields as named_fields
from everybit.metrics import Metrics, measure
from everybit.optimizer import OptimizerState
from everybit.parts import needs_whole_tensors
from everybit.policy import AnyPolicy
from everybit.replay import ReplayAxis
from everybit_torch.choosing import Decision
from everybit_torch.compiling import can_compile
from everybit_torch.members import members_of
from everybit_torch.probing import Factory, fits, is_number
from everybit_torch.reductions import Reads
from everybit_torch.units import Unit, map_state
from everybit_torch.variants import Inputs, Variants

# Elements stepped at a time without a compiler: the temporaries of one operation fit into a core's cache.
PIECE = 1 << 17
# On an accelerator: large enough for kernels to be worth their launch, small enough to be no second copy of a model.
DEVICE_PIECE = 1 << 24


# Elements of a param group from which on its step is compiled if nobody says whether it is to be: a first step that takes ten seconds
# longer is worth it after about a thousand steps of so many.
WORTH_COMPILING = 1 << 18

Compile = bool | Literal["auto"]


def require_compile(value: object) -> None:
    """Refuse what says neither yes nor no.

    Raises:
        ValueError: Neither True, nor False, nor ``"auto"``.
    """
    if not isinstance(value, bool) and value != "auto":
        raise ValueError(f"compile: got {value!r}; accepted are True, False and 'auto'.")


def piece_size(device: torch.device) -> int:
    """Elements stepped at a time on a device without a compiler."""
    return PIECE if device.type in ("cpu", "meta") else DEVICE_PIECE


class Group:
    """A param group's policies, its optimizers with the present hyperparameters, and its compiled steps."""

    def __init__(
        self,
        number: int,
        factory: Factory,
        policies: dict[torch.dtype, AnyPolicy],
        seed: int,
        *,
        announce: bool = False,
    ) -> None:
        self.number = number
        self.factory = factory
        self.policies = policies
        self.seed = seed
        self.optimizers: dict[torch.dtype, eb.Optimizer[Any]] = {}
        # Parameters whose elements are numbered, and those of them that are frozen, with the number of their first element.
        self.known: list[Tensor] = []
        self.waiting: list[tuple[Tensor, int]] = []
        self.uninitialized: list[Tensor] = []  # of lazy modules, without a shape yet
        self.elements: Counter[torch.dtype] = Counter()  # of its units
        self._arguments: dict[str, Any] = {}
        self._by_decision: list[tuple[eb.Optimizer[Any], Decision, eb.Optimizer[Any]]] = []
        self._announce = announce
        self._variants = self._no_variants()
        self._numbers: dict[torch.device, Tensor] = {}
        self.reads = Reads()

    def _no_variants(self) -> Variants:
        return Variants(self.number, self.factory, self.seed, step_in_place, announce=self._announce)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_variants": self._no_variants(),
            "reads": Reads(),
        }

    @property
    def arguments(self) -> dict[str, Any]:
        """The factory's present keyword arguments, by name."""
        return self._arguments

    def follow(self, arguments: dict[str, Any], optimizers: dict[torch.dtype, eb.Optimizer[Any]]) -> None:
        """Step with other hyperparameters from here on; the caller has migrated the state to them before."""
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
        grad: Tensor,
        *,
        compile: bool,
        metrics: bool,
        totals: Sequence[Tensor] = (),
    ) -> Metrics | None:
        """Step a unit in place; ``grad`` is in the shape of its tensor.

        ``totals`` answer the transform's reductions, in order; see :mod:`everybit_torch.reductions`.
        """
        (tensor,) = unit.tensors
        optimizer = self.optimizer_of(unit)

        def uncompiled() -> Metrics | None:
            if unit.flat and tensor.numel() > piece_size(tensor.device):
                return step_in_pieces(optimizer, unit, grad, metrics=metrics, totals=totals)
            return step_in_place(
                optimizer,
                unit.tensors,
                [grad],
                unit.state,
                unit.first,
                metrics=metrics,
                totals=totals,
                members=members_of(unit),
            )

        # Inductor (torch 2.13, CPU) splits a loop in which an index is divided by a constant, such as that of a block, and leaves out the
        # elements after the last multiple of it (CppScheduling.try_loop_split).
        short = unit.block > 1 and tensor.numel() % unit.block
        if not (compile and can_compile(tensor.device)) or not tensor.numel() or short:
            return uncompiled()
        inputs = Inputs(
            unit.tensors,
            [grad],
            unit.state,
            unit.first_tensor,
            list(totals),
            members_of(unit),
            self.policies[tensor.dtype],
            metrics,
            unit.decision,
        )
        if tensor.ndim != 1 and not needs_whole_tensors(optimizer.transform):
            inputs = _as_vectors(inputs)
        measured = self._variants.step(inputs, self._arguments, self.numbers(tensor.device), uncompiled)
        if inputs.tensors is not unit.tensors:
            # Autograd does not see that writing to a vector changes the tensor.
            torch.autograd.graph.increment_version(unit.tensors)
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
    members: tuple[eb.Members, ...] | None = None,
) -> Metrics | None:
    """The pure step, and its results written over what went in; compiled, the writes become in-place stores."""
    ctx = eb.Context(first_element=first, members=members)
    # Who measures adds up what is measured of the parts.
    trace = optimizer.step_traced(tensors, grads, state, replace(ctx, axis=ReplayAxis(totals)) if totals else ctx)
    measured = measure(optimizer, trace, ctx) if metrics else None
    write((tensors, state), (trace.params, trace.state))
    return measured


def step_in_pieces(
    optimizer: eb.Optimizer[Any], unit: Unit, grad: Tensor, *, metrics: bool, totals: Sequence[Tensor] = ()
) -> Metrics | None:
    """Step a long buffer without a compiler, piece by piece, so that temporaries stay in the cache.

    The pieces' results are the whole's, bit for bit: that is what a transform promises that may be cut anywhere.
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
            members=members_of(unit, start, min(stop, grad.numel())),
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

    A transform that may be cut anywhere does not see the difference. Where memory is in another order, the inputs are what they were.
    """
    (tensor,) = inputs.tensors
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
