"""Runs that are resumed, told which work is due, given tensors as hyperparameters, or planned on meta tensors."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from everybit.base import tree
from everybit.protocol import Context, Transform, hyperparameters, map_hyperparameters
from everybit.stepping import with_policy
from everybit.testing.examples import (
    LEARNING_RATE,
    STORED,
    Build,
    Stored,
    assert_same_bits,
    assert_same_kind,
    example_grads,
    example_params,
)


def check_resume_equals_continue(build: Build, stored: Stored = STORED) -> None:
    """Saved, loaded with ``weights_only=True`` into a state freshly made, and continued: the bits of a run never interrupted."""
    for dtype, policy in stored:
        optimizer, params = with_policy(build(LEARNING_RATE), policy, seed=7), example_params(dtype)
        state = optimizer.init(params)
        for step in range(1, 4):
            params, state = optimizer.step(params, example_grads(params, step), state)
        file = io.BytesIO()
        torch.save({"params": tree.leaves(params), "state": tree.leaves(state)}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        resumed = with_policy(build(LEARNING_RATE), policy, seed=7)
        other_params = tree.replace(example_params(dtype, seed=1), loaded["params"])
        other = tree.replace(resumed.init(other_params), loaded["state"])
        for step in range(4, 7):
            grads = example_grads(params, step)
            params, state = optimizer.step(params, grads, state)
            other_params, other = resumed.step(other_params, grads, other)
            what = f"resumed, against continued, after step {step}, {dtype}"
            assert_same_bits((other_params, other), (params, state), what)


def check_periodic_work(build: Build) -> None:
    """Where the host says which periodic work is due, a step gives the bits that it gives where the device decides."""
    for dtype, policy in STORED:
        optimizer, params = with_policy(build(LEARNING_RATE), policy), example_params(dtype)
        if not optimizer.due(1):
            return
        state = optimizer.init(params)
        for step in range(1, 7):
            grads = example_grads(params, step)
            told = optimizer.step(params, grads, state, Context(due=optimizer.due(step)))
            params, state = optimizer.step(params, grads, state)
            assert_same_bits(told, (params, state), f"decided on the host, against the device, step {step}, {dtype}")


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


def check_meta_init(build: Build) -> None:
    """Check that ``init`` on meta tensors allocates no memory and gives the shapes and dtypes of the real one."""
    for dtype, policy in STORED:
        optimizer, params = with_policy(build(LEARNING_RATE), policy), example_params(dtype)
        shadow = tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), params)
        with _OnlyMeta():  # type: ignore[no-untyped-call]
            planned = optimizer.init(shadow)
        made = optimizer.init(params)
        assert_same_kind(
            planned, tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), made), "state on meta tensors"
        )


def check_no_wait(build: Build) -> None:
    """Check that a step never reads a value from the device: it works on meta tensors, which have no values."""
    for dtype, policy in STORED:
        optimizer, params = with_policy(build(LEARNING_RATE), policy), example_params(dtype)
        grads, state = example_grads(params, 1), optimizer.init(params)
        shadows = tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), (params, grads, state))
        try:
            planned = optimizer.step(*shadows)
        except RuntimeError as error:
            raise AssertionError(f"a step on meta tensors, which have no values: {error}") from error
        assert_same_kind(planned, (shadows[0], shadows[2]), "what a step on meta tensors returns")


class _OnlyMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses every operation that makes a real tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree.leaves([out]):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                raise AssertionError(f"init on meta tensors allocates: {func} made a tensor on {leaf.device}.")
        return out
