"""Train 32 models with 32 learning rates in one call.

    python docs/examples/population.py
    python docs/examples/population.py --policy FP32 --optimizer sgd --lowest 1e-3 --highest 10

The whole run of one model, from its start to its loss, is a function of the learning rate; ``torch.func.vmap`` calls it for all of them
at once. Each member rounds with random bits of its own, by a seed of its own. ``--check 4`` runs that many members alone as well, and
compares all bits of weights and state: they are the same.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

import everybit as eb
from everybit.testing import assert_same_bits

OPTIMIZERS = {
    "adamw": eb.adamw,
    "sgd": eb.sgd,
    "lion": eb.lion,
    "lamb": eb.lamb,
    "schedule_free_adamw": eb.schedule_free_adamw,
}


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A layer whose sums do not depend on whether there is a batch of weights, as those of a matrix product do."""
    return (x.unsqueeze(-2) * weight).sum(-1) + bias


def loss(params: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean square error of a small network."""
    hidden = torch.tanh(linear(inputs.to(params["in"].dtype), params["in"], params["in_bias"]))
    return (linear(hidden, params["out"], params["out_bias"]).float() - targets).square().mean()


def main(arguments: Sequence[str] | None = None) -> dict[float, float]:
    """Train the population, print a table, and return the last loss by learning rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=[*eb.policies.PRESETS], default="LEAN_BF16")
    parser.add_argument("--optimizer", choices=[*OPTIMIZERS], default="adamw")
    parser.add_argument("--members", type=int, default=32)
    parser.add_argument("--lowest", type=float, default=1e-4)
    parser.add_argument("--highest", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--check", type=int, default=2, help="members that are trained alone as well")
    given = parser.parse_args(arguments)

    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if "BF16" in given.policy else torch.float64 if given.policy == "FP64" else torch.float32
    inputs = torch.randn(64, 8, generator=generator)
    targets = inputs[:, :1] * inputs[:, 1:2] + inputs[:, 2:3]
    shapes = {"in": (32, 8), "in_bias": (32,), "out": (1, 32), "out_bias": (1,)}
    start = {
        name: (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype) for name, shape in shapes.items()
    }

    def trained(rate: Tensor, seed: Tensor | int) -> tuple[Any, Any, Tensor]:
        optimizer = eb.with_policy(OPTIMIZERS[given.optimizer](rate), given.policy, seed=seed)
        params, state = start, optimizer.init(start)
        for _ in range(given.steps):
            params, state = optimizer.step(params, grad(loss)(params, inputs, targets), state)
        return params, state, loss(params, inputs, targets)

    rates = torch.logspace(
        *torch.tensor([given.lowest, given.highest]).log10().tolist(), given.members, dtype=torch.float64
    )
    began = time.perf_counter()
    population = vmap(trained)(rates, torch.arange(given.members))
    together = time.perf_counter() - began

    began = time.perf_counter()
    checked = range(0, given.members, max(1, -(-given.members // given.check))) if given.check else range(0)
    for number in checked:
        mine = eb.tree.map(lambda leaf, number=number: leaf[number], population)
        assert_same_bits(
            mine, trained(rates[number], number), f"member {number} of the population, against the same run alone"
        )
    alone = (time.perf_counter() - began) / max(1, len(checked))

    losses = population[2].tolist()
    best = min(losses)
    for rate, value in zip(rates.tolist(), losses, strict=True):
        print(
            f"{rate:10.2e}  {value:8.4f}  {'#' * round(40 * min(1.0, value / losses[0]))}{'  best' if value == best else ''}"
        )
    print(
        f"{given.members} members, {given.steps} steps: {together:.1f} s in one call; one member alone takes {alone:.1f} s"
    )
    print(f"{len(checked)} members trained alone have the same bits, weights and state")
    return dict(zip(rates.tolist(), losses, strict=True))


if __name__ == "__main__":
    main()
