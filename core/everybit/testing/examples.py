"""The conditions of the checks: example parameters and gradients, policies, a learning rate; and the comparison of results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from everybit.base import Hyperparameter, tree
from everybit.policies import Policy
from everybit.policies import presets as policies
from everybit.protocol import Context, Transform

P = TypeVar("P")

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def example_params(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> dict[str, Any]:
    """A small tree with what trips optimizers up: nested containers, odd sizes, a 0-d tensor, an empty one, a hole.

    It lies on torch's default device (``with torch.device("cuda"): ...``), and has the same values on all.

    Args:
        dtype: The dtype of every leaf.
        seed: The seed of the values, which are normal.
    """
    generator = torch.Generator("cpu").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device(), dtype)

    return {
        "w": normal(5, 7),
        "layers": [{"w": normal(3, 2, 3), "b": normal(3)}, {"w": normal(1, 1), "b": None}],
        "scale": normal(),
        "empty": normal(0),
    }


def few_params(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A matrix, a vector and a number, for checks that compile: each tensor costs a second or more."""
    example = example_params(dtype)
    return {
        "w": example["layers"][0]["w"].reshape(6, 3),
        "b": torch.linspace(-1, 1, 37).to(dtype),
        "scale": example["scale"],
    }


def example_grads(params: P, step: int, *, dtype: torch.dtype | None = None, seed: int = 0) -> P:
    """Gradients for ``params``: normal, times powers of two from 2**-6 to 2**3; always the same for one seed and step.

    Args:
        params: Tensors with the structure and shapes of the gradients.
        step: Number of the step.
        dtype: The dtype of every leaf; None: that of the parameters.
        seed: One seed, one sequence of gradients.
    """
    generator = torch.Generator("cpu").manual_seed(1_000_003 * (seed + 1) + step)

    def one(leaf: Tensor) -> Tensor:
        magnitude = 2.0 ** torch.randint(-6, 4, leaf.shape, generator=generator, device="cpu")
        values = torch.randn(leaf.shape, generator=generator, device="cpu") * magnitude
        return values.to(leaf.device, leaf.dtype if dtype is None else dtype)

    return tree.map(one, params)


def assert_same_bits(got: object, expected: object, what: str) -> None:
    """Hold two trees to the same structure, dtypes and bits: -0 is not 0, and NaN equals only the same NaN.

    Raises:
        AssertionError: They differ; the message begins with ``what`` and names the first path, how many elements differ and by what.
    """
    try:
        tree.require_same_structure(got, expected, name="got", reference_name="expected")
    except ValueError as error:
        raise AssertionError(f"{what}: {error}") from None
    for path, a, b in zip(tree.paths(got), tree.leaves(got), _in_order_of(got, expected), strict=True):
        if a.dtype is not b.dtype:
            raise AssertionError(f"{what}: at {path or 'the tensor'}: got {a.dtype}, expected {b.dtype}.")
        different = _bits(a) != _bits(b)
        if different.any():
            index = tuple(different.nonzero()[0].tolist())
            raise AssertionError(
                f"{what}: at {path or 'the tensor'}: {int(different.sum())} of {a.numel()} elements differ, the first at {index}:"
                f" got {a[index].item()!r}, expected {b[index].item()!r}."
            )


def assert_close(got: object, expected: object, relative: float, what: str) -> None:
    """Hold two trees to differences of at most ``relative`` times the greatest magnitude in each expected leaf.

    Raises:
        AssertionError: They differ by more; the message begins with ``what`` and names the first path and the difference.
    """
    for path, a, b in zip(tree.paths(got), tree.leaves(got), _in_order_of(got, expected), strict=True):
        if a.numel() == 0:
            continue
        difference = (a.double() - b.double()).abs().max().item()
        bound = relative * b.double().abs().max().item()
        if not difference <= bound:
            raise AssertionError(
                f"{what}: at {path or 'the tensor'}: differs by {difference:.3g}, accepted is {bound:.3g}."
            )


def assert_same_kind(got: object, expected: object, what: str) -> None:
    """Hold two trees to the same structure, shapes, dtypes and devices.

    Raises:
        AssertionError: They differ; the message begins with ``what`` and names the first path.
    """
    try:
        tree.require_same_structure(got, expected, name="got", reference_name="expected")
    except ValueError as error:
        raise AssertionError(f"{what}: {error}") from None
    for path, a, b in zip(tree.paths(got), tree.leaves(got), tree.flatten_up_to(got, expected), strict=True):
        if a.dtype is not b.dtype or a.device != b.device:
            raise AssertionError(f"{what}: at {path}: is {a.dtype} on {a.device}, was {b.dtype} on {b.device}.")


def _in_order_of(reference: object, values: object) -> list[Any]:
    return tree.flatten_up_to(reference, values)


def _bits(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().view(_INTEGERS[x.dtype.itemsize]) if x.dtype.is_floating_point else x.cpu()


Build = Callable[[Hyperparameter], Transform[Any]]
"""From a learning rate to a transform."""

LEARNING_RATE = 0.05
"""Large, so that a step is felt in every format."""

Stored = tuple[tuple[torch.dtype, Policy], ...]
"""Dtypes of parameters, each with a policy that stores them."""

# The policies of stored steps: all exact, all lossy, and all random.
STORED: Stored = (
    (torch.float32, policies.FP32),
    (torch.bfloat16, policies.LEAN_BF16),
    (torch.float16, policies.TIGHT_BF16),
)


def at_step(step: int) -> Context:
    """The context of a transform at this step."""
    return Context(step=torch.tensor(step))
