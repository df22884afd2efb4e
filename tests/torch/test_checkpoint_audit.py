"""An audit of a checkpoint is that of the next step, with the momentum in the place of the gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everybit as eb
from everybit_torch import SGD, AdamW, Audit, LayerAudit, audit_checkpoint


def model_of(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, 16, generator=generator).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()


Make = Callable[[Any], torch.optim.Optimizer]
MADE: dict[str, tuple[Make, str, str | None]] = {
    "torch AdamW": (lambda p: torch.optim.AdamW(p, lr=1e-5), "exp_avg", None),
    "torch SGD": (lambda p: torch.optim.SGD(p, lr=1e-5, momentum=0.9), "momentum_buffer", None),
    "AdamW": (lambda p: AdamW(p, lr=1e-5, policy=eb.policies.KAHAN_BF16, compile=False), "momentum", "KAHAN_BF16"),
    "SGD": (
        lambda p: SGD(p, lr=1e-5, momentum=0.9, policy=eb.policies.LEAN_BF16, compile=False), "momentum", "LEAN_BF16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_it_is_the_audit_of_a_step_with_the_momentum_as_gradient(name: str, tmp_path: Path) -> None:
    make, momentum, policy = MADE[name]
    model = model_of()
    optimizer = make(model.named_parameters())
    train(model, optimizer)
    contents = {"epoch": 3, "net": model.state_dict(), "optim": optimizer.state_dict()}
    torch.save(contents, tmp_path / "checkpoint.pt")
    before = copy.deepcopy(contents)
    found = audit_checkpoint(tmp_path / "checkpoint.pt", policy=None if policy is None else eb.policies.PRESETS[policy])
    for parameter in model.parameters():
        parameter.grad = optimizer.state[parameter][momentum].detach().to(parameter.dtype).clone()
    expected = Audit(model, optimizer)
    optimizer.step()
    # SGD of torch does not count its steps.
    assert [layer.step for layer in found] == [1 if name == "torch SGD" else 6] * 6
    assert [stripped(layer) for layer in found] == [stripped(layer) for layer in expected.layers]
    assert any(layer.lost_share > layer.mended_lost_share for layer in found) == (policy != "LEAN_BF16")
    again = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert all(torch.equal(x, before["net"][key]) for key, x in again["net"].items())  # type: ignore[index]


def stripped(layer: LayerAudit) -> tuple[Any, ...]:
    return layer.name, layer.stored, layer.lost_share, layer.edq, layer.mended_lost_share, layer.frozen, layer.nonfinite


def test_without_names_parameters_are_told_by_order_and_shape(tmp_path: Path) -> None:
    """Tied weights are one parameter, and statistics of normalization are none."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model_of()
            self.head = nn.Linear(16, 32, bias=False)
            self.head.weight = self.body[0].weight  # type: ignore[assignment]

    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    train(model.body, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "one.pt")
    found = audit_checkpoint(tmp_path / "one.pt")
    assert [layer.name for layer in found] == [name for name, _ in model.named_parameters()]
    named = torch.optim.AdamW(model.named_parameters(), lr=1e-5)
    named.load_state_dict(optimizer.state_dict())
    torch.save({"model": model.state_dict(), "optimizer": named.state_dict()}, tmp_path / "two.pt")
    assert audit_checkpoint(tmp_path / "two.pt") == found


def refused(tmp_path: Path, contents: Any, match: str, **arguments: Any) -> None:
    torch.save(contents, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=match):
        audit_checkpoint(tmp_path / "checkpoint.pt", **arguments)


def test_what_cannot_be_audited_is_refused_with_what_is_accepted(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    train(model, optimizer)
    saved, weights = optimizer.state_dict(), model.state_dict()
    refused(tmp_path, {"model": weights}, "optimizer_key: got 0 that could be it .* accepted is a file that has one")
    both = {"model": weights, "ema": weights, "optimizer": saved}
    refused(tmp_path, both, "model_key: got 2 that could be it .* accepted is one of 'model', 'ema'")
    assert audit_checkpoint(tmp_path / "checkpoint.pt", model_key="ema")
    refused(tmp_path, both, "model_key: got 'emo' for the model's state dict", model_key="emo")
    one = {"model": weights, "optimizer": saved}
    refused(tmp_path, one, r"optimizer: got 'AdamWW' \(did you mean AdamW\?\); accepted are .*SGD", optimizer="AdamWW")
    refused(tmp_path, one, "policy: got one for a state dict of torch.optim's form", policy=eb.policies.LEAN_BF16)
    plain = torch.optim.SGD(model.parameters(), lr=1e-5)
    plain.step()
    refused(
        tmp_path, {"model": weights, "optimizer": plain.state_dict()}, "got a state of .*; accepted is a state with"
    )
    frozen = {name: x for name, x in weights.items() if name != "0.bias"} | {
        "other": torch.zeros(32),
        "more": torch.zeros(32),
    }
    refused(
        tmp_path, {"model": frozen, "optimizer": saved}, "got 3 parameters of shape .*, 4 in the model, and no names"
    )
    mine = AdamW(model.parameters(), lr=1e-5, policy=eb.policies.LEAN_BF16, compile=False)
    train(model, mine)
    own = {"model": weights, "optimizer": mine.state_dict()}
    refused(tmp_path, own, "policy: got None for an optimizer of everybit; accepted is that of the run")
    refused(tmp_path, own, "accepted", policy=eb.policies.EXACT_BF16)  # its moments are float32
    with pytest.raises(FileNotFoundError):
        audit_checkpoint(tmp_path / "absent.pt")
