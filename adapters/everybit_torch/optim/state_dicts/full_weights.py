"""Weights in full precision, in the order of the param groups: their dtypes, and checks of given weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

import everybit as eb
from everybit.base import DTYPES, FLOAT_DTYPES
from everybit_torch.label_resolution import resolve_parameters, tree_of
from everybit_torch.optim.interfaces import Front
from everybit_torch.optim.planned import moves
from everybit_torch.optim.state_dicts import full_precision
from everybit_torch.optim.state_dicts.full_precision import Export
from everybit_torch.optim.state_dicts.saved_structure import shown
from everybit_torch.optim.state_dicts.state_schema import require_tensor

FLOATS = tuple(map(DTYPES.__getitem__, FLOAT_DTYPES))


def dtypes(front: Front) -> dict[int, torch.dtype]:
    """Return, by id of the parameter, the dtype in which its weights are exported."""
    found: dict[int, torch.dtype] = {}
    placed = {id(one.parameter) for each in (front.own.own(), front.own.visited()) for one in each}
    for group, values in zip(front.own.groups, front.own_groups, strict=True):
        policies = {dtype: optimizer.policy for dtype, optimizer in group.optimizers.items()}
        known = {key: p for key, p in tree_of(values).items() if not is_lazy(p) and p.dtype in policies}
        resolved = resolve_parameters(policies, known)
        for parameter in values["params"]:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            if (one := resolved.get(id(parameter))) and (id(parameter) in placed or moves(parameter)):
                wide = DTYPES[one.policy.compute]
            found[id(parameter)] = wide
    return found


def export(front: Front, of: Export = eb.Optimizer.export_fp32) -> list[list[Tensor]]:
    """Return every parameter with all the precision that is stored, or as ``of`` gives it: one list per param group."""
    exported = {
        id(p): p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in front.own.waiting()
    }
    exported |= full_precision.export_all(front.own, of)
    return [[exported[id(p)] for p in group["params"]] for group in front.own_groups]


def judge(front: Front, weights: Iterable[Iterable[Tensor]]) -> dict[int, Tensor]:
    """Full-precision weights by id of their parameter.

    Raises:
        ValueError: They do not fit; the model is unchanged.
        RuntimeError: Parameters that cannot be placed.
    """
    expected = [list(group["params"]) for group in front.own_groups]
    accepted = f"accepted are {list(map(len, expected))}, each of its parameter's shape"
    given = [
        _listed(f"weights[{number}]", group, accepted)
        for number, group in enumerate(_listed("weights", weights, accepted))
    ]
    if list(map(len, given)) != list(map(len, expected)):
        raise ValueError(f"weights: got {list(map(len, given))} tensors by param group; {accepted}.")
    wides = dtypes(front)
    found: dict[int, Tensor] = {}
    for number, (parameters, values) in enumerate(zip(expected, given, strict=True)):
        for index, (parameter, value) in enumerate(zip(parameters, values, strict=True)):
            wide = wides[id(parameter)]
            held = [one for one in FLOATS if torch.promote_types(one, wide) is wide]
            require_tensor(
                f"weights[{number}][{index}]", value, held, tuple(parameter.shape), parameter,
                accepted=f"{wide}, or what it holds exactly, of shape {tuple(parameter.shape)}.",
            )  # fmt: skip
            found[id(parameter)] = value
    return found


def store(front: Front, given: Mapping[int, Tensor]) -> None:
    """Store weights that :func:`judge` returned."""
    full_precision.store_all(front.own, given)
    for parameter in front.own.waiting():
        parameter.copy_(given[id(parameter)])


def _listed(where: str, values: Any, accepted: str) -> list[Any]:
    """Return the items of a list, a tuple or a generator.

    Raises:
        ValueError: It is no list, tuple or generator.
    """
    if not isinstance(values, Iterable) or isinstance(values, (Tensor, Mapping, str, bytes)):
        raise ValueError(f"{where}: got {shown(values)}; {accepted}.")
    return list(values)
