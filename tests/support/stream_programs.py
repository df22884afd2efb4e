"""Training on a fake device with streams: everything on one stream, the forward pass on another, or two towers on two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import everybit as eb
from everybit_torch.sharded import arguments, checkpoint, offload
from everybit_torch.sharded.offload import Offload
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import Strategy
from tests.support.fake_device.device import FakeDevice
from tests.support.programs import Block, data

Way = Literal["one stream", "forward elsewhere", "two towers"]
WAYS: tuple[Way, ...] = ("one stream", "forward elsewhere", "two towers")

CLIPPED = eb.chain(eb.clip_by_global_norm(0.5), eb.adamw(1e-2))


class Both(nn.Module):
    """A unit that returns two tensors, of which one is computed on another stream."""

    def __init__(self, width: int, device: FakeDevice) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.side, self.device = device.stream(), device

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with elsewhere(self.device, self.side, x):
            second = self.second(x)
        second.record_stream(self.device.current)
        return self.first(x), second


class Towers(nn.Module):
    """Two blocks beside each other, of which the second is computed on another stream, and a unit that uses two streams itself."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.entry, self.left, self.right = nn.Linear(3, 5), Block(5), Block(5)
        self.both, self.exit = Both(5, device), nn.Linear(5, 2)
        self.side, self.device = device.stream("the second tower's"), device

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        with elsewhere(self.device, self.side, x):
            right = self.right(x)
        right.record_stream(self.device.current)
        first, second = self.both(self.left(x) + right)
        out: Tensor = self.exit(torch.tanh(first) * second)
        return out


@contextmanager
def elsewhere(device: FakeDevice, stream: Any, *given: Tensor) -> Iterator[None]:
    """Work on another stream, as torch's documentation has it: after what is there, and before what comes."""
    here = device.current
    stream.wait_stream(here)
    with device.on(stream):
        for x in given:
            x.record_stream(stream)
        yield
    here.wait_stream(stream)


class Training:
    """A model, and its forward and backward passes.

    Args:
        way: Which streams they use.
        device: Whose.
        dtype: Of the model.
    """

    def __init__(self, way: Way, device: FakeDevice, dtype: torch.dtype = torch.float32) -> None:
        self._way, self._device, self._dtype = way, device, dtype
        self.model = Towers(device).to(dtype)
        if way != "two towers":
            for one in (self.model, self.model.both):
                one.forward = _on_one_stream.__get__(one)  # type: ignore[method-assign]
        self.side = device.stream("the forward pass's")

    @property
    def units(self) -> list[Any]:
        return [Block, Both]

    def backward(self, step: int, *, number: int = 0, scale: float = 1.0) -> None:
        """One microbatch."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        x = data(step, rank, number, self._dtype).to(torch.device("cpu"))
        aside = elsewhere(self._device, self.side, x) if self._way == "forward elsewhere" else nullcontext()
        with aside:
            loss = self.model(x).float().square().mean() * scale
        loss.record_stream(self._device.current)
        loss.backward()


def _on_one_stream(module: Any, x: Tensor) -> Any:
    # In the same order, so that autograd adds up gradients in the same order.
    if isinstance(module, Both):
        second = module.second(x)
        return module.first(x), second
    x = module.entry(x)
    right = module.right(x)
    first, second = module.both(module.left(x) + right)
    return module.exit(torch.tanh(first) * second)


def sharded(
    way: Way,
    strategy: Strategy,
    *,
    device: FakeDevice | None = None,
    offloaded: bool | Offload = False,
    folder: Path | None = None,
    loss_scale: float = 1.0,
    clips: bool = False,
    dtype: torch.dtype = torch.float32,
    steps: int = 2,
    transform: eb.Transform[Any] = CLIPPED,
    **options: Any,
) -> dict[str, Tensor]:
    """Train with a stepper; returns the weights.

    Args:
        way: Which streams are used.
        strategy: Of the stepper.
        device: Where it runs.
        offloaded: What lies on the host; True: state.
        folder: Checkpoints are saved there in the background.
        loss_scale: The loss is multiplied by it.
        clips: The norm of gradients is clipped as torch does.
        dtype: Of the model.
        steps: How many.
        transform: Of the stepper.
        options: Of the stepper.
    """
    device = FakeDevice() if device is None else device
    with device.watching(), host_is_far(Offload.of(offloaded).anything):
        training = Training(way, device, dtype)
        stepper = FlatStepper(
            training.model, transform, strategy=strategy, units=training.units, offload=offloaded, **options
        )
        saving: list[Future[Path]] = []
        for step in range(steps):
            with stepper.no_sync():
                training.backward(step, number=0, scale=loss_scale)
            with stepper.sync():
                training.backward(step, number=1, scale=loss_scale)
            if clips:
                stepper.finish_gradients()
                nn.utils.clip_grad_norm_([p for g in stepper.as_optimizer().param_groups for p in g["params"]], 1.0)
            stepper.step(loss_scale=loss_scale)
            if folder is not None:
                with threads_of(device):
                    saving.append(checkpoint.save_sharded(stepper, folder, asynchronous=True))
        for one in saving:
            one.result()
        stepper.close()
    return {name: p.detach().clone() for name, p in training.model.named_parameters()}


@contextmanager
def host_is_far(yes: bool) -> Iterator[None]:
    """State may be kept on the host, and is brought to the device a few elements at a time."""
    if not yes:
        yield
        return
    with mock.patch.object(arguments, "is_host", return_value=False), mock.patch.object(offload, "BUCKET", 64):
        yield


@contextmanager
def threads_of(device: FakeDevice) -> Iterator[None]:
    """Checkpoints are written by a thread whose operations are the device's."""

    class Noting(ThreadPoolExecutor):
        def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            def run() -> Any:
                with device.noting():
                    return function(*args, **kwargs)

            pending = super().submit(run)
            pending.exception()  # one thread at a time: it is the order on the device that is looked at
            return pending

    with mock.patch.object(checkpoint, "ThreadPoolExecutor", Noting):
        yield
