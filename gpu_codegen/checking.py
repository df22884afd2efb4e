"""One case, from its step to what is wrong with the code for it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from everybit.testing.examples import assert_same_bits
from everybit_torch.torch_internals.kernel_calls import CompiledGraph, KernelCalls
from everybit_torch.torch_internals.kernel_lists import launches, listed_source
from gpu_codegen import interpreting
from gpu_codegen.capture import Kernel, Wrapper
from gpu_codegen.cases import Case, cases
from gpu_codegen.counting import Counts, count
from gpu_codegen.expected import Traffic, traffic
from gpu_codegen.fake_gpu import fake_gpu
from gpu_codegen.kernels import ARCHITECTURES, Architecture, compile_kernel, loaded
from gpu_codegen.laws import Found, broken, broken_between_sums, broken_by_kernels
from gpu_codegen.steps import Compiled, NotCompiledError, Step, compile_step, prepare, take

ELEMENTS = 2512
"""Of the unit whose bits are compared: not a multiple of a block, and one of a cache line."""

LIST = (9216, 512, 2560)
"""Of units that are stepped by the same launches; the first has several pieces."""

OF_LISTS = ("sm_90", "gfx942")
"""Architectures for which kernels for lists are compiled."""


@dataclass(slots=True)
class Result:
    """What was found out about a case.

    Attributes:
        optimizer: Its name.
        policy: Its name.
        launches: Kernels that a step launches.
        eager: Operators of torch that a step runs beside them.
        expected: The bytes for each element that the policy needs.
        counts: For each architecture, what each kernel does, in order of their definition.
        broken: The laws that do not hold.
        compiled: The code, to run it; None if the compiler did not take the step, or if it is one of a whole tensor.
    """

    optimizer: str
    policy: str
    launches: int
    eager: tuple[str, ...]
    expected: Traffic
    counts: dict[str, list[Counts]]
    broken: list[str]
    compiled: Compiled | None = field(repr=False)

    @property
    def name(self) -> str:
        """The case in one line."""
        return f"{self.optimizer} under {self.policy}"

    def as_data(self) -> dict[str, Any]:
        """All but the code, as JSON has it."""
        data = {name: getattr(self, name) for name in ("optimizer", "policy", "launches", "eager", "broken")}
        counts = {name: [asdict(one) for one in of_kernels] for name, of_kernels in self.counts.items()}
        return data | {"expected": asdict(self.expected), "counts": counts}


def check(name: str, architectures: Sequence[Architecture] = ARCHITECTURES) -> Result:
    """Compile the step of a case, and hold its code to the laws."""
    case = by_name(name)
    with fake_gpu():
        try:
            compiled = compile_step(case, prepare(case, ELEMENTS))
        except NotCompiledError as error:
            said = [f"{error} {error.__cause__}"]
            return Result(case.optimizer, case.policy_name, 0, (), traffic(case), {}, said, None)
        found = {
            kernel: {one.name: _counted(kernel, one) for one in architectures} for kernel in compiled.wrapper.kernels
        }
    expected = traffic(case)
    counts = {one.name: [of_kernel[one.name] for of_kernel in found.values()] for one in architectures}
    wrapper = compiled.wrapper
    said = list(broken_between_sums(wrapper, found) if case.has_sums else broken(wrapper, found, expected))
    if not case.has_sums:
        said += [f"for lists: {one}" for one in broken_by_kernels(_for_lists(wrapper, architectures), expected)]
    # Bits of a whole tensor are not compared: Triton's interpreter is driven for kernels of one dimension here.
    runs = None if case.whole else compiled
    return Result(case.optimizer, case.policy_name, len(wrapper.launches), wrapper.eager, expected, counts, said, runs)


def _for_lists(wrapper: Wrapper, architectures: Sequence[Architecture]) -> Found:
    """The kernels of a step as they are launched for several segments."""
    found = {}
    with fake_gpu():
        for kernel in wrapper.kernels:
            written = listed_source(kernel.source, kernel.name, loaded(kernel).configs[0], ())
            listed = Kernel(written.name, written.source)
            found[listed] = {one.name: _counted(listed, one) for one in architectures if one.name in OF_LISTS}
    return found


@cache
def _counted(kernel: Kernel, architecture: Architecture) -> Counts:
    return count(compile_kernel(kernel, architecture))


def different_bits(name: str, compiled: Compiled) -> list[str]:
    """Run the code of a case in Triton's interpreter; what differs from an uncompiled step on the CPU, of all tensors.

    The interpreter changes Triton for the rest of the process, in which no kernel can be compiled after that.
    """
    return different_bits_of(by_name(name), compiled, ELEMENTS)


def different_bits_of(case: Case, compiled: Compiled, elements: int) -> list[str]:
    """As :func:`different_bits`, for a unit of so many elements."""
    prepared, units = prepare(case, elements), [prepare(case, length) for length in LIST]
    expected, got, again = prepared.clone(), prepared.clone(), prepared.clone()
    expected_units = [unit.clone() for unit in units]
    for one in (expected, *expected_units):
        take(case, one)
    from triton.runtime.errors import InterpreterError

    def arguments(tensors: Sequence[Tensor]) -> list[Tensor | int]:
        return [len(tensors[0]) // -place if place < 0 else tensors[place] for place in compiled.inputs]

    try:
        with interpreting.loaded(compiled.wrapper) as module:
            module.call(arguments(got.tensors()))
            assert_same_bits(got.tensors(), expected.tensors(), "interpreted, against eager")
            graph = CompiledGraph(module.call, [module])

            def kernels_of(step: Step) -> KernelCalls | None:
                tensor, grad, *rest = step.tensors()
                other = torch.zeros_like(grad)
                return graph.kernels_for(arguments([tensor, other, *rest]), other, [tensor])

            kernels = kernels_of(again)
            if kernels is None:  # steps by totals go through all code
                return [] if prepared.totals else ["kernels by themselves: got none; accepted are those of all code."]
            kernels(prepared.grad)
            assert_same_bits(again.tensors(), expected.tensors(), "kernels by themselves, against eager")
            calls = [found for unit in units if (found := kernels_of(unit)) is not None]
            launched = launches(calls, [unit.grad for unit in units])
            if len(launched) > len(kernels.calls):
                return [f"a list of segments: got {len(launched)} launches; accepted are {len(kernels.calls)}."]
            for launch, given in launched:
                launch(*given)
            for unit, as_expected in zip(units, expected_units, strict=True):
                assert_same_bits(unit.tensors(), as_expected.tensors(), "a list of segments, against eager")
    except (InterpreterError, AssertionError) as error:  # the code asserts the sizes of what its operators return
        return [str(error) if isinstance(error, AssertionError) else f"interpreted: {error}"]
    return []


def quietly() -> None:
    """Have a process of this tool use one processor, and keep torch's warnings about tensors without memory to itself."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


@cache
def by_name(name: str) -> Case:
    """The case of this name."""
    return next(case for case in cases() if case.name == name)
