"""Lets torch's CPU compiler vectorise arithmetic on the bits of numbers.

Formats round by integer arithmetic on float32 bits. Inductor (torch 2.11 to 2.15) generates vector code for that arithmetic, but not for
the two steps into and out of it: a reinterpretation goes through memory, element by element, and a single int16 tensor makes the loop
scalar. The step is then five to ten times slower than memory is. Here both are said in vector code, for as long as one of our own steps
is compiled; the results are the same bits, so it does not matter whether a cached kernel was made with this or without. The loop is then
written out by :mod:`~everybit_torch.torch_internals.cpp_loops`.

It changes Inductor's code generator, which is private. If it is not as expected, it is left as it is, and the step is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from threading import RLock
from typing import Any

import torch

from everybit_torch.torch_internals import cpp_loops

_LOCK = RLock()
# What `c10::bit_cast` is in C++20. In C++17, in which torch 2.11 compiles, that refuses vectors: they set themselves to zero.
_BITS = "__builtin_bit_cast"
_LOW = {torch.bfloat16: "at::BFloat16", torch.float16: "at::Half"}


@contextmanager
def vector_bits() -> Iterator[bool]:
    """Within it Inductor's CPU code has vector reinterpretations and int16; yields whether it could be arranged."""
    with _LOCK:
        undo = _arrange()
        try:
            yield bool(undo)
        finally:
            for one in undo:
                one()


def _arrange() -> list[Callable[[], None]]:
    try:
        V: Any = import_module("torch._inductor.virtualized").V
        cpp: Any = import_module("torch._inductor.codegen.cpp")
    except ImportError:
        return []
    overrides, kernel = getattr(cpp, "CppVecOverrides", None), getattr(cpp, "CppVecKernel", None)
    dtypes: Any = getattr(cpp, "VECTORIZABLE_DTYPES", None)
    scalar: Any = getattr(overrides, "to_dtype_bitcast", None)
    convert: Any = getattr(overrides, "to_dtype", None)
    count: Any = getattr(kernel, "arange", None)
    load: Any = getattr(kernel, "_get_vec_load_line", None)
    store: Any = getattr(kernel, "_get_store_line", None)
    narrow: Any = getattr(cpp, "get_loop_body_lowp_fp", None)
    group: Any = getattr(cpp, "KernelGroup", None)
    written: Any = getattr(group, "codegen_group", None)
    found = (
        isinstance(dtypes, list)
        and callable(scalar)
        and callable(convert)
        and callable(count)
        and callable(load)
        and callable(store)
        and callable(narrow)
        and callable(written)
    )
    if not found or not all(hasattr(kernel, name) for name in ("_get_vec_type", "_get_num_vectors")):
        return []

    def reinterpret(x: Any, dtype: torch.dtype, src_dtype: torch.dtype) -> Any:
        if not x.is_vec or dtype.itemsize != src_dtype.itemsize:
            return scalar(x, dtype, src_dtype)
        return f"{_BITS}({V.kernel._get_vec_type(dtype)}, {x})"

    def to_dtype(
        x: Any, dtype: torch.dtype, src_dtype: torch.dtype | None = None, use_compute_types: bool = True
    ) -> Any:
        if x.is_vec and {dtype, x.dtype} == {torch.int16, torch.int32}:
            code = _converted(x, dtype, V.kernel)
        elif x.is_vec and (x.dtype, dtype) == (torch.bool, torch.int32) and V.kernel._get_num_vectors(dtype) == 1:
            # A mask has all bits set where it is true. torch's code selects from zeros and ones, which a negation does not undo.
            vector = V.kernel._get_vec_type(dtype)
            code = f"{vector}(0) - static_cast<{vector}>({x}.template cast<int32_t, 1>())"
        elif x.is_vec and dtype is torch.float64 and x.dtype in _LOW:
            code = _widened(x, V.kernel)
        else:
            return convert(x, dtype, src_dtype, use_compute_types)
        made = V.kernel.cse.generate(V.kernel.compute, code)
        made.update_on_args("to_dtype", (x, dtype), {"src_dtype": x.dtype})
        return made

    def arange(self: Any, index: Any, stride: Any) -> Any:
        if index.dtype is not torch.int32 or not str(stride).isdigit():
            return count(self, index, stride)
        # A constant vector and a broadcast, where torch's own inserts one lane after the other.
        vector = self._get_vec_type(torch.int32)
        made = self.cse.generate(self.compute, f"{vector}({index}) + {vector}::arange(0, {stride})")
        made.dtype, made.is_vec = index.dtype, True
        return made

    def load_line(self: Any, var: str, index: Any, dtype: torch.dtype, load_mask: Any = None) -> Any:
        if load_mask is not None or not _fills_a_part(self, dtype):
            return load(self, var, index, dtype, load_mask)
        return _part_load(self, dtype, f"{var} + {cpp.cexpr_index(index)}")

    def store_line(self: Any, value: Any, var: str, index: Any, dtype: torch.dtype, accu_store: bool = False) -> Any:
        stride = self._try_get_const_stride(index, self.itervars[self.tiling_idx])
        if accu_store or stride != 1 or not _fills_a_part(self, dtype):
            return store(self, value, var, index, dtype, accu_store)
        code = cpp.IndentedBuffer()
        code.writeline(
            f"std::memcpy({var} + {cpp.cexpr_index(index)}, &{value}, {self.tiling_factor * dtype.itemsize});"
        )
        return code

    def computed_in(body: Any) -> Any:
        # Where 16-bit numbers are only stored, torch counts lanes by them: two registers for each number that is computed with, which do
        # not suffice for a step.
        narrowed: Any = narrow(body)
        dtype, computes_in_float32 = narrowed
        return None if computes_in_float32 else dtype, computes_in_float32

    def codegen_group(self: Any, *args: Any, **kwargs: Any) -> str:
        source: Any = written(self, *args, **kwargs)
        return cpp_loops.rewritten(source)

    overrides.to_dtype_bitcast = staticmethod(reinterpret)  # type: ignore[union-attr]
    overrides.to_dtype = staticmethod(to_dtype)  # type: ignore[union-attr]
    kernel._get_vec_load_line = load_line  # type: ignore[union-attr]
    kernel._get_store_line = store_line  # type: ignore[union-attr]
    kernel.arange = arange  # type: ignore[union-attr]
    cpp.get_loop_body_lowp_fp = computed_in
    group.codegen_group = codegen_group
    dtypes.append(torch.int16)

    def undo() -> None:
        overrides.to_dtype_bitcast = staticmethod(scalar)  # type: ignore[union-attr]
        overrides.to_dtype = staticmethod(convert)  # type: ignore[union-attr]
        kernel.arange = count  # type: ignore[union-attr]
        kernel._get_vec_load_line = load  # type: ignore[union-attr]
        kernel._get_store_line = store  # type: ignore[union-attr]
        cpp.get_loop_body_lowp_fp = narrow
        group.codegen_group = written
        dtypes.remove(torch.int16)

    return [undo]


def _converted(x: Any, dtype: torch.dtype, kernel: Any) -> str:
    """C++ for a vector of int32 as int16 (the low halves) or of int16 as int32, in vectors as gcc and clang both have them."""
    lanes = kernel.tiling_factor
    # int16 lanes fill a register, or half of it, and the rest is not read.
    room = kernel._get_num_vectors(torch.int16) * kernel.vec_isa.bit_width() // 16
    types = (
        f"typedef int16_t __attribute__((vector_size({4 * lanes}))) Halves;"
        f" typedef int16_t __attribute__((vector_size({2 * room}))) Room;"
        f" typedef int32_t __attribute__((vector_size({4 * lanes}))) Wide;"
    )
    to = kernel._get_vec_type(dtype)
    if dtype is torch.int16:
        low_halves = ", ".join(str(2 * (lane % lanes)) for lane in range(room))
        body = (
            f"auto all = {_BITS}(Halves, {x}); return {_BITS}({to}, __builtin_shufflevector(all, all, {low_halves}));"
        )
    else:
        # Into the upper halves, and down again with their signs.
        raised = ", ".join(f"{room}, {lane}" for lane in range(lanes))
        body = (
            f"auto raised = __builtin_shufflevector({_BITS}(Room, {x}), Room{{}}, {raised});"
            f" return {_BITS}({to}, {_BITS}(Wide, raised) >> 16);"
        )
    return f"[&]() {{ {types} {body} }}()"


def _widened(x: Any, kernel: Any) -> str:
    """C++ for a vector of 16-bit numbers as float64: torch has vector code for each half of the way, and none for the whole."""
    wide, single, low = map(kernel._get_num_vectors, (torch.float64, torch.float32, x.dtype))
    singles = f"at::vec::convert<float, {single}, {_LOW[x.dtype]}, {low}>({x})"
    return f"at::vec::convert<double, {wide}, float, {single}>({singles})"


def _fills_a_part(kernel: Any, dtype: torch.dtype) -> bool:
    """Whether a vector of this dtype is the lower part of a register: then torch loads and stores it under a mask.

    A masked store of half a register delays the next load of the same buffer, because the two overlap in the masked half.
    """
    size, register = kernel.tiling_factor * dtype.itemsize, kernel.vec_isa.bit_width() // 8
    return dtype.itemsize <= 2 and dtype is not torch.bool and kernel.tail_size is None and size < register


def _part_load(kernel: Any, dtype: torch.dtype, pointer: str) -> str:
    size, register = kernel.tiling_factor * dtype.itemsize, kernel.vec_isa.bit_width() // 8
    lanes = ", ".join(str(byte) if byte < size else "-1" for byte in range(register))
    return (
        f"[&]() {{ typedef char __attribute__((vector_size({size}))) Part; Part part; std::memcpy(&part, {pointer}, {size});"
        f" return {_BITS}({kernel._get_vec_type(dtype)}, __builtin_shufflevector(part, part, {lanes})); }}()"
    )
