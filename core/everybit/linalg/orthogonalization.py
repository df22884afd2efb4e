r"""The nearest semi-orthogonal matrix by Newton and Schulz's iteration: matrix products alone, and the same bits eager and compiled.

An odd polynomial maps the singular values of a matrix and leaves its singular vectors. Repeated with the right coefficients it moves all
singular values from (0, 1] to about 1.

The Gram form takes the steps on the small square matrix :math:`R = XX^\top`, and multiplies the long one once for several steps (Zhang et
al. 2026, https://dao-ailab.github.io/blog/2026/gram-newton-schulz). With :math:`P = aI + bR + cR^2` a step is :math:`Q \leftarrow QP` and
:math:`R \leftarrow PRP`. After some steps :math:`X \leftarrow QX`, and :math:`R` is computed anew, because its rounding errors grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from everybit.base import Options

Triple = tuple[float, float, float]
"""The coefficients a, b, c of one step, :math:`X \\leftarrow aX + b(XX^\\top)X + c(XX^\\top)^2X`."""

CoefficientName = Literal["quintic", "cubic", "polar_express", "deepseek"]
"""Published sets of coefficients."""

Coefficients = CoefficientName | tuple[Triple, ...]
"""Of each step, in order; the last is repeated if there are more steps."""

Arithmetic = Literal["bfloat16", "float32", "float64"]
"""The dtype of the iteration."""

Normalization = Literal["frobenius", "polar_express"]
"""What a matrix is divided by before, so that no singular value is above 1."""

IterationForm = Literal["plain", "gram"]
"""Whether the steps are taken on the matrix, or on its products with itself."""

Batching = Literal["alone", "together"]
"""How a batch of matrices is computed: each by products of its own, or all by batched products."""

PUBLISHED: dict[CoefficientName, tuple[Triple, ...]] = {
    # Keller Jordan 2024, https://kellerjordan.github.io/posts/muon/: steepest at zero; ends between 0.7 and 1.2.
    "quintic": ((3.4445, -4.7750, 2.0315),),
    # Newton-Schulz: converges to 1.
    "cubic": ((1.5, -0.5, 0.0),),
    # Amsel et al. 2025, https://arxiv.org/abs/2505.16932, optimized for five steps with a safety factor of 1.02, as in modded-nanogpt.
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    # DeepSeek-V4's report: eight steep steps, and two that converge.
    "deepseek": (*((3.4445, -4.7750, 2.0315),) * 8, *((2.0, -1.5, 0.5),) * 2),
}


RUNS = {"bfloat16": (1, 2), "float32": (2, 3), "float64": (2, 3)}
"""How many steps the Gram form takes before the first restart, and before each further one.

As published for float16: two, and then three. In bfloat16 singular values can then leave the range of the plain form, or diverge.
"""

LONG = 2
"""The aspect of a matrix from which on the Gram form takes fewer multiply-adds."""

HALVED = 256
"""Rows from which on a symmetric product is computed as its upper half and its last block: three quarters of the multiply-adds."""


@dataclass(frozen=True, slots=True)
class NewtonSchulz(Options):
    r"""The iteration that makes matrices orthogonal.

    Args:
        coefficients: ``"quintic"`` (Keller Jordan's), ``"cubic"``, ``"polar_express"``, ``"deepseek"``, or triples :math:`(a_k, b_k, c_k)`
            of each step, the last of which is repeated.
        steps: From 1 to 99.
        arithmetic: The dtype of the iteration.
        normalization: What a matrix is divided by first. ``"frobenius"``: its norm, and at least ``eps``. ``"polar_express"``: 1.01 times
            its norm, plus ``eps``.
        eps: Above zero; the unit of the matrices.
        batching: ``"alone"``: each matrix is computed by itself, so that its bits do not depend on which others there are, nor on how
            parameters are sharded. ``"together"``: the matrices of one parameter, such as its experts, go through batched products:
            faster for many small matrices, but their bits depend on how many there are.
        form: ``"gram"``: matrices that are at least twice as long as wide go through steps on their products with themselves, with other
            rounding errors. Four times as long as wide, they take 1.8 times fewer multiply-adds; in bfloat16 1.5 times.

    Raises:
        ValueError: An argument is out of range.
    """

    coefficients: Coefficients = "quintic"
    steps: int = 5
    arithmetic: Arithmetic = "bfloat16"
    normalization: Normalization = "frobenius"
    eps: float = 1e-7
    batching: Batching = "alone"
    form: IterationForm = "plain"

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or not 1 <= self.steps < 100:
            raise ValueError(f"steps: got {self.steps!r}; accepted is a whole number of steps, from 1 to 99.")
        _ = self.triples
        if not isinstance(self.eps, (int, float)) or not 0 < self.eps < math.inf:
            raise ValueError(f"eps: got {self.eps!r}; accepted is a number above zero.")

    @property
    def triples(self) -> tuple[Triple, ...]:
        """The coefficients of each step."""
        chosen = self.coefficients
        if isinstance(chosen, str):
            if chosen not in PUBLISHED:
                raise ValueError(
                    f"coefficients: got {chosen!r}; accepted are {', '.join(map(repr, get_args(CoefficientName)))}, or a tuple of"
                    " triples (a, b, c)."
                )
            chosen = PUBLISHED[chosen]
        found = tuple(tuple(float(x) for x in one) for one in chosen)
        if not found or any(len(one) != 3 for one in found):
            raise ValueError(f"coefficients: got {chosen!r}; accepted is a tuple of triples (a, b, c), at least one.")
        return tuple(found[min(step, len(found) - 1)] for step in range(self.steps))  # type: ignore[misc]

    def orthogonalized(self, x: Tensor) -> Tensor:
        """Return matrices with the singular vectors of ``x``, and singular values about 1; a matrix of zeros stays zero.

        Args:
            x: Of shape (..., rows, columns).

        Returns:
            A tensor of the shape and dtype of ``x``.
        """
        flat = [number for one in self.triples for number in one]
        how = (flat, self.eps, self.arithmetic, self.normalization, self.batching, self.form)
        found: Tensor = iterated(x, *how) if _is_differentiated(x) else _orthogonalized(x, *how)
        return found

    def cost(self, rows: int, columns: int) -> float:
        """Return the multiply-adds of the iteration on a matrix."""
        short, long = sorted((rows, columns))
        if not _uses_gram(self.form, short, long):
            return sum(2.0 * short**2 * long + (short**3 if c else 0) for *_, c in self.triples)
        total, share = 0.0, 0.75 if short >= HALVED else 1.0
        for run in _runs(self.steps, self.arithmetic):
            total += short**2 * long * (share + 1)
            for step in run:
                squares = bool(self.triples[step][2])
                total += share * short**3 * (squares + (step > run[0]) + 2 * (step < run[-1]))
        return total


def _uses_gram(form: str, short: int, long: int) -> bool:
    return form == "gram" and long >= LONG * short


def _runs(steps: int, arithmetic: str) -> list[range]:
    """The steps between two restarts of the Gram form."""
    first, further = RUNS[arithmetic]
    edges = [0, *range(first, steps, further), steps]
    return [range(start, stop) for start, stop in pairwise(edges) if start < stop]


def _is_differentiated(x: Tensor) -> bool:
    """Whether derivatives are taken, in reverse or forward mode: torch.func differentiates no custom operators."""
    if torch.is_grad_enabled() and x.requires_grad:
        return True
    tangent = forward_ad.unpack_dual(x).tangent  # type: ignore[no-untyped-call]
    return tangent is not None


def iterated(
    x: Tensor, coefficients: Sequence[float], eps: float, arithmetic: str, normalization: str, batching: str, form: str
) -> Tensor:
    """Compute the operator ``everybit::orthogonalized`` in operators of torch: for derivatives, and for counts of allocations."""
    if not x.numel():
        return x.clone()
    if x.ndim > 2 and batching == "alone":
        each = x.reshape(-1, *x.shape[-2:])
        alone = [iterated(one, coefficients, eps, arithmetic, normalization, batching, form) for one in each]
        return torch.stack(alone).reshape(x.shape)
    tall = x.shape[-2] > x.shape[-1]
    matrix = x.to(getattr(torch, arithmetic))
    matrix = matrix if x.ndim == 2 else matrix.reshape(-1, *x.shape[-2:])
    matrix = matrix.mT if tall else matrix
    norm = matrix.norm() if x.ndim == 2 else torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    least = norm.new_full((), eps)
    matrix = matrix / (torch.maximum(norm, least) if normalization == "frobenius" else norm * 1.01 + least)
    added: Any = torch.addmm if x.ndim == 2 else torch.baddbmm
    triples = [coefficients[start : start + 3] for start in range(0, len(coefficients), 3)]
    is_gram = _uses_gram(form, matrix.shape[-2], matrix.shape[-1])
    for run in _runs(len(triples), arithmetic) if is_gram else ():
        matrix = _run(matrix, [triples[step] for step in run], added)
    for a, b, c in () if is_gram else triples:
        gram = matrix @ matrix.mT
        if c:
            gram = added(gram, gram, gram, beta=b, alpha=c)
            matrix = added(matrix, gram, matrix, beta=a)
        else:
            matrix = added(matrix, gram, matrix, beta=a, alpha=b)
    return (matrix.mT if tall else matrix).to(x.dtype).reshape(x.shape).contiguous()


def _run(matrix: Tensor, triples: Sequence[Sequence[float]], added: Any) -> Tensor:
    """Some steps in the Gram form, without a restart. All matrices but the given one are symmetric, and commute."""
    rows = matrix.shape[-2]
    half = rows // 2 if rows >= HALVED else rows

    def product(base: Tensor, x: Tensor, y: Tensor, beta: float, alpha: float) -> Tensor:
        """``beta * base + alpha * x @ y``, of which the lower left block mirrors the upper right one."""
        top = added(base[..., :half, :], x[..., :half, :], y, beta=beta, alpha=alpha)
        if half == rows:
            return top  # type: ignore[no-any-return]
        last = added(base[..., half:, half:], x[..., half:, :], y[..., half:], beta=beta, alpha=alpha)
        return torch.cat([top, torch.cat([top[..., half:].mT, last], -1)], -2)

    r = product(matrix[..., :rows], matrix, matrix.mT, 0.0, 1.0)
    q: Tensor | None = None
    for number, (a, b, c) in enumerate(triples):
        z = product(r, r, r, b, c) if c else b * r
        if q is None:
            q = z.clone()
            q.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            q = product(q, q, z, a, 1.0)
        if number + 1 < len(triples):
            r = product(r, r, z, a, 1.0)
            r = product(r, z, r, a, 1.0)
    assert q is not None
    return q @ matrix


@torch.library.custom_op("everybit::orthogonalized", mutates_args=())
def _orthogonalized(
    x: Tensor, coefficients: Sequence[float], eps: float, arithmetic: str, normalization: str, batching: str, form: str
) -> Tensor:
    return iterated(x, coefficients, eps, arithmetic, normalization, batching, form)


def _batched(_info: object, in_dims: tuple[int | None, ...], x: Tensor, *how: Any) -> tuple[Tensor, int]:
    return _orthogonalized(x.movedim(in_dims[0] or 0, 0), *how), 0


def _fake(x: Tensor, *how: Any) -> Tensor:  # noqa: ARG001  # what the operator takes
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_orthogonalized.register_fake(_fake)
_orthogonalized.register_vmap(_batched)
