"""The fake device: operations on the host's tensors, each put down to the stream that a device would have run it on."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from everybit_torch import streams
from tests.support.fake_device.backward import Backward, Engine
from tests.support.fake_device.clocks import Clock, FakeEvent, FakeStream
from tests.support.fake_device.memory import Access, Block, HazardError, Memory, Place, where

# Functions that make a tensor of none: on the host, unless they are given a device.
FACTORIES = {
    torch.tensor, torch.as_tensor, torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.frombuffer, torch.rand,
    torch.randn, torch.eye, torch.linspace, torch.empty_strided, torch.scalar_tensor,
}  # fmt: skip
# Functions whose result the host has to know.
READING = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero", "aten::masked_select"}
# Functions that accept no number of the host's among tensors of the device.
TOGETHER = {"aten::cat", "aten::stack", "aten::_foreach_norm", "aten::dot"}
COLLECTIVES = {
    "all_gather_single": (0, 1), "all_gather_into_tensor": (0, 1), "reduce_scatter_single": (0, 1), "reduce_scatter_tensor": (0, 1),
    "all_to_all_single": (0, 1), "all_reduce": (0, 0), "broadcast": (0, 0),
}  # fmt: skip
"""By name, which arguments are written and read."""


class FakeWork:
    """A collective that is under way, as NCCL has it: whoever waits makes its stream wait, and until then torch keeps the tensors."""

    def __init__(
        self, device: FakeDevice, work: Any, tensors: Sequence[Tensor], end: dict[str, int], host: bool
    ) -> None:
        self._device, self._work, self._end, self._host = device, work, end, host
        self._tensors = list(tensors)

    def uses(self, storage: torch.UntypedStorage) -> bool:
        """Whether this reads or writes memory of a storage."""
        return any(x.untyped_storage().data_ptr() == storage.data_ptr() for x in self._tensors)

    def finish(self) -> None:
        """Let the host's own collective end, of which the account says nothing."""
        with self._device.asleep():
            self._work.wait()

    def wait(self, *args: Any) -> Any:
        with self._device.asleep():
            result = self._work.wait(*args)
        (self._device.host if self._host else self._device.clock).learn(self._end)
        self._tensors = []
        return result

    def is_completed(self) -> bool:
        """What the host has seen, all that it launches comes after."""
        completed = bool(self._work.is_completed())
        if completed:
            self._device.host.learn(self._end)
        return completed


class FakeDevice:
    """A device whose streams and memory are kept account of, inside :meth:`watching`.

    What is given no device, and what is asked for on ``"cpu"`` by this name, is the host's; all else is the device's. Memory that was there
    before is the device's, and free to use.

    Args:
        stages: Whether this is a device as CUDA has them: it has streams, and a copy to or from memory of the host's that is not pinned is
            over, for the host, when it returns. False: such a copy goes on, as it may with another accelerator.

    Attributes:
        host: The host's clock.
        launched: How many operations were queued.
    """

    def __init__(self, *, stages: bool = True) -> None:
        self.host = Clock("the host")
        self.launched = 0
        self._stages = stages
        self._numbers = itertools.count(1)
        self._memory = Memory(self.host)
        self._default = FakeStream("default", self.host)
        self._communicators: dict[int, Clock] = {}
        self._under_way: weakref.WeakSet[FakeWork] = weakref.WeakSet()
        self._local = threading.local()
        self.backward = Backward(self)

    # -- streams ------------------------------------------------------------------------------------------------------------------

    @property
    def current(self) -> FakeStream:
        """This thread's stream."""
        assert self.present is not None
        return self.present

    @property
    def present(self) -> FakeStream | None:
        """This thread's stream; None while autograd works by itself."""
        found: FakeStream | None = getattr(self._local, "current", self._default)
        return found

    @present.setter
    def present(self, stream: FakeStream | None) -> None:
        self._local.current = stream

    @property
    def clock(self) -> Clock:
        """The clock of the present stream; of autograd itself, one that knows nothing yet."""
        return Clock(f"autograd {next(self._numbers)}") if self.present is None else self.present.clock

    def stream(self, name: str | None = None) -> FakeStream:
        """Make a stream."""
        return FakeStream(name or f"side {next(self._numbers)}", self.host)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """Work inside is queued on the stream."""
        before, self.present = self.present, stream
        try:
            yield
        finally:
            self.present = before

    def synchronize(self) -> None:
        """The host waits for this thread's stream."""
        self.current.synchronize()

    # -- memory -------------------------------------------------------------------------------------------------------------------

    def block_of(self, x: Tensor, place: Place = "device") -> Block | None:
        """The memory that a tensor lies in; None for one without elements."""
        x = x.to_local() if isinstance(x, DTensor) else x
        if not has_memory(x):
            return None
        storage = x.untyped_storage()
        if not storage.nbytes():
            return None
        block = self._memory.find(storage.data_ptr())
        if block is None:
            default = self._default.clock
            block = self._memory.allocate(storage.data_ptr(), storage.nbytes(), place, default, fresh=False)
            self._watch(storage, block)
        return block

    def live(self, place: Place) -> int:
        """Bytes of what was seen there, and is not freed."""
        return self._memory.live(place)

    def knows(self, x: Tensor) -> bool:
        """Whether a tensor's memory was seen."""
        return self._memory.find(x.untyped_storage().data_ptr()) is not None

    def made(self, x: Tensor, place: Place) -> None:
        """An operation has made a tensor, in memory of its own."""
        storage = x.untyped_storage()
        if has_memory(x) and storage.nbytes():
            clock = self.host if place != "device" else self.clock
            clock.learn(self.host.seen)
            self._watch(storage, self._memory.allocate(storage.data_ptr(), storage.nbytes(), place, clock))

    def _watch(self, storage: torch.UntypedStorage, block: Block) -> None:
        """Free a block with its storage, if that still lies there."""
        weakref.finalize(storage, self._memory.free, block).atexit = False

    def resized(self, storage: torch.UntypedStorage, size: int, resize: Callable[..., Any]) -> Any:
        """A storage is given other memory, or none."""
        for work in tuple(self._under_way):
            if storage.nbytes() and work.uses(storage):
                work.finish()  # a wrong program is reported below; gloo's thread must not read memory that was freed
        block = self._memory.find(storage.data_ptr()) if storage.nbytes() else None
        if block is not None:
            self._memory.free(block)
        result = resize(storage, size)
        if size:
            clock = self.clock
            clock.learn(self.host.seen)
            place = "device" if block is None else block.place
            self._watch(storage, self._memory.allocate(storage.data_ptr(), size, place, clock))
        return result

    # -- operations ---------------------------------------------------------------------------------------------------------------

    def run(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], clock: Clock) -> None:
        """Somebody reads and writes.

        Raises:
            HazardError: What has to come before may not be over.
        """
        if clock is not self.host:
            clock.learn(self.host.seen)
            self.launched += 1
        blocks = [
            (x, block, wrote)
            for xs, wrote in ((reads, False), (writes, True))
            for x in xs
            if (block := self.block_of(x))
        ]
        if clock.name.startswith("autograd"):
            for _, block, _ in blocks:
                clock.learn(block.ready or {})
                clock.learn({one.clock.name: one.number for one in block.accesses})
        number, line = clock.start(), where()
        for x, block, wrote in blocks:
            low, high = extent(x)
            self._memory.access(block, Access(low, high, clock, number, wrote, what, line))
            if clock.name.startswith("autograd"):
                block.ready = dict(clock.seen)
                block.recorded.add(clock.name)  # torch sees to that

    def place_of(self, x: Tensor) -> Place:
        """Where a tensor would be."""
        block = self.block_of(x)
        return "device" if block is None else block.place

    def read(self, x: Tensor, what: str) -> None:
        """The host reads a tensor; if that is the device's it waits for its stream first."""
        if self.place_of(x) == "device":
            self.host.learn(self.clock.seen)
        self.run(what, [x], [], self.host)

    def copied(self, what: str, into: Tensor, given: Tensor, *, waits: bool) -> None:
        """One tensor was copied to another, of which one may be the host's."""
        places = self.place_of(into), self.place_of(given)
        if "device" not in places:
            self.run(what, [given], [into], self.host)
            return
        other = places[0] if places[1] == "device" else places[1]
        if other == "host" and self._stages and places[0] == "device":
            self.run(what, [given], [], self.host)
            self.run(what, [], [into], self.clock)
        else:
            self.run(what, [given], [into], self.clock)
        if other != "device" and (waits or (other == "host" and self._stages and places[0] != "device")):
            self.host.learn(self.clock.seen)

    def collective(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A collective begins: on a stream of its communicator, after what is queued on the present one."""
        written, given = (args[index] for index in COLLECTIVES[name])
        asynchronous = kwargs.pop("async_op", False)
        group = kwargs.get("group")
        on_host = self.place_of(written) != "device"
        clock = self._communicators.setdefault(
            hash((id(group), on_host)), Clock(f"communicator {len(self._communicators) + 1}")
        )
        clock.learn(self.host.seen if on_host else self.clock.seen)
        self.run(name, [given], [written], clock)
        with self.asleep():
            work = original(*args, **kwargs, async_op=True)
        fake = FakeWork(self, work, [written, given], dict(clock.seen), on_host)
        self._under_way.add(fake)
        if asynchronous:
            return fake
        fake.wait()
        return None

    # -- what torch is told -------------------------------------------------------------------------------------------------------

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Nothing inside is the device's."""
        before = self.sleeps
        self._local.sleeps = True
        try:
            yield
        finally:
            self._local.sleeps = before

    @property
    def sleeps(self) -> bool:
        return bool(getattr(self._local, "sleeps", False))

    @contextmanager
    def watching(self) -> Iterator[FakeDevice]:
        """Keep account of this thread's operations, with the device's streams in the place of torch's."""
        resize = torch.UntypedStorage.resize_
        engine = torch.autograd.Variable._execution_engine

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            return self.resized(storage, size, resize)

        def record_stream(x: Tensor, stream: FakeStream) -> None:
            block = self.block_of(x)
            if block is not None:
                block.recorded.add(stream.name)

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(Tensor, "record_stream", record_stream))
            for name, replaced in self._seam().items():
                stack.enter_context(mock.patch.object(streams, name, replaced))
            stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized))
            stack.enter_context(
                mock.patch.object(torch.autograd.Variable, "_execution_engine", Engine(engine, self.backward))
            )
            for name in COLLECTIVES:
                if hasattr(dist, name):
                    stack.enter_context(mock.patch.object(dist, name, self._patched(name)))
            stack.enter_context(self.noting())
            yield self

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Keep account of this thread's operations, in a thread that begins inside :meth:`watching`."""
        with Functions(self), Operations(self):
            yield

    @contextmanager
    def of_fsdp(self) -> Iterator[None]:
        """FSDP2's streams are the device's, inside :meth:`watching`."""

        class Event(FakeEvent):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(device.host)

            def record(self, stream: FakeStream | None = None) -> FakeEvent:
                return super().record(stream or device.current)

        device = self
        replaced = {
            "Stream": lambda *args, **kwargs: self.stream(),
            "Event": Event,
            "current_stream": lambda *args: self.current,
            "stream": self.on,
        }
        with ExitStack() as stack:
            for name, one in replaced.items():
                stack.enter_context(mock.patch.object(torch.cpu, name, one))
            yield

    def _seam(self) -> dict[str, Any]:
        return {
            "has_streams": lambda device: self._stages,
            "current": lambda device: self.current,
            "make": lambda device: self.stream(),
            "working_on": self.on,
            "is_capturing": lambda: False,
        }

    def _patched(self, name: str) -> Callable[..., Any]:
        original = getattr(dist, name)
        return lambda *args, **kwargs: self.collective(name, original, *args, **kwargs)


def has_memory(x: Tensor) -> bool:
    """Whether a tensor is more than a shape."""
    return x.device.type == "cpu" and not isinstance(x, FakeTensor)


def extent(x: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte, and after its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size() if x.numel() else x.data_ptr()


class Functions(TorchFunctionMode):
    """What is seen of functions and not of operations: where tensors are asked for, what the host reads, and what nodes are made."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, device = dict(kwargs or {}), self._device
        if device.sleeps:
            return function(*args, **kwargs)
        if function is Tensor.backward:
            return self._backward(*args, **kwargs)
        if any(isinstance(x, DTensor) for x in args):
            return function(*args, **kwargs)
        if function in FACTORIES:
            pinned = kwargs.pop("pin_memory", False)
            on_host = kwargs.get("device") is None or kwargs.get("device") == "cpu"
            with device.asleep():
                made = function(*args, **kwargs)
            place: Place = (
                "pinned" if pinned else "host" if on_host and isinstance(kwargs.get("device", ""), str) else "device"
            )
            if not any(isinstance(x, Tensor) for x in args):
                device.made(made, place)
                if function is not torch.empty:
                    device.run(function.__name__, [], [made], device.host if place != "device" else device.clock)
            return made
        if function in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            device.read(args[0], function.__name__)
            with device.asleep():
                return function(*args, **kwargs)
        if function is Tensor.is_pinned:
            return device.place_of(args[0]) == "pinned"
        if (to := self._moved(function, args, kwargs)) is not None:
            return self._move(
                args[0], to, waits=not kwargs.get("non_blocking", False), copies=kwargs.get("copy", False)
            )
        outputs = function(*args, **kwargs)
        if device.present is not None and torch.is_grad_enabled():
            device.backward.made(outputs, device.present)
        return outputs

    def _backward(
        self, x: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        """``Tensor.backward``, in which this mode goes on: it calls hooks."""
        with self:
            torch.autograd.backward(x, gradient, retain_graph, create_graph, inputs=inputs)

    def _moved(self, function: Any, args: Any, kwargs: Any) -> Place | None:
        """Where a function is to bring a tensor; None if it is another function, or changes the dtype."""
        if function is Tensor.cpu:
            return "host"
        if (
            function is Tensor.to
            and not any(isinstance(x, (torch.dtype, Tensor)) for x in args[1:])
            and "dtype" not in kwargs
        ):
            target = args[1] if len(args) > 1 else kwargs.get("device")
            return "host" if target == "cpu" and isinstance(target, str) else "device"
        return None

    def _move(self, x: Tensor, to: Place, *, waits: bool, copies: bool) -> Tensor:
        device = self._device
        here = device.place_of(x)
        if not copies and (here == to or (here == "pinned" and to == "host")):
            if to == "host":
                device.run("cpu", [x], [], device.host)
            return x
        with device.asleep():
            moved = x.clone()
        device.made(moved, to)
        device.copied("to", moved, x, waits=waits)
        return moved


class Operations(TorchDispatchMode):
    """Every operation: what it reads, writes and makes."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, device = kwargs or {}, self._device
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # its operations on what it holds are seen
        if device.sleeps:
            return function(*args, **kwargs)
        schema = function._schema
        named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        aliases = {argument.name: argument.alias_info for argument in schema.arguments}
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for name, value in named.items():
            alias = aliases.get(name)
            into = writes if alias is not None and alias.is_write else reads
            into += [x for x in tree_leaves(value) if isinstance(x, Tensor) and has_memory(x)]
        outputs = function(*args, **kwargs)
        given = {x.untyped_storage().data_ptr() for x in (*reads, *writes) if x.untyped_storage().nbytes()}
        tensors = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and has_memory(x)]
        new = [x for x in tensors if x.untyped_storage().data_ptr() not in given]
        if not new and not writes and tensors:
            return outputs  # views
        if schema.name in READING:
            device.read(reads[0], schema.name)
            return outputs
        if schema.name == "aten::copy_":
            if not reads[0].ndim and not device.knows(reads[0]):
                device.made(reads[0], "host")  # a number of Python's
            device.copied("copy_", writes[0], reads[0], waits=not named.get("non_blocking", False))
            return outputs
        place: Place = (
            "device" if "device" in map(device.place_of, (*reads, *writes)) or not (reads or writes) else "host"
        )
        if place == "device":
            reads = self._on_device(schema.name, reads, writes)
        for x in new:
            device.made(x, place)
        if "empty" not in schema.name:
            device.run(schema.name, reads, [*writes, *new], device.host if place == "host" else device.clock)
        return outputs

    def _on_device(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> list[Tensor]:
        """What a device reads in its own memory; numbers of the host's are read when an operation is launched.

        Raises:
            HazardError: There are tensors of the host's, too, which a device cannot read.
        """
        theirs = [x for x in reads if self._device.place_of(x) != "device"]
        for x in (*theirs, *(x for x in writes if self._device.place_of(x) != "device")):
            if x.ndim or what in TOGETHER or any(x is one for one in writes):
                raise HazardError(f"{what} at {where()} is given tensors of the device, and {self._device.block_of(x)}")
        self._device.run(what, theirs, [], self._device.host)
        return [x for x in reads if all(x is not one for one in theirs)]
