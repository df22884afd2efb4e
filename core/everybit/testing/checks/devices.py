"""A step plans without memory, and never waits for the device: it runs on meta tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from everybit.base import tree
from everybit.stepping import with_policy
from everybit.testing.checks.conditions import LEARNING_RATE, STORED, Build
from everybit.testing.examples import assert_same_kind, example_grads, example_params


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
