"""The checks of hyperparameters that are given as tensors."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from everybit.base import tree
from everybit.protocol import Transform, hyperparameters, map_hyperparameters
from everybit.stepping import with_policy
from everybit.testing.checks.conditions import LEARNING_RATE, STORED, Build, Stored
from everybit.testing.examples import assert_same_bits, example_grads, example_params


def check_hyperparameters_are_data(build: Build, stored: Stored = STORED) -> None:
    """A hyperparameter may be a 0-d tensor wherever its field accepts one: the same bits as with the number, and no look at its value.

    Compiled steps get hyperparameters so, and another value needs no other code. A transform may use a number as a constant,
    and skip operations for a zero, as long as the tensor zero gives the same bits.
    """
    numbers = build(LEARNING_RATE)
    for value in (None, 0.0):
        # Each as it is, and each at zero, where transforms like to take another way.
        given = numbers if value is None else _at_zero(numbers)
        tensors = map_hyperparameters(lambda _name, x: torch.as_tensor(x, dtype=torch.float64), given)
        for dtype, policy in stored:
            one, other = (with_policy(x, policy, unsafe="allow") for x in (given, tensors))
            params = example_params(dtype)
            params["w"][0] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.0, 2.0])
            stepped = both = (params, one.init(params))
            grads = params
            for step in (1, 2):
                grads = example_grads(params, step)
                grads["w"][0] = 0.0
                stepped, both = one.step(stepped[0], grads, stepped[1]), other.step(both[0], grads, both[1])
                what = f"hyperparameters as tensors, against numbers{'' if value is None else ' (zero)'}, step {step}, {dtype}"
                assert_same_bits(both, stepped, what)
            shadows = tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), (params, grads, stepped[1]))
            traced = map_hyperparameters(lambda _name, _x: torch.empty((), dtype=torch.float64, device="meta"), given)
            try:
                with_policy(traced, policy, unsafe="allow").step(*shadows)
            except (RuntimeError, NotImplementedError, TypeError) as error:
                raise AssertionError(
                    f"hyperparameters as tensors without values: {error}; a field that decides what is computed is to be annotated with"
                    " a number's type, not Hyperparameter."
                ) from error


def _at_zero(transform: Transform[Any]) -> Transform[Any]:
    """The transform with every hyperparameter that may be zero at zero."""
    for position in range(len(hyperparameters(transform))):
        count = iter(range(position + 1))

        def zero(_name: str, value: Any, count: Any = count, position: int = position) -> Any:
            return 0.0 if next(count, None) == position else value

        with suppress(ValueError):
            transform = map_hyperparameters(zero, transform)
    return transform
