"""The reductions over all ranks that transforms ask for in a step, found by asking them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.dtypes import torch_dtype
from everybit.policy import Policy
from everybit_torch.reductions import Part, Reads, find_totals
from everybit_torch.sharded.shard_optimizer import LabelledTransform
from everybit_torch.units import Unit


def reduced_numbers(labelled: Mapping[str, LabelledTransform], parameters: int) -> list[int]:
    """How many float64 numbers each reduction has that the transforms ask for in a step.

    Args:
        labelled: The transform of each label.
        parameters: How many are trained.
    """
    by_source = {one.source: one for one in labelled.values()}
    sizes = torch.zeros(parameters, dtype=torch.float64)
    return [
        total.numel()
        for one in by_source.values()
        for total in totals_of(eb.Optimizer(one.transform, one.policy), sizes)
    ]


def totals_of(optimizer: eb.Optimizer[Any], sizes: Tensor) -> list[Tensor]:
    """Answers to what a transform asks of all ranks in a step, in order, each as zeros would give it.

    Args:
        optimizer: Of the transform, under a policy without labels.
        sizes: Number of elements of each parameter that is trained: float64.
    """
    if not optimizer.reduces:
        return []
    assert isinstance(optimizer.policy, Policy)
    empty = torch.zeros(0, dtype=torch_dtype(optimizer.policy.model_dtype))
    return find_totals([Part(optimizer, unit_of(optimizer, empty, no_members(sizes)), None)], eb.Local, Reads())


def unit_of(optimizer: eb.Optimizer[Any], tensor: Tensor, members: eb.Members) -> Unit:
    """A unit of one flat tensor, to be asked."""
    (stored,) = optimizer.formats([tensor])
    return Unit(0, tensor, [], optimizer.init([tensor]), 0, flat=True, stored=stored, whole=members)


def no_members(sizes: Tensor) -> eb.Members:
    """The members of a tensor without elements."""
    none = torch.zeros(0, dtype=torch.int64)
    return eb.Members(none, torch.zeros(1, dtype=torch.int64), sizes)
