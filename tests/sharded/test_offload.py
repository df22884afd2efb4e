"""State on the host, brought to the device a bucket at a time. Without a device the host stands in: the same copies, the same bits."""

from __future__ import annotations

import pytest
import torch
from programs import Block, data, network, weights_of
from torch import Tensor

import everybit as eb
from everybit_torch.sharded import offload, stepper
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import Strategy

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
            for unit in one.as_optimizer()._units
            for x in eb.tree.leaves((unit.state.extra, unit.state.inner))
            if x.ndim
        ]
        assert all(x.device.type == "cpu" and x.is_pinned() == (device != "cpu") for x in elements)
        steps = {int(unit.state.step) for unit in one.as_optimizer()._units}
        assert steps == {4}
    return {key: value.cpu() for key, value in weights_of(one).items()}


@pytest.mark.parametrize("bucket", [7, 64, 1 << 24])
@pytest.mark.parametrize("name", POLICIES)
def test_bucket_by_bucket_is_the_same_step(name: str, bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(name, "optim", False)
    monkeypatch.setattr(stepper, "is_host", lambda device: False)
    monkeypatch.setattr(offload, "BUCKET", bucket)
    got = trained(name, "optim", True)
    assert all(torch.equal(got[key], expected[key]) for key in expected)


def test_a_model_on_the_host_has_nothing_to_offload() -> None:
    with pytest.raises(ValueError, match="offload: got True for a model in the host's memory"):
        FlatStepper(network(), eb.adamw(1e-2), offload=True)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_on_a_device(name: str, compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BUCKET", 64)
    expected = trained(name, "optim_grads_params", False, "cuda", compile)
    got = trained(name, "optim_grads_params", True, "cuda", compile)
    assert all(torch.equal(got[key], expected[key]) for key in expected)
