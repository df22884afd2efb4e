"""Accelerate: preparing, accumulating, clipping, saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everybit as eb
from everybit_torch import AdamW

accelerate = pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def make(policy: eb.Policy, **arguments: Any) -> tuple[nn.Sequential, AdamW]:
    torch.manual_seed(0)
    dtype = torch.float32 if policy == eb.policies.FP32 else torch.bfloat16
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
    return model, AdamW(model.parameters(), lr=1e-2, policy=policy, **arguments)


def batches(model: nn.Module, steps: int) -> Any:
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(4, 6, generator=generator).to(dtype) for _ in range(steps)]


@pytest.mark.parametrize("name", ["FP32", "LEAN_BF16", "FLOOR_BF16"])
def test_accumulating_and_clipping_gives_the_plain_loops_bits(name: str) -> None:
    policy = eb.policies.PRESETS[name]
    model, optimizer = make(policy)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, prepared = accelerator.prepare(model, optimizer)
    for x in batches(model, 8):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).float().square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            prepared.step()
            prepared.zero_grad()
    plain, reference = make(policy)
    for number, x in enumerate(batches(plain, 8)):
        (plain(x).float().square().mean() / 2).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            reference.step()
            reference.zero_grad()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["FP32", "LEAN_BF16", "KAHAN_BF16"])
def test_save_state_and_load_state_continue_bit_for_bit(name: str, tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: Any, accelerator: Any, xs: Any) -> None:
        for x in xs:
            accelerator.backward(model(x).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()

    policy = eb.policies.PRESETS[name]
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*make(policy))
    xs = batches(model, 6)
    run(model, optimizer, accelerator, xs[:3])
    accelerator.save_state(str(tmp_path / "state"))
    run(model, optimizer, accelerator, xs[3:])
    expected = [p.detach().clone() for p in model.parameters()]

    other = accelerate.Accelerator(cpu=True)
    resumed, again = other.prepare(*make(policy))
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter.add_(1)
    other.load_state(str(tmp_path / "state"))
    run(resumed, again, other, xs[3:])
    for a, b in zip(expected, resumed.parameters(), strict=True):
        assert torch.equal(a, b)
