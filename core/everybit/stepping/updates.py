"""Weights without a policy: updates added to them, the step of an outer optimizer, the point at which SAM takes a gradient."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from everybit.base import Scalar, barriers, require, tree
from everybit.protocol import Axis, Local

P = TypeVar("P")


def apply_updates(params: P, updates: P) -> P:
    """``params + updates``, leaf by leaf, each sum rounded to nearest in its parameter's dtype, as in optax.

    For parameters below float32 small updates are lost this way; :func:`everybit.with_policy` is the remedy.

    Args:
        params: Tensors.
        updates: Same structure and shapes.

    Raises:
        ValueError: Structures or shapes differ; the message names the path.
    """
    tree.require_same_structure(updates, params, name="updates", reference_name="params")
    return tree.map(lambda p, u: (p + u).to(p.dtype), params, updates)


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


def sam_point(
    params: P, grads: P, radius: Scalar = 0.05, *, adaptive: bool = False, eps: Scalar = 1e-12, axis: Axis = Local
) -> P:
    r"""Return the weights at which SAM takes the gradient of a step: those with the highest loss nearby, to first order.

    .. math::
        w + \rho \frac{T^2 g}{\|T g\| + \epsilon} \qquad T = 1, \text{ or } T = |w| \text{ if adaptive}

    A step has two gradients: one at the weights, to find this point, and one at this point, by which the optimizer steps from the weights::

        there = eb.sam_point(params, grad(loss)(params), 0.05)
        params, state = opt.step(params, grad(loss)(there), state)

    16-bit parameters have a neighbourhood of 16-bit numbers: a change below half a unit in the last place of a weight is lost, as a rule
    most of it. Take the point of ``opt.export_fp32(params, state)``, and the gradient there in float32, where that matters.

    Args:
        params: The weights.
        grads: The gradient at them; same structure and shapes.
        radius: :math:`\rho`, at least zero: distance in weight space, or, if adaptive, relative to the weights.
        adaptive: Measure distances relative to each weight (ASAM).
        eps: Added to the norm, so that a gradient of zero leads nowhere.
        axis: Over what norms are taken: all parameters and shards of the step.

    Raises:
        ValueError: A hyperparameter out of range; structures or shapes that differ.

    Reference:
        Foret et al. 2021, https://arxiv.org/abs/2010.01412, equation 2; Kwon et al. 2021, https://arxiv.org/abs/2102.11600.

    Examples:
        >>> import torch, everybit as eb
        >>> eb.sam_point(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), 0.5)
        tensor([1.3000, 2.4000])
    """
    require("radius", radius, 0.0, schedule=False)
    require("eps", eps, 0.0, schedule=False)
    tree.require_same_structure(grads, params, name="grads", reference_name="params")
    grads = tree.map(_wide, tree.ordered_as(params, grads))
    weights = tree.map(_wide, params)
    scaled = tree.elementwise(lambda g, w: g * w.abs(), grads, weights) if adaptive else grads
    norm = barriers.sqrt(axis.sum(tree.sum_of_squares(scaled)))
    share = radius / (norm + eps)

    def moved(w: Tensor, g: Tensor, p: Tensor) -> Tensor:
        way = w * w * g if adaptive else g
        return (w + share * way).to(p.dtype)

    return tree.elementwise(moved, weights, grads, params)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
