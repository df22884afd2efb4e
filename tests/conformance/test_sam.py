"""SAM against optax's and pytorch_optimizer's, over 200 steps in float64. Run by ``make conformance``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import Tensor

import everybit as eb
from everybit_torch import SGD, sam_weights

jax.config.update("jax_enable_x64", True)

MATRIX = np.random.default_rng(0).standard_normal((6, 6)) / 3
START = np.random.default_rng(1).standard_normal(6)
STEPS = 200
# Each of 200 steps is some 30 roundings of 2**-53; the problem contracts what was wrong before.
NEAR = STEPS * 30 * 2.0**-53


def test_optax_opaque_is_followed() -> None:
    """Its inner optimizer divides by the norm itself: ``eps`` is 0."""

    def theirs_loss(w: Any, _: Any = None) -> Any:
        return jnp.sum(jnp.tanh(MATRIX @ w - 1) ** 2)

    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    sam = optax.contrib.sam(optax.adam(0.01), adversary, opaque_mode=True)
    w, state = jnp.asarray(START), sam.init(jnp.asarray(START))
    matrix = torch.tensor(MATRIX)

    def loss(w: Tensor) -> Tensor:
        return torch.tanh(matrix @ w - 1).square().sum()

    opt = eb.with_policy(eb.adam(0.01), eb.policies.FP64)
    mine = torch.tensor(START)
    own = opt.init(mine)
    step = jax.jit(lambda w, state: sam.update(jax.grad(theirs_loss)(w), state, w, grad_fn=jax.grad(theirs_loss)))
    for _ in range(STEPS):
        updates, state = step(w, state)
        w = optax.apply_updates(w, updates)
        there = eb.sam_point(mine, torch.func.grad(loss)(mine), 0.1, eps=0.0)
        mine, own = opt.step(mine, torch.func.grad(loss)(there), own)
    np.testing.assert_allclose(mine.numpy(), np.asarray(w), rtol=NEAR, atol=NEAR)


@pytest.mark.parametrize("adaptive", [False, True])
def test_pytorch_optimizer_is_followed(adaptive: bool) -> None:
    theirs_module = pytest.importorskip("pytorch_optimizer")
    matrix = torch.tensor(MATRIX)
    theirs, mine = (torch.nn.Parameter(torch.tensor(START)) for _ in range(2))
    sam = theirs_module.SAM([theirs], torch.optim.SGD, rho=0.1, adaptive=adaptive, lr=0.05, momentum=0.9)
    optimizer = SGD([mine], lr=0.05, momentum=0.9)

    def backward(w: Tensor) -> Tensor:
        w.grad = None
        loss = torch.tanh(matrix @ w - 1).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(STEPS):
        backward(theirs)
        sam.step(lambda: backward(theirs))
        backward(mine)
        with sam_weights(optimizer, 0.1, adaptive=adaptive):
            backward(mine)
        optimizer.step()
    # Its norm is float32, so that its point is off by 0.1 * 2**-23 at most; where training leads is off by about as much.
    torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=0.1 * 2.0**-22, atol=0.1 * 2.0**-22)
