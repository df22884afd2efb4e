"""State that was assigned to ``optimizer.state`` before a parameter's first step, as torch's ``ZeroRedundancyOptimizer`` loads it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from everybit.stepping.entries import STEP
from everybit_torch.optim.interfaces import Front
from everybit_torch.optim.planned import StatePlan
from everybit_torch.optim.state_dicts.full_precision import fill
from everybit_torch.optim.state_dicts.saved_structure import names
from everybit_torch.optim.state_dicts.state_schema import expectations, require_entry
from everybit_torch.optim.states import ParameterState

Assigned = Mapping[int, Mapping[str, Tensor]]
"""Entries of the optimizer's own, under its own names, by id of the parameter."""


def judge(front: Front, plan: StatePlan) -> Assigned:
    """Find what was assigned for parameters that are about to get their state. Names may be torch's (``exp_avg``).

    Args:
        front: The optimizer.
        plan: The plan of these parameters.

    Raises:
        ValueError: Some of a parameter's entries are missing, or one has another dtype or shape. Nothing is changed.
    """
    held = {id(one.parameter): front.own.states.get(one.parameter) for one in plan.new}
    if not any(isinstance(one, ParameterState) and one.kept for one in held.values()):
        return {}
    kinds_of = expectations(front.own, [group.optimizers for group in front.own.groups], plan, full=False)
    theirs = {} if front.torch_names is None else {name: ours for ours, name in front.torch_names.slots.items()}
    found: dict[int, dict[str, Tensor]] = {}
    for one in plan.new:
        state, kinds = held[id(one.parameter)], kinds_of[id(one.parameter)]
        if not isinstance(state, ParameterState):
            continue
        given = {theirs.get(name, name) if isinstance(name, str) else name: value for name, value in state.kept.items()}
        if theirs.keys() & state.kept.keys() and STEP in given:  # torch has one count
            given = {name: given[STEP] for name, kind in kinds.items() if kind.count} | given
        own = {name: given[name] for name in kinds if name in given}
        if not own:
            continue
        where = f"state of {one.name}, assigned before its first step"
        if own.keys() != kinds.keys():
            raise ValueError(f"{where}: has {names(own)}; accepted are none of them, or all: {names(kinds)}.")
        if one.rows is not None:
            raise ValueError(
                f"{where}: the parameter is stepped whole by an owner, to which its state has to travel; accepted is load_state_dict()."
            )
        found[id(one.parameter)] = {
            name: require_entry(f"{where}, {name!r}", value, kinds[name], one.parameter, full=False)
            for name, value in own.items()
        }
    return found


@torch.no_grad()
def adopt(front: Front, assigned: Assigned) -> None:
    """Give parameters, which have their state now, the entries that were assigned."""
    if not assigned:
        return
    front.own.come_apart_by_shared(assigned)
    for own in front.own.own():
        if id(own.parameter) in assigned:
            fill(own.entries(), assigned[id(own.parameter)])
            front.own.states[own.parameter].drop_torch_names()
