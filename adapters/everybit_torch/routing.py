"""What steps which parameter of a torch optimizer or a stepper, to be printed before training."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from everybit.combinators import matrices_of, routing_tables, shown_matrices
from everybit_torch.choosing import require_labels_used, tree_of
from everybit_torch.optimizer import TorchOptimizer


@runtime_checkable
class LaidOut(Protocol):
    """What a :class:`everybit_torch.FlatStepper` has: where its parameters lie, and the transform and policy of each label."""

    layout: Any

    @property
    def labelled(self) -> Any:
        """By label, what its parameters are stepped with."""
        ...


def routing(optimizer: TorchOptimizer | LaidOut) -> str:
    """Return a table of which transform steps which parameter, and as which matrices, to be printed before training.

    Of a stepper it lists the parameters that are trained, by the labels of transform and policy under which they are laid out.

    Args:
        optimizer: A torch optimizer of this package, before or after its first step, or a stepper.

    Raises:
        TypeError: Something else.
        ValueError: A label, such as a pattern of ``views`` of :func:`everybit.muon`, that no parameter has; a parameter that cannot be
            seen as the matrices that are asked for.

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
    if isinstance(optimizer, LaidOut):
        return _of_stepper(optimizer)
    raise TypeError(
        f"routing: got {type(optimizer).__name__}; accepted are a TorchOptimizer and a FlatStepper. (everybit.routing takes a transform and"
        " parameters.)"
    )


def _of_groups(optimizer: TorchOptimizer) -> str:
    each = [
        (next(iter(group.optimizers.values())).transform, tree_of(values))
        for group, values in zip(optimizer.engine.groups, optimizer.own_groups, strict=True)
    ]
    lines: list[str] = []
    for number, (transform, tree) in enumerate(each):
        require_labels_used(transform, [], tree, [*each[:number], *each[number + 1 :]])
        lines += [f"param group {number}"] if len(each) > 1 else []
        lines += routing_tables(transform, tree)
    return "\n".join(lines)


def _of_stepper(stepper: LaidOut) -> str:
    lines = []
    specs = stepper.layout.specs
    for label, one in stepper.labelled.items():
        own = [spec for spec in specs if spec.label == label]
        elements = sum(spec.whole_numel for spec in own)
        lines.append(f"{label or 'all'}: {len(own)} parameter{'s' if len(own) > 1 else ''}, {elements} elements")
        for spec in own:
            shape = tuple(spec.whole_shape)
            # One that may be cut between matrices is stepped as a batch of them.
            stepped = shape if spec.parts == 1 else spec.stepped_as(0, spec.numel)
            lines.append(
                f"  {spec.name} {shape}{shown_matrices(matrices_of(one.transform, spec.name, stepped), shape)}"
            )
    return "\n".join(lines)
