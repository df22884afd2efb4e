"""What autograd does with streams, and does not do on a CPU.

It runs each node of a graph on the stream that was current when the node was made, hands gradients on in order, and has the caller's
stream wait for the streams of the leaves at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.support.fake_device.clocks import FakeStream
from tests.support.fake_device.memory import Block

STREAM = "stream of the fake device"


class Device(Protocol):
    """What is asked of the fake device."""

    present: FakeStream | None

    def block_of(self, x: Tensor) -> Block | None: ...


@dataclass(slots=True)
class _Pass:
    caller: FakeStream
    began: dict[str, int]
    leaves: list[FakeStream] = field(default_factory=list)

    def end(self) -> None:
        for leaf in self.leaves:
            self.caller.wait_stream(leaf)


class Backward:
    """Has the nodes of graphs run on their streams.

    Args:
        device: Whose streams these are. While its current stream is None, autograd works by itself, between two nodes.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._passes: list[_Pass] = []

    def made(self, outputs: object, stream: FakeStream) -> None:
        """A function has returned; nodes that it made belong to the stream."""
        for output in tree_leaves(outputs):
            node: Any = output.grad_fn if isinstance(output, Tensor) else None
            if node is not None and STREAM not in node.metadata:
                # Hooks on tensors are called before those on nodes; this is the first of them.
                output.register_hook(lambda gradient: self._enter(stream, (gradient,)))
                self._follow(node, stream)

    def _follow(self, node: Any, stream: FakeStream) -> None:
        new = [node]
        while new:
            one = new.pop()
            if one is not None and STREAM not in one.metadata:
                one.metadata[STREAM] = stream
                one.register_prehook(lambda gradients: self._enter(stream, gradients))
                is_leaf = not one.next_functions
                one.register_hook(lambda given, _received, is_leaf=is_leaf: self._leave(stream, given, is_leaf=is_leaf))
                new += [other for other, _ in one.next_functions]

    def _enter(self, stream: FakeStream, gradients: Sequence[Tensor | None]) -> None:
        if not self._passes:
            return
        for gradient in gradients:
            block = None if gradient is None else self._device.block_of(gradient)
            if block is not None and block.ready is not None:
                stream.clock.learn(block.ready)
                block.recorded.add(stream.name)
            elif block is not None:
                stream.clock.learn(self._passes[-1].began)
        self._device.present = stream

    def _leave(self, stream: FakeStream, gradients: Sequence[Tensor | None], *, is_leaf: bool) -> None:
        if not self._passes:
            return
        for gradient in gradients:
            block = None if gradient is None else self._device.block_of(gradient)
            if block is not None:
                block.ready = {**(block.ready or {}), **stream.clock.seen}
        if is_leaf:
            self._passes[-1].leaves.append(stream)
        self._device.present = None

    def run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass."""
        caller = self._device.present
        assert caller is not None
        this = _Pass(caller, dict(caller.record_event().seen))
        self._passes.append(this)
        try:
            result = original(*args, **kwargs)
        finally:
            self._passes.pop()
            self._device.present = caller
        this.end()
        return result

    def at_the_end(self, function: Callable[[], object]) -> Callable[[], object]:
        """A callback as autograd calls it at the end of the pass that runs: on the caller's stream, after those of the leaves."""
        this = self._passes[-1]

        def run() -> object:
            this.end()
            before, self._device.present = self._device.present, this.caller
            try:
                return function()
            finally:
                self._device.present = before

        return run


class Engine:
    """Autograd's engine, as ``Variable._execution_engine``, with passes that are followed."""

    def __init__(self, engine: Any, backward: Backward) -> None:
        self._engine, self._backward = engine, backward

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        return self._backward.run(self._engine.run_backward, *args, **kwargs)

    def queue_callback(self, function: Callable[[], object]) -> None:
        self._engine.queue_callback(self._backward.at_the_end(function))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
