"""The copy of a model's weights that an inference engine keeps, to which changes are sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from tests.support.weights import Weights

_INTEGERS = {2: torch.int16, 4: torch.int32}


def bits(x: Tensor) -> Tensor:
    """The bits of the elements, as integers."""
    return x.detach().reshape(-1).view(_INTEGERS[x.itemsize])


def as_exported(weights: Mapping[str, Tensor], dtype: torch.dtype) -> Weights:
    """Flat copies of weights, as a program casts them for an engine."""
    return {name: x.detach().to(dtype).reshape(-1).clone() for name, x in weights.items()}


class Receiver:
    """Weights by name, as flat tensors; zeros until something is sent."""

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.held = {name: torch.zeros(x.numel(), dtype=dtype) for name, x in weights.items()}

    def take(self, changes: Iterable[tuple[str, Tensor, Tensor]]) -> dict[str, Tensor]:
        """Write what was sent, and return its indices, by name."""
        sent = {}
        for name, indices, values in changes:
            assert values.dtype is self.held[name].dtype
            assert bool((indices[1:] > indices[:-1]).all())
            self.held[name][indices.long()] = values
            sent[name] = indices
        return sent

    def has(self, weights: Weights) -> bool:
        """Whether it holds these, bit for bit."""
        return self.held.keys() == weights.keys() and all(
            torch.equal(bits(x), bits(weights[name])) for name, x in self.held.items()
        )


def changed(before: Weights, after: Weights) -> dict[str, Tensor]:
    """Where two copies have other bits: what a program finds that keeps a snapshot."""
    return {name: (bits(before[name]) != bits(x)).nonzero().view(-1) for name, x in after.items()}
