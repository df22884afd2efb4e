"""Every front end on a device with streams, which is not there: nothing is read, written or freed that another stream still uses."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import threading
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import everybit as eb
from everybit_torch import AdamW, ExactReduceScatter, TorchOptimizer, enable_gradient_release, streams
from everybit_torch.groups import Group
from everybit_torch.sharded import offload
from everybit_torch.sharded.checkpoint import load_sharded, save_sharded
from everybit_torch.sharded.pass_counts import NUMBERS
from everybit_torch.sharded.planning.peaks import SMALLEST
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import STRATEGIES, Strategy
from tests.support.fake_device.device import FakeDevice
from tests.support.fake_device.memory import HazardError, Memory
from tests.support.ranks import run
from tests.support.stream_programs import CLIPPED, WAYS, Training, Way, host_is_far, sharded, threads_of
from tests.support.transforms import lamb

SENT_EXACTLY = eb.Policy(params=eb.Kahan(), grads=eb.Grads(main="float32", comm="bfloat16", reduce="fp32"))


@functools.cache
def plain() -> dict[str, Tensor]:
    """What training comes to without streams and shards."""
    return sharded("one stream", "no_shard")


def alike(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# -- one process ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "clipped", "flat gradients", "released"])
@pytest.mark.parametrize("way", WAYS[1:])
def test_an_optimizer_steps_on_the_stream_that_calls_it(way: Way, kind: str) -> None:
    found = []
    for one in ("one stream", way):
        device = FakeDevice()
        with device.watching():
            training = Training(one, device)
            parameters = training.model.parameters()
            if kind == "clipped":
                optimizer = TorchOptimizer(parameters, lambda: CLIPPED, compile=False, metrics=True)
            else:
                optimizer = AdamW(parameters, 1e-2, compile=False, flat_gradients=kind == "flat gradients")
            if kind == "released":
                optimizer.place()
                # A bucket has parameters of both towers.
                enable_gradient_release(training.model, optimizer, bucket=80, max_norm=1.0)
            for step in range(3):
                training.backward(step)
                optimizer.step()
                optimizer.zero_grad()
            found.append({name: p.detach().clone() for name, p in training.model.named_parameters()})
    assert alike(*found)


CASES = [
    pytest.param(
        way, strategy, marks=() if way == "two towers" or strategy == STRATEGIES[-1] else pytest.mark.exhaustive
    )
    for way, strategy in itertools.product(WAYS, STRATEGIES)
]


@pytest.mark.parametrize(("way", "strategy"), CASES)
def test_a_stepper_orders_what_hooks_do_on_several_streams(way: Way, strategy: Strategy) -> None:
    assert alike(sharded(way, strategy), plain())


OPTIONS: list[tuple[Strategy, dict[str, Any]]] = [
    ("optim", {"nan": "param", "keep_gradients": False, "loss_scale": 4.0, "metrics": True}),
    ("optim_grads", {"nan": "step", "clips": True, "keep_gradients": False}),
    ("optim_grads_params", {"nan": "param", "reshard_after_forward": False, "loss_scale": 4.0}),
    ("optim_grads", {"defer_reduction": True, "keep_gradients": False}),
    ("optim_grads_params", {"defer_reduction": True, "nan": "param"}),
]


@pytest.mark.parametrize(("strategy", "options"), OPTIONS)
def test_a_stepper_orders_its_looks_at_gradients_too(strategy: Strategy, options: dict[str, Any]) -> None:
    sharded("two towers", strategy, **options)


def test_weights_gathered_by_hand_are_used_on_the_stream_of_the_pass() -> None:
    """They are gathered, and given back, on another stream, which nobody waits for by himself."""
    device = FakeDevice()
    with device.watching():
        training = Training("two towers", device)
        stepper = FlatStepper(training.model, CLIPPED, strategy="optim_grads_params", units=training.units)
        stream, first = device.stream("ahead"), next(m for m in training.model.modules() if type(m) in training.units)
        for step in range(3):
            with device.on(stream):
                stepper.unshard(training.model, async_op=True)
                stepper.unshard(first, async_op=True)
                if step == 1:
                    stepper.reshard(training.model)
            with stepper.microbatch(last=True):
                training.backward(step)
            stepper.step()


@pytest.mark.parametrize(("way", "strategy"), list(zip(WAYS, STRATEGIES[1:], strict=True)))
def test_state_on_the_host_is_copied_in_order(way: Way, strategy: Strategy) -> None:
    assert alike(sharded(way, strategy, offloaded=True), plain())


@pytest.mark.parametrize("transform", [lamb(1e-2), eb.chain(eb.adamw(1e-2), eb.clip_by_global_norm(0.1))])
def test_what_a_transform_asks_of_state_on_the_host_is_computed_on_the_device(transform: eb.Transform[Any]) -> None:
    """It is asked before the step that brings state."""
    found = sharded("one stream", "optim", offloaded=True, transform=transform)
    assert alike(found, sharded("one stream", "optim", transform=transform))


EVERYTHING = offload.Offload(weights=True, gradients=True)


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("one stream", {"defer_reduction": True, "nan": "param"}),
        ("two towers", {"nan": "step"}),
        ("forward elsewhere", {"loss_scale": 4.0, "reshard_after_forward": False}),
    ],
)
def test_weights_and_gradients_on_the_host_are_copied_in_order(way: Way, options: dict[str, Any]) -> None:
    found = sharded(way, "optim_grads_params", offloaded=EVERYTHING, **options)
    assert alike(found, sharded("one stream", "optim_grads_params", **options))


@pytest.mark.parametrize("left_out", ["begin", "end", "begin_in_room", "synchronize", "come_after"])
def test_no_wait_for_a_copy_of_weights_or_gradients_may_be_left_out(left_out: str) -> None:
    owner: Any = streams if left_out == "come_after" else offload.HostCopies

    def begins(copies: Any, device: torch.device) -> None:
        copies._stream = copies._stream or streams.make(device)

    replaced: Any = begins if left_out == "begin" else lambda *_: None
    # Gradients that are scaled are brought to the device, and waited for by that, before the host reads them.
    scale = 1.0 if left_out == "synchronize" else 4.0
    with mock.patch.object(owner, left_out, new=replaced), pytest.raises(HazardError):
        sharded("one stream", "optim_grads_params", offloaded=EVERYTHING, loss_scale=scale, nan="param")


def halves_gradients() -> None:
    """A user's code, which finds them in the host's memory."""
    device = FakeDevice()
    with device.watching(), host_is_far(True):
        training = Training("one stream", device)
        stepper = FlatStepper(
            training.model, CLIPPED, strategy="optim_grads_params", units=training.units, offload=EVERYTHING
        )
        for step in range(2):
            training.backward(step)
            stepper.finish_gradients()
            for group in stepper.as_optimizer().param_groups:
                for p in group["params"]:
                    p.grad.mul_(0.5)
            stepper.step()


def test_gradients_in_the_hosts_memory_are_there_when_they_are_used() -> None:
    halves_gradients()
    with mock.patch.object(offload.HostCopies, "synchronize", return_value=None), pytest.raises(HazardError):
        halves_gradients()


@pytest.mark.parametrize("offloaded", [True, EVERYTHING])
def test_what_persists_lies_where_it_is_planned_to_the_byte(offloaded: bool | offload.Offload) -> None:
    device = FakeDevice()
    with device.watching(), host_is_far(True):
        training = Training("one stream", device)
        stepper = FlatStepper(
            training.model, CLIPPED, strategy="optim_grads_params", units=training.units, offload=offloaded
        )
        for step in range(2):
            training.backward(step)
            stepper.step()
        gc.collect()
        with device.asleep():
            planned = stepper.plan()
        # Two numbers of passes, which ranks compare, are copied to the host's memory; they are planned as the device's.
        on_host = NUMBERS * torch.float64.itemsize
        assert device.live("device") == planned.persistent_bytes - on_host
        assert device.live("pinned") == planned.host_bytes + on_host


@pytest.mark.parametrize("offloaded", [False, True, EVERYTHING])
def test_making_a_stepper_takes_of_the_device_what_is_planned(offloaded: bool | offload.Offload) -> None:
    for policy, dtype in ((None, torch.float32), (eb.policies.EXACT_BF16, torch.bfloat16)):
        device, most, allocate = FakeDevice(), 0, Memory.allocate

        def noted(*args: Any, device: FakeDevice = device, allocate: Any = allocate, **kwargs: Any) -> Any:
            nonlocal most
            block = allocate(*args, **kwargs)
            most = max(most, device.live("device"))
            return block

        with device.watching(), host_is_far(True):
            here = torch.device("cpu")
            model = nn.Sequential(*(nn.Linear(64, 64, bias=False, device=here, dtype=dtype) for _ in range(3)))
            with mock.patch.object(Memory, "allocate", noted):
                stepper = FlatStepper(
                    model, eb.adamw(1e-2), policy=policy, strategy="optim_grads_params", units=[nn.Linear], offload=offloaded
                )  # fmt: skip
            with device.asleep():
                planned = stepper.plan().transient["construction"]
            # Tensors of fewer bytes than these are not in it.
            assert abs(most - device.live("device") - planned) < 2 * SMALLEST


def everything_on_two_ranks() -> None:
    sharded("one stream", "optim_grads_params", offloaded=EVERYTHING)
    sharded("two towers", "optim_grads_params", offloaded=EVERYTHING, defer_reduction=True)


def test_collectives_come_after_the_copies_of_what_they_send() -> None:
    run(2, everything_on_two_ranks, timeout=30)


@pytest.mark.parametrize("offloaded", [False, True, EVERYTHING])
def test_copies_to_a_device_without_streams_are_waited_for(tmp_path: Path, offloaded: bool | offload.Offload) -> None:
    device = FakeDevice(stages=False)
    strategy: Strategy = "optim_grads_params" if offloaded is EVERYTHING else "optim"
    assert alike(sharded("one stream", strategy, device=device, offloaded=offloaded, folder=tmp_path), plain())


def test_what_is_loaded_after_a_failed_step_is_not_written_over_by_its_copies(tmp_path: Path) -> None:
    device, calls, step = FakeDevice(), itertools.count(), Group.step

    def fails(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2:
            raise MemoryError("no room")
        return step(*args, **kwargs)

    def trained(*, interrupted: bool) -> dict[str, Tensor]:
        training = Training("one stream", device)
        stepper = FlatStepper(training.model, CLIPPED, offload=True)
        training.backward(0)
        stepper.step()
        if interrupted:
            save_sharded(stepper, tmp_path)
            training.backward(1)
            with mock.patch.object(Group, "step", fails), pytest.raises(MemoryError):
                stepper.step()
            load_sharded(stepper, tmp_path)
        training.backward(1)
        stepper.step()
        return dict(training.model.named_parameters())

    with device.watching(), host_is_far(True):
        assert alike(trained(interrupted=True), trained(interrupted=False))


@pytest.mark.parametrize("offloaded", [False, True, EVERYTHING])
def test_a_checkpoint_in_the_background_comes_after_the_training_streams_work(
    tmp_path: Path, offloaded: bool | offload.Offload
) -> None:
    """Everything is trained on a stream that is not the default one, which is the saving thread's."""
    device = FakeDevice()
    with device.watching(), host_is_far(bool(offloaded)):
        stream, training = device.stream("training"), Training("one stream", device)
        stream.wait_stream(device.current)
        with device.on(stream):
            stepper = FlatStepper(training.model, CLIPPED, strategy="optim_grads_params", offload=offloaded)
            for step in range(2):
                training.backward(step)
                stepper.step()
                with threads_of(device):
                    saving = save_sharded(stepper, tmp_path, asynchronous=True)
                # What was copied is on its way to the disk, and training goes on.
                training.backward(step + 2)
                stepper.step()
                saving.result()


@pytest.mark.parametrize(
    "strategy",
    [
        "optim",
        "optim_grads_params",
        *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("no_shard", "optim_grads")),
    ],
)
def test_after_an_error_in_a_backward_pass_the_caller_comes_after_its_streams(strategy: Strategy) -> None:
    """Autograd has the caller's stream wait for the others at the end of a pass, and not after an error."""
    device = FakeDevice()
    with device.watching():
        training = Training("forward elsewhere", device)
        stepper = FlatStepper(training.model, CLIPPED, strategy=strategy, units=training.units, nan="param")
        for step in range(2):
            hook = training.model.entry.weight.register_hook(refuse)  # type: ignore[no-untyped-call]
            with pytest.raises(RuntimeError, match="refused"), stepper.microbatch(last=True):
                training.backward(step)
            hook.remove()
            stepper.zero_grad()
            with stepper.microbatch(last=True):
                training.backward(step)
            stepper.step()


def test_after_an_error_released_weights_may_be_used_on_the_callers_stream() -> None:
    device = FakeDevice()
    with device.watching():
        training = Training("forward elsewhere", device)
        optimizer = AdamW(training.model.parameters(), 1e-2, compile=False)
        optimizer.place()
        enable_gradient_release(training.model, optimizer, bucket=80)
        training.model.entry.weight.register_hook(refuse)  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match="refused"):
            training.backward(0)
        optimizer.zero_grad()
        for parameter in training.model.parameters():
            parameter.detach().sum()


def refuse(_gradient: Tensor) -> None:
    raise RuntimeError("refused")


@pytest.mark.parametrize("kind", ["flat", "sharded"])
def test_parameters_that_were_made_on_another_stream_are_kept_until_they_are_copied(kind: str) -> None:
    """Their memory belongs to that stream, which may go on with something else."""
    device = FakeDevice()
    with device.watching():
        model = nn.Linear(3, 2, device=torch.device("cpu"))
        stream = device.stream()
        stream.wait_stream(device.current)
        with device.on(stream):
            if kind == "flat":
                AdamW(model.parameters(), compile=False).place()
            else:
                FlatStepper(model, CLIPPED)
        torch.zeros(6, device=torch.device("cpu"))


def test_one_device_prepares_a_step_of_released_gradients_while_another_waits() -> None:
    """Autograd has a thread for each device; the hooks of a model on several are called by several threads at once."""
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    optimizer = AdamW(model.parameters(), 1e-2, compile=False)
    enable_gradient_release(model, optimizer)
    prepare, prepared = optimizer.prepare, 0
    others = threading.Thread(target=lambda: model[1](torch.ones(2)).sum().backward())

    def slowly() -> None:
        nonlocal prepared
        prepared += 1
        if prepared == 1:
            others.start()
            others.join(0.5)  # it goes no further than to the lock
        prepare()

    with mock.patch.object(optimizer, "prepare", slowly):
        model[0](torch.ones(2)).sum().backward()
        others.join()
        optimizer.step()
    assert prepared == 1
    assert {int(entries["step"]) for entries in optimizer.state.values()} == {1}


# -- two ranks -----------------------------------------------------------------------------------------------------------------------------


def on_two_ranks() -> None:
    sharded("two towers", "optim")
    sharded("two towers", "optim_grads")
    assert alike(sharded("two towers", "optim_grads_params"), sharded("one stream", "optim_grads_params"))
    sharded("forward elsewhere", "optim_grads_params", policy=SENT_EXACTLY, dtype=torch.bfloat16)
    sharded("two towers", "optim", policy=SENT_EXACTLY, dtype=torch.bfloat16)
    fully_sharded()


def fully_sharded() -> None:
    """FSDP2 on the device's streams, with our reduce-scatter on its own, and our step between."""
    device = FakeDevice()
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    with device.watching(), device.of_fsdp():
        training = Training("one stream", device)
        model = training.model
        for module in (model.left, model.right, model):
            fully_shard(module, mp_policy=precision)
        reduce = ExactReduceScatter("bfloat16")
        for one in model.modules():
            if isinstance(one, FSDPModule):
                one.set_custom_reduce_scatter(reduce)
        optimizer = TorchOptimizer(model.parameters(), lambda: CLIPPED, compile=False)
        for step in range(2):
            training.backward(step)
            optimizer.step()
            optimizer.zero_grad()
    assert reduce.sent > 0


def test_collectives_are_ordered_with_what_hooks_do_on_several_streams() -> None:
    run(2, on_two_ranks)


# -- a device that is there ------------------------------------------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


class Elementwise(nn.Module):
    """A layer that takes some time and has the same bits in every run."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numel))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(10):
            x = torch.sin(x + self.weight)
        return x


class TwoStreams(nn.Module):
    """Two layers on two streams."""

    def __init__(self, numel: int = 1 << 22) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = Elementwise(numel), Elementwise(numel)
        self.side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        here = torch.cuda.current_stream()
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            x.record_stream(self.side)
            right: Tensor = self.right(x).tanh()
        here.wait_stream(self.side)
        right.record_stream(here)
        out: Tensor = self.left(x).tanh() + right
        return out


def trained_on_cuda(kind: str, *, aside: bool, offloaded: bool = False) -> dict[str, Tensor]:
    """Weights after training; ``aside``: all of it on a stream that is not the default one."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    model = TwoStreams().cuda()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream) if aside else contextlib.nullcontext():
        step: Any
        if kind == "released":
            optimizer = AdamW(model.parameters(), 1e-2, compile=False)
            optimizer.place()
            enable_gradient_release(model, optimizer)
            step = optimizer.step
        else:
            units = [Elementwise]
            stepper = FlatStepper(model, CLIPPED, strategy=cast(Strategy, kind), units=units, offload=offloaded)
            step = stepper.step
        for number in range(10):
            x = torch.full((1 << 22,), 1.0 / (number + 1), device="cuda")
            model(x).square().mean().backward()
            step()
        torch.cuda.synchronize()
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters() if parameter.numel()}


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("kind", ["released", *STRATEGIES[:3]])
def test_on_a_device_hooks_on_two_streams_give_the_same_bits_again_and_again(kind: str) -> None:
    first = trained_on_cuda(kind, aside=False)
    assert all(alike(trained_on_cuda(kind, aside=aside), first) for aside in (True, False, True))


@pytest.mark.cuda
@needs_cuda
def test_on_a_device_copies_of_state_beside_a_step_give_the_same_bits() -> None:
    with mock.patch.object(offload, "BUCKET", 1 << 18):
        found = trained_on_cuda("optim", aside=True, offloaded=True)
    assert alike(found, trained_on_cuda("optim", aside=False))


@pytest.mark.cuda
@needs_cuda
def test_on_a_device_a_checkpoint_in_the_background_has_the_values_of_its_step(tmp_path: Path) -> None:
    """Training is on a stream of its own and goes on at once; the values are still being computed when the saving thread begins."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    model = nn.Linear(4096, 4096, bias=False, device="cuda")
    stepper = FlatStepper(model, CLIPPED)
    x = torch.ones(4096, 4096, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = None
        for _ in range(3):
            for _ in range(20):
                x = x @ x / 4096
            model(x).square().mean().backward()
            stepper.step()
            expected = model.weight.detach().clone()
            saving = save_sharded(stepper, tmp_path, asynchronous=True)
            model(x).square().mean().backward()
            stepper.step()
            saving.result()
        load_sharded(stepper, tmp_path)
        assert expected is not None
        assert torch.equal(model.weight, expected)
