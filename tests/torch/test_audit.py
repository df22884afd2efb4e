"""An audit says what a step lost, against the same step in float64, and changes nothing."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import AdamW, Audit, LayerAudit, TorchOptimizer, enable_gradient_release, load_audit


def model_of(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)).to(dtype)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        x = torch.randn(8, 16, generator=generator).to(dtype)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-4}),
    (torch.optim.AdamW, {"lr": 1e-4, "fused": True, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "nesterov": True}),
    (torch.optim.RMSprop, {"lr": 1e-4, "foreach": True}),
    (torch.optim.Adafactor, {"lr": 1e-3}),
]


@pytest.mark.parametrize(("kind", "arguments"), OPTIMIZERS)
def test_lost_updates_and_edq_are_those_of_the_same_step_in_float64(
    kind: type[torch.optim.Optimizer], arguments: dict[str, Any]
) -> None:
    """The oracle: a model and an optimizer of the same kind in float64 that load what was there before the step."""
    model = model_of(torch.bfloat16)
    optimizer = kind(model.parameters(), **arguments)
    train(model, optimizer, 5)
    before = [p.detach().clone() for p in model.parameters()]
    wide = copy.deepcopy(model).double()
    for p, q in zip(wide.parameters(), model.parameters(), strict=True):
        p.grad = None if q.grad is None else q.grad.double()
    oracle = kind(wide.parameters(), **arguments)
    oracle.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    oracle.step()
    audit = Audit(model, optimizer)
    optimizer.step()
    assert [layer.name for layer in audit.layers] == [name for name, _ in model.named_parameters()]
    for layer, old, new, meant in zip(audit.layers, before, model.parameters(), wide.parameters(), strict=True):
        intended = meant.detach() - old.double()
        change = new.detach().double() - old.double()
        moved = intended != 0
        assert (layer.stored, layer.stochastic) == ("bfloat16", False)
        assert layer.lost_share == pytest.approx(float((moved & (change == 0)).sum() / moved.sum()), abs=1e-12)
        assert layer.edq == pytest.approx(float((change * intended).sum() / intended.square().sum()), rel=1e-9)
        kept = (old.double() + intended).float().double() == old.double()
        assert layer.mended_lost_share == pytest.approx(float((moved & kept).sum() / moved.sum()), abs=1e-12)
        assert layer.nonfinite == {}


def test_a_second_moment_that_stopped_is_found_and_one_that_moves_is_not() -> None:
    """Near its mean a second moment of decay rate 0.999 is to change by less than half a step of bfloat16, and one of 0.9 by more."""
    shares = {}
    for beta in (0.9, 0.999):
        model = model_of(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, beta))
        train(model, optimizer, 1)
        weight = next(model.parameters())
        assert weight.grad is not None
        optimizer.state[weight]["exp_avg_sq"].copy_(1.5 * weight.grad.square())  # to fall by a third of 1 - beta
        audit = Audit(model, optimizer)
        optimizer.step()
        shares[beta] = audit.layers[0].frozen["exp_avg_sq"]
    assert shares == {0.9: 0.0, 0.999: 1.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_has_the_same_bits_with_an_audit(dtype: torch.dtype) -> None:
    found: list[list[Tensor]] = []
    for audited in (False, True):
        model = model_of(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=10)
        audit = Audit(model, optimizer, every=2) if audited else None
        train(model, optimizer, 6, scheduler)
        if audit is not None:
            assert sorted({layer.step for layer in audit.layers}) == [1, 3, 5]
            audit.remove()
            train(model, optimizer, 1, scheduler)
            assert {layer.step for layer in audit.layers} == {1, 3, 5}
        else:
            train(model, optimizer, 1, scheduler)
        found.append([p.detach().clone() for p in model.parameters()])
        state = optimizer.state_dict()["state"]
        found[-1] += [entry["exp_avg_sq"] for entry in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_float32_training_loses_nothing() -> None:
    model = model_of(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    audit = Audit(model, optimizer, every=5)
    train(model, optimizer, 10)
    assert len(audit.layers) == 2 * len(list(model.parameters()))
    for layer in audit.layers:
        assert layer.edq == pytest.approx(1.0, abs=1e-4)
        assert layer.frozen == {}


def test_infinite_numbers_are_counted_by_what_they_are_in() -> None:
    model = nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    audit = Audit(model, optimizer)
    model.weight.grad = torch.tensor([[1.0, float("inf"), float("nan"), 0.0]], dtype=torch.bfloat16)
    optimizer.step()
    assert audit.layers[0].nonfinite == {"gradient": 2, "weights": 2, "momentum_buffer": 2}


def test_a_parameter_without_a_gradient_is_left_out() -> None:
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    optimizer = torch.optim.AdamW(model.parameters())
    audit = Audit(model, optimizer)
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert [layer.name for layer in audit.layers] == ["0.weight"]


PRESETS = ["FP32", "EXACT_BF16", "LEAN_BF16", "KAHAN_BF16", "FLOOR_BF16", "PURE_BF16"]


@pytest.mark.parametrize("preset", PRESETS)
def test_of_everybits_optimizer_it_is_what_the_optimizer_measures_itself(preset: str) -> None:
    """Metrics are of all parameters together and of updates in float32, which differ from those in float64 by 1e-4 of their size."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False, dtype=torch.float32 if preset == "FP32" else torch.bfloat16)
    policy = eb.policies.PRESETS[preset]
    optimizer = TorchOptimizer(
        model.parameters(), eb.adamw, lr=1e-5, policy=policy, metrics=True, compile=False, unsafe="allow"
    )
    audit = Audit(model, optimizer, every=3)
    for number in range(4):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number)).to(model.weight.dtype)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()
    (_, layer), metrics = audit.layers, optimizer.metrics()
    assert (layer.step, layer.name, layer.stochastic) == (4, "weight", preset == "FLOOR_BF16")
    assert layer.lost_share == pytest.approx(float(metrics.lost_share), abs=1e-12)
    assert layer.edq == pytest.approx(float(metrics.edq), rel=1e-4)
    assert set(layer.frozen) == ({"momentum", "variance"} if preset == "PURE_BF16" else set())


def test_of_everybits_optimizer_it_is_what_it_is_of_torchs_where_both_store_the_same() -> None:
    """Everything rounded to nearest in bfloat16, as torch does; after a first step, before which neither has a state."""
    audits = []
    for mine in (False, True):
        model = model_of(torch.bfloat16)
        optimizer: torch.optim.Optimizer = (
            TorchOptimizer(
                model.named_parameters(),
                eb.adamw,
                lr=1e-4,
                policy=eb.policies.PURE_BF16,
                weight_decay=0.01,
                compile=False,
                unsafe="allow",
            )
            if mine
            else torch.optim.AdamW(model.named_parameters(), lr=1e-4)
        )
        audits.append(Audit(model, optimizer))
        train(model, optimizer, 1)
    for ours, theirs in zip(*(audit.layers for audit in audits), strict=True):
        assert ours.name == theirs.name
        assert ours.mended_lost_share == theirs.mended_lost_share
        # Some updates are near half a unit in the last place, where a rounding of the arithmetic before decides.
        assert ours.lost_share == pytest.approx(theirs.lost_share, abs=2 / ours.elements)


def test_training_with_everybits_optimizer_has_the_same_bits_with_an_audit() -> None:
    """Several groups, a clip over all of them, and state that has to be whole; one parameter without a gradient."""
    found = []
    for audited in (False, True):
        model = model_of(torch.bfloat16)
        idle = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        model.register_parameter("idle", idle)
        weights = [p for p in model.parameters() if p.ndim > 1]
        groups: list[dict[str, Any]] = [
            {"params": weights, "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2]},
        ]
        optimizer = TorchOptimizer(
            groups,
            lambda learning_rate=1e-3, weight_decay=0.0: eb.chain(
                eb.clip_by_global_norm(0.1), eb.adamw(learning_rate, weight_decay=weight_decay)
            ),
            policy=eb.policies.FLOOR_BF16, lr=1e-3, weight_decay=0.0, compile=False,
        )  # fmt: skip
        audit = Audit(model, optimizer, every=2) if audited else None
        train(model, optimizer, 5)
        if audit is not None:
            assert {layer.step for layer in audit.layers} == {1, 3, 5}
            assert "idle" not in {layer.name for layer in audit.layers}
            assert all(layer.stochastic for layer in audit.layers)
        found.append([p.detach().clone() for p in model.parameters()] + optimizer.export_fp32()[0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_it_is_saved_and_read_again(tmp_path: Path) -> None:
    model = model_of(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    audit = Audit(model, optimizer)
    train(model, optimizer, 1)
    audit.save(tmp_path / "new" / "audit.json")
    assert load_audit(tmp_path / "new" / "audit.json") == audit.layers
    assert isinstance(audit.layers[0], LayerAudit)
    for content in ("nothing", "[]", json.dumps({"format": 1}), json.dumps({"kind": "everybit audit", "format": 99})):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(ValueError, match=r"other\.json: got .*; accepted is a file that Audit\.save wrote"):
            load_audit(tmp_path / "other.json")


def test_what_cannot_be_audited_is_refused() -> None:
    model = model_of(torch.bfloat16)
    theirs = torch.optim.AdamW(model.parameters())
    mine = AdamW(model.parameters(), policy=eb.policies.LEAN_BF16)
    enable_gradient_release(model, mine)
    Audit(model, mine)
    with pytest.raises(RuntimeError, match=r"audit: got an optimizer that steps during the backward pass"):
        mine.step()
    with pytest.raises(TypeError, match="optimizer: got int; accepted"):
        Audit(model, 3)  # type: ignore[arg-type]
    for every in (0, True, 1.5):
        with pytest.raises(ValueError, match=r"every: got .*; accepted is a whole number, at least 1"):
            Audit(model, theirs, every=every)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optimizer: got 2 parameters that are not the model's"):
        Audit(model, torch.optim.SGD(nn.Linear(2, 2).parameters()))
    for first in (0, True):
        with pytest.raises(ValueError, match=r"first: got .*; accepted is a whole number, at least 1"):
            Audit(model, theirs, first=first)
