"""Which transform steps which parameter, and as which matrices: a table to be printed before training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from everybit.base import label_table, plain_name, tree
from everybit.combinators.masked import Masked, Partition
from everybit.protocol import transforms_in


@runtime_checkable
class OfMatrices(Protocol):
    """A transform that sees each parameter as one matrix or several."""

    def matrices(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the shapes (..., rows, columns) of the batches of matrices that a parameter of this shape is.

        Raises:
            ValueError: It cannot be seen so.
        """
        ...


def matrices_of(transform: object, name: str, shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the shapes of the batches of matrices that a transform sees in a parameter; an empty list if it sees no matrices.

    Args:
        transform: Without masks and labels, or with those of this parameter decided.
        name: The parameter's name.
        shape: The parameter's shape.

    Raises:
        ValueError: It cannot be seen so; the message begins with the name.
    """
    found: list[tuple[int, ...]] = []
    for node in transforms_in(transform):
        if isinstance(node, OfMatrices):
            try:
                found = node.matrices(shape)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    return found


def routing(transform: object, params: object) -> str:
    """Return a table of which transform steps which parameter, and as which matrices, to be printed before training.

    Args:
        transform: A transform with an :func:`everybit.partition`, which is shown. Without it all parameters have the label ``all``.
        params: A tree of tensors, such as ``dict(model.named_parameters())``; tensors on the meta device will do.

    Raises:
        ValueError: A label, such as a pattern of :class:`everybit.Matrices`, that no parameter has; a label without transform; a
            parameter that its matrix view does not fit.

    Examples:
        >>> import torch, everybit as eb
        >>> params = {"embed.weight": torch.ones(9, 4), "qkv.weight": torch.ones(12, 4), "proj.weight": torch.ones(4, 4)}
        >>> print(eb.routing(eb.muon(0.02, matrices=eb.Matrices(views={"qkv": eb.row_blocks(4, 4, 4)})), params))
        labels by names and shapes
        others: 1 parameter, 36 elements
          embed.weight (9, 4) by name
        qkv: 1 parameter, 48 elements
          qkv.weight (12, 4) as 4 x 4, 4 x 4, 4 x 4
        matrix: 1 parameter, 16 elements
          proj.weight (4, 4)
    """
    leaves = tree.leaves(params)
    outermost = list(_outermost(transform))
    for one in outermost:
        one.require_used(tree.label(one.labels, params), tree.paths(params), leaves)
    return "\n".join(routing_tables(transform, params))


def routing_tables(transform: object, params: object) -> list[str]:
    """Return the tables of :func:`routing`, one for each partition; unused labels are left out.

    Raises:
        ValueError: A label without transform; a parameter that its matrix view does not fit.
    """
    outermost = list(_outermost(transform))
    if not outermost:
        return [label_table(lambda _path, _leaf: "all", params, _as_matrices(dict.fromkeys(["all"], transform)))]
    tables = []
    for one in outermost:
        labels = one.labels if isinstance(one.labels, WithReasons) else None
        tables += [] if labels is None else [f"labels by {labels.basis()}"]
        tables.append(label_table(one.labels, params, _as_matrices(one.transforms, labels)))
    return tables


@runtime_checkable
class WithReasons(Protocol):
    """Labels that give the reason of each decision."""

    def basis(self) -> str:
        """Return what all labels are decided by."""
        ...

    def reason(self, path: str, parameter: Tensor) -> str:
        """Return what decided the label of a parameter; empty where it is the usual one."""
        ...

    def misses(self, path: str, parameter: Tensor) -> bool:
        """Whether a parameter is one that another label is expected for, and no rule names it."""
        ...


def missed(transform: object, params: object) -> list[str]:
    """Return the names and shapes of parameters that labels leave out, where no rule names them."""
    found = []
    for one in _outermost(transform):
        if isinstance(one.labels, WithReasons):
            for path, leaf in zip(tree.paths(params), tree.leaves(params), strict=True):
                if one.labels.misses(path, leaf):
                    found.append(f"{plain_name(path)} {tuple(leaf.shape)} {one.labels.reason(path, leaf)}")
    return found


def _as_matrices(transforms: Any, labels: WithReasons | None = None) -> Any:
    def shown(label: str, path: str, leaf: Tensor) -> str:
        if label not in transforms:
            raise ValueError(
                f"partition: {plain_name(path)} is labelled {label!r}, for which there is no transform; accepted are"
                f" {', '.join(map(repr, transforms))}."
            )
        shapes = matrices_of(transforms[label], plain_name(path) or "a parameter", tuple(leaf.shape))
        reason = "" if labels is None else labels.reason(path, leaf)
        reason += ", large, and named by no rule" if labels is not None and labels.misses(path, leaf) else ""
        return shown_matrices(shapes, leaf.shape) + (f" {reason}" if reason else "")

    return shown


def shown_matrices(shapes: Sequence[tuple[int, ...]], shape: Sequence[int]) -> str:
    """Return the text after a parameter seen as these batches of matrices; empty if it is a single matrix of its own shape."""
    if list(shapes) in ([], [tuple(shape)]):
        return ""
    return f" as {', '.join(' x '.join(map(str, one)) for one in shapes)}"


def _outermost(transform: object) -> Iterator[Partition]:
    """The partitions of a transform that are inside no other partition or mask."""
    found = [node for node in transforms_in(transform) if isinstance(node, (Masked, Partition))]
    inside = {id(one) for node in found for one in transforms_in(node) if one is not node}
    yield from (node for node in found if isinstance(node, Partition) and id(node) not in inside)
