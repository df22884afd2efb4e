"""The bytes that a step has to move for each element, by what the policy says is stored. Nothing here looks at compiled code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import everybit as eb
from everybit.formats import Format
from gpu_codegen.cases import Case


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes for each element.

    Attributes:
        loaded: Parameter, slots and gradient.
        stored: Parameter and slots.
    """

    loaded: float
    stored: float


def traffic(case: Case) -> Traffic:
    """Parts of the parameter and of each slot, in and out, and the gradient in; a step that changes nothing moves nothing.

    Nothing is said of steps with sums between their kernels, which read what they add up once more.
    """
    if case.has_sums:
        return Traffic(0.0, 0.0)
    optimizer = case.built
    parameter = torch.empty(1, dtype=case.dtype, device="meta")
    (resolved,) = optimizer.formats([parameter])
    slots: list[str] = []
    eb.tree.map_slots(lambda name, _: slots.append(name), optimizer.init([parameter]).inner)
    kept = _bytes(resolved.params) + sum(_bytes(resolved.slot(name)) for name in slots)
    return Traffic(loaded=kept + case.gradient.itemsize, stored=kept)


def _bytes(format: Format) -> float:
    parts: Any = format.parts()
    return float(sum(part.dtype.itemsize / part.block for part in parts))
