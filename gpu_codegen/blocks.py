"""``python -m gpu_codegen.blocks``: code for GPUs of steps whose state has one number for a block of elements.

The laws of :mod:`gpu_codegen.laws` are about kernels that go through elements; these have a kernel in rows of a block each. What is held
here: few launches, nothing beside them, no read-back, no tensor of the unit's length, exact arithmetic, and the bits of an uncompiled step.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import torch

from everybit.policies.presets import PRESETS
from gpu_codegen.capture import Wrapper
from gpu_codegen.cases import MAIN, Case
from gpu_codegen.checking import different_bits_of, quietly
from gpu_codegen.counting import count
from gpu_codegen.fake_gpu import fake_gpu
from gpu_codegen.kernels import ARCHITECTURES, compile_kernel
from gpu_codegen.laws import arithmetic, read_backs
from gpu_codegen.steps import compile_step, prepare

ELEMENTS = 2560
"""Whole blocks of all formats."""

LAUNCHES = 3
"""One that makes all coefficients, one that moves memory, and one for the scales, of which there is one in 128 or 256 elements."""


REGISTERS = 96
"""Of a thread. With more of them an SM has room for fewer than twenty warps, and loads are waited for."""

NAMES = ("LEAN_8BIT", "FLOOR_8BIT")
"""Presets. Two codes of 4 bits in a byte are put together by a kernel of its own: ``LEAN_4BIT`` is five launches."""


def check(name: str) -> tuple[int, list[str]]:
    """Compile AdamW's step under a preset: the number of launches, and what is wrong.

    Once in a process: the interpreter changes Triton for the rest of it.
    """
    factory, arguments = MAIN["adamw"]
    case = Case("adamw", name, PRESETS[name], factory, arguments, torch.bfloat16, torch.bfloat16)
    with fake_gpu():
        compiled = compile_step(case, prepare(case, ELEMENTS))
        wrapper = compiled.wrapper
        found = {
            (kernel.name, one.name): compile_kernel(kernel, one) for kernel in wrapper.kernels for one in ARCHITECTURES
        }
    said = list(broken(wrapper))
    for (kernel, architecture), binary in found.items():
        counts = count(binary)
        said += [f"{architecture}, {kernel}: {one}" for one in arithmetic(counts)]
        if counts.registers > REGISTERS and binary.architecture.backend == "cuda":
            said.append(f"{architecture}, {kernel}: got {counts.registers} registers; accepted are {REGISTERS}.")
    said += different_bits_of(case, compiled, ELEMENTS)
    return len(wrapper.launches), said


def broken(wrapper: Wrapper) -> Iterator[str]:
    """The laws of the code around the kernels."""
    if len(wrapper.launches) > LAUNCHES:
        yield f"launches: got {len(wrapper.launches)}; accepted are {LAUNCHES}."
    if wrapper.eager:
        yield f"eager operators: got {', '.join(wrapper.eager)}; accepted are none."
    yield from read_backs(wrapper)
    if large := [shape for shape in wrapper.allocations if re.search(r"\d+\s*\*|\*\s*\d+|,\s*\d", shape)]:
        yield f"intermediates: got the shapes ({'), ('.join(large)}); accepted are one number for each block."


if __name__ == "__main__":
    quietly()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=quietly, max_tasks_per_child=1) as pool:
        given = sys.argv[1:] or NAMES
        results = dict(zip(given, pool.map(check, given), strict=True))
    json.dump(results, sys.stdout)
    sys.exit(any(said for _, said in results.values()))
