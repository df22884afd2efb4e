"""A step computes the same in whatever mode it is called: autocast, defaults, inference, determinism, precision of products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import FlatStepper, create, evaluation_weights, load_sharded, save_sharded


@contextmanager
def setting(put: Callable[[Any], object], value: object, before: object) -> Iterator[None]:
    put(value)
    try:
        yield
    finally:
        put(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype float64": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "default dtype bfloat16": lambda: setting(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "default device meta": lambda: setting(torch.set_default_device, "meta", None),
    "inside of a device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "products in bfloat16": lambda: setting(torch.set_float32_matmul_precision, "medium", "highest"),
}
BF16, F32 = torch.bfloat16, torch.float32


def model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).to(dtype)


def stepped(name: eb.OptimizerName, dtype: torch.dtype, policy: Any, *, compile: bool, mode: Any) -> list[Tensor]:
    trained = model(dtype)
    optimizer = create(name, trained, lr=1e-2, policy=policy, compile=compile)
    for number in range(2):
        for p in trained.parameters():
            p.grad = torch.linspace(-1, number + 1, p.numel()).view_as(p).to(dtype)
        with mode():
            optimizer.step()
    return [p.detach().clone() for p in trained.parameters()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "dtype", "policy"),
    [("adamw", BF16, "LEAN_BF16"), ("adamw", BF16, "LEAN_8BIT"), ("soap", F32, None), ("shampoo", F32, None), ("kron", F32, None),
     ("normuon", BF16, "LEAN_BF16"), ("prodigy", F32, None)],
)  # fmt: skip
@pytest.mark.sampled(3)
def test_a_step_is_the_same_in_every_mode(name: Any, dtype: torch.dtype, policy: Any, mode: str) -> None:
    plain = stepped(name, dtype, policy, compile=False, mode=nullcontext)
    found = stepped(name, dtype, policy, compile=False, mode=MODES[mode])
    assert all(map(torch.equal, found, plain))
    assert torch.get_default_dtype() is F32


@pytest.mark.parametrize("mode", ["autocast to float16", "default device meta", "products in bfloat16"])
@pytest.mark.sampled(3)
@pytest.mark.slow
def test_a_compiled_step_is_the_same_in_every_mode(mode: str) -> None:
    plain = stepped("adamw", BF16, "LEAN_BF16", compile=False, mode=nullcontext)
    assert all(map(torch.equal, stepped("adamw", BF16, "LEAN_BF16", compile=True, mode=MODES[mode]), plain))


@pytest.mark.parametrize("mode", MODES)
def test_a_steppers_step_is_the_same_in_every_mode(mode: str) -> None:
    found = []
    for chosen in (nullcontext, MODES[mode]):
        trained = model(BF16)
        stepper = FlatStepper(trained, eb.soap(1e-2), policy="LEAN_BF16", strategy="optim")
        for _ in range(2):
            with stepper.microbatch(last=True):
                trained(torch.ones(3, 8, dtype=BF16)).square().sum().backward()
            with chosen():
                stepper.step()
        found.append([p.detach().clone() for p in trained.parameters()])
        stepper.close()
    assert all(map(torch.equal, *found))


def test_a_closure_runs_in_the_callers_mode() -> None:
    trained = model(F32)
    optimizer, seen = create("adamw", trained, lr=1e-2), []

    def closure() -> float:
        out = trained(torch.ones(3, 8))
        seen.append(out.dtype)
        out.sum().backward()
        return float(out.detach().sum())

    with torch.autocast("cpu", BF16):
        optimizer.step(closure)
        assert torch.is_autocast_enabled("cpu")
    assert seen == [BF16]


@pytest.mark.parametrize("compile", [False, True])
def test_a_pure_step_inside_of_autocast_multiplies_in_float32(compile: bool) -> None:
    optimizer = eb.with_policy(
        eb.chain(eb.orthogonalize(iteration=eb.NewtonSchulz(arithmetic="float32")), eb.scale(0.1)), "FP32"
    )
    params = {"w": torch.linspace(-1, 1, 20).view(5, 4)}
    state = optimizer.init(params)
    torch._dynamo.reset()
    step: Any = torch.compile(optimizer.step, fullgraph=True, backend="eager") if compile else optimizer.step
    plain = optimizer.step(params, params, state)[0]["w"]
    with torch.autocast("cpu", BF16):
        assert torch.equal(step(params, params, state)[0]["w"], plain)
    torch._dynamo.reset()


def test_a_whole_run_under_a_default_device_without_values(tmp_path: Path) -> None:
    """As where a model is made on meta, given memory, and trained before the default is taken back."""
    with setting(torch.set_default_device, "meta", None):
        trained = nn.Linear(4, 4).to_empty(device="cpu")
        nn.init.constant_(trained.weight, 0.5)
        nn.init.zeros_(trained.bias)
        x = torch.ones(2, 4, device="cpu")
        optimizer = create("soap", trained, lr=1e-2, compile=False)
        trained(x).square().sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.load_full_state_dict(optimizer.full_state_dict())
        assert all(x.device.type == "cpu" for x in optimizer.export_fp32()[0])
        with evaluation_weights(optimizer):
            pass
        trained.zero_grad()
        stepper = FlatStepper(trained, eb.adamw(1e-2), policy="FP32", strategy="optim_grads")
        with stepper.microbatch(last=True):
            trained(x).square().sum().backward()
        assert not stepper.step().skipped
        save_sharded(stepper, tmp_path)
        load_sharded(stepper, tmp_path)
        stepper.close()
