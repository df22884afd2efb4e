"""Methods that compute the same whatever mode they are called in.

Autocast would compute products of an optimizer in 16 bits, a default device or dtype would decide where and how wide the few tensors are
that a step makes for itself, and memory that is made in inference mode is unusable outside of it. All of these are settings of the model's
code around the call. Deterministic algorithms are left as they are set: they do not change the results of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

from everybit_torch.torch_internals.tensors import count_modes, precision

P = ParamSpec("P")
R = TypeVar("R")

_DTYPE = torch.float32
_ACCELERATOR = torch.accelerator.current_accelerator()
_DEVICES = ("cpu",) if _ACCELERATOR is None else ("cpu", _ACCELERATOR.type)
_EXACT = ("none", "ieee")


def in_plain_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function under torch's defaults.

    The defaults are: no autocast, no inference mode, float32, the CPU, and float32 products of factors that are not rounded.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        changes = _changes()
        if not changes:
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for change in changes:
                stack.enter_context(change)
            return function(*args, **kwargs)

    return run


def _changes() -> list[AbstractContextManager[Any]]:
    """The changes that restore the defaults: usually an empty list, after three microseconds."""
    found: list[AbstractContextManager[Any]] = []
    if torch.is_inference_mode_enabled():
        found.append(torch.inference_mode(False))
    found += [torch.autocast(kind, enabled=False) for kind in _DEVICES if torch.is_autocast_enabled(kind)]
    if torch.get_default_dtype() is not _DTYPE:
        found.append(_default_dtype())
    if count_modes() and torch.get_default_device().type != "cpu":  # a default device is a mode
        found.append(torch.device("cpu"))
    if not torch.compiler.is_compiling():
        found += [_exact(name) for name in ("mkldnn", "cuda") if precision(name, "matmul") not in _EXACT]
    return found


@contextmanager
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(_DTYPE)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _exact(library: str) -> Iterator[None]:
    """Have a library not round the factors of float32 products."""
    setting = getattr(torch.backends, library).matmul
    before = setting.fp32_precision
    setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        setting.fp32_precision = before
