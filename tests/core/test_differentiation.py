"""Derivatives through stored steps: rounding differentiates as the identity, never as zero by accident."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb

SIXTEEN_BITS = ["MIXED_BF16", "EXACT_BF16", "LEAN_BF16", "KAHAN_BF16", "TIGHT_BF16", "FLOOR_BF16"]
OWN: dict[str, eb.Policy] = {
    "float32 residual": eb.Policy(params=eb.Kahan("float32")),
    "float16 residual, stochastic": eb.Policy(params=eb.Kahan("float16", "stochastic")),
    "momentum in two parts": eb.Policy(
        params=eb.Split(16), momentum=eb.Kahan(), variance=eb.Split(8, rounding="stochastic")
    ),
    "to nearest": eb.Policy(momentum=eb.Nearest("bfloat16"), variance=eb.Nearest("bfloat16")),
}


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w": (40,), "b": (3, 2), "s": ()}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


START, TARGET = tensors(0), tensors(1)


def outcome(policy: eb.Policy, dtype: torch.dtype, where: Tensor, seed: int | Tensor = 0) -> Tensor:
    """The loss after six AdamW steps on a quadratic, as a function of (learning rate, weight decay, shift of the start).

    The shift is away from the target in each element: terms of its derivative have one sign, and no rounding grows by cancellation.
    """
    optimizer = eb.with_policy(
        eb.adamw(where[0], weight_decay=where[1], eps_root=1e-8, b2=0.9), policy, seed=seed, unsafe="allow"
    )
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    params = {name: p.to(dtype) + where[2].to(dtype) * (p - TARGET[name]).sign().to(dtype) for name, p in START.items()}
    target = {name: p.to(wide) for name, p in TARGET.items()}
    state = optimizer.init(params)
    for _ in range(6):
        grads = {name: params[name].to(wide) - target[name] for name in params}
        params, state = optimizer.step(params, grads, state)
    losses = [((params[name].to(wide) - target[name]) ** 2).sum() for name in params]
    return torch.stack(losses).sum()


WHERE = torch.tensor([0.05, 0.1, 0.0], dtype=torch.float64)


def derivative(policy: eb.Policy, dtype: torch.dtype) -> Tensor:
    of_where: Tensor = torch.func.grad(lambda where: outcome(policy, dtype, where))(WHERE)
    return of_where


@pytest.mark.parametrize("name", [*SIXTEEN_BITS, *OWN])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_derivative_through_stored_steps_is_float32s_to_the_precision_of_the_weights(
    name: str, dtype: torch.dtype
) -> None:
    """A derivative is a sum over 47 elements and six steps of numbers that are rounded to the model's dtype (2**-8 each for bfloat16),

    and the loss is taken at weights that are rounded, too: a few times 2**-8. Before, it was exactly zero.
    """
    policy = OWN[name] if name in OWN else eb.policies.PRESETS[name]
    expected = derivative(eb.policies.FP32, torch.float32)
    found = derivative(policy, dtype)
    assert (expected.abs() > 1).all()
    # Weights and derivatives are rounded at the start and in six steps: 14 roundings of 2**-9 on average, and one of the sum.
    assert ((found - expected).abs() <= 8 * 2.0**-8 * expected.abs()).all(), (found, expected)


def test_an_exact_float32_policy_has_finite_differences_as_its_derivative() -> None:
    found = derivative(eb.policies.FP64, torch.float64)
    for index in range(3):
        nudge = torch.zeros_like(WHERE)
        nudge[index] = 1e-6
        high, low = (outcome(eb.policies.FP64, torch.float64, WHERE + sign * nudge) for sign in (1, -1))
        assert float(found[index]) == pytest.approx(float((high - low) / 2e-6), rel=1e-6)


@pytest.mark.parametrize("name", ["LEAN_BF16", "KAHAN_BF16", "TIGHT_BF16", "FLOOR_BF16", "MIXED_BF16"])
@pytest.mark.sampled(2)
def test_forward_mode_and_batches_differentiate_alike(name: str) -> None:
    policy = eb.policies.PRESETS[name]

    def one(where: Tensor) -> Tensor:
        return outcome(policy, torch.bfloat16, where)

    found = derivative(policy, torch.bfloat16)
    forward = torch.func.jacfwd(one)(WHERE)
    # Either mode rounds at the start and in six steps: 14 roundings of 2**-9 on average, and one of the sum over elements.
    assert ((forward - found).abs() <= 8 * 2.0**-8 * found.abs()).all()
    wheres = torch.stack([WHERE, WHERE * 0.5])
    batched = torch.func.vmap(torch.func.grad(one))(wheres)
    looped = torch.stack([torch.func.grad(one)(where) for where in wheres])
    torch.testing.assert_close(batched, looped, rtol=1e-6, atol=0)
    inside = torch.func.grad(lambda w: torch.func.vmap(one)(w).sum())(wheres)
    torch.testing.assert_close(inside, looped, rtol=1e-6, atol=0)


@pytest.mark.slow
def test_a_compiled_derivative_is_eagers() -> None:
    torch._dynamo.reset()

    def gradient(where: Tensor) -> Tensor:
        of_where: Tensor = torch.func.grad(lambda w: outcome(eb.policies.LEAN_BF16, torch.bfloat16, w))(where)
        return of_where

    compiled = torch.compile(gradient, backend="aot_eager")(WHERE)
    torch.testing.assert_close(compiled, gradient(WHERE), rtol=1e-6, atol=0)
    torch._dynamo.reset()


def test_a_population_rounds_with_a_seed_for_each_member() -> None:
    """With one seed for all, members round alike: their noise does not average out."""
    policy = eb.policies.FLOOR_BF16
    seeds = torch.tensor([0, 1, 2**40, -5])

    def member(seed: Tensor) -> Tensor:
        return outcome(policy, torch.bfloat16, WHERE, seed)

    batched = torch.func.vmap(member)(seeds)
    looped = torch.stack([outcome(policy, torch.bfloat16, WHERE, int(seed)) for seed in seeds])
    torch.testing.assert_close(batched, looped, rtol=1e-6, atol=0)
    assert len(set(looped.tolist())) == len(seeds)
    for wrong in (torch.tensor([1]), torch.tensor(1.0), 1.5, True, 2**63):
        with pytest.raises((TypeError, ValueError), match=r"seed: got .*; accepted is a whole number"):
            eb.with_policy(eb.sgd(), policy, seed=wrong)  # type: ignore[arg-type]


def training_loop(steps: int, step: Any) -> dict[str, Tensor]:
    """The documented loop: gradients of a model by autograd, and a pure step."""
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = eb.with_policy(eb.adamw(1e-2), eb.policies.LEAN_BF16)
    params: Any = dict(model.named_parameters())
    state = optimizer.init(params)
    for _ in range(steps):
        params = {name: p if p.requires_grad else p.requires_grad_() for name, p in params.items()}
        out = torch.func.functional_call(model, params, (torch.ones(1, 3, dtype=torch.bfloat16),))
        grads = dict(zip(params, torch.autograd.grad(out.float().sum(), list(params.values())), strict=True))
        params, state = step(optimizer, params, grads, state)
    return params  # type: ignore[no-any-return]


@pytest.mark.slow
def test_the_documented_loop_keeps_no_graph() -> None:
    @torch.no_grad()
    def step(optimizer: Any, *arguments: Any) -> Any:
        return optimizer.step(*arguments)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for p in training_loop(3, step).values():
            assert p.grad_fn is None
    gc.collect()


def test_a_module_parameter_outside_of_no_grad_warns_once_and_says_what_to_do() -> None:
    with pytest.warns(
        UserWarning, match=r"params\['weight'\]: got an nn.Parameter while gradients are enabled"
    ) as caught:
        training_loop(3, lambda optimizer, *arguments: optimizer.step(*arguments))
    assert [warning.filename for warning in caught] == [__file__]
    # Differentiating through steps is what plain tensors are for: nothing to say.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        derivative(eb.policies.LEAN_BF16, torch.bfloat16)
