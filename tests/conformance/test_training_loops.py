"""Loops that do more than step: compiled models, autocast, averaged weights swapped in and out, optimizers sent to other processes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import everybit as eb
from everybit_torch import AdamW

NAMES = ["FP32", "LEAN_BF16", "KAHAN_BF16", "FLOOR_BF16"]


def make(name: str, **arguments: Any) -> tuple[nn.Module, AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model = model.to(torch.float32 if name == "FP32" else torch.bfloat16)
    return model, AdamW(model.parameters(), lr=1e-2, policy=eb.policies.PRESETS[name], **arguments)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    for step in steps:
        dtype = next(model.parameters()).dtype
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("name", ["FP32", "LEAN_BF16"])
def test_a_compiled_model(name: str) -> None:
    """The compiled model reads its weights from the optimizer's buffer; the same compiled code, the same bits."""
    results = []
    for arguments in ({}, {"compile": True}):
        torch._dynamo.reset()
        model, optimizer = make(name, **arguments)
        compiled = torch.compile(model)
        results.append(train(compiled, optimizer, range(5)))
    assert same(*results)


@pytest.mark.parametrize("compile", [False, True])
def test_autocast_over_float32_weights_follows_torch(compile: bool) -> None:
    """torch's optimizer is given the same gradients, so that the two differ by their steps alone."""
    model, _ = make("FP32")
    reference, _ = make("FP32")
    mine, theirs = (
        AdamW(model.parameters(), lr=1e-2, compile=compile),
        torch.optim.AdamW(reference.parameters(), lr=1e-2),
    )
    for step in range(5):
        mine.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).float().square().mean()
        loss.backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert p.grad is not None
            assert p.grad.dtype is torch.float32
            q.grad = p.grad.clone()
        mine.step()
        theirs.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        # Five steps, each within a few units in the last place of torch's, on weights below 1.
        torch.testing.assert_close(a, b, rtol=0, atol=5 * 4 * 2**-24)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["copy_", "load_state_dict", "data"])
@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_averaged_weights_may_be_swapped_in_for_a_while(name: str, how: str, alone: bool) -> None:
    model, optimizer = make(name)
    plain, reference = make(name)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    x = torch.ones(1, 6, dtype=next(model.parameters()).dtype)
    for step in range(6):
        train(model, optimizer, range(step, step + 1))
        train(plain, reference, range(step, step + 1))
        average.update_parameters(model)
        if how == "data":
            backup: Any = [p.data for p in model.parameters()]
            for p, q in zip(model.parameters(), average.module.parameters(), strict=True):
                p.data = q.data
        elif how == "copy_":
            backup = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for p, q in zip(model.parameters(), average.module.parameters(), strict=True):
                    p.copy_(q)
        else:
            backup = {key: value.clone() for key, value in model.state_dict().items()}
            model.load_state_dict(average.module.state_dict())
        assert torch.equal(model(x), average.module(x))
        if how == "data":
            for p, b in zip(model.parameters(), backup, strict=True):
                p.data = b
        elif how == "copy_":
            with torch.no_grad():
                for p, b in zip(model.parameters(), backup, strict=True):
                    p.copy_(b)
        else:
            model.load_state_dict(backup)
        assert same([p.detach() for p in model.parameters()], [p.detach() for p in plain.parameters()])
    assert same(optimizer.export_fp32()[0], reference.export_fp32()[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_a_model_that_goes_on_from_its_average(name: str, alone: bool) -> None:
    """The average is written into the model for good: it is what the optimizer steps, without what residuals held of other weights."""
    model, optimizer = make(name)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))  # type: ignore[no-untyped-call]
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        average.update_parameters(model)
    model.load_state_dict(average.module.state_dict())
    optimizer.zero_grad()
    (weights,) = optimizer.export_fp32()
    for weight, p in zip(weights, average.module.parameters(), strict=True):
        # Where the average equals the weight, its residual still fits; elsewhere it is dropped. Half a unit in the last place at most.
        torch.testing.assert_close(
            weight, p.detach().float(), rtol=0 if name in ("FP32", "FLOOR_BF16") else 2**-8, atol=0
        )
    after = train(model, optimizer, range(3, 6))
    assert all(bool(x.isfinite().all()) for x in after)
    moved = [
        (a.float() - p.detach().float()).abs().max() for a, p in zip(after, average.module.parameters(), strict=True)
    ]
    # Three steps of lr 1e-2 and Adam, whose steps with betas (0.9, 0.999) are below 1.1 * lr once it has run for a while.
    assert max(float(m) for m in moved) < 5e-2


def _elsewhere(pickled: bytes, queue: Any) -> None:
    torch.set_num_threads(1)
    model, optimizer = pickle.loads(pickled)
    weights = train(model, optimizer, range(3, 6))
    queue.put(
        {"weights": [w.float().tolist() for w in weights], "steps": int(optimizer.state_dict()["state"][0]["step"])}
    )


@pytest.mark.parametrize("name", ["FP32", "FLOOR_BF16"])
def test_an_optimizer_goes_on_in_another_process(name: str) -> None:
    """Sent as bytes, so that no memory is shared."""
    model, optimizer = make(name)
    train(model, optimizer, range(3))
    optimizer.zero_grad()
    context = multiprocessing.get_context("spawn")
    queue: Any = context.SimpleQueue()
    child = context.Process(target=_elsewhere, args=(pickle.dumps((model, optimizer)), queue))
    child.start()
    result = queue.get()
    child.join()
    assert child.exitcode == 0
    expected = [w.float().tolist() for w in train(model, optimizer, range(3, 6))]
    assert result == {"weights": expected, "steps": 6}


def _train_shared(model: nn.Module) -> None:
    torch.set_num_threads(1)
    optimizer = AdamW(model.parameters(), lr=1e-2, policy=eb.policies.FLOOR_BF16)
    train(model, optimizer, range(3))
    optimizer.zero_grad()


def test_a_shared_model_stays_shared() -> None:
    """Hogwild: what a process steps, the others see."""
    model, _ = make("FLOOR_BF16")
    expected, reference = make("FLOOR_BF16")
    train(expected, reference, range(3))
    model.share_memory()
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_train_shared, args=(model,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert same([p.detach() for p in model.parameters()], [p.detach() for p in expected.parameters()])


def test_a_model_that_is_shared_after_the_first_step_stays_shared() -> None:
    model, optimizer = make("FP32")
    plain, reference = make("FP32")
    train(model, optimizer, range(1))
    train(plain, reference, range(1))
    model.share_memory()
    train(model, optimizer, range(1, 3))
    train(plain, reference, range(1, 3))
    assert all(p.is_shared() for p in model.parameters())  # type: ignore[no-untyped-call]
    assert same([p.detach() for p in plain.parameters()], [p.detach() for p in model.parameters()])
