"""Metrics of a step, which show whether a policy loses updates."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import tree, without_gaps
from everybit.protocol import Context, Cut, Sum, then
from everybit.stepping.optimizer import Optimizer, OptimizerState, StepTrace

P = TypeVar("P")
S = TypeVar("S")


@tree.state
class Metrics:
    """The effect of one step's updates on stored weights: sums, 0-d float64, so that those of several buffers or shards can be added.

    Attributes:
        lost: Number of elements with an update above zero in magnitude that changed neither parameter nor compensation.
        moved: Number of elements with an update other than zero.
        effective: Inner product of the parameters' change and the intended update.
        intended: Sum of squares of the updates.
        gradient: Sum of squares of the gradients.
    """

    lost: Tensor
    moved: Tensor
    effective: Tensor
    intended: Tensor
    gradient: Tensor

    @property
    def lost_share(self) -> Tensor:
        """Share of the non-zero updates that had no effect, in [0, 1]; 0 if no update was to change anything.

        Under stochastic rounding most small updates have no effect in a given step, and the right effect on average: see :attr:`edq`.
        """
        return torch.where(self.moved > 0, self.lost / self.moved, 0.0)

    @property
    def edq(self) -> Tensor:
        r"""Effective descent quality: the share of the intended update that reached the weights, 1 if all of it did.

        :math:`\langle \Delta p, u \rangle / \lVert u \rVert^2` with compensation counted in; Collage's EDQ (Yu et al. 2024,
        https://arxiv.org/abs/2405.03637) over the norm of the update. 1 if all updates are zero.
        """
        return torch.where(self.intended > 0, self.effective / self.intended, 1.0)

    @property
    def update_norm(self) -> Tensor:
        """Euclidean norm of the intended update."""
        return self.intended.sqrt()

    @property
    def gradient_norm(self) -> Tensor:
        """Euclidean norm of the gradient."""
        return self.gradient.sqrt()

    def asdict(self) -> dict[str, float]:
        """Return everything as Python numbers by name, for a logger.

        Keys are ``lost_share``, ``edq``, ``update_norm``, ``gradient_norm``, ``lost`` and ``moved``. The host waits for the device, once.

        Examples:
            >>> import everybit as eb
            >>> eb.Metrics.zero().asdict()
            {'lost_share': 0.0, 'edq': 1.0, 'update_norm': 0.0, 'gradient_norm': 0.0, 'lost': 0.0, 'moved': 0.0}
        """
        values = {
            "lost_share": self.lost_share,
            "edq": self.edq,
            "update_norm": self.update_norm,
            "gradient_norm": self.gradient_norm,
            "lost": self.lost,
            "moved": self.moved,
        }
        return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))

    def __add__(self, other: Metrics) -> Metrics:
        """Return the metrics of both together."""
        return Metrics(
            self.lost + other.lost,
            self.moved + other.moved,
            self.effective + other.effective,
            self.intended + other.intended,
            self.gradient + other.gradient,
        )

    @staticmethod
    def zero(device: torch.device | None = None) -> Metrics:
        """Return the metrics of no elements: all sums are zero."""
        return Metrics(*(torch.zeros((), dtype=torch.float64, device=device) for _ in range(5)))


@tree.state
class MeasuredState(Generic[S]):
    """The optimizer's state, and the metrics of the step that made it."""

    optimizer: OptimizerState[S]
    metrics: Metrics

    @property
    def step(self) -> Tensor:
        """The number of calls of ``step`` so far; int64, 0-d."""
        return self.optimizer.step


@dataclass(frozen=True, slots=True)
class Measured(Generic[S]):
    """An optimizer that measures each of its steps; made by :func:`with_metrics`."""

    optimizer: Optimizer[S]

    @property
    def cut(self) -> Cut:
        """How finely parameters may be cut: as the optimizer's, since sums over elements can be added up afterwards."""
        return self.optimizer.cut

    def init(self, params: P, ctx: Context | None = None) -> MeasuredState[S]:
        """Return the optimizer's initial state, and metrics of zero."""
        leaves = tree.leaves(params)
        return MeasuredState(self.optimizer.init(params, ctx), Metrics.zero(leaves[0].device if leaves else None))

    def step(
        self, params: P, grads: P, state: MeasuredState[S], ctx: Context | None = None
    ) -> tuple[P, MeasuredState[S]]:
        """Step as the optimizer does, bit for bit; ``state.metrics`` has the metrics of this step."""
        ctx = ctx or Context()

        def measured(trace: StepTrace) -> tuple[P, MeasuredState[S]]:
            here = measure(self.optimizer, trace, ctx)
            return ctx.request(
                Sum(torch.stack(dataclasses.astuple(here))),
                lambda sums: (trace.params, MeasuredState(trace.state, Metrics(*sums.unbind()))),
            )

        return then(self.optimizer.step_traced(params, grads, state.optimizer, ctx), measured)

    def export_fp32(self, params: P, state: MeasuredState[S]) -> P:
        """Return the weights in float32, as the optimizer's ``export_fp32`` does."""
        return self.optimizer.export_fp32(params, state.optimizer)

    def import_fp32(self, weights: P, params: P, state: MeasuredState[S] | None = None) -> tuple[P, MeasuredState[S]]:
        """Store float32 weights, as the optimizer's ``import_fp32`` does; the metrics start at zero."""
        new, stored = self.optimizer.import_fp32(weights, params, None if state is None else state.optimizer)
        return new, MeasuredState(stored, Metrics.zero(stored.step.device))


def with_metrics(optimizer: Optimizer[S]) -> Measured[S]:
    """Measure each step: the share of lost updates, the effective descent quality, and norms; without host synchronization.

    Raises:
        TypeError: ``optimizer`` was not made by ``with_policy``; losses depend on how weights are stored.

    Examples:
        >>> import torch, everybit as eb
        >>> opt = eb.with_metrics(eb.with_policy(eb.sgd(1e-4), eb.policies.PURE_BF16))
        >>> params = {"w": torch.ones(4, dtype=torch.bfloat16)}
        >>> params, state = opt.step(params, {"w": torch.ones(4)}, opt.init(params))
        >>> float(state.metrics.lost_share), float(state.metrics.edq)
        (1.0, 0.0)
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"with_metrics: got {optimizer!r}; accepted is what with_policy(...) returns.")
    return Measured(optimizer)


def measure(optimizer: Optimizer[Any], trace: StepTrace, ctx: Context | None = None) -> Metrics:
    """The metrics of the elements of a step that ``ctx`` says are this process's."""
    ctx = ctx or Context()
    reached = tree.leaves(optimizer.export_fp32(trace.params, trace.state))
    total = Metrics.zero(trace.state.step.device)
    counted = (
        ctx.owned(without_gaps(ctx.first_element, values)) for values in (trace.before, trace.updates, trace.grads)
    )
    before, updates, grads = counted
    for x, y, u, g in zip(tree.leaves(before), reached, tree.leaves(updates), tree.leaves(grads), strict=True):
        moving = u != 0
        total = total + Metrics(
            (moving & (x == y)).sum().double(),
            moving.sum().double(),
            ((y - x).double() * u.double()).sum(),
            u.double().square().sum(),
            g.double().square().sum(),
        )
    return total
