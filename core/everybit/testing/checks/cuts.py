"""A step on one flat buffer, and on tensors apart from one another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from everybit.base import tree
from everybit.protocol import Transform
from everybit.stepping import OptimizerState, with_policy
from everybit.testing.examples import (
    LEARNING_RATE,
    STORED,
    Build,
    assert_same_bits,
    at_step,
    example_grads,
    example_params,
)


def check_flat_equals_tree(build: Build) -> None:
    """A transform that may be cut anywhere and does not reduce gives the same bits on one flat buffer as on the tree of tensors."""
    for dtype, policy in STORED:
        optimizer = with_policy(build(LEARNING_RATE), policy)
        if optimizer.cut != "element" or optimizer.reduces:
            return
        params = example_params(dtype)
        flat = flattened(params)
        state, flat_state = optimizer.init(params), optimizer.init(flat)
        for step in (1, 2, 3):
            grads = example_grads(params, step)
            params, state = optimizer.step(params, grads, state)
            flat, flat_state = optimizer.step(flat, flattened(grads), flat_state)
            assert_same_bits(flat, flattened(params), f"flat buffer, against the tree, after step {step}, {dtype}")
            for name, parts in stored_slots(params, state).items():
                what = f"{name} of the flat buffer, against the tree, after step {step}, {dtype}"
                assert_same_bits(stored_slots(flat, flat_state)[name], parts, what)


def check_cut(build: Build) -> None:
    """Check the values of ``cut`` and ``reduces``. Without ``reduces``, no tensor's update may depend on another's gradient.

    :func:`everybit.testing.check_shards_equal_whole` checks that promises about cuts are kept.
    """
    promised: Any = build(LEARNING_RATE)
    if promised.cut not in ("element", "tensor"):
        raise AssertionError(f"cut: got {promised.cut!r}; accepted are 'element', 'tensor'.")
    if not isinstance(promised.reduces, bool):
        raise AssertionError(f"reduces: got {promised.reduces!r}; accepted are True and False.")
    if not promised.reduces:
        _check_tensors_are_independent(build)


def promises(transform: Transform[Any]) -> str:
    """Describe the promises of a transform, for messages."""
    return f"cut {transform.cut!r}{' and reduces' if transform.reduces else ''}"


def _check_tensors_are_independent(build: Build) -> None:
    transform, params = build(LEARNING_RATE), example_params(torch.float64)
    state = transform.init(params)
    _, state = transform.update(example_grads(params, 1), state, params, at_step(1))
    grads = example_grads(params, 2)
    expected = tree.leaves(transform.update(grads, state, params, at_step(2))[0])
    for index, path in enumerate(tree.paths(params)):
        others = [g if i == index else 3 * g + 1 for i, g in enumerate(tree.leaves(grads))]
        got = tree.leaves(transform.update(tree.replace(grads, others), state, params, at_step(2))[0])
        what = f"{promises(transform)}: the update at {path} depends on the gradients of other tensors"
        assert_same_bits(got[index], expected[index], what)


def flattened(values: object) -> Tensor:
    """All elements, end to end."""
    return torch.cat([leaf.reshape(-1) for leaf in tree.leaves(values)])


def stored_slots(params: object, state: OptimizerState[Any]) -> dict[str, list[Tensor]]:
    """Each slot's parts, and those of the parameters, laid end to end."""
    found: dict[str, list[Tensor]] = {}
    for name, slot in [("extra", state.extra), *tree.slots(state.inner)]:
        values = [one for one in tree.flatten_up_to(params, slot) if one is not None]
        each = [x for one in values for x in (one.values() if isinstance(one, dict) else [one])]
        stored = [one if isinstance(one, tuple) else (one,) for one in each]
        key = f"{name}#{len(found)}"
        found[key] = [torch.cat([part.reshape(-1) for part in parts]) for parts in zip(*stored, strict=True)]
    return found
