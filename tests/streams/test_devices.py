"""Models on several devices, on one that is not the present one, and on one that cannot compute what a step needs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import everybit as eb
from everybit_torch import AdamW, FlatStepper, TorchOptimizer, engine, stepping, streams
from everybit_torch.collectives.communicator import Communicator
from tests.support.fake_device.device import FakeDevice
from tests.support.fake_device.memory import HazardError

CLIPPED = eb.chain(eb.clip_by_global_norm(0.5), eb.adamw(1e-2))


def test_each_device_has_the_totals_of_reductions() -> None:
    """A number of another device's may not be used with its tensors, but the host's may: so the meta device stands in for another."""
    parameters = [nn.Parameter(torch.ones(4, device=device)) for device in ("cpu", "meta", "cpu")]
    optimizer = TorchOptimizer(parameters, lambda: CLIPPED, compile=False)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    seen: list[tuple[str, list[str]]] = []
    step = stepping.step_in_place

    def noting(one: Any, tensors: list[Tensor], *args: Any, totals: Sequence[Tensor], **options: Any) -> Any:
        seen.append((tensors[0].device.type, [total.device.type for total in totals]))
        return step(one, tensors, *args, totals=totals, **options)

    total = torch.tensor(12.0, dtype=torch.float64)
    with (
        mock.patch.object(engine, "find_totals", return_value=[total]),
        mock.patch.object(stepping, "step_in_place", noting),
    ):
        optimizer.step()
    assert {device for device, _ in seen} == {"cpu", "meta"}
    assert all(totals == [device] for device, totals in seen)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices")
def test_a_clip_goes_over_two_devices() -> None:
    found = []
    for devices in (("cuda:0", "cuda:0"), ("cuda:1", "cuda:0")):
        parameters = [nn.Parameter(torch.ones(4, device=device)) for device in devices]
        optimizer = TorchOptimizer(parameters, lambda: CLIPPED, compile=False)
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 3.0)
        optimizer.step()
        found.append([parameter.detach().cpu() for parameter in parameters])
    assert all(map(torch.equal, *found))


def test_a_communicators_own_tensors_lie_on_the_models_device() -> None:
    """With NCCL alone they cannot lie on the host, and torch's present device may be another rank's."""

    class OfNccl:
        _device_types = (torch.device("cuda"),)

    with mock.patch.object(dist, "get_world_size", return_value=2), mock.patch.object(dist, "get_rank", return_value=1):
        group: Any = OfNccl()
        assert Communicator(group, near=torch.device("cuda", 3)).device == torch.device("cuda", 3)
        assert Communicator(group, near=torch.device("cpu")).device == torch.device("cuda")


def test_a_device_without_float64_is_refused_when_the_optimizer_is_made() -> None:
    with FakeTensorMode():
        model = nn.ParameterList([nn.Parameter(torch.empty(2, device="mps"))])
        with pytest.raises(ValueError, match="param group 0, parameter 0: got a parameter on mps:0, a device without"):
            AdamW(model.parameters())
        with pytest.raises(ValueError, match="model: got a parameter on mps:0, a device without float64"):
            FlatStepper(model, CLIPPED)


def test_what_hooks_are_given_may_be_freed_on_its_own_stream() -> None:
    """As a gradient that one stream has made, in a hook on another, which works on a third."""
    with FakeDevice().watching() as device:
        home, here, first, second = streams.Home(), torch.device("cpu"), device.stream(), device.stream()
        home.begin(here)
        with device.on(first):
            x = torch.ones(4, device=here)
        second.wait_stream(first)
        with device.on(second):
            x.record_stream(second)  # type: ignore[arg-type]
            with home.entered(here, x):
                x.sum()
        del x
        with device.on(first):
            torch.ones(4, device=here)


def test_a_captured_stream_waits_for_none_from_before() -> None:
    """CUDA refuses that in a capture; whoever begins one has synchronized."""
    for captures in (False, True):
        with FakeDevice().watching() as device, mock.patch.object(streams, "is_capturing", return_value=captures):
            home, here, stream = streams.Home(), torch.device("cpu"), device.stream()
            home.begin(here)
            x = torch.ones(4, device=here)
            with device.on(stream):
                home.begin(here)
                with home.entered(here), pytest.raises(HazardError) if captures else contextlib.nullcontext():
                    x.sum()
                assert device.current is stream
