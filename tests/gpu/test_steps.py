"""Steps on a GPU: the bits of eager code, two kernels, and the battery of promises."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import everybit as eb
from everybit.testing import CHECKS, REGISTRY, check_compiled_equals_eager
from everybit.testing.examples import assert_same_bits
from everybit_torch import EXACT_OPTIONS, AdamW, FlatStepper, TorchOptimizer
from everybit_torch.streams import make
from everybit_torch.torch_internals.kernel_calls import CompiledGraph
from tests.support.devices import require_device, some
from tests.support.exact_models import whole_of

pytestmark = pytest.mark.cuda
require_device()

PRESETS = eb.policies.PRESETS
STEPS = 5


def slow(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
    """AdamW whose second moment decays fast enough for every preset."""
    return eb.adamw(learning_rate, b2=0.95)


SHAPES: dict[str, tuple[int, ...]] = {"layer0.weight": (65, 64), "layer1.weight": (1111,)}
"""Of a length that is a multiple of 16, and of one that is not; longer than a block of threads."""
OF_ALL_LABELS: dict[str, tuple[int, ...]] = {**SHAPES, "head.weight": (66, 64), "b": (3,), "scale": ()}
"""Some for each label of the registry's partitions."""
LAUNCHES = {"LEAN_8BIT": 3, "FLOOR_8BIT": 3, "LEAN_4BIT": 5}
"""Kernels of steps under policies with blocks: one more stores scales, and two more pack codes of 4 bits."""


def parameters(policy: str, device: torch.device, shapes: dict[str, tuple[int, ...]]) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, PRESETS[policy].model_dtype)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for name, shape in shapes.items()
    }


def stepped(
    policy: str,
    factory: Callable[..., Any],
    device: torch.device,
    shapes: dict[str, tuple[int, ...]] = SHAPES,
    **options: Any,
) -> tuple[TorchOptimizer, list[Tensor]]:
    """The optimizer, and all tensors after some steps; by default each parameter is a group."""
    named = parameters(policy, device, shapes)
    params = [*named.values()]
    options = {"lr": 0.01, "seed": 3} | options
    groups: Any = [{"params": [one]} for one in named.items()] if shapes is SHAPES else named.items()
    optimizer = TorchOptimizer(groups, factory, policy=PRESETS[policy], **options)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 + step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p)
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        optimizer.step()
    state = [x for p in params for x in optimizer.state[p].values() if isinstance(x, Tensor)]
    return optimizer, [*(p.detach() for p in params), *state]


@pytest.mark.parametrize("policy", some(PRESETS))
def test_compiled_steps_have_the_bits_of_uncompiled_ones(policy: str, device: torch.device) -> None:
    _, expected = stepped(policy, slow, device, compile=False)
    _, got = stepped(policy, slow, device, compile=True)
    assert_same_bits(got, expected, "compiled, against uncompiled")


@pytest.mark.parametrize("name", some(REGISTRY))
def test_so_have_those_of_every_optimizer(name: str, device: torch.device) -> None:
    if name == "injected" and torch.__version__ < "2.13":
        pytest.skip("Dynamo of torch 2.11 does not trace what makes it: a step runs uncompiled, and warns")
    _, expected = stepped("LEAN_BF16", REGISTRY[name], device, OF_ALL_LABELS, compile=False)
    _, got = stepped("LEAN_BF16", REGISTRY[name], device, OF_ALL_LABELS, compile=True)
    assert_same_bits(got, expected, "compiled, against uncompiled")


@pytest.mark.parametrize("policy", some(PRESETS))
def test_a_compiled_step_is_two_kernels_and_no_transfer(policy: str, device: torch.device) -> None:
    dtype = getattr(torch, PRESETS[policy].model_dtype)
    parameter = nn.Parameter(torch.ones(1 << 16, device=device, dtype=dtype))
    optimizer = AdamW([parameter], betas=(0.9, 0.95), policy=PRESETS[policy], compile=True)
    parameter.grad = torch.ones_like(parameter)
    for _ in range(3):
        optimizer.step()
    names = launched(optimizer, device)
    assert len(names) == (LAUNCHES.get(policy, 2) if device.type == "cuda" else 0), names


def launched(optimizer: TorchOptimizer, device: torch.device) -> list[str]:
    """What a step has a GPU do."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as found:
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    there = [event.name for event in found.events() if event.device_type.name == "CUDA"]
    assert any(event.device_type.name == "CPU" for event in found.events())
    return [name for name in there if not name.startswith("Optimizer.step#")]  # torch's mark of the whole step


@pytest.mark.parametrize("policy", some(PRESETS))
def test_later_steps_of_several_long_parameters_are_two_kernels(policy: str, device: torch.device) -> None:
    """Gradients are other tensors at each step, and their addresses a transfer; where they lie as they did, there is none."""
    dtype, lengths = getattr(torch, PRESETS[policy].model_dtype), [(1 << 20) + 4096, 3 << 20, 1 << 20]
    made = [[nn.Parameter(torch.linspace(-1, 1, n, device=device).to(dtype)) for n in lengths] for _ in range(2)]
    ours, expected = (
        AdamW(ones, policy=PRESETS[policy], seed=3, compile=is_ours)
        for ones, is_ours in zip(made, (True, False), strict=True)
    )
    for step in range(6):
        for one in itertools.chain(*made):
            one.grad = torch.linspace(1, -1, one.numel(), device=device).to(dtype) * (step + 1)
        for optimizer in (ours, expected):
            optimizer.step()
    assert_same_bits([x.detach() for x in made[0]], [x.detach() for x in made[1]], "lists, against uncompiled")
    ours.step()
    names = launched(ours, device)
    assert len(names) == (LAUNCHES.get(policy, 2) if device.type == "cuda" else 0), names


@pytest.mark.parametrize("policy", some(["FP32", "LEAN_BF16"]))
def test_later_steps_call_kernels_by_themselves(
    policy: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the stream on which they were found; on another they are found anew. Weights of a layer, with their bits."""
    runs: list[int] = []
    run = CompiledGraph.__call__

    def noted(self: CompiledGraph, *args: Any) -> Any:
        runs.append(1)
        return run(self, *args)

    monkeypatch.setattr(CompiledGraph, "__call__", noted)
    dtype = getattr(torch, PRESETS[policy].model_dtype)
    made = [nn.Parameter(torch.linspace(-1, 1, (1 << 20) + 16, device=device).to(dtype)) for _ in range(2)]
    ours, expected = (
        AdamW([one], policy=PRESETS[policy], compile=is_ours) for one, is_ours in zip(made, (True, False), strict=True)
    )
    streams = [torch.cuda.current_stream(), make(device)] if device.type == "cuda" else []
    counts = []
    for step in range(8):
        for one in made:
            one.grad = torch.linspace(1, -1, one.numel(), device=device).to(dtype) * (step + 1)
        with torch.cuda.stream(streams[step // 5]) if streams else nullcontext():
            ours.step()
        if streams:
            torch.cuda.synchronize()
        expected.step()
        counts.append(len(runs))
    assert counts[2] == counts[4], counts
    assert counts[5] == counts[7] == counts[4] + len(streams) // 2, counts
    assert_same_bits([made[0].detach()], [made[1].detach()], "kernels by themselves, against uncompiled")


def test_a_step_on_a_device_is_that_of_the_host(device: torch.device) -> None:
    """In float64, where what differs are the last bits of powers: some units of 2**-53, each step a thousandth of a weight."""
    _, host = stepped("FP64", eb.adamw, torch.device("cpu"), compile=False)
    for compile in (False, True):
        _, there = stepped("FP64", eb.adamw, device, compile=compile)
        for a, b in zip(there, host, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-13, atol=1e-15)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("policy", some(["LEAN_BF16", "TIGHT_BF16", "EXACT_BF16", "MIXED_BF16"]))
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_a_compiled_stepper_has_the_bits_of_an_uncompiled_one(policy: str, strategy: Any, device: torch.device) -> None:
    found = []
    for compile in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(33, 64), nn.Tanh(), nn.Linear(64, 5)).bfloat16().to(device)
        stepper = FlatStepper(
            model,
            eb.adamw(0.01, b2=0.95),
            policy=PRESETS[policy],
            strategy=strategy,
            units=[nn.Linear],
            compile=compile,
        )
        for step in range(3):
            x = torch.randn(8, 33, generator=torch.Generator().manual_seed(step)).bfloat16().to(device)
            with stepper.microbatch(last=True):
                model(x).float().square().mean().backward()
            stepper.step()
        found.append([whole_of(p).clone() for p in model.parameters()])
        stepper.close()
    assert_same_bits(found[1], found[0], "compiled, against uncompiled")


# Their promise is about default options, under which code for a GPU is contracted.
EAGER = [name for name in CHECKS if name != "compiled equals eager"]


@pytest.mark.parametrize("check", EAGER)
@pytest.mark.parametrize("name", some(REGISTRY))
def test_every_optimizer_keeps_its_promises(name: str, check: str, device: torch.device) -> None:
    if check == "no recompilation" and torch.__version__ < "2.13":
        pytest.skip("Dynamo before torch 2.13 refuses some of these where the torch optimizer does not compile them")
    if (name, check) == ("schedule-free adamw", "hyperparameters are data") and device.type == "cuda":
        pytest.skip("a float64 power on CUDA differs in its last bit between an exponent that is a number and a tensor")
    with device:
        CHECKS[check](REGISTRY[name])


@pytest.mark.parametrize("policy", some(PRESETS))
def test_a_users_compiled_function_has_eager_bits_under_the_exact_options(policy: str, device: torch.device) -> None:
    check = partial(check_compiled_equals_eager, options=EXACT_OPTIONS, policy=PRESETS[policy])
    with device:
        dtype = getattr(torch, PRESETS[policy].model_dtype)
        check(slow, dtype=dtype, params=torch.linspace(-2, 2, 203).to(dtype))
