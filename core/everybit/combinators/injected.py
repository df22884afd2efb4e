"""Hyperparameters that are part of the state, to be changed while a run goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from everybit.base import tree
from everybit.combinators.wrapping import Wrapping
from everybit.protocol import (
    ALONE,
    Context,
    SlotDecay,
    Transform,
    accepting,
    decays,
    enter,
    eval_params,
    hyperparameters,
    map_hyperparameters,
    require_transform,
)

P = TypeVar("P")


@tree.state
class InjectedState:
    """The hyperparameters by name, float64 and 0-d, and the inner transform's state."""

    hyperparameters: dict[str, Tensor]
    inner: Any


@dataclass(frozen=True, slots=True)
class Injected(Wrapping):
    """A transform with hyperparameters that are read from the state; made by :func:`inject_hyperparameters`."""

    transform: Transform[Any]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        require_transform(self.transform, who="inject_hyperparameters")
        known = list(dict.fromkeys(name for name, _ in hyperparameters(self.transform)))
        missing = [name for name in self.names if name not in known]
        if missing or not self.names:
            raise ValueError(
                f"names: got {', '.join(map(repr, missing)) or 'none'}; accepted are hyperparameters of the transform that are numbers or"
                f" tensors: {', '.join(known)}."
            )

    def decays(self) -> tuple[SlotDecay, ...]:
        """Return the inner transform's decay rates. A rate in the state may have any value, and is declared as a tensor."""
        return decays(self._with({name: torch.empty((), dtype=torch.float64, device="meta") for name in self.names}))

    def eval_params(self, params: P, state: InjectedState) -> P:
        """Return the inner transform's weights for evaluation."""
        return eval_params(self._with(state.hyperparameters), params, state.inner)

    def init(self, params: P) -> InjectedState:
        """Return the hyperparameters as they were given, and the inner transform's state."""
        leaves = tree.leaves(params)
        device = leaves[0].device if leaves else None
        given: dict[str, Tensor] = {}
        for name, value in hyperparameters(self.transform):
            if name in self.names and name not in given:
                given[name] = torch.as_tensor(value, dtype=torch.float64, device=device).clone()
        return InjectedState(given, self.transform.init(params))

    def update(self, updates: P, state: InjectedState, params: P, ctx: Context = ALONE) -> tuple[P, InjectedState]:
        """The inner update with the state's hyperparameters, which it hands on."""
        kept = {name: value.clone() for name, value in state.hyperparameters.items()}
        return enter(
            self._with(kept),
            updates,
            state.inner,
            params,
            ctx,
            lambda moves, inner: (moves, InjectedState(kept, inner)),
        )

    def _with(self, values: dict[str, Tensor]) -> Transform[Any]:
        return map_hyperparameters(lambda name, value: values.get(name, value), self.transform)


def inject_hyperparameters(transform: Transform[Any], *names: str) -> Injected:
    """Keep hyperparameters of a transform in its state, where they can be changed between steps, saved, batched and differentiated.

    ``eb.tree.set(state, "learning_rate", 1e-4)`` returns a state with another value, and compiled code is not compiled again.

    Args:
        transform: Its hyperparameters of these names are numbers or tensors. Of several by one name, in a chain, all take the value of the
            first.
        *names: Such as ``"learning_rate"``.

    Raises:
        TypeError: ``transform`` is not a transform.
        ValueError: A name that the transform does not have.

    Examples:
        >>> import torch, everybit as eb
        >>> opt = eb.with_policy(eb.inject_hyperparameters(eb.sgd(0.1), "learning_rate"), eb.policies.FP32)
        >>> params, state = torch.ones(1), opt.init(torch.ones(1))
        >>> params, _ = opt.step(params, torch.ones(1), eb.tree.set(state, "learning_rate", 0.5))
        >>> params
        tensor([0.5000])
    """
    # A compiled step calls it, and it reads annotations behind a cache, which a compiler need not trace.
    torch.compiler.assume_constant_result(accepting)  # type: ignore[no-untyped-call]
    return Injected(transform, names)
