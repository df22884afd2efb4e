"""The compilation of a step: as a whole, in one pass over memory.

Options of torch's compiler are in :mod:`everybit_torch.torch_internals.compiler`, which is imported when a step is compiled, and
not before: that takes longer than ``import torch``.
"""

from __future__ import annotations

import logging
import os
import shutil
import types
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import count
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx

from everybit.protocol import Context, accepting
from everybit_torch import notices
from everybit_torch.torch_internals import compiler

_LOGGER = logging.getLogger("everybit_torch")
_COUNT = count(1)

WHOLE = 16
"""Elements: in vectors of a multiple of these a thread of an accelerator loads and stores several at a time."""

F = TypeVar("F", bound=Callable[..., Any])


class DeclinedError(Exception):
    """Torch's compiler ran the function uncompiled. No input was written."""


def compile_step(function: F, began: Callable[[Callable[..., Any], Sequence[Any]], None]) -> F:
    """``function`` compiled as a whole, with coefficients made before the loop and bits handled in vectors.

    ``began`` is called with the compiled code and its arguments, when it begins to run. An error before that is the compiler's,
    and no input was written. ``function`` runs compiled or not at all.

    Raises:
        DeclinedError: The compiled function raises it where torch would run ``function`` uncompiled.
    """

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        compiled = compiler.compile_graph(graph, inputs)

        def run(*args: Any) -> Any:
            began(compiled, args)
            return compiled(*args)

        return run

    def step(*args: Any) -> Any:
        # Switched off, or inside of a dispatch mode, torch runs the function uncompiled, and raises afterwards, if at all. A caller that
        # then steps uncompiled would take the step a second time.
        if not torch.compiler.is_dynamo_compiling():
            raise DeclinedError
        return function(*args)

    # A copy of the code, because the compiler's cache belongs to the code object and is bounded. And a name, because Dynamo before torch
    # 2.13 remembers by name which numbers of a closure change, and these differ between functions.
    code = step.__code__.replace(co_name=f"{function.__name__}_{next(_COUNT)}")
    own = types.FunctionType(code, step.__globals__, step.__name__, None, step.__closure__)
    compiler.accept_default(Context)
    compiler.compare_classes()
    # It looks at annotations, behind a cache, which a compiler need not trace.
    torch.compiler.assume_constant_result(accepting)  # type: ignore[no-untyped-call]
    return cast(F, torch.compile(own, fullgraph=True, backend=backend))


def let_length_vary(tensors: Sequence[Tensor]) -> None:
    """Have the next compilation make code for vectors of any length in the place of these."""
    for tensor in tensors:
        if tensor.ndim == 1 and tensor.numel() > 1:
            compiler.let_length_vary(tensor)


def know_whole_lines(tensors: Sequence[Tensor]) -> None:
    """Make one code for vectors on an accelerator of lengths that are multiples of :data:`WHOLE`, and one for others.

    It is called inside the compiled function, with all tensors. Without it a compiler has to assume of an unknown length that elements
    cannot be loaded together: threads then load two bytes at a time, and not sixteen.
    """
    for tensor in tensors:
        if tensor.device.type != "cpu" and tensor.ndim == 1 and is_whole(tensor.numel()):
            continue


def is_whole(length: int) -> bool:
    """Whether vectors of this length are stepped by code for lengths that are multiples of :data:`WHOLE`."""
    return length % WHOLE == 0


def reached_limit(error: BaseException) -> bool:
    """Whether the compiler refused to make one more graph of the same code."""
    return compiler.reached_recompile_limit(error)


def cause(error: BaseException) -> str:
    """Why something was not compiled, in one line."""
    inner = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(inner).splitlines()]
    # torch wraps errors of its code generator: "backend='...' raised:" does not name the cause.
    text = next((line for line in lines if line and not line.endswith("raised:")), "")
    return f"{type(inner).__name__}: {text}" if text else type(inner).__name__


def can_compile(device: torch.device) -> bool:
    """Whether steps on a device can be compiled; warns, once, if they cannot because there is no C++ compiler."""
    if device.type != "cpu" or (error := _cpp_compiler_error()) is None:
        return True
    _warn_of_missing_compiler(error)
    return False


def may_compile(device: torch.device) -> bool:
    """The same for steps that are compiled by default: the log says, once, that there is no C++ compiler."""
    if device.type == "cpu" and (error := _cpp_compiler_error()) is not None:
        _log_missing_compiler(error)
    return has_compiler(device)


@cache
def tell_of_small_models(device: torch.device) -> None:
    """Log, once for a device, that a model is stepped uncompiled because it is small, if there seems to be a compiler.

    torch's own look for one imports its compiler, which an uncompiled step need not.
    """
    on_cpu = device.type == "cpu" and any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++")))
    if on_cpu or (device.type != "cpu" and has_compiler(device)):
        _LOGGER.warning(
            "compile='auto': a model of so few elements is stepped uncompiled. compile=True makes a step five to ten times faster, after"
            " some seconds at the first step; compile=False steps uncompiled without this message."
        )


def has_compiler(device: torch.device) -> bool:
    """Whether torch compiles for a device, with the compilers that are installed."""
    if device.type == "cpu":
        return _cpp_compiler_error() is None
    return device.type in ("cuda", "xpu") and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _cpp_compiler_error() -> str | None:
    """Why there is no C++ compiler; None if there is one."""
    try:
        compiler.cpp_compiler()
    except Exception as error:
        return type(error).__name__
    return None


_WITHOUT = (
    "torch found no C++ compiler (%s); steps run uncompiled, with the same results and many times slower. Install g++ or clang++, or name"
    " one in the environment variable CXX."
)


@cache
def _warn_of_missing_compiler(error: str) -> None:
    notices.warn(f"compile: got True, but {_WITHOUT % error}")


@cache
def _log_missing_compiler(error: str) -> None:
    _LOGGER.warning(f"compile='auto': {_WITHOUT}", error)
