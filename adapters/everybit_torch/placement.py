"""Plans which parameters are stepped together, and where they lie in memory, for all of them before any is moved.

What can be refused is refused here, so that placing itself does not fail half-way, and a checkpoint can be judged by what placing
would make.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

import everybit as eb
from everybit.combinators import matrices_of, needs_whole_tensors
from everybit.policies import block_of, resolve_tree
from everybit.stepping import OptimizerState
from everybit_torch.choosing import Decision, Tree, applied, decide, require_labels_used, tree_of
from everybit_torch.dtensors import is_dtensor, local, row_shards
from everybit_torch.gradients import UnitGradients
from everybit_torch.memory import has_repeated_elements, held_elsewhere, sharing
from everybit_torch.owner_transforms import require_rows
from everybit_torch.sharded_blocks import require_whole_blocks
from everybit_torch.units import Unit, can_be_flat, laid_out


@dataclass(slots=True)
class Settled:
    """The parameters of a param group for which it is settled where they lie, or that they wait.

    Attributes:
        known: All of them, in order.
        waiting: Those that are numbered and have nothing else, because they are frozen, with the number of their first element.
        uninitialized: Those of lazy modules that have no shape yet.
    """

    known: list[Tensor] = field(default_factory=list)
    waiting: list[tuple[Tensor, int]] = field(default_factory=list)
    uninitialized: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Run:
    """Parameters that will share a unit.

    Attributes:
        group: Number of their param group.
        optimizer: Their optimizer.
        names: What messages call them.
        parameters: In order.
        firsts: Global index of the first element of each.
        flat: Whether they will become pieces of one buffer; else they stay where they are.
        decision: What the group's masks and labels said of them.
    """

    group: int
    optimizer: eb.Optimizer[Any]
    names: list[str]
    parameters: list[Tensor]
    firsts: list[int]
    flat: bool
    decision: Decision | None

    def tensor(self) -> Tensor:
        """Return the tensor of a unit whose parameter keeps its own memory."""
        (whole,) = [local(p).detach() for p in self.parameters]
        flatten = whole.is_contiguous() and not needs_whole_tensors(self.optimizer.transform)
        return whole.view(-1) if flatten else whole

    def shadow(self) -> Tensor:
        """The tensor of the unit, without its memory."""
        if self.flat:
            _, size = laid_out([p.numel() for p in self.parameters], block_of(self.optimizer.policy))
            return torch.empty(size, dtype=self.parameters[0].dtype, device="meta")
        return torch.empty_like(self.tensor(), device="meta")

    def unit(
        self,
        tensor: Tensor,
        state: OptimizerState[Any],
        firsts: Sequence[int],
        gradients: UnitGradients | None = None,
    ) -> Unit:
        """The unit, over this tensor and with this state, of parameters with these indices."""
        named = list(zip(self.names, self.parameters, firsts, strict=True))
        return Unit.of(
            self.group, self.optimizer, tensor, named, state,
            flat=self.flat, gradients=gradients, decision=self.decision,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Placement:
    """A plan of which parameters become which units.

    Attributes:
        runs: To be made units.
        counted: How many elements of each dtype are numbered then.
        settled: For each group, what is settled then.
    """

    runs: list[Run]
    counted: dict[torch.dtype, int]
    settled: list[Settled]


def moves(parameter: Tensor) -> bool:
    """Whether a parameter is trained: else it has nothing but numbers."""
    return parameter.requires_grad or parameter.grad is not None


def is_settled(settled: Sequence[Settled], params: Sequence[list[Tensor]], wanted: frozenset[int]) -> bool:
    """Whether there is nothing to place. Fast: it is asked at every step."""
    for group, given in zip(settled, params, strict=True):
        if len(given) != len(group.known) or not all(map(is_, given, group.known)):
            return False
        if any(moves(p) or id(p) in wanted for p, _ in group.waiting):
            return False
        if group.uninitialized and not all(map(is_lazy, group.uninitialized)):
            return False
    return True


def plan_placement(
    settled: Sequence[Settled],
    optimizers: Sequence[dict[torch.dtype, eb.Optimizer[Any]]],
    param_groups: Sequence[Mapping[str, Any]],
    counted: dict[torch.dtype, int],
    numbers: Mapping[Tensor, int],
    wanted: frozenset[int],
    *,
    allow_flat: bool,
) -> Placement:
    """Decide what becomes of every parameter that has no unit; nothing is changed.

    A frozen parameter gets no unit until it is unfrozen, or is ``wanted`` (by id).

    Args:
        settled: For each group, what is settled already.
        optimizers: For each group and dtype, what the parameters will be stepped with.
        param_groups: The optimizer's.
        counted: How many elements of each dtype are numbered.
        numbers: Of the first elements of parameters that were numbered through a whole model.
        wanted: Parameters that get a unit although they are frozen.
        allow_flat: Whether parameters may become pieces of a buffer.

    Raises:
        RuntimeError: Parameters were cast since the optimizer was made, or taken out of a param group since the first step.
        ValueError: Parameters that cannot be stepped where they lie: sharded ones that are cut in another way than their
            transform or format admits, elements that are one place in memory, memory that parameters share and that a policy keeps
            residuals of.
    """
    plan = Placement([], dict(counted), [])
    params = [values["params"] for values in param_groups]
    apart = _apart(params)
    for number, (group, own, values) in enumerate(zip(settled, optimizers, param_groups, strict=True)):
        given = values["params"]
        _require_none_gone(number, group, given)
        before = {id(p) for p in group.known} - {id(p) for p in group.uninitialized}
        lazy: list[Tensor] = [p for p in given if id(p) not in before and is_lazy(p)]
        later = {id(p) for p in lazy}
        new = [p for p in given if id(p) not in before and id(p) not in later]
        if wrong := [p.dtype for p in new if p.dtype not in own]:
            raise RuntimeError(
                f"param group {number}: a parameter is {wrong[0]} now and was not when the optimizer was made. Cast the"
                " model first, then make its optimizer."
            )
        waiting = list(group.waiting)
        for parameter in new:
            # Elements are numbered through all parameters of a dtype, so that a parameter's random bits are its own.
            first = plan.counted.get(parameter.dtype, 0)
            plan.counted[parameter.dtype] = first + parameter.numel()
            waiting.append((parameter, numbers.get(parameter, first)))
        left: list[tuple[Tensor, int]] = []
        buckets: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, int]]] = {}
        for parameter, first in waiting:
            if moves(parameter) or id(parameter) in wanted:
                buckets.setdefault((parameter.dtype, parameter.device), []).append((parameter, first))
            else:
                left.append((parameter, first))
        for (dtype, _), parameters in buckets.items():
            tree = tree_of(values)
            plan.runs.extend(_runs(number, own[dtype], parameters, apart, tree, allow_flat=allow_flat))
        plan.settled.append(Settled(list(given), left, lazy))
    _require_writable(plan.runs, params)
    if not any(group.known for group in settled):
        _require_labels_used(plan.runs, optimizers, param_groups)
    return plan


def _require_labels_used(
    runs: Sequence[Run], optimizers: Sequence[dict[torch.dtype, eb.Optimizer[Any]]], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse labels that no parameter of any group has; lazy parameters have no shape yet, and any label later."""
    decisions = [run.decision.choices for run in runs if run.decision is not None]
    each = [
        (next(iter(own.values())).transform, tree_of(values))
        for own, values in zip(optimizers, groups, strict=True)
        if own
    ]
    if not any(is_lazy(p) for _, tree in each for p in tree.values()):
        for number, (transform, tree) in enumerate(each):
            require_labels_used(transform, decisions, tree, [*each[:number], *each[number + 1 :]])


def _require_none_gone(number: int, group: Settled, given: list[Tensor]) -> None:
    there = {id(p) for p in given}
    if gone := [index for index, p in enumerate(group.known) if id(p) not in there]:
        raise RuntimeError(
            f"param group {number}: parameters {gone} were taken out or replaced since the first step, and what the optimizer"
            " keeps for them would be lost. Make a new optimizer, and carry the state over with a state_dict."
        )


def _runs(
    number: int,
    optimizer: eb.Optimizer[Any],
    parameters: list[tuple[Tensor, int]],
    apart: set[int],
    tree: Tree,
    *,
    allow_flat: bool,
) -> Iterator[Run]:
    """Runs of neighbours that can share a buffer; what cannot is a run of its own.

    What a transform asks of everything that is stepped is asked of all runs, and of all ranks.
    """
    block = block_of(optimizer.policy)
    runs: list[tuple[list[Tensor], list[int], bool, Decision | None]] = []
    end = -1
    names = {id(p): f"param group {number}, parameter {index}" for index, p in enumerate(tree.values())}
    named = {id(p): name if isinstance(name, str) else names[id(p)] for name, p in tree.items()}
    decisions = decide(optimizer, tree, [parameter for parameter, _ in parameters])
    for (parameter, first), decided in zip(parameters, decisions, strict=True):
        own = applied(optimizer, decided)
        require_whole_blocks(named[id(parameter)], parameter, own.policy)
        transform = own.transform
        whole = needs_whole_tensors(transform)
        if whole and parameter.numel():
            matrices_of(transform, named[id(parameter)], parameter.shape)  # which refuses shapes that do not fit
        decision = decided
        if whole and is_dtensor(parameter):
            try:
                decision = _in_rows(optimizer, transform, decided, parameter)
            except ValueError as error:
                raise ValueError(f"{named[id(parameter)]}: {error}") from None
        flat = allow_flat and not whole and id(parameter) not in apart and can_be_flat(parameter)
        # Blocks of a run have indices of their own; without blocks its elements have consecutive ones.
        follows = block > 1 or first == end
        if runs and flat and runs[-1][2] and follows and decision == runs[-1][3]:
            runs[-1][0].append(parameter)
            runs[-1][1].append(first)
        else:
            runs.append(([parameter], [first], flat, decision))
        end = first + parameter.numel()
    for run, firsts, flat, decision in runs:
        yield Run(number, applied(optimizer, decision), [names[id(p)] for p in run], run, firsts, flat, decision)


def _in_rows(
    optimizer: eb.Optimizer[Any], transform: eb.Transform[Any], decided: Decision | None, parameter: Tensor
) -> Decision | None:
    """The decision for a parameter of which ranks hold rows, though its transform needs whole tensors.

    Raises:
        ValueError: It cannot be stepped so.
    """
    if row_shards(parameter) is None:
        return decided
    decision = Decision((), None, rows=True) if decided is None else replace(decided, rows=True)
    require_rows(decision.applied(optimizer), transform, parameter.shape, parameter.dtype)
    return decision


def _apart(params: Sequence[list[Tensor]]) -> set[int]:
    """Return the ids of parameters that keep their own memory, because other tensors share it."""
    here = [p for given in params for p in given if not is_lazy(p)]
    tensors = [local(p) for p in here]
    numbers = {number for pair in sharing(tensors) for number in pair} | held_elsewhere(tensors)
    return {id(here[number]) for number in numbers}


def _require_writable(runs: list[Run], params: Sequence[list[Tensor]]) -> None:
    """Refuse memory that a step could not write without changing what else lies there.

    Raises:
        ValueError: The message names the parameters.
    """
    new = [(run, name, p) for run in runs for name, p in zip(run.names, run.parameters, strict=True)]
    for _, name, parameter in new:
        if has_repeated_elements(local(parameter)):
            raise ValueError(
                f"{name}: got a tensor of shape {tuple(parameter.shape)} and strides {parameter.stride()}, several of whose"
                " elements are one place in memory (expand); accepted are parameters that can be written to: clone it."
            )
    here = [p for given in params for p in given if not is_lazy(p)]
    run_of = {id(p): run for run, _, p in new}
    names = {id(p): f"param group {n}, parameter {i}" for n, given in enumerate(params) for i, p in enumerate(given)}
    for pair in sharing([local(p) for p in here]):
        found = [here[number] for number in pair]
        for parameter in found:
            run = run_of.get(id(parameter))
            if run is None:
                continue
            both = " and ".join(names[id(one)] for one in found)
            (resolved,) = resolve_tree(run.optimizer.policy, [parameter.detach()])  # of a run of one
            if len(resolved.params.parts()) > 1:
                raise ValueError(
                    f"{both}: share memory, and {resolved.params} keeps the rest of each of them apart, which would be two answers to what"
                    " the weights are; accepted are parameters with memory of their own. To tie two weights let them be one Parameter."
                )
