"""Several gradients for one update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from everybit.base import Count, Slot, tree
from everybit.combinators.chain import zero_step
from everybit.combinators.wrapping import Wrapping, gated
from everybit.protocol import ALONE, Context, SlotDecay, Transform, decays

P = TypeVar("P")


@tree.state
class AccumulateState(Generic[P]):
    """``step`` counts updates made, ``count`` the gradients since the last one (both int64, 0-d); ``gradient`` is their mean."""

    step: Tensor
    count: Tensor
    gradient: Slot[P]
    inner: Any


@dataclass(frozen=True, slots=True)
class Accumulate(Wrapping):
    r"""Accumulate gradients, and give their mean to the inner transform every ``every`` steps; in between, updates are zero.

    The mean is kept as a running one, :math:`a \leftarrow a + (g - a) / k`, which neither overflows nor loses the small gradients as a
    sum does. Whether an update is made is decided on the device: the inner update is computed each time, and kept when it counts.

    The mean is a slot, ``gradient``, which a policy stores as any other slot (``Policy.slots``). A bfloat16 mean that is rounded to
    nearest is refused for more than 32 gradients: the last of them would not move it.

    Each parameter counts its own gradients. Under a torch optimizer a parameter without a gradient is left out of a step, so that an expert
    with one gradient in four steps moves once in sixteen steps, by the mean of four gradients. Where every parameter is to move at the same
    steps let autograd add up in ``.grad``, and call ``step()`` once in ``every`` backward passes.

    Args:
        transform: The transform that the mean goes through.
        every: Gradients per update, at least 1.

    Raises:
        ValueError: ``every`` below 1.
    """

    transform: Transform[Any]
    every: Count

    def decays(self) -> tuple[SlotDecay, ...]:
        """Return the inner transform's decay rates, and that of the mean, which its last gradient changes by ``1 / every``."""
        return SlotDecay("gradient", 1 - 1 / self.every), *decays(self.transform)

    def init(self, params: P) -> AccumulateState[P]:
        """Return a state with a zero mean of gradients and the inner transform's state."""
        return AccumulateState(
            zero_step(params), zero_step(params), tree.zeros_like(params), self.transform.init(params)
        )

    def update(
        self, updates: P, state: AccumulateState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, AccumulateState[P]]:
        """The inner update of the mean, or zero."""
        count = state.count + 1
        mean = tree.map(lambda g, a: a + (g - a) / count, updates, state.gradient)
        due = count == self.every
        step = state.step + due

        def after(moves: P, inner: Any) -> tuple[P, AccumulateState[P]]:
            left = tree.where(due, tree.zeros_like(mean), mean)
            return moves, AccumulateState(step, count * ~due, left, inner)

        return gated(due, self.transform, mean, state.inner, params, ctx.counted(state.step + 1), after)


accumulate = Accumulate
