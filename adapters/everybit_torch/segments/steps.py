"""The steps of segments of one factory: compiled where that is possible, with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

import everybit as eb
from everybit.policies import AnyPolicy
from everybit.protocol import Due
from everybit.stepping import Metrics
from everybit.stepping.entries import map_parts
from everybit_torch.compiled import (
    LIMIT,
    Factory,
    GradientKind,
    Inputs,
    Variants,
    can_compile,
    fits,
    is_number,
    may_compile,
    same_objects,
    tell_of_small_models,
)
from everybit_torch.label_resolution import Decision
from everybit_torch.segments.segment import Segment, step_in_place
from everybit_torch.segments.totals import Partial, contribution, find_uncompiled
from everybit_torch.streams import copies_need_no_wait, is_capturing
from everybit_torch.torch_internals.kernel_calls import KernelCalls

Compile = bool | Literal["auto"]

WORTH_COMPILING = 1 << 18
"""Elements of one dtype in a param group from which on its step is compiled by default: a first step that takes seconds longer is worth it
after about a thousand steps."""

MOST_PERIODS = LIMIT.bit_length() - 1
"""Periods of which the host answers in compiled code, so that a step has no more variants than :data:`LIMIT` for its answers."""


def require_compile(value: object) -> None:
    """Refuse a value that does not say whether to compile.

    Raises:
        ValueError: Neither True, nor False, nor ``"auto"``.
    """
    if not isinstance(value, bool) and value != "auto":
        raise ValueError(f"compile: got {value!r}; accepted are True, False and 'auto'.")


class _Kept(NamedTuple):
    """The kernels that step a segment, as long as only its gradient is another.

    Attributes:
        gradient: The kind of its gradient.
        chosen: What masks and labels said, and the work that is due.
        totals: The tensors with the totals of requests.
        kernels: Their calls.
    """

    gradient: GradientKind
    chosen: tuple[Decision | None, Due]
    totals: list[Tensor]
    kernels: KernelCalls


class Steps:
    """The steps of a factory's optimizer under one policy, with its present hyperparameters.

    Args:
        factory: Makes a transform of hyperparameters.
        policy: The formats of weights and state.
        seed: The seed of stochastic rounding.
        compile: Whether steps are compiled. ``"auto"``: from :data:`WORTH_COMPILING` elements on, where there is a compiler.
        number: The param group's number, for messages.

    Attributes:
        elements: The number of elements that it steps.
        arguments: The factory's present keyword arguments.
    """

    def __init__(
        self, factory: Factory, policy: AnyPolicy, *, seed: int = 0, compile: Compile = "auto", number: int = 0
    ) -> None:
        self._factory, self._policy, self._seed, self._number = factory, policy, seed, number
        self._compile: Compile = compile
        self.elements = 0
        self.arguments: dict[str, Any] = {}
        self._numbers: dict[torch.device, Tensor] = {}
        self._begin()

    def _begin(self) -> None:
        given = self._number, self._factory, self._seed
        self._steps: Variants[Metrics | None] = Variants(*given, step_in_place, self._compile)
        self._finds: Variants[Partial | None] = Variants(*given, contribution, self._compile)
        self._kept: WeakKeyDictionary[Segment, _Kept] = WeakKeyDictionary()
        self._in_graphs: list[Tensor] = []  # numbers that captured steps read, and that stay what they are

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in self.__dict__.items() if name not in ("_steps", "_finds", "_kept", "_in_graphs")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def follow(self, arguments: Mapping[str, Any]) -> None:
        """Step with other hyperparameters from here on; segments are given the optimizer of these. Other numbers need no new code."""
        self.arguments = dict(arguments)
        self._finds.follow(arguments)
        if self._steps.follow(arguments):
            self._kept.clear()
        for device in [*self._numbers]:
            self._fill(device)

    def compiles(self, device: torch.device) -> bool:
        """Whether steps are compiled on a device."""
        if torch.compiler.is_compiling():
            return False  # the step is a part of what the user compiles
        if self._compile != "auto":
            return self._compile
        if self.elements < WORTH_COMPILING:
            tell_of_small_models(device)
            return False
        return may_compile(device)

    def due(self, segment: Segment) -> Due:
        """Return the periodic work that is due at a segment's next step, as far as the host says it.

        Compiled code is made for each decision, so that there the host decides for the longest periods, and the device for others.
        """
        found = segment.due()
        return found[-MOST_PERIODS:] if found and self.compiles(segment.tensor.device) else found

    def step(
        self,
        segment: Segment,
        grad: Tensor,
        totals: Sequence[Tensor] = (),
        *,
        decision: Decision | None = None,
        due: Due = (),
        metrics: bool = False,
    ) -> Metrics | None:
        """Step a segment in place.

        Args:
            segment: The segment.
            grad: The gradient, in its tensor's shape.
            totals: The totals of the transform's requests, in order.
            decision: The results of masks and labels for the segment.
            due: The periodic work that is due.
            metrics: Whether to measure the step.
        """
        if segment.host is not None:
            before = segment.count.known(segment.state.step)
            measured = segment.host.step(
                segment,
                grad,
                lambda piece, own: self.step(piece, own, totals, decision=decision, due=due, metrics=metrics),
            )
            segment.note_step(before)
            return measured

        def uncompiled() -> Metrics | None:
            return segment.step(grad, totals, due=due, metrics=metrics)

        if not self._can_compile(segment):
            return uncompiled()
        before = segment.count.known(segment.state.step)
        measured, again = None, None if metrics else self._kernels(segment, grad, totals, decision, due)
        if again is not None:
            again(grad)
        else:
            inputs = self._inputs(segment, grad, totals, decision, due, metrics=metrics)
            measured = self._found(segment, inputs, grad, uncompiled)
        segment.note_step(before)
        return measured

    def _found(
        self, segment: Segment, inputs: Inputs, grad: Tensor, uncompiled: Callable[[], Metrics | None]
    ) -> Metrics | None:
        """Step a segment by code that has to be found, or made."""
        again = self._learned(segment, inputs)
        if again is not None:
            again(grad)
            return None
        measured = self._steps.step(inputs, self.arguments, self._numbers_on(segment.tensor.device), uncompiled)
        if inputs.tensors[0] is not segment.tensor:
            # Autograd does not see that writing to a vector changes the tensor.
            torch.autograd.graph.increment_version([segment.tensor])
        return measured

    def again(
        self,
        segment: Segment,
        grad: Tensor,
        totals: Sequence[Tensor] = (),
        decision: Decision | None = None,
        due: Due = (),
    ) -> Callable[[Tensor], object] | None:
        """Return the call that steps a segment by the code that ran last for it; None: :meth:`step` has to find code.

        It takes the gradient. The caller notes the step, and does not trace it.

        Args:
            segment: The segment.
            grad: The gradient: as many elements as the tensor has, in any shape.
            totals: The totals of the transform's requests, in order.
            decision: The results of masks and labels for the segment.
            due: The periodic work that is due.
        """
        if segment.host is not None:
            return None
        kernels = self._kernels(segment, grad, totals, decision, due)
        if kernels is not None:
            return kernels
        if segment.tensor.ndim != 1 or not self.compiles(segment.tensor.device):
            return None  # code for other tensors goes through Dynamo
        if not grad.is_contiguous():
            return None  # a copy is made at its turn, so that one is there at a time
        vector = grad if grad.ndim == 1 else grad.view(-1)
        return self._learned(segment, self._inputs(segment, vector, totals, decision, due, metrics=False))

    def _kernels(
        self, segment: Segment, grad: Tensor, totals: Sequence[Tensor], decision: Decision | None, due: Due
    ) -> KernelCalls | None:
        """The kernels that stepped a segment last, if only its gradient is another."""
        if self._steps.look_at_variables():
            self._kept.clear()
        kept = self._kept.get(segment)
        if kept is None or kept.gradient.tensor is not segment.tensor or kept.chosen != (decision, due):
            return None
        fits = same_objects(kept.totals, totals) and kept.gradient.fits(grad) and kept.kernels.accepts(grad)
        return kept.kernels if fits else None

    def _learned(self, segment: Segment, inputs: Inputs) -> Callable[[Tensor], object] | None:
        """The call of the code that ran last for a segment; kernels are kept for the steps to come."""
        again = self._steps.again(inputs, self._numbers_on(segment.tensor.device))
        if isinstance(again, KernelCalls):
            gradient = GradientKind.of(segment.tensor, inputs.grads[0].dtype)
            self._kept[segment] = _Kept(gradient, (inputs.decision, inputs.due), inputs.totals, again)
        return again

    def find(
        self,
        segment: Segment,
        grad: Tensor,
        totals: Sequence[Tensor],
        due: Due = (),
        *,
        decision: Decision | None = None,
    ) -> Partial | None:
        """Find a segment's contribution to a total; see :func:`~everybit_torch.segments.totals.find_totals`."""

        def uncompiled() -> Partial | None:
            return find_uncompiled(segment, grad, totals, due)

        if segment.host is not None or not self._can_compile(segment) or segment.is_whole:
            return uncompiled()  # code would be made for each shape
        inputs = self._inputs(segment, grad, totals, decision, due)
        return self._finds.step(inputs, self.arguments, self._numbers_on(segment.tensor.device), uncompiled)

    def _can_compile(self, segment: Segment) -> bool:
        device = segment.tensor.device
        return segment.tensor.numel() > 0 and self.compiles(device) and can_compile(device)

    def _inputs(
        self,
        segment: Segment,
        grad: Tensor,
        totals: Sequence[Tensor],
        decision: Decision | None,
        due: Due,
        *,
        metrics: bool | None = None,
    ) -> Inputs:
        """The arguments of compiled code, as vectors where the transform may be cut anywhere: then one code is for all shapes.

        ``metrics`` says whether a step is measured. None: the code finds a contribution, and changes no weights.
        """
        tensor, state = segment.tensor, segment.state
        mask, watch = (None, None) if segment.watched is None or metrics is None else segment.watched
        if (
            tensor.ndim != 1
            and not segment.is_whole
            and all(x.is_contiguous() for x in (tensor, *eb.tree.leaves(state)))
        ):
            state = map_parts(segment.layout, state, lambda x, _: _vector(x), lambda x: x)
            tensor, grad = _vector(tensor), _vector(grad.contiguous())
            mask = None if mask is None else _vector(mask)
        choices: list[tuple[str, Any]] = [("holds_wholes", not segment.is_part)]
        choices += [] if metrics is None else [("metrics", metrics)]
        choices += [] if watch is None else [("watch", watch)]
        return Inputs(
            [tensor], [grad], state if mask is None else (state, mask), segment.first_tensor, list(totals), self._policy, decision, due,
            tuple(choices), metrics is not False, segment, segment.layout,
        )  # fmt: skip

    def _numbers_on(self, device: torch.device) -> Tensor:
        """The numeric hyperparameters for compiled code that is about to run, and that may be captured."""
        held = self._numbers.get(device)
        numbers = self._fill(device) if held is None else held
        if is_capturing() and not any(numbers is one for one in self._in_graphs):
            self._in_graphs.append(numbers)
        return numbers

    def _fill(self, device: torch.device) -> Tensor:
        """The numeric hyperparameters as one float64 tensor: a new value is new data, and not new code."""
        values = [float(value) if fits(value) else 0.0 for value in self.arguments.values() if is_number(value)]
        held = self._numbers.get(device)
        if held is None or held.numel() != len(values) or any(held is one for one in self._in_graphs):
            held = self._numbers[device] = torch.empty(len(values), dtype=torch.float64, device=device)
            self._kept.clear()  # kernels that read the numbers of before
        # A copy that blocks waits until the device has done all that it was told.
        held.copy_(torch.tensor(values, dtype=torch.float64), non_blocking=copies_need_no_wait(device))
        return held


def _vector(x: Tensor) -> Tensor:
    # No view of a tensor of this shape: the compiler would make code for the shape.
    return x.view(-1).data
