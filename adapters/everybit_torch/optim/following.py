"""Other hyperparameters: judged for all param groups before any follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from everybit.stepping import OptimizerState
from everybit_torch.arguments import differ
from everybit_torch.label_resolution import applied, choices, decide, tree_of
from everybit_torch.optim.groups import Group, Optimizers, require_alike
from everybit_torch.optim.parameters import Parameters, Stepped
from everybit_torch.optim.planned import ParamGroups
from everybit_torch.optim.skeletons import renested, skeleton
from everybit_torch.segments import Segment


def follow(parameters: Parameters, param_groups: ParamGroups, arguments: Sequence[dict[str, Any]]) -> None:
    """Step with these hyperparameters from here on.

    Args:
        parameters: The optimizer's parameters.
        param_groups: Its param groups.
        arguments: The factory's arguments for each group.

    Raises:
        TypeError: A hyperparameter of another kind.
        ValueError: A hyperparameter out of range, a change of the state, or of masks and labels, or groups that have to be alike and are
            not. The optimizer is unchanged.
    """
    changes = [
        (group, new, group.build(new))
        for group, new in zip(parameters.groups, arguments, strict=True)
        if differ(new, group.arguments)
    ]
    future = {group.number: optimizers for group, _, optimizers in changes}
    require_alike([(group, future.get(group.number, group.optimizers)) for group in parameters.groups])
    if not changes:
        return
    for group, _, optimizers in changes:
        require_same_decisions(parameters, group, optimizers, param_groups[group.number])
    states = [one for change in changes for one in _renested(parameters, *change)]
    for group, new, optimizers in changes:
        group.follow(new, optimizers)
    _give_optimizers(parameters)
    for stepped, state in states:
        stepped.of.segment = replace(stepped.of.segment, optimizer=stepped.optimizer, state=state)
        parameters.show([stepped])


def require_same_decisions(
    parameters: Parameters, group: Group, optimizers: Optimizers, values: Mapping[str, Any]
) -> None:
    """Refuse optimizers whose masks or labels come out otherwise for parameters that have state.

    Args:
        parameters: The optimizer's parameters.
        group: The group whose optimizers they will be.
        optimizers: By dtype.
        values: The param group.

    Raises:
        ValueError: The message names a parameter.
    """
    for dtype, new in optimizers.items():
        before, after = choices(group.optimizers[dtype].transform), choices(new.transform)
        if skeleton(before, numbers=True) == skeleton(after, numbers=True):
            continue
        known = [(p, one.decision) for one in parameters.stepped if one.group is group for p in one.of.parameters]
        known += [(one.parameter, one.decision) for one in parameters.visited() if one.group is group]
        had = [(p, decision) for p, decision in known if p.dtype is dtype]
        for (p, decision), now in zip(had, decide(new, tree_of(values), [p for p, _ in had]), strict=True):
            was, will = (one.choices if one is not None else () for one in (decision, now))
            if was != will:
                place = next(place for place, one in enumerate(values["params"]) if one is p)
                raise ValueError(
                    f"param group {group.number}, parameter {place}: masks and labels came out as {was} at the first step, and with these"
                    f" hyperparameters as {will}; accepted are values that change none. Make a new optimizer, and carry the state over with"
                    " full_state_dict()."
                )


def require_same_view(parameters: Parameters, group: Group, optimizers: Optimizers) -> None:
    """Refuse optimizers that look at more than parameters were placed for: at whole tensors, at numbers of each, at indices in the whole.

    Args:
        parameters: The optimizer's parameters.
        group: The group whose optimizers they will be.
        optimizers: By dtype, with the masks and labels of the present ones.

    Raises:
        ValueError: The message says what changed.
    """
    own = [one for one in parameters.stepped if one.group is group]
    placed = {(one.dtype, one.decision, one.of.is_sharded): one.optimizer for one in own}
    visited = [one for one in parameters.visited() if one.group is group]
    placed |= {(one.parameter.dtype, one.decision, False): one.optimizer for one in visited}  # an owner has the whole
    for (dtype, decision, is_sharded), before in placed.items():
        after = applied(optimizers[dtype], decision)
        for what, was, will in (
            ("see whole tensors", before.needs_whole, after.needs_whole),
            ("request numbers of each parameter", before.per_tensor, after.per_tensor or before.per_tensor),
            ("draw random bits", before.draws_bits, before.draws_bits or (is_sharded and after.draws_bits)),
        ):
            if was != will:
                raise ValueError(
                    f"{group.owner}, param group {group.number}: its transform would {'' if will else 'not '}{what}, and its parameters"
                    f" were placed at the first step for one that does{' not' if will else ''}; make a new optimizer."
                )


def start_with(parameters: Parameters, arguments: Sequence[dict[str, Any]], optimizers: Sequence[Optimizers]) -> None:
    """Step with other hyperparameters, for state that is loaded after this: state that differs begins anew."""
    changed = {group.number: group.changed(new) for group, new in zip(parameters.groups, optimizers, strict=True)}
    for group, new, values in zip(parameters.groups, optimizers, arguments, strict=True):
        group.follow(values, new)
    _give_optimizers(parameters)
    for one in parameters.stepped:
        if one.dtype in changed[one.group.number]:
            before = one.of.segment
            one.of.segment = Segment.new(one.optimizer, before.tensor, before.first, before.is_part, before.host)
            one.of.segment.watched = before.watched
            parameters.show([one])
    for visiting in parameters.visiting:
        if any(one.parameter.dtype in changed[one.group.number] for one in visiting.members):
            visiting.begin_with(lambda one: one.group.decided(one.parameter.dtype, one.decision))


def _give_optimizers(parameters: Parameters) -> None:
    for one in parameters.stepped:
        one.of.segment.optimizer = one.group.decided(one.dtype, one.decision)
    for member in parameters.visited():
        member.give(member.group.decided(member.parameter.dtype, member.decision))


def _renested(
    parameters: Parameters, group: Group, arguments: Mapping[str, Any], optimizers: Optimizers
) -> Iterator[tuple[Stepped, OptimizerState[Any]]]:
    """Nest the state of a group's parameters as other hyperparameters ask for, where they change the structure of a transform.

    Raises:
        ValueError: The state would have other entries; the message names the hyperparameters.
    """
    changed = group.changed(optimizers)
    if not changed:
        return
    require_same_view(parameters, group, optimizers)
    if any(one.group is group and one.parameter.dtype in changed for one in parameters.visited()):
        raise ValueError(
            f"param group {group.number}: its transform would keep other state, and that of parameters that are stepped whole lies with"
            " owners; accepted are values that keep the same. Make a new optimizer, and carry the state over with a state_dict."
        )
    for one in parameters.stepped:
        if one.group is not group or one.dtype not in changed:
            continue
        try:
            segment = one.of.segment
            yield one, renested(segment.state, applied(optimizers[one.dtype], one.decision), segment.tensor)
        except ValueError as error:
            before = group.arguments
            names = [
                name
                for name, targets in group.names.items()
                if any(arguments[each] is not before[each] for each in targets if each in before)
            ]
            raise ValueError(f"param group {group.number}: {', '.join(names)}: {error}") from None
