"""A captured kernel, compiled by Triton for an architecture that need not be at hand."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gpu_codegen.capture import Kernel


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a kernel is compiled for.

    Attributes:
        name: As in tables: ``sm_90``.
        backend: Triton's, ``"cuda"`` or ``"hip"``.
        arch: Triton's name of it.
        warp: Threads that run together.
    """

    name: str
    backend: str
    arch: int | str
    warp: int


ARCHITECTURES = (
    Architecture("sm_80", "cuda", 80, 32),
    Architecture("sm_90", "cuda", 90, 32),
    Architecture("sm_100", "cuda", 100, 32),
    Architecture("gfx942", "hip", "gfx942", 64),
)


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled kernel.

    Attributes:
        architecture: What it was compiled for.
        elements_per_thread: Of the block that each program works on; 0 where a program works on one element.
        ttir: Triton's own code, in which each load and store says whether it is of a block or of one element.
        llir: LLVM's code.
        assembly: PTX, or the assembly of an AMD processor.
        resources: What the assembler says about registers and memory, as text.
    """

    architecture: Architecture
    elements_per_thread: int
    ttir: str
    llir: str
    assembly: str
    resources: str


def compile_kernel(kernel: Kernel, architecture: Architecture) -> Binary:
    """Compile a kernel with the options that torch passes to Triton, in the first of the configurations that it would measure.

    Has to be called within :func:`gpu_codegen.fake_gpu.fake_gpu`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tuner = loaded(kernel)
    config = tuner.configs[0]
    meta = tuner._create_compile_meta(config)
    options = tuner._create_compile_options(config, meta)
    constants = dict(meta["constants"])
    signature = {name: "constexpr" if name in constants else kind for name, kind in meta["signature"].items()}
    source = ASTSource(tuner.fn, signature, constants, dict(meta["configs"][0]))
    if architecture.backend != "cuda":
        options = {name: value for name, value in options.items() if name not in _OF_CUDA}
    compiled: Any = triton.compile(
        source, target=GPUTarget(architecture.backend, architecture.arch, architecture.warp), options=options
    )
    block = constants.get("XBLOCK", 1)
    text = compiled.asm
    is_cuda = architecture.backend == "cuda"
    return Binary(
        architecture,
        block // (config.num_warps * architecture.warp),
        str(text["ttir"]),
        str(text["llir"]),
        str(text["ptx" if is_cuda else "amdgcn"]),
        _resource_usage(text["cubin"]) if is_cuda else str(text["amdgcn"]),
    )


# Options that only Triton's CUDA backend takes.
_OF_CUDA = ("enable_reflect_ftz", "launch_pdl", "launch_cooperative_grid")


def loaded(kernel: Kernel) -> Any:
    """What the compiler's own code makes of a kernel's source: its function, configurations and options."""
    from torch._inductor.codecache import PyCodeCache

    return getattr(PyCodeCache.load(kernel.source), kernel.name)


@cache
def _cuobjdump() -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def _resource_usage(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_cuobjdump(), "--dump-resource-usage", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
