"""Updates only where they agree with the gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from everybit.base import tree
from everybit.combinators.wrapping import Wrapping
from everybit.protocol import ALONE, Context, Transform, enter

P = TypeVar("P")

Rescale = Literal["count", "share", "none"]
"""How what is left of an update is made larger for what is not."""


@tree.state
class CautiousState:
    """The inner transform's state."""

    inner: Any


@dataclass(frozen=True, slots=True)
class Cautious(Wrapping):
    r"""Set the inner transform's updates to zero where their sign is not the gradient's, and make the others of the parameter larger.

    .. math::
        u \leftarrow s \, \mathbb{1}[u g > 0] \, u

    The inner transform is a preconditioner, so its updates still point uphill; learning rate and weight decay come after it. Its state is
    not affected. With n elements in the parameter, of which k agree, the factor s is

    - ``"share"``: :math:`1 / \max(k/n, 10^{-3})`, as in the authors' code and timm;
    - ``"count"``: :math:`n / (k + 1)`, as in the paper;
    - ``"none"``: s is 1.

    Args:
        transform: The masked transform.
        rescale: The factor.

    Raises:
        TypeError: ``transform`` is not a transform.
        ValueError: ``rescale`` is not among these names.

    Reference:
        Liang et al. 2024, https://arxiv.org/abs/2411.16085, Algorithm 1.

    Examples:
        >>> import everybit as eb
        >>> tx = eb.chain(eb.cautious(eb.scale_by_adam()), eb.add_decayed_weights(0.1), eb.scale_by_learning_rate(3e-4))
    """

    transform: Transform[Any]
    rescale: Rescale = "share"

    @property
    def reduces(self) -> bool:
        """True: the share of elements that agree is a number of each parameter."""
        return True

    @property
    def per_tensor(self) -> bool:
        """True, as above."""
        return True

    def init(self, params: P) -> CautiousState:
        """Return the inner transform's state."""
        return CautiousState(self.transform.init(params))

    def update(self, updates: P, state: CautiousState, params: P, ctx: Context = ALONE) -> tuple[P, CautiousState]:
        """The inner updates where they agree with what came in."""

        def masked(moves: P, inner: Any) -> tuple[P, CautiousState]:
            # Signs, since their product neither overflows nor vanishes.
            agreement = tree.elementwise(lambda u, g: (torch.sign(u) * torch.sign(g) > 0).to(u.dtype), moves, updates)
            kept = tree.elementwise(lambda u, a: torch.where(a > 0, u, 0.0), moves, agreement)
            if self.rescale == "none":
                return kept, CautiousState(inner)

            def rescaled(agreeing: tuple[P, P]) -> tuple[P, CautiousState]:
                factors = tree.map(self._factor, *agreeing)
                expanded = ctx.per_tensor.expand(factors, kept)
                return tree.elementwise(lambda u, f: u * f, kept, expanded), CautiousState(inner)

            return ctx.request(ctx.per_tensor.sum_and_size(agreement), rescaled)

        return enter(self.transform, updates, state.inner, params, ctx, masked)

    def _factor(self, agreeing: Tensor, size: Tensor) -> Tensor:
        if self.rescale == "count":
            return size / (agreeing + 1)
        return 1 / (agreeing / size.clamp(min=1)).clamp(min=1e-3)


cautious = Cautious
