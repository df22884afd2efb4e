"""Clips: ``clip_grad_norm_`` where gradients are not in ``.grad``, torch's function, which is noticed, and clips in chains."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import everybit as eb
from everybit_torch import AdamW, FlatStepper, TorchOptimizer, enable_gradient_release, load_sharded, save_sharded

X = torch.linspace(-1.0, 2.0, 12).view(3, 4)


def model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))


def backward(module: nn.Module) -> None:
    loss: Tensor = 10 * module(X).square().sum()
    loss.backward()  # type: ignore[no-untyped-call]


def norm_of(module: nn.Module) -> float:
    twin = copy.deepcopy(module).double()
    found: Tensor = 10 * twin(X.double()).square().sum()
    found.backward()  # type: ignore[no-untyped-call]
    return math.sqrt(sum(float(p.grad.square().sum()) for p in twin.parameters() if p.grad is not None))


@pytest.mark.parametrize("strategy", range(3))
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_stepper_clips_as_torch_does(strategy: Any, norm_type: float) -> None:
    ours, theirs = model(), model()
    stepper = FlatStepper(ours, eb.adamw(1e-2, eps=1.0), strategy=strategy)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, eps=1.0)
    for _ in range(3):
        with stepper.microbatch(last=True):
            backward(ours)
        found = stepper.clip_grad_norm_(0.3, norm_type)
        stepper.step()
        optimizer.zero_grad()
        backward(theirs)
        expected = clip_grad_norm_(theirs.parameters(), 0.3, norm_type)
        optimizer.step()
        # Three steps of a network of two layers in float32, whose sums have at most 12 terms.
        assert float(found) == pytest.approx(float(expected), rel=64 * 2.0**-24)
    stepper.close()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=64 * 2.0**-24)


@pytest.mark.parametrize("strategy", range(3))
def test_torchs_function_on_a_steppers_model_warns_once_and_not_after_close(strategy: Any) -> None:
    module = model()
    stepper = FlatStepper(module, eb.sgd(0.1), strategy=strategy)
    with stepper.microbatch(last=True):
        backward(module)
    with pytest.warns(UserWarning, match=r"^clip_grad_norm_: call stepper\.clip_grad_norm_\(max_norm\)") as caught:
        assert clip_grad_norm_(module.parameters(), 1.0) == 0
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip_grad_norm_(module.parameters(), 1.0)
        stepper.step()
        stepper.close()
        backward(module)
        assert clip_grad_norm_(module.parameters(), 1.0) > 0


def test_a_release_measures_its_own_norm_and_clips_by_the_one_before() -> None:
    module = model()
    optimizer = AdamW(module.parameters(), lr=1e-2)
    release = enable_gradient_release(module, optimizer, max_norm=1.0)
    norms = []
    for _ in range(3):
        expected = norm_of(module)
        backward(module)
        found = release.clip_grad_norm_(1.0)
        optimizer.step()
        norms.append(float(found))
        assert float(found) == pytest.approx(expected, rel=64 * 2.0**-24)
        assert release.norm is not None
        assert float(release.norm) == float(found)
    assert len(set(norms)) == 3


def test_a_release_without_a_norm_says_how_to_get_one_and_torchs_function_is_noticed() -> None:
    module = model()
    optimizer = AdamW(module.parameters())
    release = enable_gradient_release(module, optimizer)
    backward(module)
    with pytest.raises(RuntimeError, match=r"^clip_grad_norm_: pass max_norm=\.\.\. to enable_gradient_release"):
        release.clip_grad_norm_(1.0)
    with pytest.warns(UserWarning, match=r"^clip_grad_norm_: call release\.clip_grad_norm_\(max_norm\)"):
        assert clip_grad_norm_(module.parameters(), 1.0) == 0
    optimizer.step()
    release.remove()
    backward(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert clip_grad_norm_(module.parameters(), 1.0) > 0


def test_other_models_are_left_alone() -> None:
    FlatStepper(model(), eb.sgd(0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert clip_grad_norm_(model().parameters(), 1.0) == 0


@pytest.mark.parametrize("strategy", range(3))
def test_a_closed_stepper_refuses_to_go_on(strategy: Any, tmp_path: Any) -> None:
    module = model()
    stepper = FlatStepper(module, eb.sgd(0.1), strategy=strategy)
    save_sharded(stepper, tmp_path / "before")
    stepper.close()
    before = [p.detach().clone() for p in module.parameters()]
    calls: dict[str, Callable[[], Any]] = {
        "microbatch": lambda: stepper.microbatch(last=True).__enter__(),
        "no_sync": lambda: stepper.no_sync().__enter__(),
        "step": stepper.step,
        "finish_gradients": stepper.finish_gradients,
        "save_sharded": lambda: save_sharded(stepper, tmp_path / "after"),
        "load_sharded": lambda: load_sharded(stepper, tmp_path / "before"),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=rf"^{name}: make a new FlatStepper of the model\. This one was closed"):
            call()
    stepper.close()
    assert all(torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True))


INNER: dict[str, Callable[[], Any]] = {
    "adamw": lambda: eb.adamw(1e-2),
    "soap": lambda: eb.soap(1e-2),
    "shampoo": lambda: eb.shampoo(1e-2),
    "adafactor": lambda: eb.adafactor(1e-2),
    "nested": lambda: eb.chain(eb.scale_by_adam(), eb.chain(eb.add_decayed_weights(0.1), eb.scale(-1e-2))),
}


def clipped(inner: Callable[[], Any]) -> Any:
    return eb.chain(eb.clip_by_global_norm(1e9), inner())


# Factors in 4 bits are refused.
CASES = [
    (i, p) for i in INNER for p in ("LEAN_8BIT", "FLOOR_8BIT", "LEAN_4BIT") if (i, p) != ("adafactor", "LEAN_4BIT")
]


@pytest.mark.parametrize(("inner", "policy"), CASES)
@pytest.mark.parametrize("shape", ["contiguous", "transposed", "channels last"])
@pytest.mark.sampled(3)
@pytest.mark.sampled(3)
def test_a_clip_that_clips_nothing_changes_no_bit(inner: str, policy: Any, shape: str) -> None:
    def stepped(make: Callable[[], Any]) -> Tensor:
        torch.manual_seed(0)
        p = {
            "contiguous": lambda: nn.Parameter(torch.randn(16, 32).bfloat16()),
            "transposed": lambda: nn.Parameter(torch.randn(32, 16).bfloat16().t()),
            "channels last": lambda: nn.Parameter(
                torch.randn(8, 3, 3, 3).bfloat16().to(memory_format=torch.channels_last)
            ),
        }[shape]()
        optimizer = TorchOptimizer([p], make, policy=policy, compile=False)
        for step in range(3):
            p.grad = torch.full_like(p, 0.5 + step)
            optimizer.step()
        return p.detach()

    expected = stepped(INNER[inner])
    # A factor of 1 is multiplied by; random bits belong to the same elements.
    assert torch.equal(stepped(lambda: clipped(INNER[inner])), expected)
