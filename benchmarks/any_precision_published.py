"""AnyPrecisionAdamW's algorithm as torchdistX published it, for comparison; ours is ``everybit_torch.AnyPrecisionAdamW``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class PublishedAnyPrecisionAdamW(torch.optim.Optimizer):
    """Moments in dtypes of one's choice and Kahan summation of the weights, one tensor after the other, all in the weight's own dtype."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        use_kahan_summation: bool = True,
        momentum_dtype: torch.dtype = torch.float32,
        variance_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.use_kahan_summation = use_kahan_summation
        self.dtypes = (momentum_dtype, variance_dtype)
        super().__init__(list(params), {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """One update of all parameters."""
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                state: dict[str, Any] = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(p, dtype=self.dtypes[0])
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=self.dtypes[1])
                    if self.use_kahan_summation:
                        state["compensation"] = torch.zeros_like(p)
                state["step"] += 1
                step = float(state["step"])
                momentum, variance = state["exp_avg"], state["exp_avg_sq"]
                if group["weight_decay"]:
                    p.mul_(1 - lr * group["weight_decay"])
                momentum.mul_(b1).add_(p.grad, alpha=1 - b1)
                variance.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                denominator = (variance.sqrt() / (1 - b2**step) ** 0.5).add_(group["eps"])
                size = -lr / (1 - b1**step)
                if not self.use_kahan_summation:
                    p.addcdiv_(momentum.to(p.dtype), denominator.to(p.dtype), value=size)
                    continue
                compensation = state["compensation"]
                compensation.addcdiv_(momentum.to(p.dtype), denominator.to(p.dtype), value=size)
                before = p.clone()
                p.add_(compensation)
                compensation.add_(before.sub_(p))
