"""The sum of what ranks have sent, compiled for GPUs that are not there: what its code does wrong, and whether its bits are eager's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everybit.testing.examples import assert_same_bits
from everybit_torch.collectives.reduction import install
from everybit_torch.compiled import fused_sums
from gpu_codegen import interpreting, laws
from gpu_codegen.capture import Wrapper, captured
from gpu_codegen.counting import count
from gpu_codegen.expected import Traffic
from gpu_codegen.fake_gpu import fake_gpu
from gpu_codegen.kernels import ARCHITECTURES, Architecture, compile_kernel

LENGTH = 1 << 20
"""Elements of each part that code is made for."""

ELEMENTS = 2512
"""Of each part whose bits are compared."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A kind of sum.

    Attributes:
        ranks: How many parts.
        wire: Their dtype.
        adds: Whether the present values are in the sum.
        divisor: What the sum is divided by; None: nothing.
        scale: Of the parts.
        main: dtype of the result.
    """

    ranks: int
    wire: torch.dtype = torch.bfloat16
    adds: bool = False
    divisor: float | None = None
    scale: float = 1.0
    main: torch.dtype = torch.float32

    @property
    def traffic(self) -> Traffic:
        """Each part in, the result out, and where it is added to, in."""
        read = self.ranks * self.wire.itemsize + (self.main.itemsize if self.adds else 0)
        return Traffic(loaded=float(read), stored=float(self.main.itemsize))

    def tensors(self, numel: int, device: str, fill: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """The result, the parts, and the divisor."""
        by = None if self.divisor is None else torch.full((1,), self.divisor, dtype=torch.float64, device=device)
        if not fill:
            shape = (self.ranks, numel)
            return (
                torch.empty(numel, dtype=self.main, device=device),
                torch.empty(shape, dtype=self.wire, device=device),
                by,
            )
        generator = torch.Generator().manual_seed(self.ranks)
        sizes = torch.exp(3 * torch.randn(self.ranks, numel, generator=generator))
        parts = (torch.randn(self.ranks, numel, generator=generator) * sizes).to(self.wire)
        return torch.randn(numel, generator=generator).to(self.main), parts, by


def compile_sum(one: Sum) -> list[tuple[Wrapper, list[object]]]:
    """The code of a sum, of one kernel after the other, with the first arguments of each.

    Has to be called within :func:`gpu_codegen.fake_gpu.fake_gpu`.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True), captured() as found:
        main, parts, by = one.tensors(LENGTH, "cuda", fill=False)
        done = fused_sums.FusedSums(main.device)(main, parts, adds=one.adds, by=by, scale=one.scale)
        if not done:
            raise RuntimeError(f"{one}: was not compiled")
        return [(module.wrapper, list(map(_name, module.arguments))) for module in found]


def _name(argument: object) -> object:
    """What an argument of the code is; the length stays as it is."""
    if not isinstance(argument, Tensor):
        return argument
    return "parts" if argument.ndim == 2 else "by" if argument.dtype is torch.float64 else "main"


def broken(sums: Sequence[Sum], architectures: Sequence[Architecture] = ARCHITECTURES) -> list[list[str]]:
    """What is wrong with the code of each of these sums, which one kernel has to make."""
    said: list[list[str]] = []
    compiled = []
    with fake_gpu():
        for one in sums:
            ((wrapper, arguments),) = compile_sum(one)
            compiled.append((wrapper, arguments))
            said.append([*_of_wrapper(wrapper), *_of_kernels(one, wrapper, architectures)])
    # At the end, since the interpreter changes Triton.
    for one, (wrapper, arguments), found in zip(sums, compiled, said, strict=True):
        found += different_bits(one, wrapper, arguments)
    return said


def _of_wrapper(wrapper: Wrapper) -> Iterator[str]:
    if len(wrapper.launches) != 1:
        yield f"launches: got {len(wrapper.launches)}; accepted is 1."
    yield from laws.launches(wrapper)
    yield from laws.read_backs(wrapper)
    if wrapper.allocations:
        yield f"allocations: got {', '.join(wrapper.allocations)}; accepted are none."


def _of_kernels(one: Sum, wrapper: Wrapper, architectures: Sequence[Architecture]) -> Iterator[str]:
    found = {
        kernel: {each.name: count(compile_kernel(kernel, each)) for each in architectures} for kernel in wrapper.kernels
    }
    for kernel, of_kernel in found.items():
        for name, counts in of_kernel.items():
            yield from (f"{name}, {kernel.name}: {said}" for said in laws.arithmetic(counts))
    yield from laws.bytes_moved(found, one.traffic)


def different_bits(one: Sum, wrapper: Wrapper, arguments: Sequence[object]) -> list[str]:
    """What differs from a sum that was not compiled, of the code's in Triton's interpreter."""
    main, parts, by = one.tensors(ELEMENTS, "cpu", fill=True)
    expected = main.clone()
    install(expected, list(parts), mode="add" if one.adds else "copy", divisor=one.divisor, scale=one.scale)
    given = {"main": main, "parts": parts, "by": by}
    interpreting.run(wrapper, [given[x] if isinstance(x, str) else ELEMENTS for x in arguments])  # type: ignore[misc]
    try:
        assert_same_bits(main, expected, "interpreted, against eager")
    except AssertionError as error:
        return [str(error)]
    return []
