"""The reductions over all ranks that transforms ask for in a step, found by asking them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.base import Blocks, torch_dtype
from everybit.policies import Policy
from everybit.protocol import periods
from everybit_torch.asking import Reads
from everybit_torch.host_counts import Due
from everybit_torch.reductions import Part, find_totals
from everybit_torch.sharded.labelling import LabelledTransform
from everybit_torch.units import Unit


def reduced_numbers(labelled: Mapping[str, LabelledTransform], parameters: int, *, alone: bool) -> list[int]:
    """How many float64 numbers each reduction has that the transforms ask for in a step: the one in which they are the most.

    Args:
        labelled: The transform of each label.
        parameters: How many are trained.
        alone: Whether no other rank takes part.
    """
    by_source = {one.source: one for one in labelled.values()}
    sizes = torch.zeros(parameters, dtype=torch.float64)
    found: list[int] = []
    for one in by_source.values():
        optimizer = eb.Optimizer(one.transform, one.policy)
        answers = answers_of(optimizer, sizes, alone=alone) if optimizer.reduces else [()]
        found += max(([total.numel() for total in totals_of(optimizer, sizes, due)] for due in answers), key=sum)
    return found


def totals_of(optimizer: eb.Optimizer[Any], sizes: Tensor, due: Due) -> list[Tensor]:
    """Answers to what a transform asks of all ranks in a step, in order, each as zeros would give it.

    Args:
        optimizer: Of the transform, under a policy without labels.
        sizes: Number of elements of each parameter that is trained: float64.
        due: Which periodic work is due.
    """
    if not optimizer.reduces:
        return []
    unit = _empty_unit(optimizer, sizes)
    return find_totals([Part(optimizer, unit, None, due=due)], eb.Local, Reads())


def answers_of(optimizer: eb.Optimizer[Any], sizes: Tensor, *, alone: bool) -> list[Due]:
    """Each answer that the host gives in some step to which periodic work is due; of nothing, where the device decides.

    Args:
        optimizer: Of the transform, under a policy without labels.
        sizes: Number of elements of each parameter that is trained: float64.
        alone: Whether no other rank takes part in the transform's reductions.
    """
    own = periods(optimizer.transform)
    if optimizer.reduces and not alone and Reads().promises(optimizer, _empty_unit(optimizer, sizes)).in_periodic_work:
        return [()]
    # The work of some periods is due together first where their least common multiple is, with that of all which divide it.
    together = (some for count in range(len(own) + 1) for some in combinations(own, count))
    return list(dict.fromkeys(optimizer.due(math.lcm(*some) + 1) for some in together))


def _empty_unit(optimizer: eb.Optimizer[Any], sizes: Tensor) -> Unit:
    assert isinstance(optimizer.policy, Policy)
    empty = torch.zeros(0, dtype=torch_dtype(optimizer.policy.model_dtype))
    return unit_of(optimizer, empty, no_members(sizes))


def unit_of(optimizer: eb.Optimizer[Any], tensor: Tensor, members: eb.Members, first: int | Blocks = 0) -> Unit:
    """A unit of one flat tensor, to be asked."""
    (stored,) = optimizer.formats([tensor])
    return Unit(0, tensor, [], optimizer.init([tensor]), first, flat=True, stored=stored, whole=members)


def no_members(sizes: Tensor) -> eb.Members:
    """The members of a tensor without elements."""
    none = torch.zeros(0, dtype=torch.int64)
    return eb.Members(none, torch.zeros(1, dtype=torch.int64), sizes)
