"""Averages of the weights are those of torch and of the papers' formulas, and a 16-bit average moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import everybit as eb


def run(
    average: eb.Transform[Any], gradients: Sequence[Tensor], policy: eb.Policy = eb.policies.FP64
) -> tuple[list[Tensor], list[Tensor]]:
    """The weights after each step, and their averages."""
    optimizer = eb.with_policy(eb.chain(eb.sgd(0.1), average), policy)
    params = torch.zeros_like(gradients[0])
    state = optimizer.init(params)
    weights, averages = [], []
    for gradient in gradients:
        params, state = optimizer.step(params, gradient, state)
        weights.append(params)
        averages.append(optimizer.eval_params(params, state))
    return weights, averages


def walk(steps: int, size: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(steps)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(steps)]


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_it_is_torchs_average(kind: str) -> None:
    """Over 200 steps in float64, where both add some 200 rounded numbers of size 1: 200 * 2**-53 each."""
    module = nn.Linear(5, 1, bias=False, dtype=torch.float64)
    ema = get_ema_multi_avg_fn(0.99)  # type: ignore[no-untyped-call]
    theirs = AveragedModel(module, multi_avg_fn=ema if kind == "ema" else None)
    average: eb.Transform[Any] = eb.average_weights(0.99, debias=False) if kind == "ema" else eb.mean_weights()
    for weights, ours in zip(*run(average, walk(200)), strict=True):
        with torch.no_grad():
            module.weight.copy_(weights)
        theirs.update_parameters(module)
        found = next(theirs.parameters()).detach()[0]
        torch.testing.assert_close(ours, found, rtol=0, atol=400 * 2.0**-53 * float(weights.abs().max() + 1))


@settings(max_examples=40)
@given(
    decay=st.floats(0.0, 1.0), gamma=st.floats(0.0, 20.0), start=st.integers(0, 5), steps=st.integers(1, 30),
)  # fmt: skip
def test_it_is_the_papers_weighted_mean(decay: float, gamma: float, start: int, steps: int) -> None:
    """Each weight's share written out: beta**(t-s) for an EMA; for a power a product of (1 - 1/t)**(gamma+1); 1 for a mean."""
    gradients = walk(steps)
    kinds: list[tuple[eb.Transform[Any], float | None]] = [
        (eb.average_weights(decay, start=start), decay),
        (eb.mean_weights(start=start), 1.0),
        (eb.power_average_weights(gamma, start=start), None),
    ]
    for average, fade in kinds:
        weights, averages = run(average, gradients)
        for step in range(1, steps + 1):
            used = weights[start:step] if step > start else [weights[step - 1]]
            shares = [0.0] * len(used)
            for t in range(1, len(used) + 1):
                if fade is not None:
                    shares = [share * fade for share in shares]
                    shares[t - 1] = 1.0
                else:
                    newest = 1 - (1 - 1 / t) ** (gamma + 1)
                    shares = [share * (1 - newest) for share in shares]
                    shares[t - 1] = newest
            expected = sum(share * w for share, w in zip(shares, used, strict=True)) / sum(shares)
            # Every average adds at most 30 numbers of size at most 30 * 0.1 * 5, each rounded some five times.
            torch.testing.assert_close(averages[step - 1], expected, rtol=0, atol=30 * 5 * 15 * 2.0**-52)


@pytest.mark.slow
def test_a_bfloat16_average_moves_where_one_that_is_rounded_to_nearest_stands_still() -> None:
    """Weights that jump from 1 to 2: after 2000 steps of an EMA of 0.999 the average is 2 - 0.999**2000 = 1.865.

    Stochastic rounding adds noise to each of the 4096 elements: a step moves it by 2**-7 or not at all, so that its variance is at most
    2**-7 * 0.001 a step, and 2**-7 / 2 after all steps that are remembered. The mean of all elements is off by 0.001 (one deviation).
    """
    steps, jump = 2000, torch.full((4096,), 2.0)
    found = {}
    for name, format in (
        ("nearest", eb.Nearest("bfloat16")),
        ("stochastic", eb.Stochastic("bfloat16")),
        ("Kahan", eb.Kahan()),
    ):
        policy = eb.Policy(slots={"average": format})
        optimizer = eb.with_policy(
            eb.chain(eb.set_to_zero(), eb.average_weights(0.999, debias=False)), policy, unsafe="allow"
        )
        state = optimizer.init(torch.ones(4096))
        _, state = optimizer.step(torch.ones(4096), torch.zeros(4096), state)
        for _ in range(steps):
            _, state = optimizer.step(jump, torch.zeros(4096), state)
        found[name] = float(optimizer.eval_params(jump, state).mean())
    expected = 2 - 0.999**steps
    assert found["nearest"] == 1.0
    assert found["stochastic"] == pytest.approx(expected, abs=0.01)
    assert found["Kahan"] == pytest.approx(expected, abs=0.01)


def test_what_would_stand_still_is_refused() -> None:
    policy = eb.Policy(state=eb.Nearest("bfloat16"))
    for average in (eb.average_weights(0.999), eb.mean_weights(), eb.power_average_weights()):
        with pytest.raises(ValueError, match=r"Policy\.state: got .* for|it would stop moving"):
            eb.with_policy(eb.chain(eb.sgd(0.1), average), policy)
    eb.with_policy(eb.chain(eb.sgd(0.1), eb.average_weights(0.9)), policy)


@pytest.mark.parametrize("make", [eb.average_weights, eb.mean_weights, eb.power_average_weights])
def test_bad_values_are_named(make: Any) -> None:
    for start in (-1, True, 1.5):
        with pytest.raises(ValueError, match=r"start: got .*; accepted is a whole number of updates, at least 0"):
            make(start=start)
    with pytest.raises(ValueError, match=r"decay: got 1\.5"):
        eb.average_weights(1.5)
    with pytest.raises(ValueError, match="gamma: got -1"):
        eb.power_average_weights(-1.0)
