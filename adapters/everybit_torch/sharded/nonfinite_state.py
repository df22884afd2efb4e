"""The parameters with infinite or NaN weights or state, by name: the trace of a gradient that was not finite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from everybit.stepping.entries import WEIGHTS
from everybit_torch.ambient import in_plain_mode
from everybit_torch.checkpoint.agreement import gathered
from everybit_torch.collectives import Communicator
from everybit_torch.optim import TorchOptimizer, names_of, parameters_of
from everybit_torch.placements import is_primary_copy, mesh_of
from everybit_torch.sharded.reports import count_nonfinite
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.torch_internals.dtensors import local


@dataclass(frozen=True, slots=True)
class NonFiniteState:
    """An entry of a parameter's state, or the parameter itself, with numbers that are infinite or NaN.

    Attributes:
        name: The parameter's name. Of a ``TorchOptimizer`` that was made without names the number of its group, and in it.
        entry: As in state dicts: ``"momentum"``, ``"variance.scale"``; ``"param"`` for the model's own tensor.
        count: The number of the parameter's elements that are stored with such a number: all elements of a block if that is its scale. Of
            factors, which have other shapes than the parameter, the number of such numbers.
    """

    name: str
    entry: str
    count: int

    def __str__(self) -> str:
        return f"{self.name}: {self.count} elements of {self.entry} are not finite"


@in_plain_mode
@torch.no_grad()
def nonfinite_state(optimizer: TorchOptimizer | FlatStepper) -> tuple[NonFiniteState, ...]:
    """Find the weights and the state that are infinite or NaN, as stored. They are neither decoded nor changed.

    With ``nan="step"`` a ``FlatStepper`` skips steps that would store such numbers. The host waits for the device once.

    Args:
        optimizer: An optimizer of everybit_torch, or a stepper, of which every rank has to call this.

    Returns:
        One entry for each tensor that holds such numbers, parameter by parameter; the same on all ranks that shard them.

    Raises:
        TypeError: Something else, such as what ``as_optimizer()`` returns.

    Examples:
        >>> import torch
        >>> from everybit_torch import AdamW, nonfinite_state
        >>> model = torch.nn.Linear(64, 8)
        >>> optimizer = AdamW(model.named_parameters(), policy="FP32")
        >>> model(torch.ones(64)).sum().backward()
        >>> model.weight.grad[2, 3] = torch.nan
        >>> optimizer.step()
        >>> [(one.name, one.entry, one.count) for one in nonfinite_state(optimizer)]
        [('weight', 'param', 1), ('weight', 'momentum', 1), ('weight', 'variance', 1)]
    """
    if isinstance(optimizer, FlatStepper):
        optimizer.engine.completeness.require("nonfinite_state")
    given = optimizer.as_optimizer() if isinstance(optimizer, FlatStepper) else optimizer
    if not isinstance(given, TorchOptimizer):
        raise TypeError(
            f"nonfinite_state: got {type(optimizer).__name__}; accepted are TorchOptimizer, its subclasses, and FlatStepper."
        )
    mesh = mesh_of(list(parameters_of(given.param_groups)))
    communicators = [] if mesh is None else [Communicator(mesh.get_group(d)) for d in range(mesh.ndim)]
    if isinstance(optimizer, FlatStepper) and optimizer.engine.shares_pieces:
        communicators = [optimizer.inner]
    found = list(_of_optimizer(given))
    device = found[0][2].device if found else torch.device("cpu")
    counts = torch.stack([count.to(device) for _, _, count in found]).tolist() if found else []
    own = [(name, entry, count) for (name, entry, _), count in zip(found, counts, strict=True) if count]
    total: dict[tuple[str, str], int] = {}
    for communicator in reversed(communicators):
        own = [one for of_rank in gathered(own, communicator) for one in of_rank]
    for name, entry, count in own:
        total[name, entry] = total.get((name, entry), 0) + count
    return tuple(
        NonFiniteState(name, entry, count)
        for one in dict.fromkeys(name for name, _ in total)
        for (name, entry), count in total.items()
        if name == one
    )


Found = Iterator[tuple[str, str, Tensor]]
"""Names of a parameter and of an entry, and how many of this rank's elements are not finite, on the device."""


def _of_optimizer(optimizer: TorchOptimizer) -> Found:
    names: dict[int, str] = {}
    mesh = mesh_of(list(parameters_of(optimizer.param_groups)))
    for number, group in enumerate(optimizer.param_groups):
        for name, parameter in zip(names_of(number, group), group["params"], strict=True):
            if mesh is None or is_primary_copy(parameter, mesh):
                names[id(parameter)] = name
                yield name, WEIGHTS, count_nonfinite(local(parameter).detach())
    for parameter, entry, _, x in optimizer.own.kept():
        if id(parameter) not in names or entry.role == "shared" or not x.is_floating_point() or not x.numel():
            continue
        block = 1 if entry.part is None or entry.cut == "tensor" else entry.part.block
        count = count_nonfinite(x) * block
        if block > 1:
            # The last number may be that of fewer elements.
            count = count - torch.where(torch.isfinite(x[-1]), 0, x.numel() * block - local(parameter).numel())
        yield names[id(parameter)], entry.name, count
