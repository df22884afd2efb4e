"""Adam-mini's direction: Adam's, with one second moment for each block of a parameter."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import (
    Hyperparameter,
    Slot,
    at,
    bias_correction,
    materialize,
    mean,
    require,
    require_count,
    require_name,
    require_step,
    sqrt,
    tree,
)
from everybit.protocol import ALONE, Context, SlotDecay, WholeTensors

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
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

    reads_weights: ClassVar[bool] = False
    b1: Hyperparameter = 0.9
    b2: Hyperparameter = 0.999
    eps: Hyperparameter = 1e-8
    rows: int | None = None

    def __post_init__(self) -> None:
        require("b1", self.b1, 0.0, 1.0, open_high=True)
        require("b2", self.b2, 0.0, 1.0, open_high=True)
        require("eps", self.eps, 0.0)
        require_count("rows", self.rows, "a number of rows", optional=True)

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
        b1, b2, eps = at(self.b1, step, name="b1"), at(self.b2, step, name="b2"), at(self.eps, step, name="eps")
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
