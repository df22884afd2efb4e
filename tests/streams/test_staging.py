"""Checkpoints that are copied to pinned memory while a device trains: what has to wait does, and nothing else."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from everybit_torch.sharded import checkpoint
from everybit_torch.sharded.checkpoint import save_sharded
from everybit_torch.sharded.offload import HostCopies
from everybit_torch.sharded.staging import StagingMemory
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import Strategy
from tests.support.fake_device.clocks import FakeEvent
from tests.support.fake_device.device import FakeDevice
from tests.support.fake_device.memory import HazardError
from tests.support.stream_programs import CLIPPED, Training, threads_of


@contextmanager
def written_later(device: FakeDevice) -> Iterator[Callable[[], None]]:
    """Checkpoints are written when what this gives is called, and not before: what their thread waits for is not waited for by then."""
    waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    class Later(ThreadPoolExecutor):
        def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            pending: Future[Any] = Future()
            waiting.append((pending, lambda: function(*args, **kwargs)))
            return pending

    def write() -> None:
        for pending, function in waiting:
            with device.noting():
                pending.set_result(function())
        waiting.clear()

    with mock.patch.object(checkpoint, "ThreadPoolExecutor", Later):
        yield write


def trained(path: Path, strategy: Strategy, device: FakeDevice, *, later: bool, by_hand: bool = False) -> None:
    """Two saves in the background, on a stream that is not the default one, each with a step after it."""
    with device.watching():
        stream, training = device.stream("training"), Training("one stream", device)
        stream.wait_stream(device.current)
        with device.on(stream):
            stepper = FlatStepper(training.model, CLIPPED, strategy=strategy, units=training.units)
            for step in range(2):
                training.backward(step)
                stepper.step()
                with written_later(device) if later else threads_of(device) as write:
                    saving = save_sharded(stepper, path, asynchronous=True)
                    if by_hand:
                        write_to_weights(stepper)
                    training.backward(step + 2)
                    stepper.step()
                    if later:
                        assert write is not None
                        write()
                saving.result()


@torch.no_grad()
def write_to_weights(stepper: FlatStepper) -> None:
    """A user's: where weights are whole they may be written to at any time, and else inside ``full_parameters()``."""
    with stepper.full_parameters() if stepper.sharding.params else nullcontext():
        for x in stepper.model.parameters():
            x.mul_(0.5)


BOTH = [pytest.param("optim", marks=pytest.mark.exhaustive), "optim_grads_params"]


@pytest.mark.parametrize("strategy", BOTH)
def test_a_step_comes_after_the_copies_of_what_it_writes(tmp_path: Path, strategy: Strategy) -> None:
    """The host waits for nothing: the writer has not begun when the step is queued."""
    trained(tmp_path, strategy, FakeDevice(), later=True)
    with (
        mock.patch.object(StagingMemory, "order", return_value=None),
        pytest.raises(HazardError, match=r"reads|writes"),
    ):
        trained(tmp_path, strategy, FakeDevice(), later=True)


@pytest.mark.parametrize("strategy", BOTH)
def test_a_writer_waits_for_the_copies(tmp_path: Path, strategy: Strategy) -> None:
    trained(tmp_path, strategy, FakeDevice(), later=False)
    with mock.patch.object(FakeEvent, "synchronize", return_value=None), pytest.raises((HazardError, RuntimeError)):
        trained(tmp_path, strategy, FakeDevice(), later=False)


@pytest.mark.parametrize("strategy", ["optim", pytest.param("optim_grads_params", marks=pytest.mark.exhaustive)])
def test_weights_may_be_written_to_by_hand_while_they_are_copied(tmp_path: Path, strategy: Strategy) -> None:
    trained(tmp_path, strategy, FakeDevice(), later=True, by_hand=True)


def test_memory_that_is_given_back_while_it_is_copied_is_not_used_for_something_else(tmp_path: Path) -> None:
    def program() -> None:
        device = FakeDevice()
        with device.watching(), device.on(device.stream("training")), written_later(device) as write:
            training = Training("one stream", device)
            stepper = FlatStepper(training.model, CLIPPED, strategy="optim_grads_params", units=training.units)
            training.backward(0)
            stepper.step()
            save_sharded(stepper, tmp_path, asynchronous=True)
            del stepper, training
            gc.collect()
            torch.zeros(64, device=torch.device("cpu"))
            write()

    def forgotten(*_: Any) -> None:
        """No mock, which would keep what it is given."""

    program()
    with mock.patch.object(HostCopies, "keep", forgotten), pytest.raises(HazardError, match="record_stream"):
        program()


def test_nothing_is_allocated_on_the_device_for_a_save_in_the_background(tmp_path: Path) -> None:
    device, made = FakeDevice(), dict.fromkeys(("device", "host", "pinned"), 0)
    original = FakeDevice.made

    def noted(one: FakeDevice, x: Tensor, place: Any) -> None:
        made[place] += x.untyped_storage().nbytes()
        original(one, x, place)

    with device.watching():
        training = Training("one stream", device)
        stepper = FlatStepper(training.model, CLIPPED, strategy="optim_grads_params", units=training.units)
        training.backward(0)
        stepper.step()
        pinned = []
        for _ in range(2):
            with mock.patch.object(FakeDevice, "made", noted), threads_of(device):
                save_sharded(stepper, tmp_path, asynchronous=True).result()
            assert made["device"] == 0
            pinned.append(made["pinned"])
        assert pinned == [stepper.staging.nbytes] * 2  # the second allocates none
