"""Flat buffers with gaps: parameters of any size are one unit, compiled, with the bits of parameters that are stepped each by itself."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import TorchOptimizer

SHAPES = [(50, 30), (77,), (64, 3, 7, 7), (), (1000, 7), (256,), (1,)]
POLICIES = {
    "LEAN_8BIT": eb.policies.LEAN_8BIT,
    "LEAN_4BIT": eb.policies.LEAN_4BIT,
    "three sizes": eb.Policy(
        params=eb.Split(8, rounding="stochastic"),
        momentum=eb.Blockwise("float", block=32),
        variance=eb.Blockwise("root", 4, 128),
    ),
}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in SHAPES]


def clipped(lr: float = 1e-2) -> Any:
    return eb.chain(eb.clip_by_global_norm(0.7), eb.adamw(lr))


def give_gradients(params: list[nn.Parameter], step: int, absent: tuple[int, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for number, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator).bfloat16()
        if p.grad is None:
            p.grad = grad
        else:
            p.grad.copy_(grad)
        if number in absent:
            p.grad = None


def make(params: list[nn.Parameter], policy: Any, factory: Callable[..., Any] = eb.adamw, **options: Any) -> Any:
    return TorchOptimizer(params, factory, lr=1e-2, policy=policy, **{"compile": False, **options})


def held(params: list[nn.Parameter], optimizer: Any) -> list[Tensor]:
    state = optimizer.state_dict()["state"]
    return [p.detach().clone() for p in params] + [x.clone() for entries in state.values() for x in entries.values()]


def trained(policy: Any, factory: Callable[..., Any] = eb.adamw, steps: int = 3, **options: Any) -> list[Tensor]:
    params = parameters()
    optimizer = make(params, policy, factory, **options)
    for step in range(steps):
        give_gradients(params, step)
        optimizer.step()
    return held(params, optimizer)


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", [{}, {"flat_gradients": True}])
def test_odd_sizes_are_one_unit_and_compiled_without_a_warning(policy: str, options: dict[str, Any]) -> None:
    params = parameters()
    optimizer = make(params, POLICIES[policy], compile=True, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for step in range(3):
            give_gradients(params, step)
            optimizer.step()
    assert len(optimizer.engine.units) == 1
    assert_same(held(params, optimizer), trained(POLICIES[policy], layout="tree"))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("flat_gradients", [False, True])
def test_a_norm_over_everything_and_metrics_leave_the_gaps_out(policy: str, flat_gradients: bool) -> None:
    params = parameters()
    optimizer = make(params, POLICIES[policy], clipped, flat_gradients=flat_gradients, metrics=True)
    alone = parameters()
    tree = make(alone, POLICIES[policy], clipped, layout="tree", metrics=True)
    for step in range(3):
        give_gradients(params, step)
        give_gradients(alone, step)
        optimizer.prepare()
        (unit,) = optimizer.engine.units
        stops = [0, *(m.stop for m in unit.members)]
        starts = [*(m.start for m in unit.members), unit.tensor.numel()]
        for stop, start in zip(stops, starts, strict=True):
            unit.tensor[stop:start] = math.nan
        optimizer.step()
        tree.step()
        # Sums of float64 in another order, over 20,000 numbers of which none cancels: 2e4 units of 2^-53 are 2.3e-12.
        assert optimizer.metrics().asdict() == pytest.approx(tree.metrics().asdict(), rel=2.3e-12)
    # The norm is a float64 sum in another order; rounded to float32 it is the same number here.
    assert_same(held(params, optimizer), held(alone, tree))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_on_with_the_same_bits(duplicate: Callable[[Any], Any]) -> None:
    params = parameters()
    optimizer = make(params, eb.policies.LEAN_8BIT)
    give_gradients(params, 0)
    optimizer.step()
    params, optimizer = duplicate((params, optimizer))
    for step in (1, 2):
        give_gradients(params, step)
        optimizer.step()
    assert_same(held(params, optimizer), trained(eb.policies.LEAN_8BIT, layout="tree"))


@pytest.mark.parametrize("absent", [(1,), (0, 3), (6,), (2, 3, 4)])
@pytest.mark.parametrize("flat_gradients", [False, True])
def test_parameters_without_a_gradient_are_cut_out_and_come_back(absent: tuple[int, ...], flat_gradients: bool) -> None:
    found = []
    for options in ({"flat_gradients": flat_gradients}, {"layout": "tree"}):
        params = parameters()
        optimizer = make(params, eb.policies.LEAN_8BIT, **options)
        for step in range(5):
            optimizer.zero_grad()
            give_gradients(params, step, absent if step in (1, 2) else ())
            optimizer.step()
        found.append(held(params, optimizer))
    assert_same(*found)


def test_a_parameter_that_leaves_the_buffer_takes_its_own_state_along() -> None:
    found = []
    for layout in ("auto", "tree"):
        params = parameters()
        optimizer = make(params, eb.policies.LEAN_8BIT, layout=layout)
        give_gradients(params, 0)
        optimizer.step()
        for number in (0, 2):
            p = params[number]
            p.grad = None
            p.data = p.data.transpose(0, 1).contiguous().transpose(0, 1)
        for step in (1, 2):
            give_gradients(params, step)
            optimizer.step()
        found.append(held(params, optimizer))
    assert_same(*found)


@pytest.mark.parametrize("policy", POLICIES)
def test_state_is_saved_for_each_parameter_and_loads_into_every_layout(policy: str) -> None:
    params = parameters()
    optimizer = make(params, POLICIES[policy])
    give_gradients(params, 0)
    optimizer.step()
    file = io.BytesIO()
    torch.save({"params": [p.detach() for p in params], "state": optimizer.state_dict()}, file)
    for options in ({}, {"layout": "tree"}, {"flat_gradients": True}):
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        fresh = [nn.Parameter(p) for p in saved["params"]]
        other = make(fresh, POLICIES[policy], **options)
        other.load_state_dict(saved["state"])
        for step in (1, 2):
            give_gradients(fresh, step)
            other.step()
        assert_same(held(fresh, other), trained(POLICIES[policy], layout="tree"))


def test_a_buffer_without_gaps_is_as_long_as_its_parameters() -> None:
    params = [nn.Parameter(torch.zeros(256, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))]
    whole = make(params[:1], eb.policies.LEAN_8BIT)
    for p in params:
        p.grad = torch.ones_like(p)
    whole.step()
    assert whole.engine.units[0].tensor.numel() == 256
    odd = make(params[1:], eb.policies.LEAN_BF16)
    odd.step()
    assert odd.engine.units[0].tensor.numel() == 5
