"""What a compiled kernel does, counted in its code: instructions that round otherwise than eager code, and bytes that move."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpu_codegen.kernels import Binary

FMA_OF_A_DIVISION = 5
"""An exact division of two float32 or float64 on an AMD processor is a sequence with so many fused multiply-adds."""

FMA_OF_A_ROOT = {"f32": 2, "f64": 7}
"""As above, of an exact square root."""

FMA_OF_A_GUESSED_ROOT = 5
"""As above, of a float32 that is not subnormal (LLVM's AMDGPU backend, ``legalizeFSQRTF32``)."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What one kernel does on one architecture.

    Attributes:
        contracted: Products and sums that were made one operation, or may be by the assembler.
        approximate: Divisions and roots that are not correctly rounded.
        flushing: Operations that take subnormal numbers for zero.
        spills: Bytes of memory that each thread has for itself: registers that did not fit, and arrays of library functions.
        registers: Registers of a thread.
        loaded: Bytes that are loaded for each element.
        stored: Bytes that are stored for each element.
        widest: Bytes of the widest access to memory.
        moved: Bytes that a thread's instructions load and store, by the assembly.
    """

    contracted: int
    approximate: int
    flushing: int
    spills: int
    registers: int
    loaded: float
    stored: float
    widest: int
    moved: int


def count(binary: Binary) -> Counts:
    """Count in all forms of a kernel."""
    of_assembly = _nvidia(binary) if binary.architecture.backend == "cuda" else _amd(binary)
    loaded, stored = (_of_blocks(binary.ttir, kind) for kind in ("load", "store"))
    return Counts(loaded=loaded, stored=stored, **of_assembly)


def _number(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text, re.M))


def _of_blocks(ttir: str, kind: str) -> float:
    """Bytes for each element: what is loaded or stored for a whole block, and not once for all elements."""
    found = re.findall(rf"tt\.{kind} .*: tensor<(\d+)x!tt\.ptr<(\w+)>>", ttir)
    return sum(_bits(name) for length, name in found if length != "1") / 8


def _bits(name: str) -> int:
    return 8 if name == "i1" else int(re.sub(r"\D*(\d+).*", r"\1", name.replace("bf", "f")))


def _nvidia(binary: Binary) -> dict[str, int]:
    ptx = binary.assembly
    # Of library functions, such as powers, which are written with these, and of which the backend may leave some out.
    written = _number(r"call .*@llvm\.(?:nvvm\.)?fma\.", binary.llir)
    fused = _number(r"^\s*(?:@\S+ )?(?:fma|mad)\.rn[.\w]*\.f\d+", ptx)
    # The assembler may fuse what is not marked as rounded.
    unmarked = _number(r"^\s*(?:@\S+ )?(?:mul|add|sub)(?:\.ftz)?\.f\d+", ptx)
    accesses = [
        int(count or 1) * int(bits) // 8
        for count, bits in re.findall(r"\b(?:ld|st)\.global(?:\.\w+)*?(?:\.v(\d))?\.[buf](\d+)", ptx)
    ]
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", binary.resources))
    return {
        "contracted": max(fused - written, 0) + unmarked,
        "approximate": _number(r"^\s*(?:@\S+ )?(?:div\.full|(?:div|rcp|sqrt|rsqrt)\.approx)[.\w]*\.f32", ptx),
        "flushing": _number(r"\.ftz\.f(?:16|32)", ptx),
        "spills": int(usage["STACK"]) + int(usage["LOCAL"]),
        "registers": int(usage["REG"]),
        "widest": max(accesses, default=0),
        "moved": sum(accesses),
    }


_WIDTHS = {
    "ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16,
}  # fmt: skip


def _amd(binary: Binary) -> dict[str, int]:
    text = binary.assembly
    divisions, roots = _number(r"^\s*v_div_fmas_f", text), dict.fromkeys(FMA_OF_A_ROOT, 0)
    roots["f32"] = _number(r"^\s*v_sqrt_f32", text)
    roots["f64"] = _number(r"^\s*v_rsq_f64", text)
    written = sum(
        int(lanes or 1) for lanes in re.findall(r"call .*@llvm\.(?:fma|fmuladd)\.(?:v(\d))?f(?:32|64)\(", binary.llir)
    )
    scalar = _number(r"^\s*v_(?:fma|fmac|mad|mac|madak|madmk|fmaak|fmamk)_f(?:32|64)", text)
    packed = _number(r"^\s*v_pk_(?:fma|mad)_f32", text)
    exact = divisions * FMA_OF_A_DIVISION + sum(number * FMA_OF_A_ROOT[kind] for kind, number in roots.items())
    fused = scalar + 2 * packed - written - exact
    # Where no input is subnormal an exact root begins with the reciprocal root. One that is not refined lacks its multiply-adds.
    guesses = _number(r"^\s*v_rsq_(?:iflag_)?f32", text)
    refined = min(guesses, max(fused, 0) // FMA_OF_A_GUESSED_ROOT)
    accesses = [
        _WIDTHS[width]
        for width in re.findall(r"^\s*(?:global|buffer|flat)_(?:load|store)_(\w+?)(?:_d16(?:_hi)?)?\s", text, re.M)
    ]
    flushes = not re.search(r"\.amdhsa_float_denorm_mode_32 3", text)

    def resource(name: str) -> int:
        return sum(int(number) for number in re.findall(rf"\.{name}:\s+(\d+)", text))

    return {
        "contracted": max(fused - refined * FMA_OF_A_GUESSED_ROOT, 0),
        # Each exact division takes a reciprocal as its first guess.
        "approximate": _number(r"^\s*v_rcp_(?:iflag_)?f32", text)
        - _number(r"^\s*v_div_fmas_f32", text)
        + guesses
        - refined,
        "flushing": int(flushes),
        # Scalar registers are spilled into vector registers, which is no memory.
        "spills": 4 * resource("vgpr_spill_count") + resource("private_segment_fixed_size"),
        "registers": resource("vgpr_count"),
        "widest": max(accesses, default=0),
        "moved": sum(accesses),
    }
