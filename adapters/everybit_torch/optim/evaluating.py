"""The weights for evaluation in the place of the model's, and those that are trained in the optimizer's state meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import everybit as eb
from everybit.protocol import eval_params
from everybit_torch.optim.interfaces import Front
from everybit_torch.optim.state_dicts import full_weights
from everybit_torch.optim.state_dicts.state_schema import require_tensor

if TYPE_CHECKING:
    from everybit_torch.optim.state_dicts.loading import Loaded

TRAINED = "trained_weights"
"""The entry of a parameter's state that has the weights which are trained, while the model has others."""


def _trained(front: Front) -> Iterator[Tensor]:
    """The parameters that have state."""
    for one in front.own.own():
        yield one.parameter
    for visited in front.own.visited():
        yield visited.parameter


def has_others(front: Front) -> bool:
    """Whether any parameter is evaluated with other weights than those that are trained."""
    optimizers: dict[int, eb.Optimizer[Any]] = {}
    shapes: dict[int, Tensor] = {}
    for each in (
        ((one.stepped.optimizer, one.parameter) for one in front.own.own()),
        ((one.optimizer, one.parameter) for one in front.own.visited()),
    ):
        for optimizer, parameter in each:
            optimizers[id(optimizer)], shapes[id(optimizer)] = optimizer, parameter
    return any(_evaluates_others(one, shapes[key]) for key, one in optimizers.items())


def _evaluates_others(optimizer: eb.Optimizer[Any], parameter: Tensor) -> bool:
    like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    params, state = optimizer.decode([like], optimizer.init([like]))
    return eval_params(optimizer.transform, params, state.inner)[0] is not params[0]


@torch.no_grad()
def begin(front: Front) -> None:
    """Give the model the weights for evaluation, and keep those that are trained as :data:`TRAINED`."""
    values = full_weights.export(front, eb.Optimizer.eval_params)
    given = {
        id(p): value
        for group, found in zip(front.own_groups, values, strict=True)
        for p, value in zip(group["params"], found, strict=True)
    }
    if front.own.watch is not None:
        front.own.watch.look(_trained(front))
    for parameter in _trained(front):
        front.state[parameter][TRAINED] = parameter.detach().clone()
        parameter.copy_(given[id(parameter)])


@torch.no_grad()
def end(front: Front) -> None:
    """Give the model the weights that are trained."""
    for parameter in _trained(front):
        if TRAINED in front.state[parameter]:
            parameter.copy_(front.state[parameter][TRAINED])
            del front.state[parameter][TRAINED]
    if front.own.watch is not None:
        front.own.watch.note(_trained(front))


def is_saved_in(loaded: Loaded, parameters: Sequence[Tensor]) -> bool:
    """Whether a checkpoint was saved while the model had weights for evaluation.

    Raises:
        ValueError: The trained weights in it are not the parameters'; the optimizer is unchanged.
    """
    kept = [(p, loaded.kept.get(id(p), {})) for p in parameters]
    for number, (parameter, entries) in enumerate(kept):
        if TRAINED in entries:
            require_tensor(
                f"state_dict['state'][{number}][{TRAINED!r}]", entries[TRAINED], [parameter.dtype], tuple(parameter.shape), parameter,
                accepted=f"{parameter.dtype} of shape {tuple(parameter.shape)}.",
            )  # fmt: skip
    return any(TRAINED in entries for _, entries in kept)
