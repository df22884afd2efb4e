"""Where parameters lie changes nothing but speed."""

from __future__ import annotations

import gc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model

import everybit as eb
from everybit_torch import AdamW, Lion, TorchOptimizer
from everybit_torch.optimizer import Layout
from tests.support.small_models import Awkward, give_gradients, same_bits, train, values

LOW = ["MIXED_BF16", "EXACT_BF16", "LEAN_BF16", "KAHAN_BF16", "TIGHT_BF16", "FLOOR_BF16"]


def skip(step: int, name: str) -> bool:
    return name == "vector" and step in (2, 3)


def lie_in_a_row(model: torch.nn.Module) -> bool:
    parameters = [p for p in model.parameters() if p.numel()]
    return all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairwise(parameters))


@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flat_is_tree_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    results = []
    layouts: tuple[Layout, Layout] = ("flat", "tree")
    for layout in layouts:
        model = Awkward(dtype)
        optimizer = AdamW(model.parameters(), lr=1e-3, policy=eb.policies.PRESETS[name], layout=layout, seed=3)
        train(model, optimizer, 8, without=skip)
        results.append(values(model) + [w for group in optimizer.export_fp32() for w in group])
    assert same_bits(*results)


@pytest.mark.parametrize(
    "name",
    [
        "FP32",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in LOW),
    ],
)
def test_compiled_is_eager_bit_for_bit(name: str) -> None:
    """Also where a missing gradient cuts a buffer, and while steps are measured."""
    torch._dynamo.reset()
    dtype = torch.float32 if name == "FP32" else torch.bfloat16
    results = []
    for compile in (False, True):
        model = Awkward(dtype)
        optimizer = AdamW(model.parameters(), lr=1e-3, policy=eb.policies.PRESETS[name], compile=compile, metrics=True)
        train(model, optimizer, 4, without=skip)
        results.append(values(model) + [w for group in optimizer.export_fp32() for w in group])
    assert same_bits(*results)


def test_parameters_become_pieces_of_one_buffer_and_trees_stay_where_they_are() -> None:
    flat, tree = Awkward(), Awkward()
    pointers = [p.data_ptr() for p in tree.parameters()]
    train(flat, AdamW(flat.parameters(), layout="flat"), 1)
    train(tree, AdamW(tree.parameters(), layout="tree"), 1)
    assert lie_in_a_row(flat)
    assert [p.data_ptr() for p in tree.parameters()] == pointers


def test_the_layout_is_shown_and_a_clip_is_flat_too() -> None:
    model = Awkward()
    element = AdamW(model.parameters())
    train(model, element, 1)
    assert "param group 0: flat, 5 parameters in 1 run, uncompiled;" in repr(element)

    def clipped(learning_rate: float) -> eb.Transform[Any]:
        return eb.chain(eb.clip_by_global_norm(1.0), eb.scale_by_learning_rate(learning_rate))

    other = Awkward()
    whole = TorchOptimizer(other.parameters(), clipped, lr=0.1)
    assert "param group 0: flat, from the first step on;" in repr(whole)
    train(other, whole, 1)
    assert "param group 0: flat, 5 parameters in 1 run, uncompiled;" in repr(whole)
    tree = TorchOptimizer(Awkward().parameters(), clipped, lr=0.1, layout="tree")
    assert "param group 0: tree, from the first step on;" in repr(tree)


def test_other_memory_given_to_a_parameter_counts_and_joins_the_buffer_again() -> None:
    model, reference = Awkward(torch.float64), Awkward(torch.float64)
    mine, theirs = AdamW(model.parameters()), torch.optim.AdamW(reference.parameters())
    train(model, mine, 2)
    train(reference, theirs, 2)
    model.matrix.data = torch.full((7, 5), 2.0, dtype=torch.float64)
    reference.matrix.data = torch.full((7, 5), 2.0, dtype=torch.float64)
    model.load_state_dict(model.state_dict())  # in place: the views see it
    got, expected = train(model, mine, 2, start=2), train(reference, theirs, 2, start=2)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert lie_in_a_row(model)


def test_a_model_moved_to_another_dtype_after_a_step_is_refused_by_name() -> None:
    model = Awkward()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 1)
    model.to(torch.bfloat16)
    give_gradients(model, 0)
    before = values(model)
    with pytest.raises(RuntimeError, match=r"is torch.bfloat16 on cpu now, but was torch.float32 on cpu"):
        optimizer.step()
    assert same_bits(before, values(model))


def test_a_transposed_parameter_is_stepped_on_its_own() -> None:
    model, reference = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    reference.load_state_dict(model.state_dict())
    model.weight.data = model.weight.data.t().contiguous().t()
    mine, theirs = AdamW(model.parameters(), layout="flat"), torch.optim.AdamW(reference.parameters())
    got, expected = train(model, mine, 5), train(reference, theirs, 5)
    assert not model.weight.is_contiguous()
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_long_buffer_is_initialised_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    import everybit_torch.units as units

    results = []
    for chunk in (1 << 22, 10):
        monkeypatch.setattr(units, "CHUNK", chunk)
        model = Awkward(torch.bfloat16)
        optimizer = Lion(model.parameters(), policy=eb.policies.MIXED_BF16)
        results.append(train(model, optimizer, 3))
    assert same_bits(*results)


@pytest.mark.parametrize("name", ["FP32", "PURE_BF16", *LOW])
def test_bytes_are_what_the_policy_says(name: str) -> None:
    policy = eb.policies.PRESETS[name]
    dtype = torch.float32 if name == "FP32" else torch.bfloat16
    model = Awkward(dtype)
    optimizer = AdamW(model.parameters(), betas=(0.9, 0.95), policy=policy)
    train(model, optimizer, 1)
    table = optimizer.bytes_table()
    elements = sum(p.numel() for p in model.parameters())
    counters = table.pop("counters")
    assert {use: size / elements for use, size in table.items()} == policy.bytes_table()
    # The chain's and the optimizer's step, int64.
    assert counters == 16
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    for state in optimizer.state.values():
        storages |= {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in state.values()}
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    storages.pop(0, None)
    assert sum(storages.values()) + gradients == elements * policy.bytes_per_param() + counters


def test_main_gradients_may_be_wider_than_the_model() -> None:
    policy = eb.Policy(params=eb.Split(16), grads=eb.Grads(main="float32"))
    model = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
    optimizer = AdamW(model.parameters(), policy=policy)
    for _ in range(2):
        model(torch.ones(3, 4, dtype=torch.bfloat16)).float().sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is torch.float32
    assert optimizer.bytes_table()["gradient"] == 4 * 10
    optimizer.step()


@pytest.mark.parametrize("name", ["FP32", *LOW])
def test_stepping_in_pieces_is_stepping_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import everybit_torch.stepping as module

    dtype = torch.float32 if name == "FP32" else torch.bfloat16
    results = []
    for piece in (1 << 17, 10):
        monkeypatch.setattr(module, "PIECE", piece)
        model = Awkward(dtype)
        optimizer = AdamW(model.parameters(), lr=1e-3, policy=eb.policies.PRESETS[name], metrics=True)
        train(model, optimizer, 4, without=skip)
        metrics = [float(optimizer.metrics().lost), float(optimizer.metrics().moved)]
        state = [x.clone() for entries in optimizer.state.values() for x in entries.values()]
        results.append([*values(model), *state, torch.tensor(metrics)])
    assert same_bits(*results)


def test_a_gradient_that_is_there_already_in_the_models_dtype_is_refused_by_name() -> None:
    model = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
    model(torch.ones(3, 4, dtype=torch.bfloat16)).float().sum().backward()
    policy = eb.Policy(params=eb.Split(16), grads=eb.Grads(main="float32"))
    with pytest.raises(
        ValueError, match=r"Grads.main: got torch.float32, but .* holds a torch.bfloat16 gradient already; clear it"
    ):
        AdamW(model.parameters(), policy=policy)


def test_a_piece_is_saved_and_copied_alone(tmp_path: Path) -> None:
    """A view of the buffer would carry all of it along, and safetensors would refuse it."""
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(2, 2))
    optimizer = AdamW(model.parameters(), layout="flat")
    train(model, optimizer, 1)
    small = model.get_parameter("1.weight")
    for tensor in (small, optimizer.state[small]["momentum"]):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        torch.save(tensor, tmp_path / "small.pt")
        assert (tmp_path / "small.pt").stat().st_size < 4000
    save_model(model, str(tmp_path / "model.safetensors"))
    loaded = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], p) for name, p in model.named_parameters())


def test_memory_lives_as_long_as_a_piece_of_it() -> None:
    model, expected = Awkward(), Awkward()
    optimizer = AdamW(model.parameters(), layout="flat", lr=0.0, weight_decay=0.0)
    train(model, optimizer, 1)
    held = [model.matrix.detach(), optimizer.state[model.other]["variance"]]
    del optimizer
    gc.collect()
    noise = [torch.randn(100) for _ in range(100)]  # would land in memory that was freed too early
    assert same_bits(values(model), values(expected))
    assert torch.equal(held[0], expected.matrix)
    assert bool((held[1] >= 0).all())
    assert len(noise) == 100
