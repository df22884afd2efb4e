"""Each transform against an independent statement of it: torch.optim, the paper, or a line of arithmetic.

Gradients are random and do not depend on the parameters (open loop): no error is fed back, so that tolerances can be derived.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import everybit as eb
from everybit import testing

STEPS = 200
SHAPES = ((7, 5), (), (0,), (3, 2, 2), (11,))


def tensors(seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def run_torch(make: Callable[[list[Tensor]], torch.optim.Optimizer], dtype: torch.dtype) -> list[Tensor]:
    params = [x.requires_grad_() for x in tensors(0, dtype)]
    optimizer = make(params)
    for step in range(1, STEPS + 1):
        for p, g in zip(params, tensors(step, dtype), strict=True):
            p.grad = g
        optimizer.step()
    return [p.detach() for p in params]


def run_ours(transform: eb.Transform[Any], dtype: torch.dtype) -> list[Tensor]:
    optimizer = eb.with_policy(transform, eb.policies.FP64 if dtype is torch.float64 else eb.policies.FP32)
    params = tensors(0, dtype)
    state = optimizer.init(params)
    for step in range(1, STEPS + 1):
        params, state = optimizer.step(params, tensors(step, dtype), state)
    return params


def greatest_difference(ours: list[Tensor], reference: list[Tensor]) -> float:
    """Relative to the greatest magnitude among all parameters."""
    scale = max(x.abs().max().item() for x in reference if x.numel())
    return (
        max((a.double() - b.double()).abs().max().item() for a, b in zip(ours, reference, strict=True) if a.numel())
        / scale
    )


# Both float32 runs round p + u once a step, by at most half an ulp of p: two random walks of 200 roundings, uniform in half an ulp
# either way (standard deviation 12**-0.5 ulp), so their difference has a standard deviation of (2 * 200 / 12)**0.5 = 5.8 ulp of p. Four of
# these are exceeded by one element in 16 000, and a normal parameter is about a third of the greatest of the 59: 8 ulp of the greatest
# (measured: 2.5). Roundings inside u add relative errors of u, which is at most a tenth of p here.
FLOAT32_BOUND = 8 * 2.0**-23
FLOAT64_BOUND = 1e-12


def assert_follows(
    transform: eb.Transform[Any],
    reference: Callable[[list[Tensor]], torch.optim.Optimizer],
    *,
    also_in_float32: float = 0.0,
) -> None:
    for dtype, bound in ((torch.float64, FLOAT64_BOUND), (torch.float32, FLOAT32_BOUND + also_in_float32)):
        difference = greatest_difference(run_ours(transform, dtype), run_torch(reference, dtype))
        assert difference <= bound, f"{dtype}: {difference:.3g} > {bound:.3g}"


@pytest.mark.parametrize("weight_decay", [pytest.param(0.0, marks=pytest.mark.exhaustive), 0.1])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"),
    [(None, 0.0, False), (0.9, 0.0, False), (0.9, 0.5, False), (0.5, 1.0, False), (0.9, 0.0, True)],
)
@pytest.mark.sampled(2)
def test_sgd_follows_torch(
    momentum: float | None, dampening: float, nesterov: bool, maximize: bool, weight_decay: float
) -> None:
    assert_follows(
        eb.sgd(
            0.01,
            momentum=momentum,
            dampening=dampening,
            nesterov=nesterov,
            maximize=maximize,
            weight_decay=weight_decay,
        ),
        lambda params: torch.optim.SGD(
            params,
            lr=0.01,
            momentum=momentum or 0.0,
            dampening=dampening,
            nesterov=nesterov,
            maximize=maximize,
            weight_decay=weight_decay,
            foreach=False,
        ),
    )


ADAM_GRID = [
    {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "maximize": False},
    {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "maximize": False},
    {"b1": 0.0, "b2": 0.99, "eps": 1e-3, "weight_decay": 0.01, "maximize": True},
    {"b1": 0.5, "b2": 0.0, "eps": 1e-6, "weight_decay": 0.0, "maximize": True},
]


@pytest.mark.parametrize("hyper", ADAM_GRID, ids=str)
@pytest.mark.parametrize(("ours", "theirs"), [(eb.adam, torch.optim.Adam), (eb.adamw, torch.optim.AdamW)])
@pytest.mark.sampled(4)
def test_adam_and_adamw_follow_torch(ours: Any, theirs: Any, hyper: dict[str, Any]) -> None:
    # torch.optim.AdamW multiplies by 1 - lr * weight_decay, rounded to float32 (the same way each step), and rounds the product.
    factor = 1 - 0.01 * hyper["weight_decay"]
    decay_error = STEPS * abs(torch.tensor(factor).item() / factor - 1) if ours is eb.adamw else 0.0
    assert_follows(
        ours(0.01, **hyper),
        lambda params: theirs(
            params,
            lr=0.01,
            betas=(hyper["b1"], hyper["b2"]),
            eps=hyper["eps"],
            weight_decay=hyper["weight_decay"],
            maximize=hyper["maximize"],
            foreach=False,
        ),
        also_in_float32=decay_error,
    )


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize(("weight_decay", "maximize"), [(0.0, False), (0.1, True)])
@pytest.mark.sampled(4)
def test_rmsprop_follows_torch(centered: bool, momentum: float | None, weight_decay: float, maximize: bool) -> None:
    assert_follows(
        eb.rmsprop(
            0.001,
            decay=0.9,
            eps=1e-6,
            momentum=momentum,
            centered=centered,
            weight_decay=weight_decay,
            maximize=maximize,
        ),
        lambda params: torch.optim.RMSprop(
            params,
            lr=0.001,
            alpha=0.9,
            eps=1e-6,
            momentum=momentum or 0.0,
            centered=centered,
            weight_decay=weight_decay,
            maximize=maximize,
            foreach=False,
        ),
    )


class PaperLion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023, line by line, in float64 whatever the parameters are."""

    def __init__(self, params: list[Tensor], lr: float, b1: float, b2: float, wd: float) -> None:
        super().__init__(params, {"lr": lr, "b1": b1, "b2": b2, "wd": wd})
        self.momentum = [torch.zeros_like(p, dtype=torch.float64) for p in params]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        for p, m in zip(group["params"], self.momentum, strict=True):
            g = p.grad.double()
            c = group["b1"] * m + (1 - group["b1"]) * g
            p.copy_(p.double() - group["lr"] * (torch.sign(c) + group["wd"] * p.double()))
            m.copy_(group["b2"] * m + (1 - group["b2"]) * g)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lion_follows_its_paper(weight_decay: float) -> None:
    assert_follows(
        eb.lion(0.001, b1=0.9, b2=0.99, weight_decay=weight_decay),
        lambda params: PaperLion(params, 0.001, 0.9, 0.99, weight_decay),
    )


def test_lion_maximizes_by_the_same_steps_uphill() -> None:
    down, up = eb.lion(0.001), eb.lion(0.001, maximize=True)
    grads, params = tensors(1, torch.float64), tensors(0, torch.float64)
    updates, _ = down.update(grads, down.init(params), params)
    opposite, _ = up.update([-g for g in grads], up.init(params), params)
    testing.assert_same_bits(opposite, updates, "uphill")


def test_fully_decoupled_decay_does_not_depend_on_the_learning_rate() -> None:
    zero = {"w": torch.zeros(3, dtype=torch.float64)}
    for learning_rate in (1e-4, 1e-2):
        optimizer = eb.with_policy(eb.adamw(learning_rate, weight_decay=1e-3, fully_decoupled=True), eb.policies.FP64)
        params = {"w": torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)}
        state = optimizer.init(params)
        for _ in range(50):
            params, state = optimizer.step(params, zero, state)
        expected = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64) * (1 - 1e-3) ** 50
        torch.testing.assert_close(params["w"], expected, rtol=1e-13, atol=0)


def test_fully_decoupled_decay_follows_the_schedule_relative_to_its_peak() -> None:
    schedule = eb.linear_schedule(0.02, 0.0, 10)
    transform = eb.adamw(schedule, weight_decay=0.1, fully_decoupled=True, max_learning_rate=0.02)
    optimizer = eb.with_policy(transform, eb.policies.FP64)
    params = torch.ones(2, dtype=torch.float64)
    state = optimizer.init(params)
    expected = 1.0
    for step in range(12):
        params, state = optimizer.step(params, torch.zeros(2, dtype=torch.float64), state)
        expected *= 1 - 0.1 * max(0.0, 1 - step / 10)
        torch.testing.assert_close(params, torch.full((2,), expected, dtype=torch.float64), rtol=1e-13, atol=0)


def test_adamw_decays_where_its_mask_says() -> None:
    params = {"w": torch.ones(2, dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}
    for fully_decoupled, factor in ((False, 1 - 0.1 * 0.5), (True, 1 - 0.5)):
        transform = eb.adamw(0.1, weight_decay=0.5, mask={"w": True, "b": False}, fully_decoupled=fully_decoupled)
        optimizer = eb.with_policy(transform, eb.policies.FP64)
        after, _ = optimizer.step(params, eb.tree.zeros_like(params), optimizer.init(params))
        torch.testing.assert_close(after["w"], params["w"] * factor, rtol=1e-15, atol=0)
        assert torch.equal(after["b"], params["b"])


def test_adam_with_eps_inside_the_root_is_differentiable_at_zero() -> None:
    def moved(g: Tensor) -> Tensor:
        transform = eb.adam(0.1, eps=0.0, eps_root=1e-6)
        updates, _ = transform.update(g, transform.init(g), g)
        return updates.sum()

    zero = torch.zeros(3, dtype=torch.float64)
    # u = -lr g / sqrt(g**2 + eps_root) after one step, with slope -lr / sqrt(eps_root) at zero.
    torch.testing.assert_close(torch.func.grad(moved)(zero), torch.full_like(zero, -0.1 / 1e-3), rtol=1e-12, atol=0)


def test_rmsprop_with_eps_inside_the_root() -> None:
    transform = eb.scale_by_rms(0.9, 0.25, eps_inside_root=True)
    g = torch.tensor([3.0, -1.0], dtype=torch.float64)
    updates, _ = transform.update(g, transform.init(g), g)
    torch.testing.assert_close(updates, g / (0.1 * g**2 + 0.25).sqrt(), rtol=1e-15, atol=0)


def test_centered_rmsprop_survives_constant_gradients() -> None:
    """Mean of squares less square of mean is zero but for rounding, which may well be below zero."""
    optimizer = eb.with_policy(eb.rmsprop(1e-3, decay=0.5, eps=1e-3, centered=True), eb.policies.FP32)
    params = torch.ones(1000)
    grads = torch.linspace(-3, 3, 1000)
    state = optimizer.init(params)
    for _ in range(100):
        params, state = optimizer.step(params, grads, state)
    assert params.isfinite().all()


def test_momentum_starts_with_the_undampened_gradient() -> None:
    transform = eb.chain(eb.trace(0.5, dampening=0.25))
    g = torch.tensor([4.0])
    state = transform.init(g)
    seen = []
    for _ in range(3):
        updates, state = transform.update(g, state, g)
        seen.append(updates.item())
    assert seen == [4.0, 0.5 * 4 + 0.75 * 4, 0.5 * 5 + 0.75 * 4]


def test_clip_limits_every_element_and_lets_nan_through() -> None:
    x = torch.tensor([-3.0, -0.5, 0.0, 2.0, float("inf"), float("nan")])
    limits: tuple[eb.Hyperparameter, ...] = (1.0, torch.tensor(1.0, dtype=torch.float64), eb.constant_schedule(1.0))
    for limit in limits:
        transform = eb.chain(eb.clip(limit))
        updates, _ = transform.update(x, transform.init(x), x)
        expected = torch.tensor([-1.0, -0.5, 0.0, 1.0, 1.0, float("nan")])
        torch.testing.assert_close(updates, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("limit", [0.5, 3.0, 1e6])
def test_clip_by_global_norm_is_torchs_without_its_millionth(limit: float) -> None:
    grads = [g for g in tensors(3, torch.float64) if g.numel()]
    params = [torch.zeros_like(g, requires_grad=True) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(params, limit, foreach=False)
    ours, _ = eb.clip_by_global_norm(limit).update(grads, eb.clip_by_global_norm(limit).init(grads), grads)
    correction = (norm / (norm + 1e-6)).item() if norm > limit else 1.0
    for u, p in zip(ours, params, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(u * correction, p.grad, rtol=1e-14, atol=0)
    assert eb.tree.norm(ours) <= max(limit, 0) * (1 + 1e-14)


def test_clip_by_global_norm_leaves_zero_alone_and_squares_in_float32_or_better() -> None:
    clip = eb.clip_by_global_norm(1.0)
    zeros = [torch.zeros(3), torch.zeros(())]
    testing.assert_same_bits(clip.update(zeros, clip.init(zeros), zeros)[0], zeros, "zeros")
    # 300**2 is beyond float16, 1e-4**2 below it.
    assert eb.tree.norm([torch.full((4,), 300.0, dtype=torch.float16)]) == 600.0
    small = eb.tree.norm([torch.full((4,), 1e-4, dtype=torch.float16)])
    assert small.item() == pytest.approx(2e-4, rel=2.0**-11)  # that of float16, in which 1e-4 is given
    assert eb.tree.norm({}) == 0


class Shards(eb.Local):
    """An axis whose other members hold the sum 4."""

    @staticmethod
    def sum(value: Tensor) -> Tensor:
        return value + 4.0


def test_clip_by_global_norm_is_of_all_shards() -> None:
    clip = eb.clip_by_global_norm(1.0)
    x = torch.tensor([2.0, 1.0])
    updates, _ = eb.fulfil(clip.update(x, clip.init(x), x, eb.Context(pending=True)), Shards())
    torch.testing.assert_close(updates, x / 3.0)


def test_sign_scale_identity_and_zero() -> None:
    x = torch.tensor([-2.0, -0.0, 0.0, 3.0])
    assert eb.scale_by_sign().update(x, eb.scale_by_sign().init(x), x)[0].tolist() == [-1.0, 0.0, 0.0, 1.0]
    assert eb.scale(-2.5).update(x, eb.scale(-2.5).init(x), x)[0].tolist() == [5.0, 0.0, 0.0, -7.5]
    assert eb.identity().update(x, eb.identity().init(x), x)[0] is x
    assert eb.set_to_zero().update(x, eb.set_to_zero().init(x), x)[0].tolist() == [0.0] * 4


def test_a_learning_rate_of_zero_moves_nothing_and_breaks_nothing() -> None:
    for make in (eb.sgd, eb.adam, eb.adamw, eb.lion, eb.rmsprop):
        optimizer = eb.with_policy(make(0.0), eb.policies.FP32)
        params = tensors(0, torch.float32)
        after, _ = optimizer.step(params, tensors(1, torch.float32), optimizer.init(params))
        assert all(torch.equal(a, b) for a, b in zip(after, params, strict=True))


def test_apply_updates_rounds_each_sum_once_into_the_parameters_dtype() -> None:
    params = {"a": torch.tensor([1.0, 256.0], dtype=torch.bfloat16), "b": torch.tensor(1.0)}
    updates = {"b": torch.tensor(0.5), "a": torch.tensor([2.0**-8, 1.0])}
    after = eb.apply_updates(params, updates)
    assert list(after) == ["a", "b"]
    assert after["a"].tolist() == [1.0, 256.0]
    assert after["a"].dtype is torch.bfloat16
    assert after["b"].item() == 1.5


def test_apply_updates_names_the_path_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"updates\['a'\]: shape \(3,\), but params\['a'\] has \(2,\)"):
        eb.apply_updates({"a": torch.ones(2)}, {"a": torch.ones(3)})
    with pytest.raises(ValueError, match=r"no tensor at updates\['a'\]; unexpected updates\['b'\]"):
        eb.apply_updates({"a": torch.ones(2)}, {"b": torch.ones(2)})


def test_transforms_print_compare_hash_and_tell_their_hyperparameters() -> None:
    transform = eb.adamw(3e-4, b2=0.95)
    assert transform == eb.adamw(3e-4, b2=0.95)
    assert transform != eb.adamw(3e-4)
    assert hash(transform) == hash(eb.adamw(3e-4, b2=0.95))
    assert (
        repr(transform.transforms[0])
        == "ScaleByAdam(b1=0.9, b2=0.95, eps=1e-08, eps_root=0.0, amsgrad=False, eps_before_correction=False)"
    )
    assert transform.transforms[-1] == eb.scale_by_learning_rate(3e-4)
