"""The combinators that apply one transform after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from everybit.base import tree
from everybit.combinators.wrapping import Composed
from everybit.protocol import ALONE, Context, Transform, eval_params, in_turn, require_transform

P = TypeVar("P")


@tree.state
class ChainState:
    """``step`` counts the updates done (int64, 0-d), once for the whole chain; ``states`` are those of its transforms."""

    step: Tensor
    states: tuple[Any, ...]


@tree.state
class NamedChainState:
    """The state of a named chain: as :class:`ChainState`, with the states of its transforms by name."""

    step: Tensor
    states: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Chain(Composed):
    """Transforms applied left to right."""

    transforms: tuple[Transform[Any], ...]

    def __post_init__(self) -> None:
        for index, transform in enumerate(self.transforms):
            require_transform(transform, who=f"chain, argument {index}")

    def parts(self) -> tuple[Transform[Any], ...]:
        """Return the transforms in order."""
        return self.transforms

    def eval_params(self, params: P, state: ChainState) -> P:
        """Return the weights for evaluation: each part maps those of the part before it."""
        for transform, inner in zip(self.transforms, state.states, strict=True):
            params = eval_params(transform, params, inner)
        return params

    def init(self, params: P) -> ChainState:
        """Return the initial state of each transform, and a count of zero steps."""
        return ChainState(zero_step(params), tuple(transform.init(params) for transform in self.transforms))

    def update(self, updates: P, state: ChainState, params: P, ctx: Context = ALONE) -> tuple[P, ChainState]:
        """Apply each part's update to the output of the part before it."""
        step = state.step + 1
        return in_turn(
            self.transforms,
            updates,
            state.states,
            params,
            ctx.at(step),
            lambda u, states: (u, ChainState(step, states)),
        )


@dataclass(frozen=True, slots=True)
class NamedChain(Composed):
    """Transforms with names, applied in order; their states are found by name."""

    transforms: Mapping[str, Transform[Any]] = field(hash=False)

    def __post_init__(self) -> None:
        for name, transform in self.transforms.items():
            require_transform(transform, who=f"named_chain, {name!r}")

    def parts(self) -> tuple[Transform[Any], ...]:
        """Return the transforms in order."""
        return tuple(self.transforms.values())

    def eval_params(self, params: P, state: NamedChainState) -> P:
        """Return the weights for evaluation: each part maps those of the part before it."""
        for transform, inner in ((part, state.states[name]) for name, part in self.transforms.items()):
            params = eval_params(transform, params, inner)
        return params

    def init(self, params: P) -> NamedChainState:
        """Each part's state, by its name."""
        states = {name: transform.init(params) for name, transform in self.transforms.items()}
        return NamedChainState(zero_step(params), states)

    def update(self, updates: P, state: NamedChainState, params: P, ctx: Context = ALONE) -> tuple[P, NamedChainState]:
        """Apply each part's update to the output of the part before it."""
        step = state.step + 1
        inner = tuple(state.states[name] for name in self.transforms)

        def named(updates: P, states: tuple[Any, ...]) -> tuple[P, NamedChainState]:
            return updates, NamedChainState(step, dict(zip(self.transforms, states, strict=True)))

        return in_turn(self.parts(), updates, inner, params, ctx.at(step), named)


def chain(*transforms: Transform[Any]) -> Chain:
    """Apply ``transforms`` left to right; the chain counts the steps for all of them.

    Raises:
        TypeError: An argument that is no transform, such as an ``Optimizer``.

    Examples:
        >>> import everybit as eb
        >>> eb.chain(eb.scale_by_adam(b2=0.95), eb.scale_by_learning_rate(3e-4)).cut
        'element'
    """
    return Chain(transforms)


def named_chain(transforms: Mapping[str, Transform[Any]]) -> NamedChain:
    """Apply the transforms in the mapping's order; ``state.states["name"]`` is the state of each.

    Raises:
        TypeError: A value that is no transform.
    """
    return NamedChain(dict(transforms))


def zero_step(params: object) -> Tensor:
    """A counter at zero, where the parameters are."""
    leaves = tree.leaves(params)
    return torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else None)
