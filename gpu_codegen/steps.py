"""A step of one flat unit: its tensors with values, uncompiled; and compiled, from tensors without memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import everybit as eb
from everybit.stepping import OptimizerState
from everybit_torch.compiled import variants
from everybit_torch.compiled.traceable_numbers import is_number
from everybit_torch.compiled.variants import Inputs, Variants
from everybit_torch.segments.segment import step_in_place
from gpu_codegen.capture import Wrapper, captured
from gpu_codegen.cases import Case

LENGTH = 1 << 22
"""Elements of the unit that code is made for; by it the compiler chooses how large a block is."""

MATRIX = (2048, 1024)
"""Of the whole tensor that code is made for."""

SMALL_MATRIX = (24, 20)
"""Of the one that is stepped before, for its state and its totals."""

FIRST = (1 << 32) - 1000
"""Number of the first element, so that indices carry into their upper word."""


@dataclass(frozen=True, slots=True)
class Step:
    """The inputs of a step, which is taken in place.

    Attributes:
        tensor: The parameters, flat.
        grad: Their gradient.
        state: The optimizer's.
        numbers: Hyperparameters that are numbers, float64.
        first: Number of the first element, int64, 0-d.
        totals: The totals of the transform's reductions.
    """

    tensor: Tensor
    grad: Tensor
    state: OptimizerState[Any]
    numbers: Tensor
    first: Tensor
    totals: list[Tensor]

    def tensors(self) -> list[Tensor]:
        """All tensors, always in the same order."""
        return [self.tensor, self.grad, *eb.tree.leaves(self.state), self.numbers, self.first, *self.totals]

    def like(self, length: int, device: str) -> Step:
        """The same for a unit of another length on another device, without values."""

        def one(x: Tensor) -> Tensor:
            # A number for each element, or for each block of elements.
            numel = x.numel() * length // self.tensor.numel()
            shape = (numel,) if x.ndim and x is not self.numbers else tuple(x.shape)
            return torch.empty(shape, dtype=x.dtype, device=device)

        state = eb.tree.map(one, self.state)
        totals = [one(x) for x in self.totals]
        return Step(one(self.tensor), one(self.grad), state, one(self.numbers), one(self.first), totals)

    def of_matrix(self, case: Case, device: str) -> Step:
        """The same for a matrix on another device, without values."""

        def one(x: Tensor) -> Tensor:
            return torch.empty(x.shape, dtype=x.dtype, device=device)

        tensor = torch.empty(MATRIX, dtype=case.dtype, device="meta")
        state = eb.tree.map(one, case.built.init([tensor]))
        grad = torch.empty(MATRIX, dtype=case.gradient, device=device)
        totals = [one(x) for x in self.totals]
        return Step(one(tensor), grad, state, one(self.numbers), one(self.first), totals)

    def clone(self) -> Step:
        """A copy with its own memory."""
        state = eb.tree.map(torch.clone, self.state)
        return Step(self.tensor.clone(), self.grad, state, self.numbers, self.first, self.totals)


def prepare(case: Case, length: int, *, steps: int = 2) -> Step:
    """The inputs of a step with values, on the CPU, after a few steps: of so many elements, or of a small matrix."""
    generator = torch.Generator().manual_seed(5)

    shape = SMALL_MATRIX if case.whole else (length,)

    def normal(dtype: torch.dtype = case.gradient) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    optimizer, tensor = case.built, normal(case.dtype)
    held = [float(value) for value in case.arguments.values() if is_number(value)]
    numbers = torch.tensor(held, dtype=torch.float64)
    step = Step(tensor, normal(), optimizer.init([tensor]), numbers, torch.tensor(FIRST), [])
    for _ in range(steps):
        take(case, _with_totals(optimizer, step))
        step = Step(step.tensor, normal(), step.state, numbers, step.first, [])
    return _with_totals(optimizer, step)


def take(case: Case, step: Step) -> None:
    """Take a step in place, uncompiled."""
    step_in_place(
        case.built, [step.tensor], [step.grad], step.state, step.first, metrics=False, totals=step.totals
    )  # fmt: skip


def _with_totals(optimizer: eb.Optimizer[Any], step: Step) -> Step:
    totals: list[Tensor] = []
    ctx = eb.Context(first_element=step.first, pending=True)
    while (pending := optimizer.ask([step.tensor], [step.grad], step.state, ctx, totals=totals)) is not None:
        totals.append(pending.partial().clone())
    return Step(step.tensor, step.grad, step.state, step.numbers, step.first, totals)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A step as the compiler wrote it.

    Attributes:
        wrapper: Its code.
        inputs: For each argument of its code, which of :meth:`Step.tensors` it is; below zero for a number of elements, which are
            the length over its magnitude: over 256 for the number of blocks.
    """

    wrapper: Wrapper
    inputs: tuple[int, ...]


class NotCompiledError(RuntimeError):
    """A step that the compiler did not take, or that it took in several parts."""


def compile_step(case: Case, example: Step, length: int = LENGTH) -> Compiled:
    """Have a step of a unit of ``length`` elements compiled for a GPU, in the way in which an optimizer has it compiled.

    Has to be called within :func:`gpu_codegen.fake_gpu.fake_gpu`.

    Raises:
        NotCompiledError: The compiler did not take it as a whole.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    errors: list[BaseException] = []

    def note(error: BaseException) -> str:
        errors.append(error)
        return str(error)

    def refused() -> None:
        raise NotCompiledError(f"{case.name}: the compiler did not take the step.") from errors[0]

    torch._dynamo.reset()
    with (
        mock.patch.object(variants, "cause", note),
        FakeTensorMode(allow_non_fake_inputs=True),
        captured() as found,
    ):
        step = example.of_matrix(case, "cuda") if case.whole else example.like(length, "cuda")
        inputs = Inputs(
            [step.tensor],
            [step.grad],
            step.state,
            step.first,
            step.totals,
            case.policy,
            case.decision,
            choices=(("metrics", False),),
            returns=False,
        )
        Variants(0, case.factory, 7, step_in_place).step(inputs, case.arguments, step.numbers, refused)
    if len(found) != 1:
        raise NotCompiledError(f"{case.name}: compiled in {len(found)} parts.")
    (module,) = found
    places = {id(x): place for place, x in enumerate(step.tensors())}
    return Compiled(
        module.wrapper,
        tuple(
            places[id(x)] if isinstance(x, Tensor) else -(len(step.tensor.view(-1)) // int(x)) for x in module.arguments
        ),
    )
