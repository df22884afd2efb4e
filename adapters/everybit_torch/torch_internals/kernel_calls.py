"""The kernels of a compiled graph, called without the code around them.

Inductor generates a module for each graph: kernels in C++, and a function ``call`` that allocates small buffers, makes views of them and
calls the kernels. Three layers of torch stand before ``call``. All of it takes 15 microseconds, and several times as many after a kernel
that has filled the processor's caches; a kernel of 70,000 elements takes 50. Here ``call`` is run once for some inputs without its kernels,
and the calls that it makes are kept, to be made again for the same inputs and another gradient.

A generated module that does more than that is called as torch calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from threading import get_ident
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

SCRATCH = 1 << 12
"""Bytes of buffers that are kept beside the inputs: coefficients are fewer, and what is as long as a parameter is not kept."""

Prepared = tuple[Callable[..., object], list[Any]]
"""A function and its arguments."""

_KERNEL = "cpp_fused"
_HARMLESS = {"clear", "empty_strided_cpu", "reinterpret_tensor", "torch"}


@dataclass(slots=True)
class CompiledGraph:
    """A graph compiled by Inductor.

    Attributes:
        run: Runs it, through torch's layers.
        modules: The modules that were loaded for it.
    """

    run: Callable[..., Any]
    modules: list[ModuleType] = field(default_factory=list)
    _call: FunctionType | None = field(init=False)

    def __post_init__(self) -> None:
        self._call = _only_calls_kernels(self.modules)

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        return self.run(*args)

    def kernels_for(self, args: Sequence[Any], varying: Tensor, written: Sequence[Tensor]) -> KernelCalls | None:
        """Find the calls of kernels that the graph makes for these arguments, without running them.

        Args:
            args: The graph's arguments, of which tensors are given their values in place.
            varying: One of them, in the place of which others of its kind will be given.
            written: Those to which the kernels write.

        Returns:
            The calls. None: the graph does more than to call kernels, or it needs much memory of its own, or returns something. It is then
            not looked at again.
        """
        call: Any = self._call
        if call is None:
            return None
        calls: list[_Call] = []

        def noting(kernel: Callable[..., Any]) -> Callable[..., None]:
            return lambda *given: calls.append(_Call(kernel, list(given), []))

        names = {name: noting(value) if name.startswith(_KERNEL) else value for name, value in call.__globals__.items()}
        dry = FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
        result = dry(None, list(args)) if call.__code__.co_argcount == 2 else dry(list(args))
        tensors = [x for x in args if isinstance(x, Tensor)]
        own = {x.data_ptr(): x for x in tensors}
        if result or len(own) < len(tensors) or not _settle(calls, own, varying):
            self._call = None
            return None
        return KernelCalls(calls, list(written))


class _Call(NamedTuple):
    """A call of a kernel.

    Attributes:
        kernel: The kernel.
        arguments: Its arguments; None in the place of what varies.
        places: Where that is.
    """

    kernel: Callable[..., Any]
    arguments: list[Any]
    places: list[int]


@dataclass(frozen=True, slots=True)
class KernelCalls:
    """Calls of kernels, in order. A kernel reads the address of each tensor when it is called."""

    calls: list[_Call]
    written: list[Tensor]

    def prepared(self, varying: Tensor) -> list[Prepared]:
        """Return the kernels with all their arguments. Who calls them has autograd count the writes."""
        prepared = []
        for kernel, arguments, places in self.calls:
            given = arguments.copy()
            for place in places:
                given[place] = varying
            prepared.append((kernel, given))
        return prepared

    def __call__(self, varying: Tensor) -> None:
        """Call the kernels, and have autograd count the writes."""
        for kernel, given in self.prepared(varying):
            kernel(*given)
        torch.autograd.graph.increment_version(self.written)


def _settle(calls: list[_Call], own: dict[int, Tensor], varying: Tensor) -> bool:
    """Have calls name the graph's arguments themselves, and leave out what varies; False if the other buffers are too long."""
    begins = {x.untyped_storage().data_ptr() for x in own.values()}
    scratch: dict[int, int] = {}
    for one in calls:
        for place, x in enumerate(one.arguments):
            if not isinstance(x, Tensor):
                continue
            known = own.get(x.data_ptr())
            if known is varying:
                one.places.append(place)
            one.arguments[place] = None if known is varying else x if known is None else known
            if known is None:
                storage = x.untyped_storage()
                scratch[storage.data_ptr()] = storage.nbytes()
    return bool(calls) and not begins & scratch.keys() and sum(scratch.values()) <= SCRATCH


def _only_calls_kernels(modules: list[ModuleType]) -> FunctionType | None:
    """The function that calls the kernels of a graph, if by its names it allocates buffers on the host and calls kernels, and no more."""
    if len(modules) != 1:
        return None
    call = getattr(modules[0], "call", None)
    function = getattr(call, "__func__", call)
    if not isinstance(function, FunctionType):
        return None
    others = {name for name in function.__code__.co_names if not name.startswith(_KERNEL)} - _HARMLESS
    is_plain = all(isinstance(getattr(torch, name, None), torch.dtype) for name in others)
    return function if is_plain else None


@contextmanager
def loaded_modules() -> Iterator[list[ModuleType]]:
    """Yield a list of the modules that Inductor loads on this thread within it. It stays empty if Inductor has no such function."""
    found: list[ModuleType] = []
    try:
        cache: Any = import_module("torch._inductor.codecache").PyCodeCache
        load, kept = cache.load_by_key_path, cache.__dict__["load_by_key_path"]
    except (ImportError, AttributeError, KeyError):
        yield found
        return
    thread = get_ident()

    def noting(*args: Any, **kwargs: Any) -> ModuleType:
        module: ModuleType = load(*args, **kwargs)
        if get_ident() == thread:
            found.append(module)
        return module

    cache.load_by_key_path = staticmethod(noting)
    try:
        yield found
    finally:
        cache.load_by_key_path = kept
