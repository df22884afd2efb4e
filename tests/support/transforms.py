"""Example transforms that use what a context offers: reductions per tensor, random draws, periodic work, weights for evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

import everybit as eb
from everybit.base import at, sqrt, uniform
from everybit.base import mean as mean_along
from everybit.protocol import ALONE

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class ScaleByTrustRatio:
    """Scale each parameter's update to the parameter's norm, as LAMB does (You et al. 2020, https://arxiv.org/abs/1904.00962)."""

    cut: ClassVar[eb.Cut] = "element"
    reduces: ClassVar[bool] = True
    per_tensor: ClassVar[bool] = True

    def init(self, params: P) -> Any:
        return eb.identity().init(params)

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        def ratio(weight: Tensor, move: Tensor) -> Tensor:
            return torch.where((weight > 0) & (move > 0), weight / move, 1.0)

        def scaled(weights: P, moves: P) -> tuple[P, Any]:
            ratios = ctx.per_tensor.expand(eb.tree.map(ratio, weights, moves), updates)
            return eb.tree.elementwise(lambda u, r: u * r, updates, ratios), state

        def of_weights(weights: P) -> tuple[P, Any]:
            return ctx.request(ctx.per_tensor.norm(updates), lambda moves: scaled(weights, moves))

        return ctx.request(ctx.per_tensor.norm(params), of_weights)


@dataclass(frozen=True, slots=True)
class ClipByRms:
    """Divide each parameter's update by its root mean square over a limit, where that is above 1, as Adafactor does.

    Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235, section 6.
    """

    cut: ClassVar[eb.Cut] = "element"
    reduces: ClassVar[bool] = True
    per_tensor: ClassVar[bool] = True
    limit: eb.Hyperparameter = 1.0

    def init(self, params: P) -> Any:
        return eb.identity().init(params)

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        limit = at(self.limit, ctx.step, name="limit")

        def factor(square: Tensor) -> Tensor:
            # No root of zero, which has no derivative.
            above = square > limit * limit
            return torch.where(above, torch.where(above, square, 1.0).sqrt() / limit, 1.0)

        def divided(squares: P) -> tuple[P, Any]:
            factors = ctx.per_tensor.expand(eb.tree.map(factor, squares), updates)
            return eb.tree.elementwise(lambda u, f: u / f, updates, factors), state

        return ctx.request(ctx.per_tensor.mean_of_squares(updates), divided)


@dataclass(frozen=True, slots=True)
class CenterGradients:
    """Subtract from each parameter's update its mean over all elements."""

    cut: ClassVar[eb.Cut] = "element"
    reduces: ClassVar[bool] = True
    per_tensor: ClassVar[bool] = True

    def init(self, params: P) -> Any:
        return eb.identity().init(params)

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        def centered(means: P) -> tuple[P, Any]:
            expanded = ctx.per_tensor.expand(means, updates)
            return eb.tree.elementwise(lambda u, m: u - m, updates, expanded), state

        return ctx.request(ctx.per_tensor.mean(updates), centered)


@dataclass(frozen=True, slots=True)
class AddNoise:
    """Add uniform noise of a standard deviation that falls with the step, as in Neelakantan et al. 2015 (https://arxiv.org/abs/1511.06807)."""

    cut: ClassVar[eb.Cut] = "element"
    reduces: ClassVar[bool] = False
    draws: ClassVar[bool] = True
    scale: eb.Hyperparameter = 0.1

    def init(self, params: P) -> Any:
        return eb.identity().init(params)

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        scale = at(self.scale, ctx.step, name="scale")

        def noisy(u: Tensor, key: eb.Key) -> Tensor:
            # Products by powers of two, and one rounding, so that no compiler can fuse them into other bits.
            noise = (uniform(key.bits(u)) - 0.5) * 4.0
            return u + scale * noise

        return eb.tree.elementwise(noisy, updates, ctx.keys("noise", updates)), state


@eb.state
class AverageState(Generic[P]):
    """``average`` of the weights; ``step`` is counted by who is around it."""

    average: eb.Slot[P]


@dataclass(frozen=True, slots=True)
class AverageWeights:
    """Keep a running mean of the weights, which is what is evaluated; the last of a chain."""

    cut: ClassVar[eb.Cut] = "element"
    reduces: ClassVar[bool] = False
    decay: eb.Hyperparameter = 0.9

    def decays(self) -> tuple[eb.SlotDecay, ...]:
        return (eb.SlotDecay("average", self.decay),)

    def init(self, params: P) -> AverageState[P]:
        return AverageState(eb.tree.map(torch.clone, params))

    def update(
        self, updates: P, state: AverageState[Any], params: P, ctx: eb.Context = ALONE
    ) -> tuple[P, AverageState[P]]:
        decay = at(self.decay, ctx.step, name="decay")
        average = eb.tree.elementwise(lambda a, p, u: decay * a + (1 - decay) * (p + u), state.average, params, updates)
        return updates, AverageState(average)

    def eval_params(self, params: P, state: AverageState[P]) -> P:
        return state.average


@eb.state
class ScaleState(Generic[P]):
    """``size``: magnitudes of a gradient of some steps ago."""

    size: eb.Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByOldMagnitudes:
    """Divide by the magnitudes of the gradients, which are looked at every few steps only."""

    cut: ClassVar[eb.Cut] = "element"
    reduces: ClassVar[bool] = False
    period: int = 3

    def decays(self) -> tuple[eb.SlotDecay, ...]:
        return (eb.SlotDecay("size", 0.0),)

    def periods(self) -> tuple[int, ...]:
        return (self.period,)

    def init(self, params: P) -> ScaleState[P]:
        return ScaleState(eb.tree.zeros_like(params))

    def update(self, updates: P, state: ScaleState[Any], params: P, ctx: eb.Context = ALONE) -> tuple[P, ScaleState[P]]:
        size = ctx.every(self.period, lambda: self.magnitudes(updates), lambda: state.size)
        return eb.tree.elementwise(lambda u, s: u / (s + 1), updates, size), ScaleState(size)

    def magnitudes(self, updates: P) -> P:
        """The work."""
        return eb.tree.map(torch.abs, updates)


WORK: list[int] = []
"""Of each run of periodic work that is counted, the elements that it was given, in order."""


@dataclass(frozen=True, slots=True)
class CountedWork(ScaleByOldMagnitudes):
    """As :class:`ScaleByOldMagnitudes`; each run of its work is noted in :data:`WORK`, where it is not compiled."""

    def magnitudes(self, updates: P) -> P:
        if not torch.compiler.is_compiling():
            WORK.extend(x.numel() for x in eb.tree.leaves(updates))
        return ScaleByOldMagnitudes.magnitudes(self, updates)


@eb.state
class OldNormState:
    """``norm`` of all updates, of some steps ago: 0-d, float64, the same for all parameters that are stepped equally often."""

    norm: Tensor


@dataclass(frozen=True, slots=True)
class ScaleByOldNorm:
    """Divide by one more than the norm of all updates, which is asked for every few steps only, in the work itself."""

    cut: ClassVar[eb.Cut] = "element"
    reduces: ClassVar[bool] = True
    period: int = 3

    def periods(self) -> tuple[int, ...]:
        return (self.period,)

    def init(self, params: P) -> OldNormState:
        leaves = eb.tree.leaves(params)
        return OldNormState(torch.zeros((), dtype=torch.float64, device=leaves[0].device if leaves else None))

    def update(self, updates: P, state: OldNormState, params: P, ctx: eb.Context = ALONE) -> tuple[P, OldNormState]:
        def work() -> Tensor:
            if not torch.compiler.is_compiling():
                WORK.extend(x.numel() for x in eb.tree.leaves(updates))
            return ctx.request(eb.SumOfSquares(updates), torch.sqrt)

        def divided(norm: Tensor) -> tuple[P, OldNormState]:
            return eb.tree.elementwise(lambda u: u / (norm + 1).to(u.dtype), updates), OldNormState(norm)

        return eb.then(ctx.every(self.period, work, lambda: state.norm), divided)


@eb.state
class FactoredState(Generic[P]):
    """``variance``: of a matrix the means of the squares of its rows and columns, of anything else those of its elements."""

    variance: eb.Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByFactoredRms:
    """Divide matrices by the root of a product of row and column means of squares, as Adafactor does."""

    cut: ClassVar[eb.Cut] = "tensor"
    reduces: ClassVar[bool] = False
    decay: eb.Hyperparameter = 0.9

    def decays(self) -> tuple[eb.SlotDecay, ...]:
        return (eb.SlotDecay("variance", self.decay, squares=True),)

    def init(self, params: P) -> FactoredState[P]:
        def start(p: Tensor) -> Any:
            if p.ndim < 2 or not p.numel():
                return torch.zeros_like(p)
            return {"rows": p.new_zeros(p.shape[:-1]), "columns": p.new_zeros(p.shape[:-2] + p.shape[-1:])}

        return FactoredState(eb.tree.map(start, params))

    def update(
        self, updates: P, state: FactoredState[Any], params: P, ctx: eb.Context = ALONE
    ) -> tuple[P, FactoredState[P]]:
        decay = at(self.decay, ctx.step, name="decay")

        def mean(g: Tensor, v: Any) -> Any:
            square = g * g + 1e-12
            if isinstance(v, dict):
                rows, columns = mean_along(square, -1), mean_along(square, -2)
                return {
                    "rows": decay * v["rows"] + (1 - decay) * rows,
                    "columns": decay * v["columns"] + (1 - decay) * columns,
                }
            return (decay * v.reshape(-1) + (1 - decay) * square.reshape(-1)).reshape(v.shape)

        def scaled(g: Tensor, v: Any) -> Tensor:
            if isinstance(v, dict):
                rows, columns = v["rows"], v["columns"]
                v = rows[..., None] * columns[..., None, :] / mean_along(rows, -1)[..., None, None]
            return g / sqrt(v)

        variance = eb.tree.map(mean, updates, state.variance)
        return eb.tree.map(scaled, updates, variance), FactoredState(variance)


def factored(learning_rate: Any) -> eb.Transform[Any]:
    """State that has other shapes than its parameter."""
    return eb.chain(ScaleByFactoredRms(), eb.trace(0.9), eb.scale_by_learning_rate(learning_rate))


def lamb(learning_rate: Any, b2: Any = 0.95) -> eb.Transform[Any]:
    """Adam's direction with trust ratios and weight decay."""
    return eb.chain(
        eb.scale_by_adam(b2=b2),
        eb.add_decayed_weights(0.1),
        ScaleByTrustRatio(),
        eb.scale_by_learning_rate(learning_rate),
    )


def rms_clipped(learning_rate: Any, limit: Any = 0.5) -> eb.Transform[Any]:
    """Gradients centred, Adam's direction clipped by its root mean square, and all of it by the global norm."""
    return eb.chain(
        eb.clip_by_global_norm(1.0),
        CenterGradients(),
        eb.scale_by_adam(b2=0.95, eps_root=1e-12),
        ClipByRms(limit),
        eb.trace(0.9),
        eb.scale_by_learning_rate(learning_rate),
    )


def noisy(learning_rate: Any) -> eb.Transform[Any]:
    """Two sources of noise, which have to be independent."""
    return eb.chain(AddNoise(0.5), AddNoise(0.25), eb.trace(0.9), eb.scale_by_learning_rate(learning_rate))


def averaged(learning_rate: Any) -> eb.Transform[Any]:
    """Momentum, and a running mean of the weights to be evaluated."""
    return eb.chain(eb.trace(0.9), eb.scale_by_learning_rate(learning_rate), AverageWeights())


def periodic(learning_rate: Any) -> eb.Transform[Any]:
    """Work at the steps 1, 4, 7."""
    return eb.chain(ScaleByOldMagnitudes(3), eb.trace(0.9), eb.scale_by_learning_rate(learning_rate))


def counted(learning_rate: Any, period: int = 3, momentum: float = 0.9) -> eb.Transform[Any]:
    """Work at the steps 1, 4, 7, each run of which is noted; without momentum in fewer slots."""
    rest = [eb.trace(momentum)] if momentum else []
    return eb.chain(CountedWork(period), *rest, eb.scale_by_learning_rate(learning_rate))


def counted_and_clipped(learning_rate: Any, period: int = 3) -> eb.Transform[Any]:
    """Reductions at every step, before and after the work, which asks for none."""
    return eb.chain(
        eb.clip_by_global_norm(2.0),
        CountedWork(period),
        eb.clip_by_global_norm(0.5),
        eb.scale_by_learning_rate(learning_rate),
    )


def old_norm(learning_rate: Any, period: int = 3) -> eb.Transform[Any]:
    """A reduction in the work, and one after it at every step."""
    return eb.chain(ScaleByOldNorm(period), eb.clip_by_global_norm(0.5), eb.scale_by_learning_rate(learning_rate))


def masked_noise(learning_rate: Any) -> eb.Transform[Any]:
    """Trust ratios and noise for some of the parameters only."""
    return eb.chain(
        eb.masked(eb.chain(AddNoise(0.5), ScaleByTrustRatio()), where=lambda _path, p: p.ndim > 1),
        eb.trace(0.9),
        eb.scale_by_learning_rate(learning_rate),
    )


EXAMPLES = {
    "lamb": lamb,
    "rms clipped": rms_clipped,
    "noisy": noisy,
    "averaged": averaged,
    "periodic": periodic,
    "masked noise": masked_noise,
    "factored": factored,
}
"""Builders of the examples, by name, as the battery takes them."""
