"""Small transforms against their formulas, written out in float64, over 200 random steps; and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import everybit as eb

Params = dict[str, Tensor]
Reference = Callable[[int, Params, Params], Params]

SHAPES = {"w": (6, 4), "k": (3, 2, 5), "b": (7,), "s": ()}
STEPS = 200
RATE = 0.05


def draws(seed: int, scale: float = 1.0) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: scale * torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()
    }


def norm(values: Params) -> Tensor:
    return torch.cat([x.reshape(-1) for x in values.values()]).square().sum().sqrt()


def follow(
    transform: eb.Transform[Any], reference: Reference, *, scales: Callable[[int], float] = lambda _: 1.0
) -> None:
    """Train on the same gradients by ``transform`` and by ``reference``, which returns updates to be added, of step 1 on.

    Each step is some twenty roundings of numbers of about 1, in each of 200 steps, of which an average hands on at most all: 200 * 20
    * 2**-53 of the largest number, 4e-13, and the same again where the references order sums otherwise.
    """
    tx = eb.chain(transform)
    ours = theirs = draws(0)
    state = tx.init(ours)
    for step in range(1, STEPS + 1):
        grads = draws(step, scales(step))
        updates, state = tx.update(grads, state, ours)
        ours = eb.apply_updates(ours, updates)
        theirs = eb.apply_updates(theirs, reference(step, grads, theirs))
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-12, atol=1e-12)


def descend(tx: eb.Transform[Any], *rest: eb.Transform[Any]) -> eb.Transform[Any]:
    return eb.chain(tx, *rest, eb.scale_by_learning_rate(RATE))


def each(function: Callable[..., Tensor], *trees: Params) -> Params:
    return {name: function(*(tree[name] for tree in trees)) for name in trees[0]}


@pytest.mark.parametrize("rescale", ["share", "count", "none"])
def test_cautious_updates(rescale: Any) -> None:
    momentum: Params = each(torch.zeros_like, draws(0))

    def masked(m: Tensor, g: Tensor) -> Tensor:
        mask = (m * g > 0).double()
        kept = m * mask
        if rescale == "share":
            return -RATE * kept / max(float(mask.mean()), 1e-3)
        return -RATE * kept * (m.numel() / (float(mask.sum()) + 1) if rescale == "count" else 1.0)

    def reference(step: int, grads: Params, params: Params) -> Params:
        momentum.update(each(lambda m, g: 0.9 * m + g, momentum, grads))
        return each(masked, momentum, grads)

    follow(descend(eb.cautious(eb.trace(0.9), rescale)), reference)


@pytest.mark.parametrize("at_zero", [False, True])
def test_cautious_decay(at_zero: bool) -> None:
    def decayed(g: Tensor, p: Tensor) -> Tensor:
        g = g.clamp(min=0.0)
        return -RATE * (g + 0.1 * p * ((g * p >= 0) if at_zero else (g * p > 0)))

    relu: eb.Transform[Any] = Positive()
    follow(
        descend(relu, eb.add_cautious_decay(0.1, at_zero=at_zero)),
        lambda step, grads, params: each(decayed, grads, params),
    )


class Positive(eb.Elementwise):
    """Zeros where gradients are negative, so that updates that are exactly zero are met."""

    def init(self, params: Any) -> Any:
        return eb.identity().init(params)

    def update(self, updates: Any, state: Any, params: Any, ctx: eb.Context = eb.Context()) -> Any:  # noqa: B008
        return eb.tree.elementwise(lambda u: u.clamp(min=0.0), updates), state


def test_corrected_decay_follows_the_square_of_the_learning_rate() -> None:
    rate = eb.linear_schedule(0.2, 0.0, STEPS)
    tx = eb.chain(eb.add_corrected_decay(0.1, rate, 0.2), eb.scale_by_learning_rate(rate))

    def reference(step: int, grads: Params, params: Params) -> Params:
        now = 0.2 * (1 - (step - 1) / STEPS)
        return each(lambda g, p: -now * g - now**2 / 0.2 * 0.1 * p, grads, params)

    follow(tx, reference)


@pytest.mark.parametrize("units", ["first", "last"])
def test_units_are_clipped_by_the_norms_of_their_weights(units: Any) -> None:
    def clipped(g: Tensor, p: Tensor) -> Tensor:
        dims = tuple(range(1, g.ndim)) if units == "first" else tuple(range(g.ndim - 1))
        whole = g.ndim < 2
        size = g.norm() if whole else g.norm(dim=dims, keepdim=True)
        weight = p.norm() if whole else p.norm(dim=dims, keepdim=True)
        most = 0.3 * weight.clamp(min=0.5)
        return -RATE * g * torch.where(size > most, most / size, torch.ones_like(size))

    tx = eb.clip_by_unit_norm(0.3, 0.5, units=units)
    follow(descend(tx), lambda step, grads, params: each(clipped, grads, params), scales=lambda step: 0.2 + step % 3)


def test_each_parameter_is_clipped_by_its_root_mean_square() -> None:
    def clipped(g: Tensor) -> Tensor:
        return -RATE * g / max(1.0, float(g.square().mean().sqrt()) / 0.8)

    follow(descend(eb.clip_by_rms(0.8)), lambda step, grads, params: each(clipped, grads))


def test_large_updates_are_skipped_and_leave_no_trace() -> None:
    tx = eb.skip_large_updates(eb.sgd(0.1, momentum=0.9), 5.0)
    params = torch.zeros(4, dtype=torch.float64)
    fine = torch.full((4,), 1.25, dtype=torch.float64)
    state = tx.init(params)
    _, state = tx.update(fine, state, params)
    before = [leaf.clone() for leaf in eb.tree.leaves(state.inner)]
    # 4 * 1.25 is the limit itself: twice 2 * 1.25, which is not below it.
    for bad in (100 * fine, 2.0 * fine, fine * math.nan, fine * math.inf):
        updates, state = tx.update(bad, state, params)
        assert torch.equal(updates, params)
        assert all(map(torch.equal, eb.tree.leaves(state.inner), before))
    updates, state = tx.update(fine, state, params)
    torch.testing.assert_close(updates, -0.1 * 1.9 * fine, rtol=1e-15, atol=0)
    assert (int(state.step), int(state.skipped)) == (2, 4)


def test_what_is_not_a_number_becomes_zero() -> None:
    g = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    cases: list[tuple[bool, list[float]]] = [(False, [1.0, 0.0, math.inf, -math.inf]), (True, [1.0, 0.0, 0.0, 0.0])]
    for infinite, expected in cases:
        tx = eb.zero_nans(infinite=infinite)
        assert tx.update(g, tx.init(g), g)[0].tolist() == expected


def test_rows_are_centred() -> None:
    def centred(g: Tensor) -> Tensor:
        return -RATE * (g - g.mean(tuple(range(1, g.ndim)), keepdim=True) if g.ndim > 1 else g)

    follow(descend(eb.centralize()), lambda step, grads, params: each(centred, grads))


def test_updates_have_the_norm_that_is_asked_for() -> None:
    def reference(step: int, grads: Params, params: Params) -> Params:
        size = float(norm(grads))
        return each(lambda g: -RATE * 2.0 * g / (size + 0.1), grads)

    follow(descend(eb.normalize_by_global_norm(2.0, 0.1)), reference)


def test_slow_gradients_are_amplified() -> None:
    mean: Params = {}

    def reference(step: int, grads: Params, params: Params) -> Params:
        mean.update(each(lambda m, g: 0.98 * m + 0.02 * g, mean, grads) if mean else grads)
        return each(lambda g, m: -RATE * (g + 2.0 * m), grads, mean)

    follow(descend(eb.amplify_slow_gradients()), reference)


def test_lookahead() -> None:
    slow: Params = draws(0)
    momentum: Params = each(torch.zeros_like, slow)

    def reference(step: int, grads: Params, params: Params) -> Params:
        momentum.update(each(lambda m, g: 0.9 * m + g, momentum, grads))
        fast = each(lambda p, m: p - RATE * m, params, momentum)
        if step % 5 == 0:
            slow.update(each(lambda s, f: s + 0.3 * (f - s), slow, fast))
            fast = dict(slow)
        return each(lambda f, p: f - p, fast, params)

    tx = eb.lookahead(eb.sgd(RATE, momentum=0.9), 5, 0.3)
    follow(tx, reference)
    optimizer = eb.with_policy(tx, "FP64")
    params = draws(0)
    state = optimizer.init(params)
    for step in range(1, 8):
        params, state = optimizer.step(params, draws(step), state)
        evaluated = optimizer.eval_params(params, state)
        same = all(torch.allclose(x, params[name], rtol=1e-14) for name, x in evaluated.items())
        assert same == (step == 5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: eb.cautious(eb.trace(0.9), "mean"), r"^rescale: got 'mean'; accepted are 'count', 'share', 'none'"),  # type: ignore[arg-type]
        (lambda: eb.add_cautious_decay(-1.0), r"^weight_decay: got -1\.0"),
        (lambda: eb.add_corrected_decay(0.1, 0.1, 0.0), r"^max_learning_rate: got 0\.0"),
        (lambda: eb.clip_by_unit_norm(0.1, units="middle"), r"^units: got 'middle'"),  # type: ignore[arg-type]
        (lambda: eb.clip_by_unit_norm(-0.1), r"^limit: got -0\.1"),
        (lambda: eb.clip_by_rms(-0.1), r"^limit: got -0\.1"),
        (lambda: eb.skip_large_updates(eb.sgd(0.1), -1.0), r"^limit: got -1\.0"),
        (lambda: eb.normalize_by_global_norm(eps=-1.0), r"^eps: got -1\.0"),
        (lambda: eb.amplify_slow_gradients(1.0), r"^decay: got 1\.0"),
        (lambda: eb.amplify_slow_gradients(gain=-1.0), r"^gain: got -1\.0"),
        (lambda: eb.lookahead(eb.sgd(0.1), 0), r"^period: got 0"),
        (lambda: eb.lookahead(eb.sgd(0.1), share=1.5), r"^share: got 1\.5"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_gradients_ahead_of_the_weights(decay: float) -> None:
    """As the authors' two calls a step do it: ahead along the mean of the moves, and the optimizer's step from there."""
    schedule = eb.join_schedules(
        [eb.constant_schedule(0.0), eb.linear_schedule(0.6, 0.1, 100), eb.constant_schedule(0.0)], [20, 150]
    )
    weights = draws(0)
    mean, momentum = (each(torch.zeros_like, weights) for _ in range(2))
    tx = eb.chain(eb.ema_nesterov(eb.sgd(RATE, momentum=0.5, weight_decay=0.1), schedule, decay))
    params, state = draws(0), tx.init(draws(0))
    for step in range(STEPS):
        share = float(schedule(torch.tensor(step)))
        # What the optimizer sees is ahead of the weights.
        there = each(lambda x, m, share=share: x + share * m, weights, mean)
        grads = each(lambda g, y: g + 0.1 * y, draws(step + 1), there)
        momentum = each(lambda m, g: 0.5 * m + g, momentum, each(lambda g, y: g + 0.1 * y, grads, there))
        new = each(lambda y, m: y - RATE * m, there, momentum)
        mean = each(lambda m, x, old: decay * m + (1 - decay) * (x - old), mean, new, weights)
        weights = new
        updates, state = tx.update(each(lambda g, y: g + 0.1 * y, draws(step + 1), params), state, params)
        params = eb.apply_updates(params, updates)
        for name, value in tx.eval_params(params, state).items():
            torch.testing.assert_close(value, weights[name], rtol=1e-12, atol=1e-12)


def test_without_a_lookahead_it_is_the_optimizer() -> None:
    follow(eb.ema_nesterov(eb.adamw(0.1), 0.0), _as_reference(eb.adamw(0.1)))
    with pytest.raises(ValueError, match=r"^decay: got 1\.0"):
        eb.ema_nesterov(eb.adamw(0.1), 0.5, 1.0)


def _as_reference(tx: eb.Transform[Any]) -> Reference:
    state = [tx.init(draws(0))]

    def reference(step: int, grads: Params, params: Params) -> Params:
        updates, state[0] = tx.update(grads, state[0], params)
        return updates

    return reference
