"""Transforms that ask for numbers of each whole parameter stay flat: trust ratios, clipping by a root mean square, centred gradients."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

import everybit as eb
from everybit.protocol import ALONE, per_tensor
from everybit_torch import TorchOptimizer, groups, reductions, stepping
from tests.support.small_models import Awkward, Whole, give_gradients, same_bits, train, values
from tests.support.transforms import EXAMPLES, averaged, lamb, noisy, rms_clipped

LEAN, KAHAN, FP32 = eb.policies.LEAN_BF16, eb.policies.KAHAN_BF16, eb.policies.FP32


@pytest.mark.parametrize("policy", [LEAN, FP32], ids=["LEAN", "FP32"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_flat_buffers_in_pieces_give_the_bits_of_the_whole_tree(
    monkeypatch: pytest.MonkeyPatch, name: str, policy: eb.Policy
) -> None:
    monkeypatch.setattr(reductions, "PIECE", 7)
    monkeypatch.setattr(stepping, "PIECE", 11)
    if policy is LEAN:  # each parameter by operations of its own, as long ones are
        monkeypatch.setattr(per_tensor, "SHORT", 0)
    dtype = torch.float32 if policy is FP32 else torch.bfloat16
    model = Awkward(dtype)
    whole = Whole(EXAMPLES[name], model, policy)
    kinds: tuple[dict[str, Any], ...] = ({}, {"layout": "tree"}, {"flat_gradients": True})
    models = [Awkward(dtype) for _ in kinds]
    optimizers = [
        TorchOptimizer(one.parameters(), EXAMPLES[name], lr=1e-2, policy=policy, seed=3, **kind)
        for one, kind in zip(models, kinds, strict=True)
    ]
    for step in range(4):
        give_gradients(model, 1000 + step)
        expected = whole.step(model)
        for one, optimizer in zip(models, optimizers, strict=True):
            assert same_bits(train(one, optimizer, 1, start=step), expected)


@dataclass(frozen=True)
class Normalized(eb.Elementwise):
    """Divides each parameter's updates by their norm, and notes how many elements each call has."""

    per_tensor: ClassVar[bool] = True
    reduces: ClassVar[bool] = True
    ran: list[int] = field(compare=False)

    def init(self, params: Any) -> tuple[()]:
        return ()

    def update(self, updates: Any, state: Any, params: Any, ctx: eb.Context = ALONE) -> Any:
        self.ran.append(sum(x.numel() for x in eb.tree.leaves(updates)))

        def divided(norms: Any) -> Any:
            return eb.tree.map(lambda u, n: u / n, updates, ctx.per_tensor.expand(norms, updates)), state

        return ctx.request(ctx.per_tensor.norm(updates), divided)


def test_whole_tensors_of_one_process_are_stepped_without_a_run_for_their_numbers() -> None:
    """Also when they were in a buffer before, where numbers of each are a reduction."""
    ran: list[int] = []
    weight = torch.nn.Parameter(torch.ones(2, 3))
    transposed = torch.nn.Parameter(torch.ones(2, 5).t())  # is no piece of a buffer
    optimizer = TorchOptimizer(
        [weight, transposed], lambda lr: eb.chain(Normalized(ran), eb.scale_by_learning_rate(lr)), lr=0.5
    )

    def stepped() -> list[int]:
        ran.clear()
        for one in (weight, transposed):
            one.grad = torch.ones_like(one)
        optimizer.step()
        return [elements for elements in ran if elements]

    assert stepped() == [6, 10, 6, 10]
    weight.data = weight.data.t().contiguous().t()
    before = weight.detach().clone()
    assert stepped() == [6, 10]
    assert torch.equal(weight.detach(), before - 0.5 / torch.tensor(6.0).sqrt())


@pytest.mark.exhaustive  # tests/torch/test_direct_calls.py and tests/core/test_context.py have one case each
@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("layout", ["auto", "tree"])
def test_compiled_steps_give_the_bits_of_uncompiled_ones(
    monkeypatch: pytest.MonkeyPatch, name: str, layout: Any, pieces: bool
) -> None:
    """With parameters without a gradient, so that pieces of several sizes and numbers of members are stepped."""
    if pieces:
        monkeypatch.setattr(reductions, "PIECE", 16)
        monkeypatch.setattr(groups, "EXPANDED_PIECE", 16)
    found = []
    for compile in (False, True):
        model = Awkward(torch.bfloat16)
        optimizer = TorchOptimizer(
            model.parameters(), EXAMPLES[name], lr=1e-2, policy=LEAN, compile=compile, layout=layout
        )
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
            train(model, optimizer, 1, start=step, without=lambda step, name: step == 2 and name == "vector")
        found.append(values(model))
    assert same_bits(*found)


@pytest.mark.usefixtures("traced")
def test_compiled_code_finds_partial_results_and_steps_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled the transform is run on no elements and on tensors without values: so it is found what it asks for."""
    monkeypatch.setattr(reductions, "PIECE", 16)
    monkeypatch.setattr(groups, "EXPANDED_PIECE", 16)
    ran: list[int] = []

    def note(optimizer: Any, tensors: list[torch.Tensor], *arguments: Any, **others: Any) -> Any:
        if not torch.compiler.is_compiling():
            ran.append(0 if tensors[0].is_meta else tensors[0].numel())
        return asked(optimizer, tensors, *arguments, **others)

    asked = eb.Optimizer.ask
    found = []
    for compile in (False, True):
        model = Awkward()
        optimizer = TorchOptimizer(model.parameters(), lamb, lr=1e-2, compile=compile)
        if compile:
            monkeypatch.setattr(eb.Optimizer, "ask", note)
        train(model, optimizer, 3)
        found.append(values(model))
    assert same_bits(*found)
    assert set(ran) == {0}


@pytest.mark.parametrize("layout", ["auto", "tree"])
def test_a_run_that_is_resumed_goes_on_as_it_would_have(layout: Any) -> None:
    for factory in EXAMPLES.values():
        model, other = Awkward(torch.bfloat16), Awkward(torch.bfloat16)
        optimizer = TorchOptimizer(model.parameters(), factory, lr=1e-2, policy=LEAN, layout=layout)
        train(model, optimizer, 3)
        again = TorchOptimizer(other.parameters(), factory, lr=1e-2, policy=LEAN)
        other.load_state_dict(model.state_dict())
        again.load_state_dict(optimizer.state_dict())
        expected = train(model, optimizer, 2, start=3)
        assert same_bits(train(other, again, 2, start=3), expected)


def test_groups_that_are_added_and_copies_have_numbers_of_their_own_parameters() -> None:
    """A parameter's number is its place in the optimizer, which changes when there are more."""

    def build() -> tuple[Awkward, TorchOptimizer]:
        model = Awkward()
        first, *rest = model.parameters()
        optimizer = TorchOptimizer([first], lamb, lr=1e-2)
        train(model, optimizer, 1)
        optimizer.add_param_group({"params": rest})
        return model, optimizer

    model, optimizer = build()
    whole = Awkward()
    reference = TorchOptimizer(whole.parameters(), lamb, lr=1e-2)
    train(whole, reference, 1, without=lambda step, name: name != "matrix")
    assert same_bits(train(model, optimizer, 2, start=1), train(whole, reference, 2, start=1))
    copied_model, copied = copy.deepcopy((model, optimizer))
    assert same_bits(train(copied_model, copied, 2, start=3), train(model, optimizer, 2, start=3))


def test_a_transform_with_numbers_of_each_parameter_takes_no_tree_of_temporaries() -> None:
    """Flat: all parameters are stepped as one buffer, a piece at a time."""
    model = Awkward()
    optimizer = TorchOptimizer(model.parameters(), rms_clipped, lr=1e-2)
    train(model, optimizer, 1)
    assert "flat, 5 parameters in 1 run" in repr(optimizer)


def test_weights_for_evaluation_are_those_of_the_core() -> None:
    model = Awkward(torch.bfloat16)
    whole = Whole(averaged, model, LEAN)
    optimizer = TorchOptimizer(model.parameters(), averaged, lr=1e-2, policy=LEAN, seed=3)
    for step in range(3):
        give_gradients(model, step)
        whole.step(model)
        optimizer.step()
    (got,) = optimizer.eval_params()
    assert same_bits(got, list(whole.optimizer.eval_params(whole.weights, whole.state).values()))
    assert not same_bits(got, optimizer.export_fp32()[0])


def test_noise_goes_by_an_elements_place_in_the_model() -> None:
    """A frozen parameter in between, which has no unit and keeps its numbers."""
    model, other = Awkward(), Awkward()
    model.vector.requires_grad_(False)
    optimizer = TorchOptimizer(model.parameters(), noisy, lr=1e-2)
    reference = TorchOptimizer(other.parameters(), noisy, lr=1e-2)
    for step in range(3):
        for one, stepping_it in ((model, optimizer), (other, reference)):
            give_gradients(one, step, without=lambda name: name == "vector")
            stepping_it.step()
    assert same_bits(values(model), values(other))
