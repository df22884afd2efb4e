"""A transform as a user writes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar, assert_type

import torch

import everybit as eb

P = TypeVar("P")


@eb.state
class SignumState(Generic[P]):
    momentum: eb.Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleBySignum(eb.Elementwise):
    decay: float = 0.9

    def init(self, params: P) -> SignumState[P]:
        return SignumState(eb.tree.zeros_like(params))

    def decays(self) -> tuple[eb.SlotDecay, ...]:
        return (eb.SlotDecay("momentum", self.decay),)

    def update(
        self, updates: P, state: SignumState[Any], params: P, ctx: eb.Context = eb.Context()
    ) -> tuple[P, SignumState[P]]:
        momentum = eb.tree.map(lambda g, m: self.decay * m + g, updates, state.momentum)
        return eb.tree.map(torch.sign, momentum), SignumState(momentum)


tx = eb.chain(ScaleBySignum(0.95), eb.scale_by_learning_rate(1e-4))
opt = eb.with_policy(tx, eb.policies.KAHAN_BF16)

params = {"w": torch.ones(2, dtype=torch.bfloat16)}
alone = eb.with_policy(ScaleBySignum(), eb.policies.KAHAN_BF16)
begun: eb.OptimizerState[SignumState[Any]] = alone.init(params)
# pyright gives the two methods' unsolved type variables a name each where mypy says Any; either is assignable to the other.
assert_type(alone.init(params), eb.OptimizerState[SignumState[Any]])  # pyright: ignore[reportAssertTypeFailure]
assert_type(eb.state_dict(alone.init(params)), dict[str, torch.Tensor])
assert_type(eb.by_dtype({"bfloat16": eb.policies.LEAN_BF16}), eb.ByLabel)
seeded = eb.with_policy(tx, eb.policies.KAHAN_BF16, seed=torch.tensor(1))
eb.partition({"signs": ScaleBySignum(), "rest": tx}, "signs")
