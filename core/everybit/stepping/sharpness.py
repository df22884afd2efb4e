"""Sharpness-aware minimization: the weights at which a step's gradient is taken."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from everybit.base import Scalar, barriers, require, tree
from everybit.protocol import Axis, Local

P = TypeVar("P")


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
