"""What steps which parameter of a torch optimizer or a stepper, to be printed before training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from everybit.combinators import matrices_of, routing_tables, shown_matrices
from everybit_torch.label_resolution import require_labels_used, tree_of
from everybit_torch.optim import TorchOptimizer


@runtime_checkable
class HasLabels(Protocol):
    """The labels of a :class:`everybit_torch.FlatStepper`: the transform, policy and parameters of each."""

    @property
    def labelled(self) -> Any:
        """The transform of each label's parameters."""
        ...

    @property
    def routed(self) -> Mapping[str, Routed]:
        """The parameters that are trained, by name."""
        ...


class Routed(NamedTuple):
    """A parameter that is stepped.

    Attributes:
        label: The label of its transform and policy.
        shape: Its own.
        stepped: The shape in which it is stepped; for a parameter of several matrices, that of the batch.
    """

    label: str
    shape: tuple[int, ...]
    stepped: tuple[int, ...]


def routing(optimizer: TorchOptimizer | HasLabels) -> str:
    """Return a table of which transform steps which parameter, and as which matrices, to be printed before training.

    It lists a stepper's trained parameters by the labels of transform and policy.

    Args:
        optimizer: A torch optimizer of this package, before or after its first step, or a stepper.

    Raises:
        TypeError: Something else.
        ValueError: A label, such as a pattern of :class:`everybit.Matrices`, that no parameter has; a parameter that cannot be
            seen as the matrices that the transform needs.

    Examples:
        >>> import torch
        >>> from everybit_torch import create, routing
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4))
        >>> print(routing(create("muon", model)))
        labels by types of modules, names and shapes
        others: 2 parameters, 40 elements
          0.weight (9, 4) by the type of its module
          1.bias (4,) by shape
        matrix: 1 parameter, 16 elements
          1.weight (4, 4)
    """
    if isinstance(optimizer, TorchOptimizer):
        return _of_groups(optimizer)
    if isinstance(optimizer, HasLabels):
        return _of_stepper(optimizer)
    raise TypeError(
        f"routing: got {type(optimizer).__name__}; accepted are a TorchOptimizer and a FlatStepper. (everybit.routing takes a transform and"
        " parameters.)"
    )


def _of_groups(optimizer: TorchOptimizer) -> str:
    each = [
        (next(iter(group.optimizers.values())).transform, tree_of(values))
        for group, values in zip(optimizer.own.groups, optimizer.own_groups, strict=True)
    ]
    lines: list[str] = []
    for number, (transform, tree) in enumerate(each):
        require_labels_used(transform, [], tree, [*each[:number], *each[number + 1 :]])
        lines += [f"param group {number}"] if len(each) > 1 else []
        lines += routing_tables(transform, tree)
    return "\n".join(lines)


def _of_stepper(stepper: HasLabels) -> str:
    lines = []
    for label, one in stepper.labelled.items():
        own = {name: routed for name, routed in stepper.routed.items() if routed.label == label}
        elements = sum(math.prod(routed.shape) for routed in own.values())
        lines.append(f"{label or 'all'}: {len(own)} parameter{'s' if len(own) > 1 else ''}, {elements} elements")
        for name, (_, shape, stepped) in own.items():
            lines.append(f"  {name} {shape}{shown_matrices(matrices_of(one.transform, name, stepped), shape)}")
    return "\n".join(lines)
