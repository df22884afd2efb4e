"""Second moments shared by many elements: SM3, Adam-mini and NovoGrad."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass, replace
from functools import reduce
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import (
    NonNegative,
    Rate,
    Rows,
    Slot,
    at,
    barriers,
    bias_correction,
    materialize,
    mean,
    require_name,
    require_step,
    sqrt,
    tree,
)
from everybit.protocol import ALONE, Context, SlotDecay, WholeTensors

P = TypeVar("P")


@tree.state
class Sm3State(Generic[P]):
    """For each index of each dimension the greatest sum of squares, ``{"along0": ..., "along1": ...}``; of a vector all sums."""

    maxima: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleBySm3(WholeTensors):
    r"""Divide by the root of the least of the sums of squares that an element is under, one for each of its indices.

    .. math::
        \nu_t(i) = \min_{r \ni i} \mu_{t-1}(r) + g_t(i)^2 \qquad
        u_t(i) = \frac{g_t(i)}{\sqrt{\nu_t(i) + \epsilon}} \qquad
        \mu_t(r) = \max_{i \in r} \nu_t(i)

    where r goes over the slices of a tensor along its dimensions: the rows and the columns of a matrix. A vector has a sum for each
    element, and SM3 is Adagrad. Where :math:`\nu = 0` the update is zero.

    Args:
        b2: Average, :math:`\nu_t = \beta_2 \min \mu_{t-1} + (1-\beta_2) g_t^2`, with a decay rate in [0, 1); None: sum, as the paper.
        eps: :math:`\epsilon`, added inside the root; unit of the gradient squared. optax has 1e-8, pytorch_optimizer 1e-30.
        keep_greatest: Let no :math:`\mu` fall, as pytorch_optimizer where it averages; optax lets it.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Anil et al. 2019, https://arxiv.org/abs/1901.11150, SM3-II.
    """

    reads_weights = False
    _: KW_ONLY
    b2: Rate | None = None
    eps: NonNegative = 1e-30
    keep_greatest: bool = False

    def decays(self) -> tuple[SlotDecay, ...]:
        """``maxima`` are sums, or decay with ``b2``."""
        return (SlotDecay("maxima", 1.0 if self.b2 is None else self.b2, squares=True),)

    def init(self, params: P) -> Sm3State[P]:
        """Return sums of zero."""

        def zeros(p: Tensor) -> Any:
            if p.ndim < 2 or not p.numel():
                return torch.zeros_like(p)
            return {f"along{dim}": torch.zeros_like(_first_of_others(p, dim)) for dim in range(p.ndim)}

        return Sm3State(tree.map(zeros, params))

    def update(self, updates: P, state: Sm3State[Any], params: P, ctx: Context = ALONE) -> tuple[P, Sm3State[P]]:
        """Add the squares to the least of their sums, divide by the root, and keep the greatest."""
        eps = at(self.eps, ctx.step, name="eps")
        b2 = None if self.b2 is None else at(self.b2, ctx.step, name="b2")

        def sums(g: Tensor, old: Any) -> Tensor:
            least: Tensor = reduce(torch.minimum, old.values()) if isinstance(old, dict) else old
            # Vectors: a tensor without dimensions would take the dtype of the decay rate.
            square, before = (g * g).reshape(-1), least.expand(g.shape).reshape(-1)
            return (before + square if b2 is None else b2 * before + (1 - b2) * square).reshape(g.shape)

        def kept(total: Tensor, old: Any) -> Any:
            if not isinstance(old, dict):
                return torch.maximum(total, old) if self.keep_greatest else total
            new = {f"along{dim}": total.amax(_others(total, dim), keepdim=True) for dim in range(total.ndim)}
            return {name: torch.maximum(x, old[name]) for name, x in new.items()} if self.keep_greatest else new

        def direction(g: Tensor, total: Tensor) -> Tensor:
            known = total > 0
            return torch.where(known, g / sqrt(torch.where(known, total, 1.0) + eps), 0.0)

        totals = tree.map(sums, updates, state.maxima)
        return tree.elementwise(direction, updates, totals), Sm3State(tree.map(kept, totals, state.maxima))


def _others(x: Tensor, dim: int) -> list[int]:
    return [other for other in range(x.ndim) if other != dim]


def _first_of_others(x: Tensor, dim: int) -> Tensor:
    return reduce(lambda left, other: left.narrow(other, 0, 1), _others(x, dim), x)


scale_by_sm3 = ScaleBySm3


@tree.state
class AdamMiniState(Generic[P]):
    """The running mean of the gradient, and of each block the running mean of its squares, ``{"blocks": ...}``."""

    momentum: Slot[P]
    variance: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByAdamMini(WholeTensors):
    r"""Divide the gradient's running mean by the root of the running mean of squares of its block.

    .. math::
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t \qquad
        v_t = \beta_2 v_{t-1} + (1-\beta_2) \operatorname{mean}_\text{block} g_t^2 \qquad
        u_t = \frac{m_t / (1-\beta_1^t)}{\sqrt{v_t / (1-\beta_2^t)} + \epsilon}

    Args:
        b1: Decay rate of the mean, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        eps: Added outside the root; same unit as the gradient.
        rows: The block: so many consecutive indices of the first dimension, with all that belongs to them. 1: an output unit of
            ``nn.Linear``, a token of ``nn.Embedding``; the size of a head: a head of queries or keys. None: the whole tensor.

    Raises:
        ValueError: A hyperparameter out of range, or not finite; from ``init``, a tensor with rows that are no multiple of ``rows``.

    Reference:
        Zhang et al. 2024, https://arxiv.org/abs/2406.16793, Algorithm 1.
    """

    reads_weights = False
    b1: Rate = 0.9
    b2: Rate = 0.999
    eps: NonNegative = 1e-8
    rows: Rows | None = None

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` decays with ``b1``, ``variance`` with ``b2``."""
        return SlotDecay("momentum", self.b1), SlotDecay("variance", self.b2, squares=True)

    def init(self, params: P) -> AdamMiniState[P]:
        """Return means of zero for all parameters and all their blocks."""
        for path, p in zip(tree.paths(params), tree.leaves(params), strict=True):
            if self.rows is not None and p.ndim and len(p) % self.rows:
                raise ValueError(
                    f"params{path}: has {len(p)} rows; accepted is a multiple of rows={self.rows}, which share a second moment."
                )
        squares: Any = tree.map(lambda p: {"blocks": torch.zeros_like(p.reshape(-1)[: self._count(p)])}, params)
        return AdamMiniState(tree.zeros_like(params), squares)

    def update(
        self, updates: P, state: AdamMiniState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, AdamMiniState[P]]:
        """Update the moments, and precondition by them."""
        step = require_step(ctx.step, "scale_by_adam_mini")
        b1, b2, eps = self.at(step, "b1", "b2", "eps")
        unbias_mean, unbias_square = (materialize(1 / bias_correction(b, step)) for b in (b1, b2))

        def square(g: Tensor, v: Any) -> Any:
            if not g.numel():
                return {"blocks": v["blocks"].clone()}
            return {"blocks": b2 * v["blocks"] + (1 - b2) * mean(self._blocks(g * g), -1)}

        def direction(m: Tensor, v: Any) -> Tensor:
            if not m.numel():
                return m.clone()
            roots = materialize(sqrt(v["blocks"] * unbias_square) + eps)
            return ((self._blocks(m) * unbias_mean) / roots[:, None]).reshape(m.shape)

        momentum = tree.elementwise(lambda g, m: b1 * m + (1 - b1) * g, updates, state.momentum)
        variance = tree.map(square, updates, state.variance)
        return tree.map(direction, momentum, variance), AdamMiniState(momentum, variance)

    def _count(self, p: Tensor) -> int:
        if not p.numel():
            return 0
        return 1 if self.rows is None or not p.ndim else len(p) // self.rows

    def _blocks(self, x: Tensor) -> Tensor:
        return x.reshape(self._count(x), -1)


@dataclass(frozen=True, slots=True)
class AdamMiniBlocks:
    """The blocks of a Transformer's parameters by their names, as the authors' code has them; labels for :func:`everybit.adam_mini`.

    A parameter of fewer than two dimensions is labelled ``"element"`` if ``bias`` is in its name, and ``"tensor"`` if not. Another one is
    ``"element"`` if ``bias`` is in its name; ``"head"`` with one of ``q_proj``, ``k_proj``, ``wq``, ``wk``, ``query``, ``key``; ``"row"``
    with one of ``embed``, ``embd``, ``wte``, ``lm_head``, ``output``, ``final_layer``, ``v_proj``, ``wv``, ``value``, ``o_proj``, ``wo``,
    ``attn.proj``, ``feed_forward``, ``linear``, ``mlp``; and ``"tensor"`` with none of these. Names are read in small letters.

    Attributes:
        heads: Whether the size of a head is known; if it is not, a query or key is an error.
        embeddings: Names of the embeddings of a model, by the types of its modules: they are ``"row"``, whatever they are called.
    """

    heads: bool = True
    embeddings: frozenset[str] = frozenset()

    def with_embeddings(self, names: Collection[str]) -> AdamMiniBlocks:
        """Return the same labels, for a model of which these parameters are embeddings."""
        return replace(self, embeddings=frozenset(names))

    def __call__(self, path: str, parameter: Tensor) -> str:
        """Return the label of a parameter.

        Raises:
            ValueError: A parameter without a name; a query or key without the size of a head.
        """
        given = require_name(path, "adam_mini", "what shares a second moment", "labels=")
        if given in self.embeddings:
            return "row"
        name = given.lower()
        if "bias" in name:
            return "element"
        if parameter.ndim < 2:
            return "tensor"
        if any(one in name for one in ("q_proj", "k_proj", "wq", "wk", "query", "key")):
            if not self.heads:
                raise ValueError(
                    f"head_size: got None, and {given!r} is a query or key by its name; accepted is a head's number of rows."
                )
            return "head"
        return "row" if any(one in name for one in _BY_ROW) else "tensor"


_BY_ROW = (
    "embed", "embd", "wte", "lm_head", "output", "final_layer", "v_proj", "wv", "value", "o_proj", "wo", "attn.proj", "feed_forward",
    "linear", "mlp",
)  # fmt: skip

scale_by_adam_mini = ScaleByAdamMini


@tree.state
class NovogradState(Generic[P]):
    """A decaying sum of normalised gradients, and of each tensor the running square of its gradient's norm."""

    momentum: Slot[P]
    variance: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByNovograd(WholeTensors):
    r"""Divide each tensor's gradient by the root of the running square of its norm, add decay, and sum up.

    .. math::
        v_1 = \lVert g_1 \rVert^2 \qquad v_t = \beta_2 v_{t-1} + (1-\beta_2) \lVert g_t \rVert^2

        u_t = m_t = \beta_1 m_{t-1} + \frac{g_t}{\sqrt{v_t} + \epsilon} + \lambda p_t

    Decay goes through the momentum, as in the paper.

    Args:
        b1: Decay rate of the sum, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        eps: Added outside the root; same unit as the gradient's norm.
        weight_decay: :math:`\lambda`, at least zero.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Ginsburg et al. 2019, https://arxiv.org/abs/1905.11286, Algorithm 1.
    """

    b1: Rate = 0.9
    b2: Rate = 0.25
    eps: NonNegative = 1e-8
    _: KW_ONLY
    weight_decay: NonNegative = 0.0

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` decays with ``b1``, ``variance`` with ``b2``."""
        return SlotDecay("momentum", self.b1), SlotDecay("variance", self.b2, squares=True)

    def init(self, params: P) -> NovogradState[P]:
        """Return sums of zero, and of each tensor a square of zero."""
        # A rank without elements of a tensor keeps no number for it.
        squares: Any = tree.map(lambda p: {"norm": p.new_zeros(())} if p.numel() else torch.zeros_like(p), params)
        return NovogradState(tree.zeros_like(params), squares)

    def update(
        self, updates: P, state: NovogradState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, NovogradState[P]]:
        """Update squares and sums, and return the sums."""
        step = require_step(ctx.step, "scale_by_novograd")
        b1, b2, eps, decay = self.at(step, "b1", "b2", "eps", "weight_decay")

        def square(g: Tensor, v: Any) -> Any:
            if isinstance(v, Tensor):
                return v.clone()
            new = barriers.sum_of_squares(g).to(v["norm"].dtype).reshape(1)
            mean = b2 * v["norm"].reshape(1) + (1 - b2) * new
            return {"norm": torch.where(step == 1, new, mean).reshape(())}

        def summed(g: Tensor, m: Tensor, p: Tensor, v: Tensor) -> Tensor:
            u = g / (sqrt(v) + eps)
            if isinstance(decay, Tensor):
                u = torch.where(decay == 0, u, u + decay * p)
            elif decay != 0:
                u = u + decay * p
            return b1 * m + u

        variance = tree.map(square, updates, state.variance)

        def shaped(g: Tensor, v: Any) -> Tensor:
            return v if isinstance(v, Tensor) else v["norm"].to(g.dtype).reshape((1,) * g.ndim)

        norms = tree.map(shaped, updates, variance)
        momentum = tree.elementwise(summed, updates, state.momentum, params, norms)
        return tree.map(torch.clone, momentum), NovogradState(momentum, variance)


scale_by_novograd = ScaleByNovograd
