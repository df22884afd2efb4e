"""The steps of segments of one factory: compiled where that is possible, with the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.base import FirstElement
from everybit.policies import AnyPolicy, PolicyOrName, with_name_resolved
from everybit.stepping import Metrics, OptimizerState, Unsafe, with_policy
from everybit.stepping.entries import map_parts
from everybit_torch.choosing import Decision, applied
from everybit_torch.compiled.compilation import can_compile
from everybit_torch.compiled.probing import Factory, fits, is_number
from everybit_torch.compiled.variants import Inputs, Variants
from everybit_torch.host_counts import Due
from everybit_torch.segments.segment import Segment, step_in_place
from everybit_torch.segments.totals import Partial, contribution, find_uncompiled
from everybit_torch.streams import copies_need_no_wait


class Steps:
    """A factory's optimizer with the present hyperparameters, and its compiled steps.

    Args:
        factory: Makes a transform of hyperparameters.
        policy: The formats of weights and state.
        arguments: The factory's keyword arguments.
        seed: The seed of stochastic rounding.
        unsafe: See :func:`everybit.with_policy`.
        compile: Whether steps are compiled.
        number: The param group's number, for messages.

    Attributes:
        optimizer: The present optimizer.
    """

    def __init__(
        self,
        factory: Factory,
        policy: PolicyOrName,
        arguments: Mapping[str, Any],
        *,
        seed: int = 0,
        unsafe: Unsafe = "refuse",
        compile: bool = True,
        number: int = 0,
    ) -> None:
        self._factory, self._seed = factory, seed
        self._unsafe: Unsafe = unsafe
        self._policy: AnyPolicy = with_name_resolved(policy)
        self._compiles = compile
        self._numbers: dict[torch.device, Tensor] = {}
        self._steps: Variants[Metrics | None] = Variants(number, factory, seed, _step, compile)
        self._finds: Variants[Partial | None] = Variants(number, factory, seed, _contribution, compile)
        self.arguments: dict[str, Any] = {}
        self.optimizer = self.follow(arguments, ())

    def follow(
        self, arguments: Mapping[str, Any], segments: Sequence[tuple[Segment, Decision | None]]
    ) -> eb.Optimizer[Any]:
        """Step with other hyperparameters from here on. New values of numbers do not compile anew.

        Args:
            arguments: The factory's keyword arguments.
            segments: The segments of this factory, and the results of masks and labels for them.

        Raises:
            TypeError: A hyperparameter of another kind.
            ValueError: A hyperparameter that cannot work; the present ones stay.
        """
        optimizer = with_policy(self._factory(**arguments), self._policy, seed=self._seed, unsafe=self._unsafe)
        made = [applied(optimizer, decision) for _, decision in segments]
        self.arguments, self.optimizer = dict(arguments), optimizer
        for (segment, _), own in zip(segments, made, strict=True):
            segment.optimizer = own
        self._steps.follow()
        self._finds.follow()
        for device in self._numbers:
            self._fill(device)
        return optimizer

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

        def uncompiled() -> Metrics | None:
            return segment.step(grad, totals, due=due, metrics=metrics)

        if not self._can_compile(segment):
            return uncompiled()
        before = segment.count.known(segment.state.step)
        inputs = self._inputs(segment, grad, totals, decision, due, (("metrics", metrics),), returns=metrics)
        measured = self._steps.step(inputs, self.arguments, self._numbers_on(segment.tensor.device), uncompiled)
        if inputs.tensors[0] is not segment.tensor:
            # Autograd does not see that writing to a vector changes the tensor.
            torch.autograd.graph.increment_version([segment.tensor])
        segment.note_step(before)
        return measured

    def find(
        self,
        segment: Segment,
        grad: Tensor,
        totals: Sequence[Tensor],
        due: Due = (),
        counts: bool = True,
        *,
        decision: Decision | None = None,
    ) -> Partial | None:
        """Find a segment's contribution to a total; see :func:`~everybit_torch.segments.totals.find_totals`."""

        def uncompiled() -> Partial | None:
            return find_uncompiled(segment, grad, totals, due, counts)

        if not self._can_compile(segment) or segment.is_whole:
            return uncompiled()  # code would be made for each shape
        inputs = self._inputs(segment, grad, totals, decision, due, (("counts", counts),))
        return self._finds.step(inputs, self.arguments, self._numbers_on(segment.tensor.device), uncompiled)

    def _can_compile(self, segment: Segment) -> bool:
        return (
            self._compiles
            and segment.tensor.numel() > 0
            and not torch.compiler.is_compiling()
            and can_compile(segment.tensor.device)
        )

    def _inputs(
        self,
        segment: Segment,
        grad: Tensor,
        totals: Sequence[Tensor],
        decision: Decision | None,
        due: Due,
        choices: tuple[tuple[str, Any], ...],
        *,
        returns: bool = True,
    ) -> Inputs:
        """The arguments of compiled code, as vectors where the transform may be cut anywhere: then one code is for all shapes."""
        tensor, state = segment.tensor, segment.state
        if (
            tensor.ndim != 1
            and not segment.is_whole
            and all(x.is_contiguous() for x in (tensor, *eb.tree.leaves(state)))
        ):
            state = map_parts(state, [tensor], [segment.stored], lambda x, _: _vector(x), lambda x: x)
            tensor, grad = _vector(tensor), _vector(grad.contiguous())
        return Inputs(
            [tensor], [grad], state, segment.first_tensor, list(totals), None, self._policy, decision, due, choices, returns
        )  # fmt: skip

    def _numbers_on(self, device: torch.device) -> Tensor:
        held = self._numbers.get(device)
        return self._fill(device) if held is None else held

    def _fill(self, device: torch.device) -> Tensor:
        """The numeric hyperparameters as one float64 tensor: a new value is new data, and not new code."""
        values = [float(value) if fits(value) else 0.0 for value in self.arguments.values() if is_number(value)]
        held = self._numbers.get(device)
        if held is None or held.numel() != len(values):
            held = self._numbers[device] = torch.empty(len(values), dtype=torch.float64, device=device)
        # A copy that blocks waits until the device has done all that it was told.
        held.copy_(torch.tensor(values, dtype=torch.float64), non_blocking=copies_need_no_wait(device))
        return held


def _vector(x: Tensor) -> Tensor:
    # No view of a tensor of this shape: the compiler would make code for the shape.
    return x.view(-1).data


def _step(
    optimizer: eb.Optimizer[Any],
    tensors: list[Tensor],
    grads: list[Tensor],
    state: OptimizerState[Any],
    first: FirstElement,
    *,
    totals: Sequence[Tensor],
    members: None,  # noqa: ARG001
    due: Due,
    metrics: bool,
) -> Metrics | None:
    return step_in_place(optimizer, tensors, grads, state, first, totals=totals, due=due, metrics=metrics)


def _contribution(
    optimizer: eb.Optimizer[Any],
    tensors: list[Tensor],
    grads: list[Tensor],
    state: OptimizerState[Any],
    first: FirstElement,
    *,
    totals: Sequence[Tensor],
    members: None,  # noqa: ARG001
    due: Due,
    counts: bool,
) -> Partial | None:
    return contribution(optimizer, tensors, grads, state, first, totals=totals, due=due, counts=counts)
