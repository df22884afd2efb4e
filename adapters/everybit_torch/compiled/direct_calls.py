"""Calls of compiled code without Dynamo's guards.

Before each call Dynamo's guards compare the inputs, and all Python objects that the traced functions read, with those of the trace. That
takes twice as long as a step of ten thousand elements. The inputs of a step are of a few kinds only, and this library's transforms,
policies and numbers cannot change. So a step's inputs are told apart by a few quick comparisons. Inputs of a kind for which the code ran
before go straight to the compiled code, and all others go through Dynamo.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

import everybit as eb
from everybit.base import Blocks, Scattered
from everybit.stepping import OptimizerState
from everybit.stepping.layout import Layout
from everybit_torch.compiled.compilation import compile_step, is_whole, let_length_vary
from everybit_torch.torch_internals.kernel_calls import CompiledGraph

R = TypeVar("R")

Compiled = Callable[..., Any]
# For which lengths the code is; and of each input its dtype, its device, and whether it is a vector.
_InputKind = tuple[bool, tuple[tuple[torch.dtype, torch.device, bool], ...]]
# What takes the place of the vectors' length among the arguments of compiled code.
_LENGTH = -1


class GradientKind(NamedTuple):
    """The gradients for which code that ran for one of them may run again.

    Attributes:
        tensor: The weights.
        is_on_host: Whether they lie on the CPU.
        dtype: The dtype of gradients.
        numel: Their number of elements.
        low: The highest address below the weights that is too near for a gradient to begin there.
        high: The address at which the weights end.
    """

    tensor: Tensor
    is_on_host: bool
    dtype: torch.dtype
    numel: int
    low: int
    high: int

    @classmethod
    def of(cls, tensor: Tensor, dtype: torch.dtype) -> GradientKind:
        """Return the kind of the gradients of some weights."""
        begin, numel = tensor.data_ptr(), tensor.numel()
        return cls(tensor, tensor.is_cpu, dtype, numel, begin - numel * dtype.itemsize, begin + numel * tensor.itemsize)

    def fits(self, grad: Tensor) -> bool:
        """Whether a gradient is plain and contiguous, has that dtype, length and device, and lies in no memory of the weights."""
        return (
            grad.dtype is self.dtype
            and type(grad) is Tensor
            and grad.numel() == self.numel
            and grad.is_contiguous()
            and (grad.is_cpu if self.is_on_host else grad.device == self.tensor.device)
            and not self.low < grad.data_ptr() < self.high
        )


class _Remembered(NamedTuple):
    """The inputs of a segment's last step, of which only the gradient is another at the next.

    Attributes:
        gradient: The kind of its gradient.
        first: The indices of its elements.
        state: The tensors of its state.
        totals: The tensors with the totals of requests.
        compiled: The code for them.
        places: The number of the input that each argument of the code is.
    """

    gradient: GradientKind
    first: object
    state: list[Tensor]
    totals: list[Tensor]
    compiled: Compiled
    places: list[int]


class _KnownCode:
    """Code by the kind of inputs for which it ran, and the number of the input that each of its arguments is."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Compiled, list[int]] | None] = {}
        self._ran: tuple[Compiled, Sequence[Any]] | None = None

    def note(self, compiled: Compiled, arguments: Sequence[Any]) -> None:
        """Remember which code runs, and what Dynamo passes to it."""
        self._ran = compiled, arguments

    def _learn(self, kind: Hashable | None, inputs: Sequence[Tensor], through_dynamo: Callable[[], R]) -> R:
        """Call a function through Dynamo, and learn the code that runs for this kind of inputs."""
        try:
            found = through_dynamo()
        finally:
            # Not kept: the arguments are gradients, which are to be freed.
            ran, self._ran = self._ran, None
        if kind is not None and ran is not None and kind not in self._known:
            self._known[kind] = _places(*ran, inputs)
        return found


class DirectCalls(_KnownCode):
    """A compiled step, called directly where that is safe.

    Args:
        through_dynamo: The step; it calls :meth:`note` when its code begins to run.
        began: Called when compiled code begins to run.
    """

    def __init__(self, through_dynamo: Compiled, began: Callable[[], None]) -> None:
        super().__init__()
        self._through_dynamo, self._began = through_dynamo, began
        self._remembered: WeakKeyDictionary[Any, _Remembered] = WeakKeyDictionary()

    def __call__(
        self,
        tensors: list[Tensor],
        grads: list[Tensor],
        state: OptimizerState[Any] | tuple[OptimizerState[Any], Tensor],
        numbers: Tensor,
        given: Mapping[str, Tensor],
        first: Tensor | Blocks | Scattered,
        totals: Sequence[Tensor],
        layout: Layout | None = None,
        segment: object = None,
    ) -> None:
        """Step in place; the arguments are those of a compiled step that is not measured.

        Args:
            tensors: The tensor, alone in a list, as the gradient is.
            grads: Its gradient.
            state: Its state.
            numbers: The numeric hyperparameters.
            given: Those that are tensors.
            first: The indices of the elements.
            totals: The totals of requests.
            layout: How they are stored.
            segment: The owner of this tensor and this state, with the same tensors of the state at every step.
        """
        (tensor,), (grad,) = tensors, grads
        held = eb.tree.leaves(state)
        inputs = [tensor, grad, *held, *eb.tree.leaves(first), *given.values(), *totals]
        kind = _kind(inputs)
        known = None if kind is None else self._known.get(kind)
        if known is not None:
            compiled, places = known
            if segment is not None and not given:
                self._remembered[segment] = _Remembered(
                    GradientKind.of(tensor, grad.dtype), first, held, [*totals], compiled, places
                )
            self._began()
            compiled(*_arguments(places, [*inputs, numbers]))
            return
        through_dynamo = partial(self._through_dynamo, tensors, grads, state, numbers, given, first, totals, layout)
        self._learn(kind, [*inputs, numbers], through_dynamo)

    def again(
        self, segment: object, tensor: Tensor, grad: Tensor, first: object, totals: Sequence[Tensor], numbers: Tensor
    ) -> Callable[[Tensor], object] | None:
        """Return the call of the code that ran last for a segment, if only the gradient and values of totals and numbers are others.

        The call takes a gradient of this kind, and stays valid for others of it as long as the inputs are the same.

        Args:
            segment: The owner of the tensor and of its state.
            tensor: The tensor.
            grad: Its gradient.
            first: The indices of the elements.
            totals: The totals of requests.
            numbers: The numeric hyperparameters.
        """
        last = self._remembered.get(segment)
        if last is None or torch.compiler.is_compiling():
            return None
        if last.gradient.tensor is not tensor or last.first is not first or grad.requires_grad:
            return None
        if not last.gradient.fits(grad) or not same_objects(last.totals, totals):
            return None
        rest = [*last.state, *eb.tree.leaves(last.first), *last.totals, numbers]
        kernels = None
        if isinstance(last.compiled, CompiledGraph):
            arguments = _arguments(last.places, [tensor, grad, *rest])
            kernels = last.compiled.kernels_for(arguments, grad, [tensor, *last.state])

        def call(grad: Tensor) -> object:
            vector = grad if grad.ndim == 1 else grad.view(-1)
            return last.compiled(*_arguments(last.places, [tensor, vector, *rest]))

        return kernels or call


class DirectFunction(_KnownCode):
    """A compiled function from a vector to a tensor, called directly where that is safe.

    Args:
        function: A function of this library, of which the result depends on the vector alone.

    Raises:
        DeclinedError: A call raises it where torch would run the function uncompiled.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function
        # None before the first call: importing the compiler takes long.
        self._compiled: Callable[[Tensor], Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the result for a vector."""
        is_usual = x.ndim == 1 and 2 <= x.numel() < 1 << 31 and x.is_contiguous()
        is_plain = type(x) is Tensor and not x.requires_grad and not torch.compiler.is_compiling()
        kind = (x.dtype, x.device, x.is_cpu or is_whole(x.numel())) if is_usual and is_plain else None
        known = None if kind is None else self._known.get(kind)
        if known is not None:
            compiled, places = known
            result: Tensor = compiled(*_arguments(places, [x]))[0]
            return result
        if self._compiled is None:
            self._compiled = compile_step(self._function, self.note)
        if kind is not None and kind not in self._known:
            let_length_vary([x])
        return self._learn(kind, [x], partial(self._compiled, x))


def _arguments(places: Sequence[int], inputs: Sequence[Tensor]) -> list[Any]:
    return [inputs[0].numel() if place == _LENGTH else inputs[place] for place in places]


def _kind(inputs: Sequence[Tensor]) -> _InputKind | None:
    """Return a key for the compiled code of these inputs; None unless they are contiguous vectors of one length, and 0-d tensors."""
    length = inputs[0].numel()
    # Of other lengths than these the code may be another.
    if not 2 <= length < 1 << 31 or torch.compiler.is_compiling():
        return None
    kind = []
    for x in inputs:
        vector = x.ndim == 1
        # Dynamo traces for plain tensors that require no gradient, and code is made for these.
        if (
            x.requires_grad
            or type(x) is not Tensor
            or (x.ndim and not (vector and x.numel() == length and x.is_contiguous()))
        ):
            return None
        kind.append((x.dtype, x.device, vector))
    if inputs[0].ndim != 1 or inputs[0].untyped_storage().data_ptr() == inputs[1].untyped_storage().data_ptr():
        return None
    # For an accelerator there is code for whole cache lines, and other code.
    lengths = inputs[0].is_cpu or is_whole(length)
    return (lengths, tuple(kind)) if len(set(map(id, inputs))) == len(inputs) else None


def _places(
    compiled: Compiled, arguments: Sequence[Any], inputs: Sequence[Tensor]
) -> tuple[Compiled, list[int]] | None:
    """Compiled code, and the number of the input that each of its arguments is; None if an argument is no input."""
    numbers = {id(x): number for number, x in enumerate(inputs)}
    length = inputs[0].numel()
    places = [
        numbers.get(id(x)) if isinstance(x, Tensor) else _LENGTH if type(x) is int and x == length else None
        for x in arguments
    ]
    found = [place for place in places if place is not None]
    # Code with a constant length would have been made for this length alone.
    return (compiled, found) if len(found) == len(places) and _LENGTH in found else None


def same_objects(these: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two sequences have the same tensors as objects."""
    return len(these) == len(others) and all(map(is_, these, others))
