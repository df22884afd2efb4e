"""The kernels of a compiled graph, called without the code around them.

Inductor generates a module for each graph: kernels in C++ or Triton, and a function ``call`` that allocates small buffers, makes views of
them and calls the kernels. Three layers of torch stand before ``call``. On a CPU all of it takes 15 microseconds, and several times as many
after a kernel that has filled the processor's caches; a kernel of 70,000 elements takes 50. On a GPU it takes the host longer than the
device takes for a layer's weights. Here ``call`` is run once for some inputs without its kernels, and the calls that it makes are kept, to
be made again for the same inputs and another gradient.

A generated module that does more than that is called as torch calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from threading import get_ident
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

SCRATCH = 1 << 12
"""Bytes of buffers that are kept beside the inputs: coefficients are fewer, and what is as long as a parameter is not kept."""

Prepared = tuple[Callable[..., object], list[Any]]
"""A function and its arguments."""

_ON_HOST, _ON_DEVICE = "cpp_fused", "triton_"
"""How the names of kernels begin."""

_HARMLESS = {"clear", "empty_strided_cpu", "reinterpret_tensor", "torch"} | {
    "empty_strided_cuda", "copy_if_misaligned", "copy_misaligned", "get_raw_stream", "run", "size", "cuda", "_DeviceGuard", "set_device",
}  # fmt: skip

_StreamOf = Callable[[int], int]
"""Returns the address of a device's current stream. Inductor's function does; torch's makes an object, which takes ten times as long."""

_ALIGNMENT = 16
"""Bytes. Kernels of a GPU load as many at once; torch passes them a copy of a tensor that does not begin at a multiple."""


class _Queue(NamedTuple):
    """Where kernels of a GPU are queued.

    Attributes:
        device: The number of the current device.
        stream: The address of its current stream.
    """

    device: int
    stream: int

    @classmethod
    def present(cls, stream_of: _StreamOf) -> _Queue | None:
        """Return where kernels are queued now; None while a CUDA graph is captured, which would keep the addresses of buffers."""
        if torch.cuda.is_current_stream_capturing():
            return None
        device = torch.cuda.current_device()
        return cls(device, stream_of(device))


@dataclass(slots=True)
class CompiledGraph:
    """A graph compiled by Inductor.

    Attributes:
        run: Runs it, through torch's layers.
        modules: The modules that were loaded for it.
        listed: Its kernels for lists of segments, once they were written; see :mod:`~everybit_torch.torch_internals.kernel_lists`.
    """

    run: Callable[..., Any]
    modules: list[ModuleType] = field(default_factory=list)
    listed: list[Any] | None = field(default=None, init=False)
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
            not looked at again. Or it is for a GPU, on which something is captured, or another device is current, or tensors are not
            aligned.
        """
        call: Any = self._call
        if call is None:
            return None
        tensors = [x for x in args if isinstance(x, Tensor)]
        queue, stream_of = None, cast(_StreamOf, call.__globals__.get("get_raw_stream"))
        if any(name.startswith(_ON_DEVICE) for name in call.__code__.co_names):
            queue = _Queue.present(stream_of)
            if queue is None or not all(map(_is_aligned, tensors)):
                return None
        names, calls = call.__globals__, list[_Call]()
        kernels = {name: x for name, x in names.items() if name.startswith((_ON_HOST, _ON_DEVICE))}
        queues: set[_Queue] = set()
        names = names | {name: _noting(name, kernel, calls) for name, kernel in kernels.items()}

        def noted_stream(device: int) -> int:
            queues.add(_Queue(device, stream := stream_of(device)))
            return stream

        names["get_raw_stream"] = noted_stream
        dry = FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
        result = dry(None, list(args)) if call.__code__.co_argcount == 2 else dry(list(args))
        own = {x.data_ptr(): x for x in tensors}
        if result or len(own) < len(tensors) or not _settle(calls, own, varying):
            self._call = None
            return None
        return KernelCalls(self, calls, list(written), stream_of, queue) if queues <= {queue} else None


class _Call(NamedTuple):
    """A call of a kernel.

    Attributes:
        name: The kernel's name.
        kernel: The kernel.
        launcher: What launches it, on a GPU.
        arguments: Its arguments; None in the place of what varies.
        places: Where that is.
    """

    name: str
    kernel: Callable[..., Any]
    launcher: Any
    arguments: list[Any]
    places: list[int]


def _noting(name: str, kernel: Any, calls: list[_Call]) -> Any:
    """What notes calls in the place of a kernel: of a function, or of the launcher of a kernel for a GPU."""

    def run(*given: Any, stream: int) -> None:
        calls.append(_Call(name, partial(kernel.run, stream=stream), kernel, list(given), []))

    def called(*given: Any) -> None:
        calls.append(_Call(name, kernel, None, list(given), []))

    return SimpleNamespace(run=run) if hasattr(kernel, "run") else called


@dataclass(slots=True, eq=False)
class KernelCalls:
    """Calls of kernels, in order. A kernel reads the address of each tensor when it is called.

    Attributes:
        graph: The graph of which they are the calls.
        calls: The calls.
        written: The tensors to which they write.
        stream_of: Returns the current stream of a GPU.
        queue: The queue of a GPU to which they and their buffers belong; None on a CPU.
        together: Launches for a list of segments of which this is the first; see :mod:`~everybit_torch.torch_internals.kernel_lists`.
    """

    graph: CompiledGraph
    calls: list[_Call]
    written: list[Tensor]
    stream_of: _StreamOf
    queue: _Queue | None = None
    together: object = field(default=None, init=False)

    def accepts(self, varying: Tensor) -> bool:
        """Whether the kernels may be called now, with this tensor in the place of what varies."""
        return self.queue is None or (_is_aligned(varying) and self.queue == _Queue.present(self.stream_of))

    def prepared(self, varying: Tensor) -> list[Prepared]:
        """Return the kernels with all their arguments. The caller has autograd count the writes."""
        prepared = []
        for _, kernel, _, arguments, places in self.calls:
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


def _is_aligned(x: Tensor) -> bool:
    return x.data_ptr() % _ALIGNMENT == 0


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
    """The function that calls the kernels of a graph, if by its names it allocates buffers and calls kernels, and no more."""
    graphs = [module for module in modules if hasattr(module, "call")]  # beside it the modules of kernels in Triton
    if len(graphs) != 1:
        return None
    call = getattr(graphs[0], "call", None)
    function = getattr(call, "__func__", call)
    if not isinstance(function, FunctionType):
        return None
    others = {name for name in function.__code__.co_names if not name.startswith((_ON_HOST, _ON_DEVICE))} - _HARMLESS
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
