"""The nearest semi-orthogonal matrix by Newton and Schulz's iteration: matrix products alone, and the same bits eager and compiled.

An odd polynomial maps the singular values of a matrix and leaves its singular vectors. Repeated with the right coefficients it moves all
singular values from (0, 1] to about 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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

    Raises:
        ValueError: An argument is out of range.
    """

    coefficients: Coefficients = "quintic"
    steps: int = 5
    arithmetic: Arithmetic = "bfloat16"
    normalization: Normalization = "frobenius"
    eps: float = 1e-7
    batching: Batching = "alone"

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
        how = (flat, self.eps, self.arithmetic, self.normalization, self.batching)
        found: Tensor = iterated(x, *how) if _is_differentiated(x) else _orthogonalized(x, *how)
        return found


def _is_differentiated(x: Tensor) -> bool:
    """Whether derivatives are taken, in reverse or forward mode: torch.func differentiates no custom operators."""
    if torch.is_grad_enabled() and x.requires_grad:
        return True
    tangent = forward_ad.unpack_dual(x).tangent  # type: ignore[no-untyped-call]
    return tangent is not None


def iterated(
    x: Tensor, coefficients: Sequence[float], eps: float, arithmetic: str, normalization: str, batching: str
) -> Tensor:
    """Compute the operator ``everybit::orthogonalized`` in operators of torch: for derivatives, and for counts of allocations."""
    if not x.numel():
        return x.clone()
    if x.ndim > 2 and batching == "alone":
        each = x.reshape(-1, *x.shape[-2:])
        alone = [iterated(one, coefficients, eps, arithmetic, normalization, batching) for one in each]
        return torch.stack(alone).reshape(x.shape)
    tall = x.shape[-2] > x.shape[-1]
    matrix = x.to(getattr(torch, arithmetic))
    matrix = matrix if x.ndim == 2 else matrix.reshape(-1, *x.shape[-2:])
    matrix = matrix.mT if tall else matrix
    norm = matrix.norm() if x.ndim == 2 else torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    least = norm.new_full((), eps)
    matrix = matrix / (torch.maximum(norm, least) if normalization == "frobenius" else norm * 1.01 + least)
    added: Any = torch.addmm if x.ndim == 2 else torch.baddbmm
    for start in range(0, len(coefficients), 3):
        a, b, c = coefficients[start : start + 3]
        gram = matrix @ matrix.mT
        if c:
            gram = added(gram, gram, gram, beta=b, alpha=c)
            matrix = added(matrix, gram, matrix, beta=a)
        else:
            matrix = added(matrix, gram, matrix, beta=a, alpha=b)
    return (matrix.mT if tall else matrix).to(x.dtype).reshape(x.shape).contiguous()


@torch.library.custom_op("everybit::orthogonalized", mutates_args=())
def _orthogonalized(
    x: Tensor, coefficients: Sequence[float], eps: float, arithmetic: str, normalization: str, batching: str
) -> Tensor:
    return iterated(x, coefficients, eps, arithmetic, normalization, batching)


def _batched(_info: object, in_dims: tuple[int | None, ...], x: Tensor, *how: Any) -> tuple[Tensor, int]:
    return _orthogonalized(x.movedim(in_dims[0] or 0, 0), *how), 0


def _fake(x: Tensor, *how: Any) -> Tensor:  # noqa: ARG001  # what the operator takes
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_orthogonalized.register_fake(_fake)
_orthogonalized.register_vmap(_batched)
