"""Labels of parameters by regular expressions on their names, learning rates by depth and width, and a table of what went where."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from torch import Tensor

from everybit import tree
from everybit.combinators.masked import Partition
from everybit.scalars import require
from everybit.transforms.stateless import scale

_STEP = re.compile(r"\[(?:'([^']*)'|\"([^\"]*)\"|([^\]]*))\]")


def plain_name(path: str) -> str:
    """A parameter's name with dots: ``layers.0.weight`` for ``['layers'][0].weight`` and for ``['layers.0.weight']``."""
    return _STEP.sub(lambda found: "." + next(one for one in found.groups() if one is not None), path).lstrip(".")


def require_name(path: str, who: str, why: str, instead: str) -> str:
    """Return a parameter's name with dots.

    Args:
        path: Of the parameter, as :func:`everybit.tree.paths` writes it.
        who: What decides by names, for the message.
        why: What the name would tell.
        instead: What else is accepted.

    Raises:
        ValueError: The path has positions alone: a list of parameters, or a single one.
    """
    name = plain_name(path)
    if not any(map(str.isalpha, name)):
        raise ValueError(
            f"{who}: params{path} has no name, which would tell {why}; accepted are named parameters, such as"
            f" model.named_parameters(), or {instead}."
        )
    return name


def require_each(params: object, check: Callable[[Tensor], object]) -> None:
    """Call ``check`` with every parameter of a tree.

    Raises:
        ValueError: It refuses one; the message begins with the parameter's name.
    """
    for path, leaf in zip(tree.paths(params), tree.leaves(params), strict=True):
        try:
            check(leaf)
        except ValueError as error:
            raise ValueError(f"{plain_name(path) or 'a parameter'}: {error}") from None


@dataclass(frozen=True, slots=True)
class ByName:
    """Labels by the first of several regular expressions that is found in a parameter's name; made by :func:`by_name`."""

    patterns: tuple[tuple[str, str], ...]
    default: str | None = None

    def __call__(self, path: str, parameter: Tensor) -> str:  # noqa: ARG002  # what labels are called with
        """Return the label of a parameter."""
        name = plain_name(path)
        for pattern, label in self.patterns:
            if re.search(pattern, name):
                return label
        if self.default is None:
            raise ValueError(
                f"by_name: {name!r} matches none of {', '.join(repr(one) for one, _ in self.patterns)}; accepted is a pattern for each"
                " parameter, or default=."
            )
        return self.default


@dataclass(frozen=True, slots=True)
class ByDepth:
    """Labels by the number of a layer; made by :func:`layerwise_decay`. ``labels`` are pairs of a parameter's name and its label."""

    labels: tuple[tuple[str, str], ...]

    def __call__(self, path: str, parameter: Tensor) -> str:  # noqa: ARG002  # what labels are called with
        """Return the label of a parameter."""
        return dict(self.labels)[plain_name(path)]


def require_patterns(name: str, patterns: Iterable[str]) -> None:
    """Refuse what is no regular expression.

    Raises:
        ValueError: One is none; the message has the parameter's ``name``.
    """
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{name}: got {pattern!r}; accepted are regular expressions: {error}.") from None


def by_name(patterns: Mapping[str, str], default: str | None = None) -> ByName:
    """Labels for :func:`everybit.partition` and :func:`everybit.by_label` by regular expressions on names.

    Names have dots, as ``named_parameters`` gives them. A pattern may be found anywhere in a name, and the first that is found decides.
    :func:`label_table` shows what went where, and refuses a pattern that no parameter has.

    Args:
        patterns: Label for each regular expression, in order.
        default: Label of what no pattern is found in; None: an error.

    Raises:
        ValueError: A pattern that is no regular expression; from the labels, a name that no pattern is found in.

    Examples:
        >>> import torch, everybit as eb
        >>> labels = eb.by_name({r"embed|norm|bias": "plain"}, default="matrix")
        >>> tx = eb.partition({"plain": eb.sgd(0.1), "matrix": eb.adamw(1e-3)}, labels)
        >>> print(eb.label_table(labels, {"embed.weight": torch.ones(3, 2), "out.weight": torch.ones(2, 2)}))
        plain: 1 parameter, 6 elements
          embed.weight (3, 2)
        matrix: 1 parameter, 4 elements
          out.weight (2, 2)
    """
    require_patterns("patterns", patterns)
    return ByName(tuple(patterns.items()), default)


def label_table(
    labels: Callable[[str, Tensor], Any] | object, params: object, note: Callable[[Any, str, Tensor], str] | None = None
) -> str:
    """A table of which parameters have which label (or are selected by a mask), to be printed.

    Args:
        labels: What :func:`everybit.partition` or :func:`everybit.masked` takes.
        params: A tree of tensors, such as ``dict(model.named_parameters())``.
        note: What stands after a parameter's shape, from its label, its path and itself; None: nothing.

    Raises:
        ValueError: A pattern of :func:`by_name` that decides for no parameter; a parameter without label.
    """
    given, names = tree.label(labels, params), [plain_name(path) for path in tree.paths(params)]
    if isinstance(labels, ByName):
        deciding = {next((one for one, _ in labels.patterns if re.search(one, name)), None) for name in names}
        idle = [pattern for pattern, _ in labels.patterns if pattern not in deciding]
        if idle:
            raise ValueError(
                f"by_name: no parameter is labelled by {', '.join(map(repr, idle))}; a pattern before it may have taken them. The names are"
                f" {', '.join(names[:8])}{' and others' if len(names) > 8 else ''}."
            )
    lines = []
    for label in dict.fromkeys(given):
        own = [
            (name, path, leaf)
            for name, path, leaf, one in zip(names, tree.paths(params), tree.leaves(params), given, strict=True)
            if one == label
        ]
        elements = sum(leaf.numel() for _, _, leaf in own)
        lines.append(f"{label}: {len(own)} parameter{'s' if len(own) > 1 else ''}, {elements} elements")
        lines += [f"  {name} {tuple(leaf.shape)}{note(label, path, leaf) if note else ''}" for name, path, leaf in own]
    return "\n".join(lines)


def layerwise_decay(params: object, decay: float, layer: str = r"(?:layers?|blocks?|h)\.(\d+)\.") -> Partition:
    """Layer-wise learning-rate decay: scale updates by ``decay`` once for each layer above.

    What comes before the first layer in ``params``, such as embeddings, counts as one layer more below it; what follows and belongs to no
    layer, such as the last norm and the head, is above the last, and is not scaled. The last transform of a chain, or anywhere after the
    preconditioner; weight decay that comes before it is scaled as well.

    Args:
        params: A tree of tensors whose names are looked at, such as ``dict(model.named_parameters())``.
        decay: Factor for each layer, above zero; 0.65 to 0.9 are usual for fine-tuning.
        layer: Regular expression whose first group is the layer's number.

    Returns:
        A partition, whose labels :func:`label_table` prints: ``print(eb.label_table(tx.labels, params))``.

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

    A matrix is (out, in), as in ``torch.nn.Linear``. ``"adam"`` is for preconditioners whose updates do not depend on the size of
    gradients, sign and RMSprop included. Put it after the preconditioner and before weight decay, whose strength then stays what it is:
    ``eb.chain(eb.scale_by_adam(), eb.mup_scales(params, base), eb.add_decayed_weights(0.1), eb.scale_by_learning_rate(lr))``. The initial
    weights and the multiplier of the output layer are the model's to scale: this does the learning rates alone.

    Args:
        params: A tree of tensors with names, such as ``dict(model.named_parameters())``.
        base: The same of the narrow model; a model on the meta device will do. Only shapes are looked at.
        kind: Which column.

    Returns:
        A partition, whose labels :func:`label_table` prints: ``print(eb.label_table(tx.labels, params))``.

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
