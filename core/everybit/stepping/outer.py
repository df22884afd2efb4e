"""Outer optimizers: a step on the difference that many inner steps made."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from everybit.base import tree

P = TypeVar("P")


def outer_gradient(start: P, *replicas: P) -> P:
    r"""Return the gradient of an outer optimizer: how far back it is from where the replicas went, on average, to where they began.

    .. math::
        \Delta = \theta - \frac{1}{k} \sum_{i=1}^{k} \theta_i

    DiLoCo lets each replica make some hundreds of AdamW steps on its own data, and then makes one outer step by this gradient, of SGD with
    Nesterov momentum. The replicas go on from there, with the states of their inner optimizers::

        outer = eb.with_policy(eb.sgd(0.7, momentum=0.9, nesterov=True), "FP32")
        start, outer_state = outer.step(start, eb.outer_gradient(start, *replicas), outer_state)

    With one replica and no momentum it is Lookahead. :class:`everybit_torch.OuterOptimizer` does it over a process group.

    Args:
        start: The weights with which all replicas began, in float32 or better.
        replicas: The weights of each; 16-bit weights are exact in float32, and ``opt.export_fp32(params, state)`` has their residuals.

    Raises:
        ValueError: No replica, or structures or shapes that differ.

    Reference:
        Douillard et al. 2023, https://arxiv.org/abs/2311.08105, Algorithm 1.

    Examples:
        >>> import torch, everybit as eb
        >>> eb.outer_gradient(torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([0.0]))
        tensor([0.7500])
    """
    if not replicas:
        raise ValueError("replicas: got none; accepted is one tree of weights at least.")
    for number, replica in enumerate(replicas):
        tree.require_same_structure(replica, start, name=f"replicas[{number}]", reference_name="start")

    def difference(here: Tensor, *there: Tensor) -> Tensor:
        wide = here.to(torch.promote_types(here.dtype, torch.float32))
        total = wide - there[0]
        for other in there[1:]:
            total = total + (wide - other)
        return total / len(replicas)

    return tree.map(difference, start, *(tree.ordered_as(start, one) for one in replicas))
