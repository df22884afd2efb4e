"""State on the host, brought to the device a bucket at a time. Without a device the host stands in: the same copies, the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import everybit as eb
from everybit_torch.sharded import arguments, offload
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import Strategy
from tests.support.programs import Block, data, network, weights_of

POLICIES = ["FP32", "LEAN_BF16", "KAHAN_BF16"]


def trained(
    name: str, strategy: Strategy, offloaded: bool, device: str = "cpu", compile: bool = False
) -> dict[str, Tensor]:
    dtype = torch.float32 if name == "FP32" else torch.bfloat16
    model = network(dtype).to(device)
    transform = eb.chain(eb.clip_by_global_norm(0.5), eb.adamw(1e-2))
    policy = eb.policies.PRESETS[name]
    one = FlatStepper(
        model, transform, policy=policy, strategy=strategy, units=[Block], offload=offloaded, compile=compile
    )
    for step in range(4):
        with one.microbatch(last=True):
            model(data(step, 0, 0, dtype).to(device)).float().square().mean().backward()
        one.step()
    if offloaded:
        elements = [
            x
            for unit in one.as_optimizer().engine.units
            for x in eb.tree.leaves((unit.state.extra, unit.state.inner))
            if x.ndim
        ]
        assert all(x.device.type == "cpu" and x.is_pinned() == (device != "cpu") for x in elements)
        steps = {int(unit.state.step) for unit in one.as_optimizer().engine.units}
        assert steps == {4}
    return {key: value.cpu() for key, value in weights_of(one).items()}


@pytest.mark.parametrize("bucket", [7, 64, 1 << 24])
@pytest.mark.parametrize("name", POLICIES)
def test_bucket_by_bucket_is_the_same_step(name: str, bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(name, "optim", False)
    monkeypatch.setattr(arguments, "is_host", lambda device: False)
    monkeypatch.setattr(offload, "BUCKET", bucket)
    got = trained(name, "optim", True)
    assert all(torch.equal(got[key], expected[key]) for key in expected)


def test_a_model_on_the_host_has_nothing_to_offload() -> None:
    with pytest.raises(ValueError, match="offload: got True for a model in the host's memory"):
        FlatStepper(network(), eb.adamw(1e-2), offload=True)


class Recorder:
    """Streams and events that write down what they are told."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Recorder) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.log.append(f"the host waits for {self.name}")


def test_copies_wait_for_the_device_and_the_host_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that a device is told, read off without one: the first fetch had waited for nothing, and the host never did."""
    log: list[str] = []
    made: list[Recorder] = []

    def stream(device: torch.device) -> Recorder:
        made.append(Recorder("the copies", log))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Recorder("the step", log))
    copies, device = offload.HostCopies(), torch.device("cuda")
    copies.synchronize()
    assert log == []
    for _ in range(2):  # two units of one step
        copies.begin(device)
        copies.end(device)
    copies.synchronize()
    assert len(made) == 1  # so that what one unit wrote is there for the next fetch
    once = ["the copies waits for the step", "the step waits for the copies"]
    assert log == [*once, *once, "the host waits for the copies"]


def test_a_step_ends_with_the_host_waiting_for_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(arguments, "is_host", lambda device: False)
    monkeypatch.setattr(offload.HostCopies, "end", lambda self, device: calls.append("end"))
    monkeypatch.setattr(offload.HostCopies, "synchronize", lambda self: calls.append("synchronize"))
    trained("FP32", "optim", True)
    assert calls.count("synchronize") == 4  # one in each step
    assert calls[-2:] == ["end", "synchronize"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_state_on_the_host_may_be_read_after_a_step() -> None:
    """As an asynchronous checkpoint reads it, at once."""
    model = torch.nn.Linear(4096, 4096, bias=False, device="cuda")
    one = FlatStepper(model, eb.adamw(1e-2), offload=True)
    for _ in range(3):
        with one.microbatch(last=True):
            model(torch.ones(1, 4096, device="cuda")).sum().backward()
        one.step()
        state = [x for entries in one.as_optimizer().state.values() for x in entries.values()]
        at_once = [x.clone() for x in state]
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(at_once, state, strict=True))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_on_a_device(name: str, compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BUCKET", 64)
    expected = trained(name, "optim_grads_params", False, "cuda", compile)
    got = trained(name, "optim_grads_params", True, "cuda", compile)
    assert all(torch.equal(got[key], expected[key]) for key in expected)
