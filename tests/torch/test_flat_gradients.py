"""Gradients accumulated in one buffer are the gradients torch accumulates one by one."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import SGD, AdamW
from tests.support.small_models import Awkward, same_bits, values

NAMES = ["FP32", "MIXED_BF16", "EXACT_BF16", "LEAN_BF16", "KAHAN_BF16", "FLOOR_BF16"]


def backward(model: Awkward, step: int, *, without: str = "") -> None:
    """A backward pass whose gradients are standard normal."""
    generator = torch.Generator().manual_seed(2000 + step)
    loss = torch.zeros(())
    for name, parameter in model.named_parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if name != without:
            loss = loss + (parameter.float() * gradient).sum()
    loss.backward()  # type: ignore[no-untyped-call]


def run(
    name: str, *, flat: bool, clip: bool = False, micro: int = 1, set_to_none: bool = True, compile: bool = False
) -> list[Tensor]:
    model = Awkward(torch.float32 if name == "FP32" else torch.bfloat16)
    optimizer = AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.95), policy=eb.policies.PRESETS[name], flat_gradients=flat, compile=compile
    )  # fmt: skip
    for step in range(6):
        optimizer.zero_grad(set_to_none)
        for part in range(micro):
            backward(model, 10 * step + part, without="vector" if step in (2, 3) else "")
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [*values(model), *(x.clone() for entry in optimizer.state.values() for x in entry.values())]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("clip", [False, True])
def test_the_bits_are_those_of_gradients_of_their_own(name: str, clip: bool) -> None:
    assert same_bits(run(name, flat=True, clip=clip), run(name, flat=False, clip=clip))


@pytest.mark.exhaustive
def test_and_compiled() -> None:
    assert same_bits(run("KAHAN_BF16", flat=True, compile=True), run("KAHAN_BF16", flat=False))


@pytest.mark.parametrize("set_to_none", [False, True])
def test_microbatches_add_up_in_place(set_to_none: bool) -> None:
    flat, plain = (run("FP32", flat=flat, micro=3, set_to_none=set_to_none) for flat in (True, False))
    assert same_bits(flat, plain)


def test_gradients_lie_in_one_buffer_and_stay_there() -> None:
    model = Awkward()
    optimizer = AdamW(model.parameters(), flat_gradients=True)
    backward(model, 0)
    optimizer.step()
    grads = [p.grad for p in model.parameters()]
    addresses = [grad.data_ptr() for grad in grads if grad is not None]
    sizes = [grad.nbytes for grad in grads if grad is not None]
    held = [(address, size) for address, size in zip(addresses, sizes, strict=True) if size]
    assert len(held) == 4
    assert all(a + size == b for (a, size), (b, _) in pairwise(held))
    for step in (1, 2):
        optimizer.zero_grad()
        assert not any(grad.count_nonzero() for grad in grads if grad is not None)
        backward(model, step)
        optimizer.step()
        assert [p.grad.data_ptr() for p in model.parameters() if p.grad is not None] == addresses


def test_a_parameter_whose_gradient_stayed_zero_is_skipped_even_after_clipping() -> None:
    """Clipping multiplies all gradients, also those that are zeros because nothing arrived."""
    model, reference = Awkward(torch.float64), Awkward(torch.float64)
    mine = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, flat_gradients=True)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for step in range(8):
        for network, optimizer in ((model, mine), (reference, theirs)):
            optimizer.zero_grad()
            backward(network, step, without="matrix" if step % 3 == 1 else "")
            nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
    for a, b in zip(values(model), values(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_zeros_that_were_asked_for_are_gradients() -> None:
    """``set_to_none=False`` makes torch step with zero gradients: decay and momentum go on."""
    model, reference = Awkward(torch.float64), Awkward(torch.float64)
    mine = AdamW(model.parameters(), lr=0.1, weight_decay=0.1, flat_gradients=True)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(4):
        for network, optimizer in ((model, mine), (reference, theirs)):
            optimizer.zero_grad(set_to_none=False)
            if step == 0:
                backward(network, step)
            optimizer.step()
    for a, b in zip(values(model), values(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["model.zero_grad", "assigned", "written"])
def test_gradients_from_elsewhere_count(how: str) -> None:
    def step_with(model: Awkward, optimizer: torch.optim.Optimizer, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        if how == "model.zero_grad":
            model.zero_grad()
            backward(model, step, without="other")
        else:
            optimizer.zero_grad()
            for parameter in model.parameters():
                gradient = torch.randn(parameter.shape, generator=generator)
                if how == "assigned" or parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.copy_(gradient)
        optimizer.step()

    results = []
    for flat in (True, False):
        model = Awkward()
        optimizer = AdamW(model.parameters(), flat_gradients=flat)
        for step in range(4):
            step_with(model, optimizer, step)
        results.append(values(model))
    assert same_bits(*results)


def test_wide_gradients_of_a_narrow_model_are_accumulated_wide() -> None:
    policy = eb.Policy(params=eb.Split(16), grads=eb.Grads(main="float32"))
    results = []
    for flat in (True, False):
        model = Awkward(torch.bfloat16)
        optimizer = AdamW(model.parameters(), policy=policy, flat_gradients=flat)
        for step in range(3):
            for part in range(4):
                backward(model, 10 * step + part)
            assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        results.append([*values(model), *optimizer.export_fp32()[0]])
    assert same_bits(*results)


def test_a_wider_gradient_than_the_buffer_is_refused_by_name() -> None:
    model = nn.Linear(3, 2)
    optimizer = AdamW(model.parameters(), flat_gradients=True)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    model.weight.grad = None
    model.weight.grad_dtype = torch.float64
    model.weight.grad = torch.ones(2, 3, dtype=torch.float64)
    before = values(model)
    with pytest.raises(
        ValueError, match=r"flat_gradients: got a torch.float64 gradient .*\(2, 3\).* kept as torch.float32"
    ):
        optimizer.step()
    assert same_bits(before, values(model))


def test_a_sparse_gradient_is_refused_before_anything_changes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True))
    optimizer = AdamW(model.parameters(), flat_gradients=True)
    model[0](model[1](torch.tensor([1]))).sum().backward()
    before = values(model)
    with pytest.raises(TypeError, match=r"got a torch.sparse_coo gradient .*\(3, 2\); accepted are dense"):
        optimizer.step()
    assert same_bits(before, values(model))


def test_it_needs_the_flat_layout() -> None:
    with pytest.raises(ValueError, match=r"flat_gradients: got True with layout='tree'"):
        AdamW(Awkward().parameters(), flat_gradients=True, layout="tree")


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_has_a_buffer_of_its_own(how: str) -> None:
    model = Awkward()
    optimizer = AdamW(model.parameters(), flat_gradients=True)
    backward(model, 0, without="vector")
    optimizer.step()
    optimizer.zero_grad()
    pair: Any = (model, optimizer)
    other, twin = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    before = values(other)
    for step in (1, 2):
        backward(model, step, without="matrix")
        optimizer.step()
        optimizer.zero_grad()
    assert same_bits(before, values(other))
    for step in (1, 2):
        backward(other, step, without="matrix")
        twin.step()
        twin.zero_grad()
    assert same_bits(values(model), values(other))


def test_a_resumed_run_goes_on_with_the_same_bits() -> None:
    def make(model: Awkward) -> AdamW:
        return AdamW(model.parameters(), lr=1e-2, policy=eb.policies.LEAN_BF16, flat_gradients=True)

    model, other = Awkward(torch.bfloat16), Awkward(torch.bfloat16)
    optimizer, resumed = make(model), make(other)
    for step in range(3):
        backward(model, step, without="other" if step == 1 else "")
        optimizer.step()
        optimizer.zero_grad()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    for step in range(3, 6):
        for network, one in ((model, optimizer), (other, resumed)):
            backward(network, step)
            one.step()
            one.zero_grad()
    assert same_bits(values(model), values(other))


def test_a_parameter_does_not_keep_an_optimizers_buffer_alive() -> None:
    model = Awkward()
    optimizer = AdamW(model.parameters(), flat_gradients=True)
    backward(model, 0)
    optimizer.step()
    (unit,) = optimizer.engine.units
    buffer = weakref.ref(unit.gradients)
    del optimizer, unit
    gc.collect()
    assert buffer() is None


@pytest.mark.parametrize(
    "how", ["load_state_dict", "load_full_state_dict", "bytes_table", "import_fp32", "full_state_dict", "nothing"]
)
@pytest.mark.parametrize("written", ["by autograd", "by hand", "by the model"])
def test_a_zero_that_was_asked_for_is_a_gradient_however_parameters_were_placed(how: str, written: str) -> None:
    """What places parameters before the first step comes between the first gradients and their buffer."""
    model, reference = Awkward(torch.float64), Awkward(torch.float64)
    mine = AdamW(model.parameters(), lr=0.1, weight_decay=0.1, flat_gradients=True)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(3):
        for network in (model, reference):
            if step == 0 and written == "by autograd":
                backward(network, step, without="vector")
            elif step == 0:
                for name, parameter in network.named_parameters():
                    parameter.grad = None if name == "vector" else torch.ones_like(parameter)
        if step == 0 and how != "nothing":
            use = getattr(mine, how)
            if how in ("bytes_table", "full_state_dict"):
                use()
            else:
                use({
                    "load_state_dict": mine.state_dict, "load_full_state_dict": mine.full_state_dict, "import_fp32": mine.export_fp32,
                }[how]())  # fmt: skip
        for network, optimizer in ((model, mine), (reference, theirs)):
            if written == "by the model":
                network.zero_grad(set_to_none=False)
            else:
                optimizer.zero_grad(set_to_none=False)
            optimizer.step()
    for a, b in zip(values(model), values(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_gradient_that_was_written_into_the_buffer_counts_when_it_is_zeroed_there() -> None:
    model, reference = Awkward(torch.float64), Awkward(torch.float64)
    mine = AdamW(model.parameters(), lr=0.1, weight_decay=0.1, flat_gradients=True)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(3):
        for network, optimizer in ((model, mine), (reference, theirs)):
            optimizer.zero_grad()
            if step == 0:
                backward(network, step)
            else:
                for parameter in network.parameters():
                    if parameter.grad is None:
                        parameter.grad = torch.ones_like(parameter)
                    else:
                        parameter.grad.fill_(1.0)
                optimizer.zero_grad(set_to_none=False)
            optimizer.step()
    for a, b in zip(values(model), values(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("when", ["before the pass", "after it"])
@pytest.mark.parametrize("what", ["the gradient's data", "the module's dtype and back", "the module's memory format"])
def test_a_gradient_that_was_given_other_memory_is_the_one_that_is_stepped_with(
    what: str, when: str, set_to_none: bool
) -> None:
    """Modules move gradients by ``grad.data = ...``, as people do who scale them."""

    def move(model: nn.Module) -> None:
        if what == "the module's memory format":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        elif what == "the module's dtype and back":
            model.float().double()
        else:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.data = parameter.grad.data * 0.5

    results = []
    pairs: Any = ((SGD, {"flat_gradients": True}), (torch.optim.SGD, {"foreach": False}))
    for kind, arguments in pairs:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2)).double()
        inputs = torch.randn(4, 2, 4, 4, dtype=torch.float64)
        optimizer: Any = kind(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1, **arguments)
        for step in range(5):
            optimizer.zero_grad(set_to_none)
            if step == 2 and when == "before the pass":
                move(model)
            model(inputs).square().mean().backward()
            if step == 2 and when == "after it":
                move(model)
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_frozen_parameter_without_a_gradient_stays_without(set_to_none: bool) -> None:
    """Its zeros were a gradient to the next optimizer, which decayed it."""
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    optimizer = AdamW(parameters, weight_decay=0.5, flat_gradients=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    parameters[1].requires_grad_(False)
    parameters[1].grad = None
    optimizer.zero_grad(set_to_none=set_to_none)
    assert parameters[1].grad is None
    before = parameters[1].detach().clone()
    successor = AdamW(parameters, weight_decay=0.5)
    successor.load_state_dict(optimizer.state_dict())
    parameters[0].grad = torch.ones(3)
    successor.step()
    assert torch.equal(parameters[1], before)
    # Unfrozen it is trained in the buffer again.
    parameters[1].requires_grad_(True)
    for one in parameters:
        one.grad = None
    optimizer.zero_grad()
    sum(one.sum() for one in parameters).backward()  # type: ignore[union-attr]
    optimizer.step()
    assert not torch.equal(parameters[1], before)
