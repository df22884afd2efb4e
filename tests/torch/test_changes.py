"""Which weights changed: what steps note is what a snapshot of the weights finds, and a receiver's copy stays equal bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import everybit as eb
from everybit.base import rounding
from everybit.policies import PolicyName
from everybit_torch import AdamW, TorchOptimizer, create, enable_gradient_release, evaluation_weights, plan
from everybit_torch.segments import WatchedDType
from tests.support.float_patterns import every
from tests.support.receiver import Receiver, as_exported, bits, changed
from tests.support.small_models import Awkward, give_gradients, train, values

DTYPES: dict[WatchedDType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
POLICIES: tuple[PolicyName, ...] = ("FP32", "LEAN_BF16", "FLOOR_BF16", "LEAN_8BIT", "KAHAN_BF16", "EXACT_BF16")


def model_for(policy: PolicyName) -> Awkward:
    return Awkward(torch.float32 if policy == "FP32" else torch.bfloat16)


def named(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


# -- what is noted -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("watch", DTYPES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.sampled(3)])])
def test_one_step_changes_what_a_snapshot_finds(policy: PolicyName, watch: WatchedDType, compile: bool) -> None:
    model = model_for(policy)
    optimizer = AdamW(model.named_parameters(), lr=1e-3, policy=policy, compile=compile, watch=watch)
    receiver = Receiver(named(model), DTYPES[watch])
    assert optimizer.take_changed().whole == tuple(named(model))
    receiver.take(optimizer.take_changed())
    snapshot = as_exported(named(model), DTYPES[watch])
    assert receiver.has(snapshot)
    for step in range(12):
        train(model, optimizer, 1, start=step)
        now, changes = as_exported(named(model), DTYPES[watch]), optimizer.take_changed()
        assert changes.whole == ()
        sent = receiver.take(changes)
        assert all(torch.equal(sent[name], found.int()) for name, found in changed(snapshot, now).items())
        assert receiver.has(now)
        snapshot = now


MANY: dict[str, Callable[[nn.Module], TorchOptimizer]] = {
    name: lambda model, name=name: create(name, model, lr=1e-3, policy="LEAN_BF16", watch="bfloat16")
    for name in ("sgd", "lion", "muon", "soap", "adafactor", "schedule_free_adamw", "lamb", "ademamix")
} | {
    "clipped": lambda model: TorchOptimizer(
        model.named_parameters(),
        lambda learning_rate=1e-3: eb.chain(eb.clip_by_global_norm(0.5), eb.adamw(learning_rate)),
        policy="FLOOR_BF16",
        watch="bfloat16",
        metrics=True,
    ),
    "every third step": lambda model: TorchOptimizer(
        model.named_parameters(),
        lambda learning_rate=1e-3: eb.accumulate(eb.adamw(learning_rate), 3),
        policy="LEAN_BF16",
        watch="bfloat16",
    ),
}


@pytest.mark.parametrize("name", MANY)
def test_several_steps_change_at_least_what_a_snapshot_finds(name: str) -> None:
    """Some parameters have no gradient at times, so that their bucket comes apart. The weights are those of a run that is not watched."""
    model = Awkward(torch.bfloat16)
    other = copy.deepcopy(model)
    optimizer, plain = MANY[name](model), MANY[name](other)
    plain.own.watch = None
    receiver, sent = Receiver(named(model), torch.bfloat16), 0
    receiver.take(optimizer.take_changed())
    for start in range(0, 12, 4):
        before = as_exported(named(model), torch.bfloat16)
        for one, own in ((model, optimizer), (other, plain)):
            train(one, own, 4, start=start, without=lambda step, name: step % 4 == 1 and name in ("vector", "other"))
        now = as_exported(named(model), torch.bfloat16)
        found = receiver.take(optimizer.take_changed())
        assert all(set(where.tolist()) <= set(found[name].tolist()) for name, where in changed(before, now).items())
        assert receiver.has(now)
        sent += sum(map(len, found.values()))
    assert sent < 3 * sum(p.numel() for p in model.parameters())
    assert all(map(torch.equal, values(model), values(other)))


@given(st.lists(st.floats(width=32), min_size=1, max_size=64), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_numbers_are_seen_as_torch_casts_them(numbers: list[float], watch: WatchedDType) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    y = torch.cat([x[1:], x[:1]])
    seen = [rounding.seen_bits(one, watch) for one in (x, y)]
    cast = [one.to(DTYPES[watch]) for one in (x, y)]
    same = (bits(cast[0]) == bits(cast[1])) | (cast[0].isnan() & cast[1].isnan())
    differ = seen[0] != seen[1]
    assert torch.equal(~differ | (x.isnan() & y.isnan()), same)


@pytest.mark.parametrize("patterns", [every("bfloat16"), every("float16")], ids=["bfloat16", "float16"])
def test_every_number_of_16_bits_is_seen_as_torch_casts_it(patterns: Tensor) -> None:
    for watch, dtype in DTYPES.items():
        cast = patterns.to(dtype)
        numbers = ~cast.isnan()
        of_cast = bits(cast)[numbers].tolist()
        of_seen = rounding.seen_bits(patterns, watch)[numbers].tolist()
        assert len({*zip(of_cast, of_seen, strict=True)}) == len({*of_cast}) == len({*of_seen})


# -- what is not missed --------------------------------------------------------------------------------------------------------------


def loads(optimizer: TorchOptimizer, model: nn.Module) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 1, start=50)
    optimizer.load_state_dict(saved)


def loads_in_full(optimizer: TorchOptimizer, model: nn.Module) -> None:
    saved = optimizer.full_state_dict()
    train(model, optimizer, 1, start=50)
    optimizer.load_full_state_dict(saved)


def loads_other_state(optimizer: TorchOptimizer, model: nn.Module) -> None:
    other = copy.deepcopy(model)
    policy: Any = "FP32" if model.matrix.dtype is torch.float32 else "LEAN_BF16"
    saving = AdamW(other.named_parameters(), lr=1e-3, policy=policy, amsgrad=True)
    train(other, saving, 2)
    optimizer.load_state_dict(saving.state_dict())


def imports(optimizer: TorchOptimizer, model: nn.Module) -> None:
    optimizer.import_fp32([[w + 1 for w in group] for group in optimizer.export_fp32()])


@torch.no_grad()
def writes(optimizer: TorchOptimizer, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(2)


@torch.no_grad()
def writes_before_a_step(optimizer: TorchOptimizer, model: nn.Module) -> None:
    writes(optimizer, model)
    train(model, optimizer, 1, start=60)


def loads_the_model(optimizer: TorchOptimizer, model: nn.Module) -> None:
    model.load_state_dict({name: x + 1 for name, x in model.state_dict().items()})


def gives_other_memory(optimizer: TorchOptimizer, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data + 1


def gives_other_memory_before_a_step(optimizer: TorchOptimizer, model: nn.Module) -> None:
    gives_other_memory(optimizer, model)
    train(model, optimizer, 1, start=60)


def forgets(optimizer: TorchOptimizer, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.add_(1)
    optimizer.forget_changes()


OUTSIDE = [
    loads, loads_in_full, loads_other_state, imports, writes, writes_before_a_step, loads_the_model, gives_other_memory,
    gives_other_memory_before_a_step, forgets,
]  # fmt: skip


@pytest.mark.parametrize("policy", ["LEAN_BF16", "FP32"])
@pytest.mark.parametrize("write", OUTSIDE)
def test_what_others_write_is_named_as_a_whole(write: Callable[..., None], policy: PolicyName) -> None:
    model = model_for(policy)
    optimizer = AdamW(model.named_parameters(), lr=1e-3, policy=policy, watch="bfloat16")
    receiver = Receiver(named(model), torch.bfloat16)
    receiver.take(optimizer.take_changed())
    train(model, optimizer, 3)
    receiver.take(optimizer.take_changed())
    write(optimizer, model)
    changes = optimizer.take_changed()
    assert {name for name, p in model.named_parameters() if p.numel()} <= set(changes.whole)
    receiver.take(changes)
    assert receiver.has(as_exported(named(model), torch.bfloat16))
    train(model, optimizer, 1, start=70)
    assert optimizer.take_changed().whole == ()
    receiver.take(optimizer.take_changed())
    assert receiver.has(as_exported(named(model), torch.bfloat16))


def test_evaluation_and_skipped_steps_change_nothing() -> None:
    model = Awkward(torch.bfloat16)
    optimizer = TorchOptimizer(
        model.named_parameters(),
        lambda learning_rate=1e-2: eb.apply_if_finite(eb.adamw(learning_rate)),
        policy="LEAN_BF16",
        average=0.9,
        watch="bfloat16",
    )
    list(optimizer.take_changed())
    train(model, optimizer, 2)
    list(optimizer.take_changed())
    with evaluation_weights(optimizer), pytest.raises(RuntimeError, match="take_changed: the model has its weights"):
        optimizer.take_changed()
    give_gradients(model, 0, scale=torch.inf)
    optimizer.step()
    assert all(len(indices) == 0 for _, indices, _ in optimizer.take_changed())
    assert optimizer.take_changed().whole == ()


def test_parameters_come_and_go() -> None:
    """A frozen parameter is named once; one that is unfrozen, or added, as it begins to change."""
    model, more = Awkward(torch.bfloat16), nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    model.matrix.requires_grad_(False)
    optimizer = AdamW(model.named_parameters(), lr=1e-2, policy="LEAN_BF16", watch="bfloat16")
    receiver = Receiver(named(model) | {"more": more}, torch.bfloat16)
    receiver.take(optimizer.take_changed())
    train(model, optimizer, 2, without=lambda _, name: name == "matrix")
    assert len(receiver.take(optimizer.take_changed())["matrix"]) == 0
    model.matrix.requires_grad_(True)
    optimizer.add_param_group({"params": [("more", more)]})
    more.grad = torch.ones(5, dtype=torch.bfloat16)
    train(model, optimizer, 2, start=2)
    changes = optimizer.take_changed()
    assert changes.whole == ("more",)
    assert len(receiver.take(changes)["matrix"]) > 0
    assert receiver.has(as_exported(named(model) | {"more": more}, torch.bfloat16))


def test_a_parameter_that_was_not_reached_stays_changed() -> None:
    model = Awkward(torch.bfloat16)
    optimizer = AdamW(model.named_parameters(), lr=1e-2, policy="LEAN_BF16", watch="bfloat16")
    list(optimizer.take_changed())
    train(model, optimizer, 1)
    first = next(iter(optimizer.take_changed()))
    rest = list(optimizer.take_changed())
    assert first[0] == rest[0][0]
    assert len(first[1]) > 0 == len(rest[0][1])
    assert len(rest[1][1]) > 0


def test_steps_in_the_backward_pass_are_noted() -> None:
    model = nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 3)).to(torch.bfloat16)
    optimizer = AdamW(model.named_parameters(), lr=1e-2, policy="LEAN_BF16", watch="bfloat16")
    enable_gradient_release(model, optimizer)
    receiver = Receiver(named(model), torch.bfloat16)
    receiver.take(optimizer.take_changed())
    for _ in range(3):
        model(torch.ones(2, 6, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
        changes = optimizer.take_changed()
        assert changes.whole == ()
        assert sum(map(len, receiver.take(changes).values())) > 0
        assert receiver.has(as_exported(named(model), torch.bfloat16))


# -- what else ---------------------------------------------------------------------------------------------------------------------


def test_the_mask_is_counted() -> None:
    model = nn.Linear(100, 50, dtype=torch.bfloat16)
    optimizer = AdamW(model.named_parameters(), policy="LEAN_BF16", watch="bfloat16")
    assert optimizer.bytes_table()["changed"] == 100 * 50 + 50
    given: dict[str, Any] = {"policy": "LEAN_BF16", "strategy": "no_shard"}
    plain, watched = (plan(model, eb.adamw(1e-3), ranks=1, watch=watch, **given) for watch in (None, "bfloat16"))
    assert watched.persistent_bytes - plain.persistent_bytes == watched.persistent["changed"] == 100 * 50 + 50


def test_what_cannot_be_watched_is_refused() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="watch: got 'int8'; accepted are 'float32', 'bfloat16', 'float16'"):
        AdamW(model.parameters(), watch="int8")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="take_changed: changes are not noted"):
        AdamW(model.parameters()).take_changed()
    with pytest.raises(RuntimeError, match="forget_changes: changes are not noted"):
        AdamW(model.parameters()).forget_changes()
    shared = nn.ParameterList([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))])
    shared[1].data = shared[0].data
    optimizer = AdamW(shared.parameters(), watch="bfloat16")
    for parameter in shared:
        parameter.grad = torch.ones(4)
    with pytest.raises(ValueError, match="watch: 2 parameters share memory with others"):
        optimizer.step()
    shared[1].data = torch.ones(4)
    optimizer.step()
    shared[1].data = shared[0].data
    before = values(shared)
    with pytest.raises(RuntimeError, match="watch: 2 parameters share memory with others"):
        optimizer.step()
    assert all(map(torch.equal, values(shared), before))
    assert AdamW(model.parameters(), watch=torch.bfloat16).take_changed().whole == (  # type: ignore[arg-type]
        "param group 0, parameter 0",
        "param group 0, parameter 1",
    )
