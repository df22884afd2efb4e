"""State on the host, brought to the device a bucket at a time. Without a device the host stands in: the same copies, the same bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import everybit as eb
from everybit_torch.sharded import arguments, offload
from everybit_torch.sharded.checkpoint import load_sharded, save_sharded
from everybit_torch.sharded.plan import plan
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import Strategy
from tests.support.programs import Block, data, network, weights_of
from tests.support.ranks import run
from tests.support.transforms import lamb, rms_clipped
from tests.support.weights import Weights, equal

POLICIES = ["FP32", "LEAN_BF16", "KAHAN_BF16"]


EVERYTHING = offload.Offload(weights=True, gradients=True)


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


CYCLES: list[tuple[str, dict[str, Any], str]] = [
    ("FP32", {"nan": "step"}, "loss scale"),
    ("LEAN_BF16", {"nan": "param"}, "no_sync"),
    ("KAHAN_BF16", {"defer_reduction": True}, ""),
    ("MIXED_BF16", {"reshard_after_forward": False, "metrics": True}, "clip"),
    ("EXACT_BF16", {"nan": "step"}, "not finite"),
    ("EXACT_BF16", {"nan": "param"}, "resume"),
]


def cycled(
    name: str,
    options: dict[str, Any],
    kind: str,
    strategy: Strategy,
    away: bool | offload.Offload,
    then: bool | offload.Offload,
    path: Path,
) -> tuple[Weights, list[Any]]:
    """Three steps of three microbatches each; and what was reported."""
    dtype = torch.float32 if name == "FP32" else torch.bfloat16
    wire = eb.Grads(main="float32", comm="bfloat16", reduce="fp32")
    policy = dataclasses.replace(eb.policies.PRESETS[name], grads=wire if name != "FP32" else eb.Grads())
    transform = eb.chain(eb.clip_by_global_norm(0.5), eb.adamw(1e-2))
    arguments: dict[str, Any] = {"policy": policy, "strategy": strategy, "units": [Block], **options}
    model = network(dtype)
    one = FlatStepper(model, transform, offload=away, **arguments)
    scale = 4.0 if kind == "loss scale" else 1.0
    seen: list[Any] = []
    for step in range(3):
        for number in range(3):
            within = one.microbatch(last=number == 2) if kind != "no_sync" else one.no_sync()
            with within:
                loss = model(data(step, dist.get_rank(), number, dtype)).float().square().mean() * scale
                (loss * torch.inf if kind == "not finite" and step == 1 and number == 0 else loss).backward()
        if kind == "clip":
            one.finish_gradients()
            parameters = [p for group in one.as_optimizer().param_groups for p in group["params"]]
            seen.append(float(torch.nn.utils.clip_grad_norm_(parameters, 0.25)))
        report = one.step(loss_scale=scale)
        seen += [float(report.grad_norm), report.skipped, report.nonfinite]
        if kind == "resume" and step == 1:
            save_sharded(one, path, asynchronous=bool(away)).result(60)
            model = network(dtype, seed=1)
            one = FlatStepper(model, transform, offload=then, **arguments)
            load_sharded(one, path)
    if kind == "metrics":
        seen.append(one.as_optimizer().metrics())
    seen.append(one.model_state_dict("sharded") is not None)
    return weights_of(one), seen


def all_cycled(path: Path) -> list[Any]:
    """The cases in which something is not as without offload."""
    wrong: list[Any] = []
    with mock.patch.object(arguments, "is_host", return_value=False), mock.patch.object(offload, "BUCKET", 16):
        for number, (name, options, kind) in enumerate(CYCLES):
            strategies: list[tuple[Strategy, bool | offload.Offload]] = [
                ("optim_grads_params", EVERYTHING), ("optim_grads_params", True), ("optim_grads", True), ("optim", True),
            ]  # fmt: skip
            expected: dict[Strategy, Any] = {}
            for strategy, away in strategies[: 4 if number < 2 else 1]:
                if strategy not in expected:
                    expected[strategy] = cycled(
                        name, options, kind, strategy, False, False, path / f"{number} {strategy}"
                    )
                place = path / f"{number} {strategy} {away}"
                for then in (away, False) if kind == "resume" else (away,):
                    weights, seen = cycled(name, options, kind, strategy, away, then, place / str(then))
                    if not equal(weights, expected[strategy][0]) or str(seen) != str(expected[strategy][1]):
                        wrong.append((number, strategy, away, seen, expected[strategy][1]))
            if kind == "resume":
                back = cycled(name, options, kind, "optim_grads_params", False, EVERYTHING, path / f"{number} back")
                if not equal(back[0], expected["optim_grads_params"][0]):
                    wrong.append((number, "back"))
    return wrong


def test_training_with_shards_on_the_host_has_the_same_bits(tmp_path: Path) -> None:
    """Sums over microbatches and ranks, clips, checks, deferred reductions, and checkpoints from one to the other."""
    for wrong in run(2, all_cycled, tmp_path):
        assert not wrong


def test_a_model_on_the_host_has_nothing_to_offload() -> None:
    for given in (True, EVERYTHING):
        with pytest.raises(ValueError, match=r"offload: got .* for a model in the host's memory"):
            FlatStepper(network(), eb.adamw(1e-2), offload=given)
        with pytest.raises(ValueError, match=r"offload: got .* for device='cpu', whose memory is the host's"):
            plan(network(), eb.adamw(1e-2), offload=given)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ("state", {}, "offload: got 'state'; accepted are True, False, and Offload"),
    (offload.Offload(state=1), {}, "accepted are True, False, and Offload"),  # type: ignore[arg-type]
    (offload.Offload(weights=True), {}, "one device"),
    (offload.Offload(gradients=True), {}, "one device"),
    (offload.Offload(False, True, True), {}, "one device"),
    (
        EVERYTHING,
        {"strategy": "optim_grads"},
        "under 'optim_grads', where every rank computes with weights that are whole",
    ),
    (EVERYTHING, {"keep_gradients": False}, "with keep_gradients=False"),
]


@pytest.mark.parametrize(("given", "options", "said"), REFUSED)
def test_what_offload_does_not_go_with_is_refused_by_name(
    given: Any, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "is_host", lambda device: False)
    model = network()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    chosen: dict[str, Any] = {"strategy": "optim_grads_params", **options}
    calls: list[Callable[[], object]] = [
        lambda: FlatStepper(model, eb.adamw(1e-2), offload=given, **chosen),
        lambda: plan(model, eb.adamw(1e-2), offload=given, device="cuda", **chosen),
    ]
    for call in calls:
        with pytest.raises((TypeError, ValueError)) as refused:
            call()
        assert said in str(refused.value)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before


def test_transforms_that_reduce_are_refused_with_gradients_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "is_host", lambda device: False)
    for transform in (lamb(1e-2), rms_clipped(1e-2), eb.chain(eb.adamw(1e-2), eb.clip_by_global_norm(1.0))):
        with pytest.raises(
            ValueError, match="for a transform that reduces, where all that can be is to clip by the global norm"
        ):
            FlatStepper(network(), transform, strategy="optim_grads_params", offload=EVERYTHING)


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
    assert calls.count("synchronize") == 5  # when it was made, and one in each step
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
