"""Code that breaks each law, made on purpose; run as a program, which prints what each law says of it as JSON.

A program, because it registers a device with torch, and Triton's interpreter changes Triton, for the rest of a process.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import everybit_torch.torch_internals.compiler as torch_compiler
from everybit.base import materialize
from everybit_torch import EXACT_OPTIONS
from everybit_torch.torch_internals.compiler import device_options
from gpu_codegen import interpreting, laws, steps
from gpu_codegen.capture import Wrapper, captured
from gpu_codegen.cases import Case, cases
from gpu_codegen.counting import Counts, count
from gpu_codegen.expected import Traffic, traffic
from gpu_codegen.fake_gpu import fake_gpu
from gpu_codegen.kernels import ARCHITECTURES, Architecture, compile_kernel, loaded
from gpu_codegen.steps import compile_step, prepare

SM_90, GFX942 = ARCHITECTURES[1], ARCHITECTURES[3]
LENGTH = 2512


def code_for(function: Callable[..., Any], *dtypes: torch.dtype, options: dict[str, Any] | None = None) -> Wrapper:
    """The code for a function of vectors on a GPU, compiled as users compile."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch._dynamo.reset()
    with FakeTensorMode(), captured() as found:
        vectors = [torch.empty(LENGTH, dtype=dtype, device="cuda") for dtype in dtypes]
        torch.compile(function, fullgraph=True, options=options)(*vectors)
    return found[0].wrapper


def counts_of(wrapper: Wrapper, architecture: Architecture) -> list[Counts]:
    return [count(compile_kernel(kernel, architecture)) for kernel in wrapper.kernels]


def said(law: Callable[[Any], Iterator[str]], values: list[Any]) -> list[str]:
    return [one for value in values for one in law(value)]


@contextmanager
def without(option: str) -> Iterator[None]:
    """Steps compiled without an option that they need."""
    left = {name: value for name, value in device_options().items() if name != option}
    with mock.patch.object(torch_compiler, "device_options", return_value=left):
        yield


def whole_step(case: Case) -> Wrapper:
    return compile_step(case, prepare(case, LENGTH)).wrapper


def in_two(target: Tensor, x: Tensor) -> None:
    """A barrier between two operations on all elements: a tensor of the unit's length, an eager operator, two kernels."""
    target.copy_(materialize(x * 2) + target)


def read_by_the_host(target: Tensor, x: Tensor) -> None:
    target.copy_(x * int(x.count_nonzero().item()))


def kahan(value: Tensor, residual: Tensor, update: Tensor) -> None:
    """A compensated sum that is written with casts."""
    whole = value.float() + residual.float() + update
    rounded = whole.to(torch.bfloat16)
    residual.copy_((whole - rounded.float()).to(torch.bfloat16))
    value.copy_(rounded)


def written_twice(target: Tensor, copy: Tensor, x: Tensor) -> None:
    """A step that keeps a copy of its parameters that no format needs."""
    target.copy_(target - x)
    copy.copy_(target)


def written_once(target: Tensor, x: Tensor) -> None:
    target.copy_(target - x)


def compensation_lost(options: dict[str, Any] | None) -> list[str]:
    """What the interpreter's bits say of the compensated sum, of which only the residual is compared."""
    wrapper = codes["kahan, exact" if options else "kahan"]
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(LENGTH, generator=generator).bfloat16()
    update = 1e-3 * torch.randn(LENGTH, generator=generator)
    # Without a residual the whole is the sum of two, so that the compensation is what the rounding left.
    residual = torch.zeros(LENGTH, dtype=torch.bfloat16)
    got = [value.clone(), residual.clone(), update]
    interpreting.run(wrapper, got)
    if got[1].count_nonzero() == 0:
        return ["interpreted, against eager: the residual is zero."]
    return []


codes: dict[str, Wrapper] = {}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    by_name = {case.name: case for case in cases()}
    adamw, lean = by_name["adamw under FP32"], by_name["adamw under LEAN_BF16"]
    found: dict[str, list[str]] = {}
    with fake_gpu():
        whole = whole_step(adamw)
        found["whole"] = [
            one
            for architecture in (SM_90, GFX942)
            for one in laws.broken(
                whole,
                {kernel: {architecture.name: count(compile_kernel(kernel, architecture))} for kernel in whole.kernels},
                traffic(adamw),
            )
        ]
        with without("emulate_precision_casts"):
            contracted = whole_step(adamw)
        for architecture in (SM_90, GFX942):
            found[f"contracted, {architecture.name}"] = said(laws.arithmetic, counts_of(contracted, architecture))
        with without("eager_numerics.division_rounding"):
            approximate = whole_step(adamw)
        found["approximate"] = said(laws.arithmetic, counts_of(approximate, SM_90))
        with without("eager_numerics.disable_ftz"):
            found["flushing"] = said(laws.arithmetic, counts_of(whole_step(adamw), SM_90))
        with without("aggressive_fusion"):
            found["launches"] = list(laws.launches(whole_step(lean)))
        exact, float32 = dict(EXACT_OPTIONS), torch.float32
        found["spilled"] = said(laws.arithmetic, spilled(whole))
        split = code_for(in_two, float32, float32, options=exact)
        found["eager operators"] = list(laws.launches(split))
        found["intermediates"] = list(laws.intermediates(split))
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            found["read backs"] = list(laws.read_backs(code_for(read_by_the_host, float32, float32, options=exact)))
        codes["kahan"] = code_for(kahan, torch.bfloat16, torch.bfloat16, float32)
        codes["kahan, exact"] = code_for(kahan, torch.bfloat16, torch.bfloat16, float32, options=exact)
        twice = code_for(written_twice, float32, float32, float32, options=exact)
        of_twice = {kernel: {"sm_90": count(compile_kernel(kernel, SM_90))} for kernel in twice.kernels}
        found["bytes, once"] = list(laws.bytes_moved(of_twice, Traffic(8, 8)))
        found["bytes, twice"] = list(laws.bytes_moved(of_twice, Traffic(8, 4)))
        of_whole = {kernel: {"sm_90": count(compile_kernel(kernel, SM_90))} for kernel in whole.kernels}
        found["bytes of another policy"] = list(laws.bytes_moved(of_whole, traffic(lean)))
        # For lengths that are no multiple of 16, of which there is other code.
        odd = compile_step(adamw, prepare(adamw, LENGTH + 1), steps.LENGTH + 1).wrapper
        found["narrow"] = list(laws.accesses(counts_of(odd, SM_90)))
        of_dtypes = [code_for(quotient, dtype, dtype, options=exact) for dtype in (float32, torch.float64)]
        found["division and root"] = [
            f"{architecture.name}: {[(one.contracted, one.approximate) for one in counts_of(code, architecture)]}"
            for code in of_dtypes
            for architecture in (SM_90, GFX942)
        ]
    found["cast folded"] = compensation_lost(None)
    found["cast kept"] = compensation_lost(exact)
    print(json.dumps(found))  # noqa: T201


def quotient(target: Tensor, x: Tensor) -> None:
    """A division and a root in one kernel, whose exact sequences have fused multiply-adds on an AMD processor."""
    target.copy_(target / x.sqrt())


def spilled(wrapper: Wrapper) -> list[Counts]:
    """The counts of a step whose threads may use 24 registers."""
    tuner = type(loaded(wrapper.kernels[0]))
    options = tuner._create_compile_options
    with mock.patch.object(tuner, "_create_compile_options", lambda *args: {**options(*args), "maxnreg": 24}):
        return counts_of(wrapper, SM_90)


if __name__ == "__main__":
    main()
