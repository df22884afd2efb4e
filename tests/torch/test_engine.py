"""The engine by itself: memory with named members is stepped, cut, loaded and counted without any front end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import everybit as eb
from everybit_torch import stepping
from everybit_torch.engine import Engine
from everybit_torch.groups import Group
from everybit_torch.units import Unit
from tests.support.block_formats import Int8Blocks
from tests.support.transforms import lamb

SIZES = {"a": (3, 5), "b": (7,), "c": (2, 3)}
POLICIES = ["FP32", "KAHAN_BF16", "LEAN_BF16"]


def alone(_: object) -> None:
    """All parameters are in this process."""


def clipped(learning_rate: float) -> eb.Transform[Any]:
    return eb.chain(eb.clip_by_global_norm(0.5), eb.adamw(learning_rate, b2=0.9))


def model(policy: eb.Policy) -> dict[str, Tensor]:
    dtype = torch.float32 if policy == eb.policies.FP32 else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SIZES.items()}


def engine_of(
    values: dict[str, Tensor],
    policy: eb.Policy,
    factory: Callable[[float], eb.Transform[Any]] = clipped,
) -> tuple[Engine, dict[str, Tensor]]:
    """``a`` and ``b`` lie in one buffer, and ``c`` is a tensor of its own."""
    dtype = values["a"].dtype
    engine = Engine(alone)
    group = Group(
        0, factory, {dtype: policy}, names={"lr": ("learning_rate",)}, owner="engine", seed=3, unsafe="refuse",
        compile=False,
    )  # fmt: skip
    arguments = {"learning_rate": 1e-2}
    group.follow(arguments, group.build(arguments))
    engine.groups.append(group)
    buffer = torch.cat([values["a"].reshape(-1), values["b"]])
    members = {"a": buffer[:15].view(3, 5), "b": buffer[15:], "c": values["c"].clone()}
    for tensor, first, names in ((buffer, 0, ["a", "b"]), (members["c"], 22, ["c"])):
        optimizer, flat = group.optimizers[dtype], tensor.ndim == 1
        state = (
            engine.init_state(optimizer, tensor, first)
            if flat
            else optimizer.init([tensor], eb.Context(first_element=first))
        )
        firsts = [first, first + 15]
        named = [(name, members[name], number) for name, number in zip(names, firsts, strict=False)]
        engine.add(Unit.of(0, optimizer, tensor, named, state, flat=flat))
    return engine, members


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SIZES.items()}


def train(engine: Engine, members: dict[str, Tensor], steps: range) -> None:
    for step in steps:
        for name, grad in gradients(step).items():
            members[name].grad = grad.to(members[name].dtype)
        engine.step(engine.prepare())


@pytest.mark.parametrize("factory", [clipped, lamb])
@pytest.mark.parametrize("how", ["at once", "in pieces"])
@pytest.mark.parametrize("name", POLICIES)
def test_segments_of_memory_get_the_bits_of_the_tree(
    name: str, how: str, factory: Callable[[float], eb.Transform[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a transform that asks for numbers of each member."""
    policy = eb.policies.PRESETS[name]
    values = model(policy)
    if how == "in pieces":
        monkeypatch.setattr(stepping, "PIECE", 5)
    engine, members = engine_of(values, policy, factory)
    train(engine, members, range(3))
    optimizer = eb.with_policy(factory(1e-2), policy, seed=3)
    state = optimizer.init(values)
    for step in range(3):
        grads = {key: grad.to(values[key].dtype) for key, grad in gradients(step).items()}
        values, state = optimizer.step(values, grads, state)
    assert all(torch.equal(members[key], values[key]) for key in values)


def test_a_member_without_a_gradient_is_skipped_with_its_count() -> None:
    policy = eb.policies.FP32
    engine, members = engine_of(model(policy), policy)
    train(engine, members, range(1))
    before = members["b"].clone()
    members["b"].grad = None
    engine.step(engine.prepare())
    assert torch.equal(members["b"], before)
    counts = {unit.members[0].name: int(unit.state.step) for unit in engine.units}
    assert counts == {"a": 2, "b": 1, "c": 2}
    assert {name: int(engine.states[members[name]]["step"]) for name in members} == counts


def test_members_with_different_counts_are_stepped_apart_after_loading() -> None:
    policy = eb.policies.FP32
    engine, members = engine_of(model(policy), policy)
    train(engine, members, range(2))
    given = {id(x): {key: value.clone() for key, value in engine.states[x].own.items()} for x in members.values()}
    for entry in given[id(members["b"])].values():
        if not entry.ndim:
            entry.fill_(7)
    engine.load(given)
    assert [[member.name for member in unit.members] for unit in engine.units] == [["a"], ["b"], ["c"]]
    assert [int(unit.state.step) for unit in engine.units] == [2, 7, 2]


def test_a_refused_hyperparameter_is_called_by_the_users_name_and_changes_nothing() -> None:
    policy = eb.policies.FP32
    engine, members = engine_of(model(policy), policy)
    with pytest.raises(ValueError, match=r"^engine, param group 0: lr: got -1"):
        engine.follow([{"learning_rate": -1.0}])
    assert engine.groups[0].arguments == {"learning_rate": 1e-2}
    assert len(engine.units) == 2
    assert all(members[name].grad is None for name in members)


def test_the_account_of_bytes_is_that_of_what_is_allocated() -> None:
    policy = eb.policies.KAHAN_BF16
    engine, members = engine_of(model(policy), policy)
    others = torch.zeros(11)
    table = engine.bytes_table([others])
    tensors = [x for unit in engine.units for x in eb.tree.leaves(unit.state)]
    weights = sum(x.nbytes for x in members.values())
    assert table["parameter"] == weights + others.nbytes
    assert sum(table.values()) == weights + others.nbytes + table["gradient"] + sum(x.nbytes for x in tensors)


@settings(max_examples=60, deadline=None)
@given(numel=st.integers(0, 200), elements=st.integers(1, 90), blocks=st.booleans())
def test_pieces_are_every_element_once_and_begin_at_blocks(numel: int, elements: int, blocks: bool) -> None:
    policy = eb.Policy(momentum=Int8Blocks()) if blocks else eb.policies.LEAN_BF16
    dtype = torch.float32 if blocks else torch.bfloat16
    optimizer = eb.with_policy(eb.lion(1e-3), policy)
    tensor = torch.arange(numel, dtype=torch.float32).to(dtype)
    (stored,) = optimizer.formats([tensor])
    unit = Unit(0, tensor, [], optimizer.init([tensor]), 40, flat=True, stored=stored)
    found = list(unit.pieces(elements))
    assert torch.equal(torch.cat([tensor[where] for where, _ in found]), tensor)
    for where, piece in found:
        assert where.start % unit.block == 0
        assert piece.tensor.data_ptr() == tensor[where].data_ptr()
        assert piece.first == 40 + where.start
        assert piece.tensor.numel() <= max(elements, unit.block)
    assert len(found) == 1 or all(piece.tensor.numel() for _, piece in found)
