"""Learning rates by the depth of a layer and by the width of a model, as partitions that scale updates."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from torch import Tensor

from everybit.base import plain_name, require, tree
from everybit.combinators.masked import Partition
from everybit.transforms import scale


@dataclass(frozen=True, slots=True)
class ByDepth:
    """Labels by the number of a layer; made by :func:`layerwise_decay`. ``labels`` are pairs of a parameter's name and its label."""

    labels: tuple[tuple[str, str], ...]

    def __call__(self, path: str, parameter: Tensor) -> str:  # noqa: ARG002  # what labels are called with
        """Return the label of a parameter."""
        return dict(self.labels)[plain_name(path)]


def layerwise_decay(params: object, decay: float, layer: str = r"(?:layers?|blocks?|h)\.(\d+)\.") -> Partition:
    """Layer-wise learning-rate decay: scale updates by ``decay`` once for each layer above.

    Parameters before the first layer in ``params``, such as embeddings, count as one layer more below it. Those that follow and belong to
    no layer, such as the last norm and the head, are above the last layer, and are not scaled. Put it last in a chain, or anywhere after
    the preconditioner; weight decay that comes before it is scaled as well.

    Args:
        params: A tree of tensors with the model's names, such as ``dict(model.named_parameters())``.
        decay: Factor for each layer, above zero; 0.65 to 0.9 are usual for fine-tuning.
        layer: A regular expression with the layer's number as its first group.

    Returns:
        A partition; :func:`label_table` prints its labels: ``print(eb.label_table(tx.labels, params))``.

    Raises:
        ValueError: No name has a layer, or ``decay`` is out of range.

    Reference:
        Clark et al. 2020, https://arxiv.org/abs/2003.10555, appendix A.

    Examples:
        >>> import torch, everybit as eb
        >>> names = ["embed.weight", "layers.0.weight", "layers.1.weight", "head.weight"]
        >>> tx = eb.layerwise_decay({name: torch.ones(1) for name in names}, 0.5)
        >>> [scale.factor for scale in tx.transforms.values()]
        [0.125, 0.25, 0.5, 1.0]
    """
    require("decay", decay, 0.0, schedule=False)
    names = [plain_name(path) for path in tree.paths(params)]
    found = [re.search(layer, name) for name in names]
    numbers = [None if one is None else int(one.group(1)) for one in found]
    known = [number for number in numbers if number is not None]
    if not known:
        raise ValueError(
            f"layer: got {layer!r}, which is found in none of the {len(names)} names, {', '.join(names[:5])}; accepted is a regular"
            " expression whose first group is a layer's number."
        )
    top, first = max(known) + 2, next(index for index, number in enumerate(numbers) if number is not None)
    depths = [number + 1 if number is not None else 0 if index < first else top for index, number in enumerate(numbers)]
    labels = tuple((name, f"depth {depth}") for name, depth in zip(names, depths, strict=True))
    factors = {f"depth {depth}": scale(float(decay) ** (top - depth)) for depth in sorted({*depths})}
    return Partition(factors, ByDepth(labels))


@dataclass(frozen=True, slots=True)
class ByWidth:
    """Labels by the factor that a parameter's widths give its learning rate; made by :func:`mup_scales`."""

    labels: tuple[tuple[str, str], ...]

    def __call__(self, path: str, parameter: Tensor) -> str:  # noqa: ARG002  # what labels are called with
        """Return the label of a parameter."""
        return dict(self.labels)[plain_name(path)]


def mup_scales(params: object, base: object, kind: Literal["adam", "sgd"] = "adam") -> Partition:
    r"""Scale updates by the widths of parameters, so that a learning rate tuned on a narrow model fits a wide one (muP).

    A dimension that has another size in ``base`` is a *width*, and r is the ratio of its sizes. As in the authors' package updates are
    scaled by

    - hidden matrices, which have two widths: :math:`1/r_\text{in}` for ``"adam"``, :math:`r_\text{out}/r_\text{in}` for ``"sgd"``;
    - input and output layers, biases and norms, which have one: 1 for ``"adam"``, :math:`r` for ``"sgd"``;
    - all others: 1.

    A matrix is (out, in), as in ``torch.nn.Linear``. ``"adam"`` is for preconditioners with updates that do not depend on the size of
    gradients, sign and RMSprop included. Put it after the preconditioner and before weight decay, which it then does not scale:
    ``eb.chain(eb.scale_by_adam(), eb.mup_scales(params, base), eb.add_decayed_weights(0.1), eb.scale_by_learning_rate(lr))``. The initial
    weights and the multiplier of the output layer are the model's to scale: this does the learning rates alone.

    Args:
        params: A tree of tensors with names, such as ``dict(model.named_parameters())``.
        base: The same of the narrow model; a model on the meta device will do. Only shapes are looked at.
        kind: Which column.

    Returns:
        A partition; :func:`label_table` prints its labels: ``print(eb.label_table(tx.labels, params))``.

    Raises:
        ValueError: Names or numbers of dimensions differ; a parameter with more than two widths, or two that are not its first two
            dimensions; an unknown ``kind``.

    Reference:
        Yang et al. 2022, https://arxiv.org/abs/2203.03466, table 8; https://github.com/microsoft/mup.

    Examples:
        >>> import torch, everybit as eb
        >>> def shapes(width):
        ...     return {"embed": torch.ones(9, width), "hidden": torch.ones(width, width), "bias": torch.ones(width)}
        >>> tx = eb.mup_scales(shapes(64), shapes(16))
        >>> print(eb.label_table(tx.labels, shapes(64)))
        1: 2 parameters, 640 elements
          embed (9, 64)
          bias (64,)
        1/4: 1 parameter, 4096 elements
          hidden (64, 64)
    """
    if kind not in ("adam", "sgd"):
        raise ValueError(f"kind: got {kind!r}; accepted are 'adam' and 'sgd'.")
    shapes, narrow = (
        {plain_name(path): tuple(leaf.shape) for path, leaf in zip(tree.paths(one), tree.leaves(one), strict=True)}
        for one in (params, base)
    )
    if shapes.keys() != narrow.keys():
        only = sorted({*shapes} ^ {*narrow})
        raise ValueError(f"base: has other names than params, {', '.join(only[:5])} in one of them only.")
    factors = {name: _factor_of_widths(name, shape, narrow[name], kind) for name, shape in shapes.items()}
    labels = tuple((name, str(factor)) for name, factor in factors.items())
    return Partition({str(factor): scale(float(factor)) for factor in sorted({*factors.values()})}, ByWidth(labels))


def _factor_of_widths(name: str, shape: tuple[int, ...], base: tuple[int, ...], kind: str) -> Fraction:
    if len(shape) != len(base):
        raise ValueError(f"base: {name} has the shape {base}, and {shape} in params; accepted are as many dimensions.")
    ratios = [Fraction(size, narrow) if size != narrow else None for size, narrow in zip(shape, base, strict=True)]
    wide = [ratio for ratio in ratios if ratio is not None]
    if len(wide) > 2 or (len(wide) == 2 and ratios[:2] != wide):
        raise ValueError(
            f"params: {name} of the shape {shape} has {len(wide)} widths, of the shape {base} in base; accepted are two, the first two"
            " dimensions, or fewer."
        )
    if len(wide) == 2:
        return 1 / wide[1] if kind == "adam" else wide[0] / wide[1]
    return wide[0] if wide and kind == "sgd" else Fraction(1)
