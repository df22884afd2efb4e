"""A step changes no argument, and its results keep the kinds of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from everybit.base import Hyperparameter, tree
from everybit.schedules import warmup_cosine_decay_schedule
from everybit.stepping import with_policy
from everybit.testing.examples import (
    LEARNING_RATE,
    STORED,
    Build,
    Stored,
    assert_same_bits,
    assert_same_kind,
    at_step,
    example_grads,
    example_params,
)


def check_pure(build: Build) -> None:
    """Check that a call changes no argument, returns memory of its own, and gives the same bits when it is repeated.

    A transform may hand on the updates it was given; its state, and all that an optimizer returns, is fresh.
    """
    transform, params = build(LEARNING_RATE), example_params()
    state = transform.init(params)
    _no_shared_memory("the state from init", state, params=params)
    _all_separate("the state from init", state)
    for step in (1, 2):
        ctx, grads = at_step(step), example_grads(params, step)
        with _Unchanged("update", updates=grads, state=state, params=params):
            updates, new = transform.update(grads, state, params, ctx)
        again = transform.update(grads, state, params, ctx)
        assert_same_bits((updates, new), again, "update, called twice with the same arguments")
        _no_shared_memory("the state from update", new, updates=grads, state=state, params=params)
        _no_shared_memory("the updates from update", updates, state=state, params=params)
        state = new
    for dtype, policy in STORED:
        optimizer, params = with_policy(transform, policy), example_params(dtype)
        stored = optimizer.init(params)
        _no_shared_memory("the state from Optimizer.init", stored, params=params)
        grads = example_grads(params, 1)
        with _Unchanged("Optimizer.step", params=params, grads=grads, state=stored):
            out = optimizer.step(params, grads, stored)
        _no_shared_memory("what Optimizer.step returns", out, params=params, grads=grads, state=stored)


def check_state_is_a_fixed_point(build: Build, stored: Stored = STORED) -> None:
    """A state keeps structure, shapes, dtypes and devices over any number of steps, and updates those of the gradients.

    Whatever the learning rate is given as, and, under a policy, whatever dtype the gradients come in.
    """
    rates: tuple[Hyperparameter, ...] = (
        LEARNING_RATE,
        torch.tensor(LEARNING_RATE),
        torch.tensor(LEARNING_RATE, dtype=torch.float64),
        warmup_cosine_decay_schedule(LEARNING_RATE, 1, steps=5),
    )
    for rate in rates:
        transform = build(rate)
        for dtype in (torch.float32, torch.float64):
            params = example_params(dtype)
            state = first = transform.init(params)
            for step in (1, 2, 3):
                grads = example_grads(params, step)
                updates, state = transform.update(grads, state, params, at_step(step))
                assert_same_kind(updates, grads, f"updates of step {step}, learning rate {rate!r}")
                assert_same_kind(state, first, f"state after step {step}, learning rate {rate!r}")
    for dtype, policy in stored:
        optimizer = with_policy(build(LEARNING_RATE), policy)
        for grad_dtype in (torch.float32, torch.bfloat16, torch.float16):
            params = before = example_params(dtype)
            now = initial = optimizer.init(params)
            for step in (1, 2, 3):
                params, now = optimizer.step(params, example_grads(params, step, dtype=grad_dtype), now)
                assert_same_kind(params, before, f"{dtype} parameters after step {step} with {grad_dtype} gradients")
                assert_same_kind(
                    now, initial, f"state of {dtype} parameters after step {step} with {grad_dtype} gradients"
                )


def _no_shared_memory(what: str, out: object, **inputs: object) -> None:
    for name, values in inputs.items():
        owners = {
            _memory(leaf): f"{name}{path}" for path, leaf in zip(tree.paths(values), tree.leaves(values), strict=True)
        }
        for path, leaf in zip(tree.paths(out), tree.leaves(out), strict=True):
            if leaf.numel() and _memory(leaf) in owners:
                raise AssertionError(f"{what}, at {path or 'the tensor'}, shares memory with {owners[_memory(leaf)]}.")


def _all_separate(what: str, values: object) -> None:
    """Adapters write to a state in place: what shares memory would be one tensor."""
    seen: dict[int, str] = {}
    for path, leaf in zip(tree.paths(values), tree.leaves(values), strict=True):
        if leaf.numel() and (first := seen.setdefault(_memory(leaf), path)) != path:
            raise AssertionError(f"{what}, at {path}, shares memory with {first}.")
        if any(stride == 0 and size > 1 for stride, size in zip(leaf.stride(), leaf.shape, strict=True)):
            raise AssertionError(
                f"{what}, at {path}, overlaps itself (an expanded tensor); promised is memory for each element."
            )


def _memory(leaf: Tensor) -> int:
    return leaf.untyped_storage().data_ptr()


class _Unchanged:
    """Holds a block to leaving tensors as they are: their version counters, and, should ``.data`` go round these, their bits."""

    def __init__(self, who: str, **inputs: object) -> None:
        self.who = who
        self.inputs = inputs
        self.versions = [leaf._version for leaf in tree.leaves(list(inputs.values()))]
        self.copies = tree.map(torch.clone, inputs)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            return
        named = [f"{name}{path}" for name, values in self.inputs.items() for path in tree.paths(values)]
        after = [leaf._version for leaf in tree.leaves(list(self.inputs.values()))]
        for name, before, now in zip(named, self.versions, after, strict=True):
            if before != now:
                raise AssertionError(
                    f"{self.who} wrote to {name}, which was passed in; promised is that nothing is mutated."
                )
        assert_same_bits(self.inputs, self.copies, f"{self.who} changed what was passed in")
