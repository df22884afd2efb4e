"""State in the host's memory: the bits of a step without it, through two slots of bounded size. Here without a device, and its copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import everybit as eb
from everybit.policies import PolicyName
from everybit_torch import (
    AdamW,
    FlatStepper,
    TorchOptimizer,
    create,
    enable_gradient_release,
    evaluation_weights,
    load_sharded_into,
    nonfinite_state,
    save_sharded,
)
from everybit_torch.audit.layers import audit_step
from everybit_torch.segments import HostState, host_state
from tests.support.small_models import Awkward, give_gradients, same_bits, train, values
from tests.support.stream_order import Streams

POLICIES: tuple[PolicyName, ...] = (
    "FP32",
    "EXACT_BF16",
    "LEAN_BF16",
    "FLOOR_BF16",
    "KAHAN_BF16",
    "LEAN_8BIT",
    "LEAN_4BIT",
)


def clipped(learning_rate: float = 1e-2) -> Any:
    return eb.chain(eb.clip_by_global_norm(0.5), eb.adamw(learning_rate))


def by_preconditioned_norm(learning_rate: float = 1e-2) -> Any:
    """Its request is computed from the state."""
    return eb.chain(eb.scale_by_adam(), eb.clip_by_global_norm(0.5), eb.scale_by_learning_rate(learning_rate))


def finite(learning_rate: float = 1e-2) -> Any:
    return eb.apply_if_finite(eb.accumulate(eb.adamw(learning_rate), 2))


Make = Callable[..., TorchOptimizer]
TRANSFORMS: dict[str, Make] = {
    name: lambda model, name=name, **options: create(name, model, lr=1e-2, **options)
    for name in ("adamw", "muon", "soap", "lamb", "adafactor", "schedule_free_adamw", "sgd")
} | {
    one.__name__: lambda model, one=one, **options: TorchOptimizer(model.named_parameters(), one, **options)
    for one in (clipped, by_preconditioned_norm, finite)
}


@pytest.fixture(autouse=True, params=[5, 1 << 20], ids=["many pieces", "one piece"])
def _on_any_device(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(host_state, "IN_TESTS", True)
    monkeypatch.setattr(host_state, "LENGTH", request.param)


def pair(make: Make, policy: PolicyName, **options: Any) -> tuple[tuple[nn.Module, TorchOptimizer], ...]:
    model = Awkward(torch.float32 if policy == "FP32" else torch.bfloat16)
    other = copy.deepcopy(model)
    return (model, make(model, policy=policy, **options | {"compile": False})), (
        other,
        make(other, policy=policy, offload="state", **options),
    )


def require_same(one: TorchOptimizer, other: TorchOptimizer) -> None:
    mine, theirs = (optimizer.state_dict()["state"] for optimizer in (one, other))
    for number in mine:
        assert mine[number].keys() == theirs[number].keys()
        assert same_bits([*mine[number].values()], [*theirs[number].values()])


def run(make: Make, policy: PolicyName, **options: Any) -> None:
    """Train both, the one without it uncompiled; at times parameters have no gradient."""
    (model, plain), (other, offloaded) = pair(make, policy, **options)
    for start in range(0, 6, 3):
        for one, optimizer in ((model, plain), (other, offloaded)):
            train(one, optimizer, 3, start=start, without=lambda step, name: step == 4 and name == "vector")
        assert same_bits(values(model), values(other))
    require_same(plain, offloaded)
    assert same_bits(*([w for group in one.export_fp32() for w in group] for one in (plain, offloaded)))


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_have_the_bits_of_a_step_without_it(policy: PolicyName) -> None:
    run(TRANSFORMS["adamw"], policy)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_have_the_bits_of_a_step_without_it(name: str) -> None:
    run(TRANSFORMS[name], "LEAN_BF16")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["LEAN_BF16", pytest.param("FP32", marks=pytest.mark.exhaustive)])
def test_compiled_code_steps_pieces(policy: PolicyName) -> None:
    run(TRANSFORMS["clipped"], policy, compile=True)


def test_metrics_and_changes_are_those_of_a_step_without_it() -> None:
    (model, plain), (other, offloaded) = pair(TRANSFORMS["adamw"], "LEAN_BF16", metrics=True, watch="bfloat16")
    for one, optimizer in ((model, plain), (other, offloaded)):
        optimizer.take_changed().discard()
        train(one, optimizer, 3)
    ours, theirs = plain.metrics(), offloaded.metrics()
    assert float(ours.update_norm) == pytest.approx(
        float(theirs.update_norm), rel=1e-6
    )  # float32 sums in another order
    for (_, mine, _), (_, their, _) in zip(plain.take_changed(), offloaded.take_changed(), strict=True):
        assert torch.equal(mine, their)


def test_state_dicts_go_from_one_to_the_other() -> None:
    (model, plain), (other, offloaded) = pair(TRANSFORMS["adamw"], "LEAN_BF16")
    train(model, plain, 3)
    other.load_state_dict(model.state_dict())
    offloaded.load_state_dict(plain.state_dict())
    for one, optimizer in ((model, plain), (other, offloaded)):
        train(one, optimizer, 2, start=3)
    assert same_bits(values(model), values(other))
    plain.load_full_state_dict(offloaded.full_state_dict())
    for one, optimizer in ((model, plain), (other, offloaded)):
        train(one, optimizer, 2, start=5)
    assert same_bits(values(model), values(other))
    require_same(plain, offloaded)
    again = copy.deepcopy(offloaded)
    assert again.own.hosts is not None


def test_sharded_checkpoints_and_audits_read_the_hosts_copies(tmp_path: Path) -> None:
    (model, plain), (other, offloaded) = pair(TRANSFORMS["adamw"], "LEAN_BF16")
    stepped = copy.deepcopy(model)
    stepper = FlatStepper(stepped, eb.adamw(1e-2), policy="LEAN_BF16", strategy="no_shard")
    for step in range(3):
        with stepper.microbatch(last=True):
            sum((p.float() * (step + 1)).sum() for p in stepped.parameters()).backward()  # type: ignore[union-attr]
        stepper.step()
    save_sharded(stepper, tmp_path)
    for one, optimizer in ((model, plain), (other, offloaded)):
        load_sharded_into(one, optimizer, tmp_path)
        train(one, optimizer, 2)
    assert same_bits(values(model), values(other))
    require_same(plain, offloaded)
    give_gradients(model, 7)
    give_gradients(other, 7)
    audits = [
        audit_step({id(p): name for name, p in one.named_parameters()}, optimizer, 3)
        for one, optimizer in ((model, plain), (other, offloaded))
    ]
    assert audits[0] == audits[1]
    assert [one.name for one in audits[0]] == [name for name, _ in model.named_parameters()]
    assert nonfinite_state(offloaded) == ()


def test_evaluation_and_gradient_release() -> None:
    models = [nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 3)).to(torch.bfloat16)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [
        AdamW(model.parameters(), lr=1e-2, policy="LEAN_BF16", average=0.9, **options)  # type: ignore[arg-type]
        for model, options in zip(models, ({}, {"offload": "state"}), strict=True)
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        enable_gradient_release(model, optimizer)
        for _ in range(3):
            model(torch.ones(2, 6, dtype=torch.bfloat16)).square().sum().backward()
            optimizer.step()
    assert same_bits(values(models[0]), values(models[1]))
    with evaluation_weights(optimizers[0]), evaluation_weights(optimizers[1]):
        assert same_bits(values(models[0]), values(models[1]))


def test_two_pieces_are_on_the_device() -> None:
    """LEAN_BF16 has 6 bytes of state for each element."""
    model = nn.Linear(30, 20, bias=False, dtype=torch.bfloat16)
    optimizer = AdamW(model.parameters(), policy="LEAN_BF16", offload="state")
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert optimizer.own.hosts is not None
    (host,) = optimizer.own.hosts.values()
    pieces = min(2, -(-600 // host_state.LENGTH))
    table = optimizer.bytes_table()
    assert host.nbytes == table["staging"] == pieces * 6 * min(host_state.LENGTH, 600)
    assert table["host"] == 6 * 600
    assert {"momentum", "variance", "compensation"}.isdisjoint(table)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.sampled(2)])])
def test_state_goes_away_between_steps_and_comes_back(compile: bool) -> None:
    """The tensors of the state have other memory then, of which nothing of the optimizer shows what was before."""
    (model, plain), (other, moved) = pair(TRANSFORMS["clipped"], "LEAN_BF16", compile=compile)
    moved.own.hosts = None
    for start in range(3):
        train(model, plain, 2, start=2 * start)
        train(other, moved, 2, start=2 * start)
        held = [x.data_ptr() for one in moved.own.stepped for _, x in one.of.segment.entries() if x.numel() and x.ndim]
        moved.offload()
        moved.offload()
        there = [x.data_ptr() for one in moved.own.stepped for _, x in one.of.segment.entries() if x.numel() and x.ndim]
        assert not {*held} & {*there}
        shown = [x for entries in moved.state.values() for x in entries.values() if x.numel() and x.ndim]
        memory = {x.untyped_storage().data_ptr() for one in moved.own.stepped for _, x in one.of.segment.entries()}
        assert {x.untyped_storage().data_ptr() for x in shown} <= memory
        with pytest.raises(RuntimeError, match=r"step: state was moved to the host by offload\(\)"):
            train(other, moved, 1)
        require_same(plain, moved)
        moved.load_state_dict(moved.state_dict())
        moved.reload()
        moved.reload()
    assert same_bits(values(model), values(other))


def test_what_cannot_be_offloaded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="offload: got 'weights'; accepted are 'state' and None"):
        AdamW(model.parameters(), offload="weights")  # type: ignore[arg-type]
    monkeypatch.setattr(host_state, "IN_TESTS", False)
    with pytest.raises(
        ValueError, match="offload: got 'state' for parameters on cpu; accepted are parameters on a CUDA device"
    ):
        HostState(torch.device("cpu"))
    optimizer = AdamW(model.parameters(), offload="state")
    model(torch.ones(3)).sum().backward()
    before = values(model)
    with pytest.raises(ValueError, match="offload: got 'state' for parameters on cpu"):
        optimizer.step()
    assert same_bits(before, values(model))
    with pytest.raises(ValueError, match="offload: got 'state' for parameters on cpu"):
        AdamW(model.parameters()).offload()


@pytest.mark.parametrize("name", ["adamw", "muon", "clipped"])
def test_copies_and_steps_are_in_an_order_that_events_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On streams that a race detector has in the place of a device's."""
    streams, empty = Streams(), HostState.empty

    def on_host(self: HostState, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        with patch.object(streams, "has_streams", lambda _: False):  # memory that is not pinned
            made = empty(self, shape, dtype)
        streams.is_on_host(made)
        return made

    monkeypatch.setattr(host_state, "streams", streams)
    monkeypatch.setattr(HostState, "empty", on_host)
    model = Awkward(torch.bfloat16)
    optimizer = TRANSFORMS[name](model, policy="LEAN_BF16", offload="state", compile=False)
    with streams:
        train(model, optimizer, 2, without=lambda step, name: step == 0 and name == "vector")
        held = [x for entries in optimizer.state_dict()["state"].values() for x in entries.values()]
        assert all(x.isfinite().all() for x in held)
        train(model, optimizer, 2, start=2)
    assert streams.races == []
    assert min(streams.operations[one] for one in ("compute", "stream 1", "stream 2")) > 8
