"""A model's weights by name."""

from __future__ import annotations

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def equal(a: Weights, b: Weights) -> bool:
    """The same names, and equal values."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
