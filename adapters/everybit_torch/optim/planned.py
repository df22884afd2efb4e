"""A plan for parameters that have no state yet: which get state, which wait, and how each will be stepped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

import everybit as eb
from everybit.combinators import matrices_of
from everybit.policies import policies_of, resolve_tree
from everybit_torch.label_resolution import Decision, applied, decide, require_labels_used, tree_of, warn_of_missed
from everybit_torch.optim.groups import Optimizers
from everybit_torch.placements import RowShards, row_edges, row_shards
from everybit_torch.segments import is_short
from everybit_torch.shared_memory import has_repeated_elements, sharing
from everybit_torch.torch_internals.dtensors import is_dtensor, local

ParamGroups = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class New:
    """A parameter that will be stepped.

    Attributes:
        group: Number of its param group.
        name: Its name, for messages.
        parameter: The parameter.
        first: Global index of its first element.
        decision: The results of the group's masks and labels for it.
        optimizer: Its optimizer.
        shares: Whether another parameter has some of its memory.
        rows: How ranks hold its rows, if it visits an owner for a step.
    """

    group: int
    name: str
    parameter: Tensor
    first: int
    decision: Decision | None
    optimizer: eb.Optimizer[Any]
    shares: bool
    rows: RowShards | None

    def looks_at_tensors(self) -> bool:
        """Whether its transform needs whole parameters, or requests numbers of each."""
        return self.optimizer.per_tensor or self.optimizer.needs_whole

    def is_alone(self) -> bool:
        """Whether it is stepped by itself: it is long, its transform looks at whole parameters, or it shares memory."""
        return self.shares or self.looks_at_tensors() or not is_short(local(self.parameter))


@dataclass(slots=True)
class Settled:
    """The parameters of a param group that are stepped or wait.

    Attributes:
        known: All of them, in order.
        waiting: Frozen parameters. They have only the number of their first element.
        uninitialized: Those of lazy modules that have no shape yet.
    """

    known: list[Tensor] = field(default_factory=list)
    waiting: list[tuple[Tensor, int]] = field(default_factory=list)
    uninitialized: list[Tensor] = field(default_factory=list)

    def is_current(self, given: list[Tensor], wanted: frozenset[int]) -> bool:
        """Whether all parameters are settled. Fast: called at every step."""
        if len(given) != len(self.known) or not all(map(is_, given, self.known)):
            return False
        if any(moves(p) or id(p) in wanted for p, _ in self.waiting):
            return False
        return not self.uninitialized or all(map(is_lazy, self.uninitialized))


@dataclass(frozen=True, slots=True)
class StatePlan:
    """A plan for parameters that have no state yet.

    Attributes:
        new: Those that will be stepped.
        counted: How many elements of each dtype are numbered then.
        settled: The parameters of each group after the plan.
    """

    new: list[New]
    counted: dict[torch.dtype, int]
    settled: list[Settled]


def planned(
    settled: Sequence[Settled],
    counted: Mapping[torch.dtype, int],
    firsts: Mapping[Tensor, int],
    param_groups: ParamGroups,
    wanted: frozenset[int],
    optimizers: Sequence[Optimizers],
) -> StatePlan:
    """Plan the state of every parameter without state. No parameter is changed.

    Args:
        settled: The parameters of each group that are stepped or wait.
        counted: How many elements of each dtype are numbered.
        firsts: Global indices of first elements that were given.
        param_groups: The optimizer's.
        wanted: Parameters, by id, that get state although they are frozen.
        optimizers: The optimizers of each group, by dtype.

    Raises:
        RuntimeError: Parameters were cast since the optimizer was made, or taken out of a param group since the first step.
        ValueError: Parameters that cannot be stepped.
    """
    tied = tied_by_memory(parameters_of(param_groups))
    plan = StatePlan([], dict(counted), [])
    for number, (group, own, values) in enumerate(zip(settled, optimizers, param_groups, strict=True)):
        given = values["params"]
        _require_none_gone(number, group, given)
        lazy, waiting = _number(number, group, own, given, plan.counted, firsts)
        left = [(p, first) for p, first in waiting if not moves(p) and id(p) not in wanted]
        ready = [(p, first) for p, first in waiting if moves(p) or id(p) in wanted]
        plan.new.extend(_new(number, own, ready, values, tied))
        plan.settled.append(Settled(list(given), left, lazy))
    _require_writable(plan.new, [values["params"] for values in param_groups])
    if not any(group.known for group in settled):
        _require_labels_used(plan.new, optimizers, param_groups)
    return plan


def _number(
    number: int,
    group: Settled,
    own: Optimizers,
    given: list[Tensor],
    counted: dict[torch.dtype, int],
    firsts: Mapping[Tensor, int],
) -> tuple[list[Tensor], list[tuple[Tensor, int]]]:
    """Number the elements of new parameters; return those without a shape, and all others that wait."""
    before = {id(p) for p in group.known} - {id(p) for p in group.uninitialized}
    lazy: list[Tensor] = [p for p in given if id(p) not in before and is_lazy(p)]
    waiting = list(group.waiting)
    for parameter in given:
        if id(parameter) in before or is_lazy(parameter):
            continue
        if parameter.dtype not in own:
            raise RuntimeError(
                f"param group {number}: a parameter is {parameter.dtype}, and none was when the optimizer was made. Cast the model first,"
                " then make its optimizer; add_param_group() adds parameters of another dtype."
            )
        # Elements are numbered through all parameters of a dtype, so that a parameter's random bits are its own.
        first = counted.get(parameter.dtype, 0)
        counted[parameter.dtype] = first + parameter.numel()
        waiting.append((parameter, firsts.get(parameter, first)))
    return lazy, waiting


def moves(parameter: Tensor) -> bool:
    """Whether a parameter is trained. A frozen parameter has only a number."""
    return parameter.requires_grad or parameter.grad is not None


def parameters_of(param_groups: ParamGroups) -> list[Tensor]:
    """Return the parameters of all groups, in order."""
    return [parameter for values in param_groups for parameter in values["params"]]


def _new(
    number: int, optimizers: Optimizers, ready: list[tuple[Tensor, int]], values: Mapping[str, Any], tied: set[int]
) -> Iterator[New]:
    tree = tree_of(values)
    names = {id(p): f"param group {number}, parameter {index}" for index, p in enumerate(tree.values())}
    called = {id(p): name if isinstance(name, str) else names[id(p)] for name, p in tree.items()}
    for dtype in dict.fromkeys(p.dtype for p, _ in ready):
        own = [(p, first) for p, first in ready if p.dtype is dtype]
        for (p, first), decision in zip(own, decide(optimizers[dtype], tree, [p for p, _ in own]), strict=True):
            optimizer = applied(optimizers[dtype], decision)
            if optimizer.needs_whole and p.numel():
                matrices_of(optimizer.transform, called[id(p)], p.shape)  # which refuses shapes that do not fit
            rows = rows_to_bring(called[id(p)], p, optimizer)
            yield New(number, names[id(p)], p, first, decision, optimizer, id(p) in tied, rows)


def _require_none_gone(number: int, group: Settled, given: list[Tensor]) -> None:
    there = {id(p) for p in given}
    if gone := [index for index, p in enumerate(group.known) if id(p) not in there]:
        raise RuntimeError(
            f"param group {number}: parameters {gone} were taken out or replaced since the first step, and what the optimizer keeps for"
            " them would be lost. Make a new optimizer, and carry the state over with a state_dict."
        )


def _require_labels_used(new: Sequence[New], optimizers: Sequence[Optimizers], groups: ParamGroups) -> None:
    """Refuse labels that no parameter of any group has; lazy parameters have no shape yet, and any label later."""
    decisions = [one.decision.choices for one in new if one.decision is not None]
    each = [
        (next(iter(own.values())).transform, tree_of(values))
        for own, values in zip(optimizers, groups, strict=True)
        if own
    ]
    if not any(is_lazy(p) for _, tree in each for p in tree.values()):
        for number, (transform, tree) in enumerate(each):
            require_labels_used(transform, decisions, tree, [*each[:number], *each[number + 1 :]])
    for transform, tree in each:
        warn_of_missed(transform, tree)


def tied_by_memory(parameters: Sequence[Tensor]) -> set[int]:
    """The parameters, by id, that share memory with another."""
    here = [p for p in parameters if not is_lazy(p)]
    return {id(here[number]) for pair in sharing([local(p) for p in here]) for number in pair}


def _require_writable(new: Sequence[New], params: Sequence[list[Tensor]]) -> None:
    """Refuse memory that a step could not write without changing what else lies there.

    Raises:
        ValueError: The message names the parameters.
    """
    for one in new:
        if has_repeated_elements(local(one.parameter)):
            raise ValueError(
                f"{one.name}: got a tensor of shape {tuple(one.parameter.shape)} and strides {one.parameter.stride()}, several of whose"
                " elements are one place in memory (expand); accepted are parameters that can be written to: clone it."
            )
    by_id = {id(one.parameter): one for one in new if one.shares}
    if not by_id:
        return
    here = [p for given in params for p in given if not is_lazy(p)]
    names = {id(p): f"param group {n}, parameter {i}" for n, given in enumerate(params) for i, p in enumerate(given)}
    for pair in sharing([local(p) for p in here]):
        found = [here[number] for number in pair]
        for parameter in found:
            sharer = by_id.get(id(parameter))
            if sharer is None:
                continue
            (resolved,) = resolve_tree(sharer.optimizer.policy, [parameter.detach()])
            if len(resolved.params.parts()) > 1:
                both = " and ".join(names[id(one)] for one in found)
                raise ValueError(
                    f"{both}: share memory, and {resolved.params} keeps the rest of each of them apart, which would be two answers to what"
                    " the weights are; accepted are parameters with memory of their own. To tie two weights let them be one Parameter."
                )


def rows_to_bring(name: str, parameter: Tensor, optimizer: eb.Optimizer[Any]) -> RowShards | None:
    """Return how ranks hold the rows of a parameter that visits; None: this rank steps its part.

    Raises:
        ValueError: It has to be stepped whole, and ranks hold it in parts that are no rows.
    """
    if not is_dtensor(parameter) or not parameter.ndim:
        return None
    whole = optimizer.needs_whole
    policies = policies_of(optimizer.policy) if parameter.numel() else []
    blocks = {block for policy in policies for block in policy.blocks if block > 1}
    if not whole and not blocks:
        return None
    try:
        rows = row_shards(parameter)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if rows is None or whole:
        return rows
    return rows if any(_cuts(parameter, rows, block) for block in blocks) else None


def _cuts(parameter: Tensor, rows: RowShards, block: int) -> bool:
    """Whether a rank's rows begin inside a block, or torch would cut the vector of blocks at another place than where they begin."""
    length, edges = parameter.numel() // parameter.shape[0], rows.edges(parameter.shape[0])
    inside = any(edge < edges[-1] and edge * length % block for edge in edges)
    return inside or row_edges(-(-parameter.numel() // block), rows.ranks) != [-(-e * length // block) for e in edges]
