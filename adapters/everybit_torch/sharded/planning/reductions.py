"""The reductions over all ranks that transforms ask for in a step, found by asking them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

import everybit as eb
from everybit.dtypes import torch_dtype
from everybit_torch.reductions import Part, Reads, find_totals
from everybit_torch.sharded.shard_optimizer import LabelledTransform
from everybit_torch.units import Unit


def count_reductions(labelled: Mapping[str, LabelledTransform]) -> int:
    """Count the reductions that the transforms ask for in a step."""
    by_source = {one.source: one for one in labelled.values()}
    return sum(len(reductions_of(one)) for one in by_source.values())


def reductions_of(one: LabelledTransform) -> list[Tensor]:
    """Answers to what a transform asks of all ranks in a step, in order, each as zeros would give it."""
    if not one.transform.reduces:
        return []
    optimizer = eb.Optimizer(one.transform, one.policy)
    empty = torch.zeros(0, dtype=torch_dtype(one.policy.model_dtype))
    (stored,) = optimizer.formats([empty])
    unit = Unit(0, empty, [], optimizer.init([empty]), 0, flat=True, stored=stored)
    return find_totals([Part(optimizer, unit, None)], eb.Local, Reads())
