"""``torch.distributed.checkpoint``'s state dict functions, which go by names and know no optimizer but torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import everybit as eb
from everybit_torch import SGD, AdamW

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

NAMES = ["FP32", "LEAN_BF16", "KAHAN_BF16", "FLOOR_BF16"]


def make(name: str, seed: int = 0, **arguments: Any) -> tuple[nn.Module, AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model = model.to(torch.float32 if name == "FP32" else torch.bfloat16)
    return model, AdamW(model.parameters(), lr=1e-2, policy=eb.policies.PRESETS[name], **arguments)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    for step in steps:
        dtype = next(model.parameters()).dtype
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("layouts", [("flat", "tree"), ("tree", "flat")])
def test_get_and_set_continue_bit_for_bit(name: str, flatten: bool, layouts: tuple[Any, Any]) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = make(name)
    train(model, optimizer, range(3))
    saved: Any = get_optimizer_state_dict(model, optimizer, options=options)
    assert any(key.startswith("state.0.weight") for key in saved) if flatten else "0.weight" in saved["state"]
    other, resumed = make(name, seed=1)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, saved, options=options)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert {k: x.dtype for k, x in optimizer.state[a].items()} == {k: x.dtype for k, x in resumed.state[b].items()}
    expected = train(model, optimizer, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(expected, train(other, resumed, range(3, 6)), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_through_files_on_disk(name: str, tmp_path: Path) -> None:
    model, optimizer = make(name)
    train(model, optimizer, range(3))
    weights, state = get_state_dict(model, optimizer)
    state_dict_saver.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    other, resumed = make(name, seed=1)
    weights, state = get_state_dict(other, resumed)
    into: dict[str, Any] = {"model": weights, "optimizer": state}
    state_dict_loader.load(into, checkpoint_id=tmp_path)
    set_state_dict(other, resumed, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    expected = train(model, optimizer, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(expected, train(other, resumed, range(3, 6)), strict=True))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, resumed.state[b][key])
            assert value.dtype is resumed.state[b][key].dtype


def test_asking_for_the_state_before_the_first_step_counts_a_step_as_it_does_with_torchs_optimizers() -> None:
    """DCP makes state where there is none, by a step with a learning rate of zero and gradients of zero; weights stay."""
    model, optimizer = make("FLOOR_BF16")
    other, _ = make("FLOOR_BF16")
    reference = torch.optim.AdamW(other.parameters())
    ours: Any = get_optimizer_state_dict(model, optimizer)
    theirs: Any = get_optimizer_state_dict(other, reference)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert optimizer.param_groups[0]["lr"] == 1e-2
    for name in theirs["state"]:
        assert int(ours["state"][name]["step"]) == int(theirs["state"][name]["step"]) == 1
        assert not any(
            bool(x.count_nonzero()) for key, x in ours["state"][name].items() if key in ("momentum", "variance")
        )


def test_an_optimizer_without_slots() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    train(model, optimizer, range(2))
    saved: Any = get_optimizer_state_dict(model, optimizer)
    other = nn.Linear(6, 2)
    other.load_state_dict(model.state_dict())
    resumed = SGD(other.parameters(), lr=0.5)
    set_optimizer_state_dict(other, resumed, saved)
    assert resumed.param_groups[0]["lr"] == 0.1
    expected = train(model, optimizer, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(expected, train(other, resumed, range(2, 4)), strict=True))


def test_frozen_parameters() -> None:
    def frozen(seed: int) -> tuple[nn.Module, AdamW]:
        model, _ = make("LEAN_BF16", seed)
        model.get_parameter("0.bias").requires_grad_(False)
        return model, AdamW(model.parameters(), lr=1e-2, policy=eb.policies.LEAN_BF16)

    model, optimizer = frozen(0)
    train(model, optimizer, range(3))
    saved: Any = get_optimizer_state_dict(model, optimizer)
    other, resumed = frozen(1)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, saved)
    expected = train(model, optimizer, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(expected, train(other, resumed, range(3, 6)), strict=True))
