"""Labels of parameters by regular expressions on their names, and a table of what went where."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from everybit.base import tree

_STEP = re.compile(r"\[(?:'([^']*)'|\"([^\"]*)\"|([^\]]*))\]")


def plain_name(path: str) -> str:
    """A parameter's name with dots: ``layers.0.weight`` for ``['layers'][0].weight`` and for ``['layers.0.weight']``."""
    return _STEP.sub(lambda found: "." + next(one for one in found.groups() if one is not None), path).lstrip(".")


def require_name(path: str, who: str, why: str, instead: str) -> str:
    """Return a parameter's name with dots.

    Args:
        path: Of the parameter, as :func:`everybit.tree.paths` writes it.
        who: The function that decides by names, for the message.
        why: The fact that the name would tell.
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


def require_patterns(name: str, patterns: Iterable[str]) -> None:
    """Refuse patterns that are not regular expressions.

    Raises:
        ValueError: A pattern is invalid; the message has the parameter's ``name``.
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
        note: A function of a parameter's label, path and tensor to the text after its shape, or None.

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
