"""A format with one number for a block of elements in TorchOptimizer: every layout, compiled, saved, loaded, moved to other policies."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import everybit as eb
from everybit_torch import AdamW, TorchOptimizer, audit_checkpoint, nonfinite_state
from tests.support.block_formats import Int8Blocks, Int8Residual

POLICY = eb.Policy(params=Int8Residual(), momentum=Int8Blocks(), variance=Int8Blocks(16))
BLOCKWISE = eb.Policy(
    params=eb.Split(8, rounding="stochastic"),
    momentum=eb.Blockwise("float", block=32),
    variance=eb.Blockwise("root", 4, 32, scale="bfloat16"),
)
SHAPES = [(7, 9), (9,), (64,), (3, 32), (), (5, 33)]


def parameters(shapes: list[tuple[int, ...]]) -> list[torch.nn.Parameter]:
    values = [torch.sin(torch.arange(torch.Size(shape).numel()) + 1.0).view(shape) for shape in shapes]
    return [torch.nn.Parameter(value.to(torch.bfloat16)) for value in values]


def gradient(p: Tensor, number: int, step: int) -> Tensor:
    return torch.cos(torch.arange(p.numel()) * (number + 1.0) + step).view(p.shape).to(p.dtype)


def train(optimizer: TorchOptimizer, steps: range) -> None:
    for step in steps:
        for number, p in enumerate(optimizer.param_groups[0]["params"]):
            p.grad = gradient(p, number, step)
        optimizer.step()


def stored(optimizer: TorchOptimizer) -> list[Tensor]:
    values = [x for entries in optimizer.state_dict()["state"].values() for x in entries.values()]
    return [p.detach().clone() for p in optimizer.param_groups[0]["params"]] + [x.clone() for x in values]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def core(shapes: list[tuple[int, ...]], steps: int, policy: eb.Policy = POLICY) -> tuple[list[Tensor], Any]:
    params: list[Tensor] = [p.detach() for p in parameters(shapes)]
    optimizer = eb.with_policy(eb.adamw(0.01), policy)
    state = optimizer.init(params)
    for step in range(steps):
        params, state = optimizer.step(params, [gradient(p, n, step) for n, p in enumerate(params)], state)
    return params, state


@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_every_layout_steps_as_the_core_does_and_resumes(alone: bool) -> None:
    made = TorchOptimizer(parameters(SHAPES), eb.adamw, lr=0.01, policy=POLICY)
    train(made, range(3))
    params, state = core(SHAPES, 3)
    assert same(made.param_groups[0]["params"], params)
    adam = next(one for one in state.inner.states if hasattr(one, "variance"))
    for number, entries in made.state_dict()["state"].items():
        codes, scale = adam.momentum[number]
        assert torch.equal(entries["momentum"], codes)
        assert torch.equal(entries["momentum.scale"], scale)
        assert entries["variance.scale"].numel() == -(-params[number].numel() // 16)
        assert entries["param.scale"].numel() == -(-params[number].numel() // 32)
    file = io.BytesIO()
    torch.save({"state": made.state_dict(), "model": list(made.param_groups[0]["params"])}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    fresh = parameters(SHAPES)
    for p, value in zip(fresh, loaded["model"], strict=True):
        p.data.copy_(value)
    again = TorchOptimizer(fresh, eb.adamw, lr=0.01, policy=POLICY)
    again.load_state_dict(loaded["state"])
    train(made, range(3, 5))
    train(again, range(3, 5))
    assert same(stored(made), stored(again))


@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_blockwise_state_is_that_of_the_core_in_every_layout_saved_and_loaded(alone: bool) -> None:
    made = TorchOptimizer(parameters(SHAPES), eb.adamw, lr=0.01, policy=BLOCKWISE)
    train(made, range(3))
    params, state = core(SHAPES, 3, BLOCKWISE)
    assert same(made.param_groups[0]["params"], params)
    adam = next(one for one in state.inner.states if hasattr(one, "variance"))
    for number, entries in made.state_dict()["state"].items():
        for name, part in zip(("variance", "variance.scale"), adam.variance[number], strict=True):
            assert entries[name].dtype is part.dtype
            assert torch.equal(entries[name], part)
    fresh = parameters(SHAPES)
    for p, value in zip(fresh, params, strict=True):
        p.data.copy_(value)
    again = TorchOptimizer(fresh, eb.adamw, lr=0.01, policy=BLOCKWISE)
    again.load_state_dict(made.state_dict())
    train(made, range(3, 5))
    train(again, range(3, 5))
    assert same(stored(made), stored(again))


@pytest.mark.parametrize("factory", [eb.stable_adamw, eb.lamb])
def test_reductions_decode_second_moments_as_such(factory: Any) -> None:
    """e5m3 and e4m3 are other numbers. In pieces of a block, whose sums are added in another order than the core's."""
    made = TorchOptimizer(parameters(SHAPES), factory, lr=0.01, policy=BLOCKWISE)
    whole = eb.with_policy(factory(0.01), BLOCKWISE)
    params: list[Tensor] = [p.detach().clone() for p in parameters(SHAPES)]
    state = whole.init(params)
    for step in range(3):
        train(made, range(step, step + 1))
        params, state = whole.step(params, [gradient(p, n, step) for n, p in enumerate(params)], state)
    assert same(made.param_groups[0]["params"], params)


def test_a_number_that_is_not_finite_spoils_its_block_alone_and_is_reported_by_name(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 4)).to(torch.bfloat16)
    optimizer = AdamW(model.named_parameters(), lr=0.01, policy=BLOCKWISE)
    for step in range(2):
        for number, p in enumerate(model.parameters()):
            p.grad = gradient(p, number, step)
        if step:
            spoiled = next(iter(model.parameters())).grad
            assert spoiled is not None
            spoiled[3, 5] = torch.inf
        optimizer.step()
    full = optimizer.full_state_dict()["state"]
    for entries in full.values():
        for slot in ("momentum", "variance"):
            is_nan = entries[slot].isnan()
            first = entries[slot].shape == (16, 32)
            assert int(is_nan.sum()) == (32 if first else 0)
            assert not first or bool(is_nan[3].all())
    told = [(one.name, one.entry, one.count) for one in nonfinite_state(optimizer)]
    assert told == [("0.weight", "param", 1), ("0.weight", "momentum.scale", 32), ("0.weight", "variance.scale", 32)]
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    layers = {layer.name: layer.nonfinite for layer in audit_checkpoint(path, policy=BLOCKWISE)}
    assert layers == {
        "0.weight": dict.fromkeys(("gradient", "weights", "momentum", "variance"), 32),
        "0.bias": {},
        "1.weight": {},
        "1.bias": {},
    }


def test_a_long_buffer_is_stepped_in_pieces_that_end_at_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for piece in (1 << 17, 50):
        monkeypatch.setattr("everybit_torch.segments.segment.PIECE", piece)
        monkeypatch.setattr("everybit_torch.segments.segment.CHUNK", piece)
        optimizer = TorchOptimizer(parameters([(64,), (3, 32), (5, 33)]), eb.adamw, lr=0.01, policy=POLICY)
        train(optimizer, range(3))
        found.append(stored(optimizer))
    assert same(*found)


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(POLICY, marks=pytest.mark.exhaustive, id="own"),
        pytest.param(BLOCKWISE, marks=pytest.mark.exhaustive, id="Blockwise"),
        pytest.param(eb.Policy(momentum=eb.Blockwise("float", block=32)), id="momentum"),
    ],
)
@pytest.mark.slow
def test_compiled_gives_the_uncompiled_bits_where_blocks_are_whole_and_where_they_are_not(policy: eb.Policy) -> None:
    found = []
    for compile in (False, True):
        optimizer = TorchOptimizer(
            parameters([(64,), (3, 32), (5, 33)]), eb.lion, lr=0.01, policy=policy, compile=compile
        )
        train(optimizer, range(2))
        found.append(stored(optimizer))
    assert same(*found)


def test_full_precision_carries_it_to_another_policy_and_back() -> None:
    optimizer = TorchOptimizer(parameters(SHAPES), eb.adamw, lr=0.01, policy=POLICY)
    train(optimizer, range(2))
    full = optimizer.full_state_dict()
    assert set(full["state"][0]) == {"step", "param", "momentum", "variance", "inner.step"}
    assert full["state"][0]["momentum"].shape == (7, 9)
    other = TorchOptimizer(parameters(SHAPES), eb.adamw, lr=0.01, policy=eb.policies.EXACT_BF16)
    losses = other.load_full_state_dict(full)
    assert {str(loss) for loss in losses.values()} == {"exact"}
    back = TorchOptimizer(parameters(SHAPES), eb.adamw, lr=0.01, policy=POLICY)
    back.load_full_state_dict(other.full_state_dict())
    again = back.full_state_dict()
    for number, entries in full["state"].items():
        for name, value in entries.items():
            # Codes of what codes stand for: the largest of a block, and so its scale, may be another by float32's rounding.
            torch.testing.assert_close(again["state"][number][name], value, rtol=2e-6, atol=1e-9)


def test_state_of_other_blocks_is_refused_by_name_and_nothing_changes() -> None:
    optimizer = TorchOptimizer(parameters(SHAPES), eb.adamw, lr=0.01, policy=POLICY)
    train(optimizer, range(1))
    saved = optimizer.state_dict()
    policy = eb.Policy(params=Int8Residual(), momentum=Int8Blocks(16), variance=Int8Blocks(16))
    other = TorchOptimizer(parameters(SHAPES), eb.adamw, lr=0.01, policy=policy)
    before = stored(other)
    with pytest.raises(
        ValueError, match=r"parameter 0, 'momentum.scale': got .*\(2,\); accepted is torch.float32 of shape \(4,\)"
    ):
        other.load_state_dict(saved)
    assert same(before, stored(other))
