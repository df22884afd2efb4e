"""torchdistX's AnyPrecisionAdamW, with its signature and defaults, and without its defects."""

from __future__ import annotations

from typing import ClassVar, Literal, Unpack

import torch
from torch import Tensor

import everybit as eb
from everybit.base import dtype_name, require_member
from everybit.policies.checks import problems
from everybit_torch import notices
from everybit_torch.arguments import TorchArguments
from everybit_torch.optim import Params, TorchOptimizer
from everybit_torch.segments import Compile


class AnyPrecisionAdamW(TorchOptimizer):
    """AdamW with a dtype for each of its states and optional Kahan summation (https://github.com/pytorch/torchdistx/pull/52).

    The arguments and defaults are torchdistX's. What differs: weight decay goes through the compensation (in torchdistX it is lost in
    bfloat16 weights at ``lr * weight_decay`` below about 2e-3); arithmetic is float32 with one rounding per tensor and step; compiling
    keeps the compensation; a checkpoint keeps its dtypes; a closure's loss is returned.

    The default second moment, bfloat16 rounded to nearest at ``betas[1] = 0.999``, never decays. The class keeps that default, warns
    once, and offers ``variance_rounding="stochastic"``.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate, at least zero.
        betas: Decay rates of the first and the second moment, in [0, 1).
        eps: Added outside the root.
        weight_decay: A step shrinks a parameter by ``lr * weight_decay`` of itself.
        use_kahan_summation: Keep the residuals of the weights; for bfloat16 and float16 models.
        momentum_dtype: Dtype of the first moment.
        variance_dtype: Dtype of the second moment.
        compensation_buffer_dtype: Dtype of the residuals.
        variance_rounding: ``"stochastic"`` makes a bfloat16 second moment work.
        compile: Compile the step.
        metrics: Measure each step.
        seed: The seed of stochastic rounding.
        fully_decoupled: As :class:`~everybit_torch.AdamW`'s, and not torchdistX's.
        max_learning_rate: See there.
        torch_arguments: See there.

    Raises:
        TypeError: A dtype that is no floating-point format.
        ValueError: A hyperparameter out of range; Kahan summation for a float32 model, which needs no compensation.
    """

    _warned: ClassVar[bool] = False

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        use_kahan_summation: bool = False,
        momentum_dtype: torch.dtype = torch.float32,
        variance_dtype: torch.dtype = torch.bfloat16,
        compensation_buffer_dtype: torch.dtype = torch.bfloat16,
        *,
        variance_rounding: Literal["nearest", "stochastic"] = "nearest",
        compile: Compile = "auto",
        metrics: bool = False,
        seed: int = 0,
        fully_decoupled: bool = False,
        max_learning_rate: float | None = None,
        **torch_arguments: Unpack[TorchArguments],
    ) -> None:
        require_member(variance_rounding, ("nearest", "stochastic"), field="variance_rounding")
        variance = dtype_name(variance_dtype, field="variance_dtype")
        variance_format: eb.StateFormat = eb.Nearest(variance)
        if variance_rounding == "stochastic" and variance not in ("float32", "float64"):
            variance_format = eb.Stochastic("bfloat16" if variance == "bfloat16" else "float16")
        residual = dtype_name(compensation_buffer_dtype, field="compensation_buffer_dtype")
        if residual == "float64":
            raise ValueError(
                "compensation_buffer_dtype: got torch.float64; accepted are torch.bfloat16, torch.float16 and torch.float32, which"
                " already holds all that a 16-bit weight leaves of a float32."
            )
        policy = eb.Policy(
            params=eb.Kahan(residual=residual) if use_kahan_summation else eb.Nearest(),
            momentum=eb.Nearest(dtype_name(momentum_dtype, field="momentum_dtype")),
            variance=variance_format,
        )
        found = problems(policy, eb.scale_by_adam(*betas).decays())
        if found and not AnyPrecisionAdamW._warned:
            AnyPrecisionAdamW._warned = True
            notices.warn(
                f"AnyPrecisionAdamW: {found[0]} torchdistX's default is kept; pass variance_rounding='stochastic' to mend it at the same"
                " size, or variance_dtype=torch.float32. This is said once."
            )
        super().__init__(
            params, eb.adamw, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fully_decoupled=fully_decoupled,
            max_learning_rate=max_learning_rate, policy=policy, compile=compile,
            metrics=metrics, seed=seed, unsafe="allow", **torch_arguments,
        )  # fmt: skip
