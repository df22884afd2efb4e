"""Second moments of matrices in factors, means of rows and columns: Adafactor and CAME."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import (
    AtLeastOne,
    AtMostZero,
    Count,
    NonNegative,
    Rate,
    Scalar,
    Share,
    Slot,
    UpdatesFromZero,
    at,
    materialize,
    mean,
    require_step,
    sqrt,
    sum_of_squares,
    tree,
)
from everybit.linalg import Which, factored_dimensions, factored_moments
from everybit.linalg.factored_moments import moved, zeros
from everybit.protocol import ALONE, Context, SlotDecay, WholeTensors
from everybit.transforms.updates import Empty, Memoryless

P = TypeVar("P")


@tree.state
class FactoredRmsState(Generic[P]):
    """``variance``: of a matrix the means of the squares of its rows and of its columns, of anything else the squares of its elements."""

    variance: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByFactoredRms(WholeTensors):
    r"""Divide by the root of a running square that is kept for rows and columns, and limit the root mean square of the result.

    .. math::
        s_t = \max(1 - \beta_\text{cap}, t^c) \qquad
        r_t = r_{t-1} + s_t (\operatorname{mean}_\text{row} (G^2 + \epsilon_1) - r_{t-1}) \qquad
        c_t = c_{t-1} + s_t (\operatorname{mean}_\text{column} (G^2 + \epsilon_1) - c_{t-1})
    .. math::
        V_t = \frac{r_t c_t^\top}{\operatorname{mean} r_t} \qquad
        U_t = \frac{G_t}{\sqrt{V_t}} \qquad
        u_t = \frac{U_t}{\max(1, \operatorname{rms}(U_t) / d)}

    for each matrix G in a tensor of two dimensions or more. Of anything else V is the running mean of the squares themselves.

    Args:
        beta2_decay: :math:`c`, at most zero: :math:`t^c` is the share of the newest squares.
        b2_cap: :math:`\beta_\text{cap}`, in [0, 1]: the greatest decay rate. 1: no limit.
        eps1: :math:`\epsilon_1`, added to the squares; unit of the gradient squared.
        clip_threshold: :math:`d`, above zero; None: no limit.
        dimensions: ``"last"``: factor over the last two dimensions, as the paper; ``"largest"``: over the two largest, as optax and timm.
        min_size_to_factor: Factor a tensor only if both of these dimensions are at least so long.
        step_offset: Updates to leave out of t, which is at least 1: those of an earlier run with a count that goes on.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Shazeer & Stern 2018, https://arxiv.org/abs/1804.04235, Algorithms 4 to 6; the cap is of Zhai et al. 2021,
        https://arxiv.org/abs/2106.04560.
    """

    reads_weights = False
    _: KW_ONLY
    beta2_decay: AtMostZero = -0.8
    b2_cap: Share = 1.0
    eps1: NonNegative = 1e-30
    clip_threshold: NonNegative | None = 1.0
    dimensions: Which = "last"
    min_size_to_factor: Count = 1
    step_offset: UpdatesFromZero = 0

    def decays(self) -> tuple[SlotDecay, ...]:
        """Declare that ``variance`` moves more slowly the longer it is kept, down to ``b2_cap``."""
        return (SlotDecay("variance", self.b2_cap, squares=True),)

    def init(self, params: P) -> FactoredRmsState[P]:
        """Return means of zero for all parameters."""
        return FactoredRmsState(tree.map(lambda p: factored_moments.zeros(p, self._factored(p)), params))

    def update(
        self, updates: P, state: FactoredRmsState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, FactoredRmsState[P]]:
        """Update the means of squares, divide by their roots, and clip."""
        step = require_step(ctx.step, "scale_by_factored_rms")
        eps1 = at(self.eps1, step, name="eps1")
        limit = None if self.clip_threshold is None else at(self.clip_threshold, step, name="clip_threshold")
        number = (step - self.step_offset).clamp(min=1).double()
        # A power of two tensors: torch has roots of its own for powers by some numbers.
        share = number ** (torch.zeros_like(number) + at(self.beta2_decay, step, name="beta2_decay"))
        least = torch.zeros_like(number) + (1 - at(self.b2_cap, step, name="b2_cap"))
        share = materialize(torch.maximum(share, least))

        def means(g: Tensor, v: Any) -> Any:
            return factored_moments.moved(v, factored_moments.raised(g * g, eps1), share, self._factored(g))

        def direction(g: Tensor, v: Any) -> Tensor:
            u = factored_moments.over_root(g, v, self._factored(g))
            return u if limit is None else factored_moments.clipped_by_rms(u, limit)

        variance = tree.map(means, updates, state.variance)
        return tree.map(direction, updates, variance), FactoredRmsState(variance)

    def _factored(self, p: Tensor) -> tuple[int, int] | None:
        return factored_dimensions(p, self.dimensions, self.min_size_to_factor)


class _OfWholeTensors(Memoryless, WholeTensors):
    """A transform without state that uses the root mean square of parameters, each of which is whole."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ScaleByParameterRms(_OfWholeTensors):
    r"""Multiply each parameter's update by the root mean square of the parameter.

    .. math::
        u \leftarrow \max(\epsilon_2, \operatorname{rms}\, p) \, u

    Args:
        eps2: :math:`\epsilon_2`, at least zero: the least root mean square, so that parameters of zeros can be trained.

    Raises:
        ValueError: ``eps2`` out of range.

    Reference:
        Shazeer & Stern 2018, https://arxiv.org/abs/1804.04235, section 8; optax's ``scale_by_param_block_rms``.
    """

    eps2: NonNegative = 1e-3

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the scaled updates."""
        eps2 = at(self.eps2, ctx.step, name="eps2")

        def scaled(u: Tensor, p: Tensor) -> Tensor:
            # Vectors: a tensor without dimensions would take the dtype of the size.
            return (u.reshape(-1) * _size(p, eps2)).reshape(u.shape)

        return tree.map(scaled, updates, params), state


@dataclass(frozen=True, slots=True)
class SubtractRelativeDecay(_OfWholeTensors):
    r"""Subtract :math:`\lambda \eta \max(\epsilon_2, \operatorname{rms}\, p) \, p` from the updates, after the learning rate is applied.

    It is what ``add_decayed_weights`` before :func:`everybit.scale_by_parameter_rms` does, where something between the two must not see
    the decay, such as a mean of steps.

    Args:
        weight_decay: :math:`\lambda`, at least zero.
        learning_rate: :math:`\eta`, that of the chain.
        eps2: :math:`\epsilon_2`, at least zero.

    Raises:
        ValueError: A hyperparameter out of range.
    """

    weight_decay: NonNegative
    learning_rate: NonNegative
    eps2: NonNegative = 1e-3

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """``updates - weight_decay * learning_rate * max(eps2, rms(params)) * params``."""
        eps2 = at(self.eps2, ctx.step, name="eps2")
        rate = at(self.weight_decay, ctx.step, name="weight_decay") * at(
            self.learning_rate, ctx.step, name="learning_rate"
        )

        def decayed(u: Tensor, p: Tensor) -> Tensor:
            factor = materialize(rate * _size(p, eps2))
            # Zero times an infinite weight would be NaN.
            return torch.where(factor == 0, u.reshape(-1), u.reshape(-1) - factor * p.reshape(-1)).reshape(u.shape)

        return tree.map(decayed, updates, params), state


def _size(p: Tensor, least: Scalar) -> Tensor:
    """The root mean square of a whole tensor, but at least ``least``: 0-d, float64; ``least`` of a tensor without elements."""
    square = sum_of_squares(p) / max(p.numel(), 1)
    above = square > least * least
    return materialize(torch.where(above, sqrt(torch.where(above, square, 1.0)), least + torch.zeros_like(square)))


scale_by_factored_rms = ScaleByFactoredRms
scale_by_parameter_rms = ScaleByParameterRms
subtract_relative_decay = SubtractRelativeDecay


@tree.state
class TorchAdafactorState(Generic[P]):
    """``variance``: of a matrix the means of the squares of its rows and of its columns, of anything else the squares of its elements."""

    variance: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByTorchAdafactor(WholeTensors):
    r"""Adafactor in the flavour of ``torch.optim.Adafactor``, learning rate and weight decay included.

    Of a tensor of two dimensions or more, over the last two of which it is factored, for each matrix :math:`G` with weights :math:`p`:

    .. math::
        r_t = r_{t-1} + t^{c} (\operatorname{mean}_\text{row} G^2 - r_{t-1}) \qquad
        c_t = c_{t-1} + t^{c} (\operatorname{mean}_\text{column} G^2 - c_{t-1}) \qquad
        V_t = \frac{r_t c_t^\top}{\max(\operatorname{mean} r_t, \epsilon_1)}
    .. math::
        U_t = \frac{G_t}{\sqrt{\max(V_t, \epsilon_1^2)}} \qquad
        u_t = -\frac{\max(\epsilon_2, \operatorname{rms}\, p) \min(\gamma, 1/\sqrt t)}{\max(1, \operatorname{rms}(U_t) / d)} \, U_t
            - \gamma \lambda p

    Of a vector :math:`V_t` is the running mean of the squares themselves. The updates are those of the parameters, so that no learning rate
    comes after it. The paper adds :math:`\epsilon_1` to the squares before means are taken; torch takes maxima after it.

    Args:
        learning_rate: :math:`\gamma`, at least zero: the limit of the relative step.
        beta2_decay: :math:`c`, at most zero: :math:`t^c` is the share of the newest squares.
        eps1: :math:`\epsilon_1`, at least zero; None: the spacing of the compute dtype at 1, which is torch's default for a float32 or
            float64 model. torch takes that of the model's dtype.
        eps2: :math:`\epsilon_2`, at least zero: the least root mean square of weights that a step is relative to.
        d: The root mean square above which an update is scaled down; at least 1.
        weight_decay: :math:`\lambda`, at least zero.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Shazeer & Stern 2018, https://arxiv.org/abs/1804.04235, as in ``torch.optim.Adafactor``.
    """

    learning_rate: NonNegative = 1e-2
    beta2_decay: AtMostZero = -0.8
    eps1: NonNegative | None = None
    eps2: NonNegative = 1e-3
    d: AtLeastOne = 1.0
    weight_decay: NonNegative = 0.0

    def decays(self) -> tuple[SlotDecay, ...]:
        """Declare that ``variance`` moves more slowly the longer it is kept."""
        return (SlotDecay("variance", 1.0, squares=True),)

    def init(self, params: P) -> TorchAdafactorState[P]:
        """Return means of zero for all parameters."""
        return TorchAdafactorState(tree.map(lambda p: zeros(p, factored_dimensions(p)), params))

    def update(
        self, updates: P, state: TorchAdafactorState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, TorchAdafactorState[P]]:
        """Update the means of squares, divide by their roots, and scale to the weights."""
        step = require_step(ctx.step, "scale_by_torch_adafactor")
        rate, decay = self.at(step, "learning_rate", "weight_decay")
        eps1 = None if self.eps1 is None else at(self.eps1, step, name="eps1")
        eps2, limit = self.at(step, "eps2", "d")
        number = step.double()
        # A power of two tensors: torch has roots of its own for powers by some numbers.
        share = materialize(number ** (torch.zeros_like(number) + at(self.beta2_decay, step, name="beta2_decay")))
        longest = 1 / sqrt(number)
        relative = torch.where(longest > rate, rate, longest)

        def means(g: Tensor, v: Any) -> Any:
            return moved(v, g * g, share, factored_dimensions(g))

        def descent(g: Tensor, v: Any, p: Tensor) -> Tensor:
            least = torch.finfo(g.dtype).eps if eps1 is None else eps1
            if isinstance(v, dict):
                v = v["rows"] * v["columns"] / at_least(least, mean(v["rows"], -2).unsqueeze(-2))
            direction = g.reshape(-1) / sqrt(at_least(least * least, v.reshape(-1)))
            size = at_least(eps2, rms(p)) * relative / at_least(1.0, rms(direction) / limit)
            size = materialize(size)
            return (-size * direction - rate * (decay * p.reshape(-1))).reshape(p.shape)

        variance = tree.map(means, updates, state.variance)
        return tree.map(descent, updates, variance, params), TorchAdafactorState(variance)


def at_least(low: Scalar, x: Tensor) -> Tensor:
    """The greater of each element and ``low``; a NaN keeps its bits, which ``clamp`` changes if its limit is a tensor."""
    return torch.where(x < low, torch.zeros_like(x) + low, x)


def rms(x: Tensor) -> Tensor:
    """The root mean square of all elements: 0-d, float64; zero of a tensor without any."""
    return sqrt(sum_of_squares(x) / max(x.numel(), 1))


scale_by_torch_adafactor = ScaleByTorchAdafactor


@tree.state
class CameState(Generic[P]):
    """The mean of directions, the squares of gradients, and those of the differences between directions and their mean.

    Of a matrix both squares are means of rows and of columns. Of anything else there are no squares of differences.
    """

    momentum: Slot[P]
    variance: Slot[P]
    instability: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByCame(WholeTensors):
    r"""Average directions of Adafactor, and divide by the root of how far they are from their average.

    .. math::
        V_t = \beta_2 V_{t-1} + (1-\beta_2) (G_t^2 + \epsilon_1) \qquad
        U_t = \frac{G_t}{\sqrt{V_t}} \qquad
        \hat U_t = \frac{U_t}{\max(1, \operatorname{rms}(U_t) / d)}
    .. math::
        m_t = \beta_1 m_{t-1} + (1-\beta_1) \hat U_t \qquad
        S_t = \beta_3 S_{t-1} + (1-\beta_3) ((\hat U_t - m_t)^2 + \epsilon_2) \qquad
        u_t = \frac{m_t}{\sqrt{S_t}}

    for each matrix in a tensor of two dimensions or more, where V and S are kept and used as means of rows and columns; see
    :class:`everybit.scale_by_factored_rms`. There is no bias correction. Of anything else V is whole and :math:`u_t = m_t`.

    Args:
        b1: Decay rate of the mean of directions, in [0, 1).
        b2: Decay rate of the squares, in [0, 1).
        b3: Decay rate of the instability, in [0, 1).
        eps1: :math:`\epsilon_1`, added to the squares; unit of the gradient squared.
        eps2: :math:`\epsilon_2`, added to the squared differences.
        clip_threshold: :math:`d`, above zero: the root mean square to which a direction is limited.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Luo et al. 2023, https://arxiv.org/abs/2307.02047, Algorithm 2.
    """

    reads_weights = False
    b1: Rate = 0.9
    b2: Rate = 0.999
    b3: Rate = 0.9999
    eps1: NonNegative = 1e-30
    eps2: NonNegative = 1e-16
    clip_threshold: NonNegative = 1.0

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` decays with ``b1``, ``variance`` with ``b2``, ``instability`` with ``b3``."""
        return (
            SlotDecay("momentum", self.b1),
            SlotDecay("variance", self.b2, squares=True),
            SlotDecay("instability", self.b3, squares=True),
        )

    def init(self, params: P) -> CameState[P]:
        """Return means of zero for all parameters."""
        variance = tree.map(lambda p: factored_moments.zeros(p, factored_dimensions(p)), params)
        instability = tree.map(_factors_only, params)
        return CameState(tree.zeros_like(params), variance, instability)

    def update(self, updates: P, state: CameState[Any], params: P, ctx: Context = ALONE) -> tuple[P, CameState[P]]:
        """Update all means, and weigh the mean of directions."""
        b1, b2, b3 = (at(getattr(self, name), ctx.step, name=name) for name in ("b1", "b2", "b3"))
        eps1, eps2, limit = self.at(ctx.step, "eps1", "eps2", "clip_threshold")

        def square(g: Tensor, v: Any) -> Any:
            return factored_moments.moved(v, factored_moments.raised(g * g, eps1), 1 - b2, factored_dimensions(g))

        def direction(g: Tensor, v: Any) -> Tensor:
            return factored_moments.clipped_by_rms(factored_moments.over_root(g, v, factored_dimensions(g)), limit)

        def apart(u: Tensor, m: Tensor, s: Any) -> Any:
            dimensions = factored_dimensions(u)
            if dimensions is None:
                return {name: x.clone() for name, x in s.items()}
            return factored_moments.moved(s, factored_moments.raised((u - m) * (u - m), eps2), 1 - b3, dimensions)

        def trusted(m: Tensor, s: Any) -> Tensor:
            dimensions = factored_dimensions(m)
            return m.clone() if dimensions is None else factored_moments.over_root(m, s, dimensions)

        variance = tree.map(square, updates, state.variance)
        directions = tree.map(direction, updates, variance)
        momentum = tree.elementwise(lambda u, m: b1 * m + (1 - b1) * u, directions, state.momentum)
        instability = tree.map(apart, directions, momentum, state.instability)
        return tree.map(trusted, momentum, instability), CameState(momentum, variance, instability)


def _factors_only(p: Tensor) -> Any:
    """Zeros of the shapes of rows and columns, without elements for a parameter that is not factored."""
    dimensions = factored_dimensions(p)
    if dimensions is not None:
        return factored_moments.zeros(p, dimensions)
    return {name: torch.zeros_like(p.reshape(-1)[:0]) for name in ("rows", "columns")}


scale_by_came = ScaleByCame
