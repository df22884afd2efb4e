"""What has to hold of compiled code; each law says what is wrong, and nothing if it holds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from gpu_codegen.capture import Kernel, Wrapper
from gpu_codegen.counting import Counts
from gpu_codegen.expected import Traffic

LAUNCHES = 2
"""One that makes all coefficients, and one that moves memory."""

ONE_REGISTER = 8
"""Bytes of memory of a thread that saves one register, around a call for the rare cases of a division."""

COSINE = 48
"""Bytes of memory of a thread in which a cosine reduces arguments that are too large for a product: six words of 64 bits."""

MOVES = ("aten.sort.stable",)
"""Operators of torch that move numbers and round none."""

NARROWEST = 8
"""Bytes of the widest access of a kernel that moves memory."""

Found = Mapping[Kernel, Mapping[str, Counts]]
"""For each kernel, by the name of the architecture, what it does."""


def broken(wrapper: Wrapper, found: Found, expected: Traffic) -> Iterator[str]:
    """All laws of a step."""
    yield from launches(wrapper)
    yield from read_backs(wrapper)
    yield from intermediates(wrapper)
    yield from broken_by_kernels(found, expected)


def broken_by_kernels(found: Found, expected: Traffic) -> Iterator[str]:
    """The laws of a step's kernels."""
    for kernel, of_kernel in found.items():
        for architecture, counts in of_kernel.items():
            for said in arithmetic(counts):
                yield f"{architecture}, {kernel.name}: {said}"
    for name in _architectures(found):
        yield from (f"{name}: {said}" for said in accesses([of_kernel[name] for of_kernel in found.values()]))
    yield from bytes_moved(found, expected)


def broken_between_sums(wrapper: Wrapper, found: Found) -> Iterator[str]:
    """The laws of a step that has sums, or products of matrices, between its kernels."""
    yield from opaque(wrapper)
    yield from read_backs(wrapper)
    for kernel, of_kernel in found.items():
        # Random numbers are made where they are used, and not in a thread of their own.
        spilled = COSINE if "cos(" in kernel.source else ONE_REGISTER
        for architecture, counts in of_kernel.items():
            for said in arithmetic(counts, spilled):
                yield f"{architecture}, {kernel.name}: {said}"


def opaque(wrapper: Wrapper) -> Iterator[str]:
    """Operators that run beside the kernels are everybit's own, in which eager code's library functions are called one by one."""
    others = [name for name in wrapper.eager if not name.startswith("everybit.") and name not in MOVES]
    if others:
        yield f"eager operators: got {', '.join(others)}; accepted are everybit's own, and {', '.join(MOVES)}."


def launches(wrapper: Wrapper) -> Iterator[str]:
    """A step is two launches, and no operator of torch runs beside them."""
    if len(wrapper.launches) > LAUNCHES:
        yield f"launches: got {len(wrapper.launches)}; accepted are {LAUNCHES}."
    if wrapper.eager:
        yield f"eager operators: got {', '.join(wrapper.eager)}; accepted are none."


def read_backs(wrapper: Wrapper) -> Iterator[str]:
    """The host waits for nothing."""
    if wrapper.reads_back:
        yield f"values read by the host: got {', '.join(wrapper.reads_back)}; accepted are none."


def intermediates(wrapper: Wrapper) -> Iterator[str]:
    """What a step allocates are numbers, and no tensor of the unit's length."""
    large = [shape for shape in wrapper.allocations if re.sub(r"\b1\b|[\s,]", "", shape)]
    if large:
        yield f"intermediates: got {len(large)} of the shapes ({'), ('.join(large)}); accepted are single elements."


def arithmetic(counts: Counts, spilled: int = ONE_REGISTER) -> Iterator[str]:
    """Every operation is rounded as eager code rounds it, and registers suffice."""
    if counts.contracted:
        yield f"products and sums in one operation: got {counts.contracted}; accepted are none."
    if counts.approximate:
        yield f"approximate divisions and roots: got {counts.approximate}; accepted are none."
    if counts.flushing:
        yield f"operations that flush subnormal numbers to zero: got {counts.flushing}; accepted are none."
    yield from spills(counts, spilled)


def spills(counts: Counts, accepted: int = ONE_REGISTER) -> Iterator[str]:
    """Registers suffice where memory is moved; in the one thread that makes coefficients a cosine has an array."""
    if counts.spills > accepted and counts.loaded:
        yield f"spilled registers: got {counts.spills} bytes; accepted are {accepted}."


def bytes_moved(found: Found, expected: Traffic) -> Iterator[str]:
    """All kernels together move each byte once."""
    for name in _architectures(found):
        loaded = sum(of_kernel[name].loaded for of_kernel in found.values())
        stored = sum(of_kernel[name].stored for of_kernel in found.values())
        if (loaded, stored) != (expected.loaded, expected.stored):
            yield (
                f"{name}: bytes for each element: got {loaded:g} loaded and {stored:g} stored; the policy needs {expected.loaded:g} and"
                f" {expected.stored:g}."
            )


def accesses(counts: Sequence[Counts]) -> Iterator[str]:
    """What moves memory moves several elements at a time."""
    narrow = [one.widest for one in counts if one.loaded and one.widest < NARROWEST]
    if narrow:
        yield f"access to memory: got {', '.join(map(str, narrow))} bytes at a time; accepted are {NARROWEST} and more."


def _architectures(found: Found) -> list[str]:
    return sorted({name for of_kernel in found.values() for name in of_kernel})
