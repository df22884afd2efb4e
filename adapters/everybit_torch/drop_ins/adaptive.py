"""Adagrad and Adafactor with ``torch.optim``'s signatures."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

import everybit as eb
from everybit.policies import PolicyOrName
from everybit_torch.drop_ins.drop_in import DropIn, DropInOptions
from everybit_torch.optim import Params, TorchNames
from everybit_torch.segments import Compile


class Adagrad(DropIn):
    """Adagrad, as ``torch.optim.Adagrad``; see :func:`everybit.adagrad` and :class:`~everybit_torch.TorchOptimizer`.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate, at least zero.
        lr_decay: The learning rate of step t is ``lr / (1 + (t - 1) * lr_decay)``.
        weight_decay: L2 penalty.
        initial_accumulator_value: The initial sum of squares, at least zero.
        eps: Added outside the root.
        maximize: Ascend instead.
        policy: How parameters and state are stored: a policy, or the name of one in :mod:`everybit.policies`. None: as the model is, for
            float32 and float64 models alone.
        average: The decay rate of a moving average of the weights (EMA), such as 0.999; see :class:`TorchOptimizer`.
        compile: Compile the step; ``"auto"``: for large models.
        metrics: Measure every step; see :meth:`TorchOptimizer.metrics`.
        seed: The seed of stochastic rounding.
        options: See :class:`DropInOptions`.
    """

    torch_class = torch.optim.Adagrad
    torch_names = TorchNames(
        {"sum_of_squares": "sum"},
        True,
        {"foreach": None, "differentiable": False, "fused": None},
        {"eps_inside_root": False},
        eager=True,
    )

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        policy: PolicyOrName | None = None,
        average: float | Tensor | None = None,
        compile: Compile = "auto",
        metrics: bool = False,
        seed: int = 0,
        **options: Unpack[DropInOptions],
    ) -> None:
        super().__init__(
            params, eb.adagrad, lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, initial_accumulator_value=initial_accumulator_value,
            eps=eps, maximize=maximize, policy=policy, average=average, compile=compile,
            metrics=metrics, seed=seed, **options,
        )  # fmt: skip


class Adafactor(DropIn):
    """Adafactor, as ``torch.optim.Adafactor``; see :func:`everybit.torch_adafactor` and :class:`~everybit_torch.TorchOptimizer`.

    Args:
        params: Parameters, or param groups.
        lr: The limit of the relative step, at least zero.
        beta2_decay: The share of the newest squares in step t is ``t ** beta2_decay``; at most zero.
        eps: The least root of a mean of squares (None: the spacing of the compute dtype at 1), and the least root mean square of
            weights that a step is relative to.
        d: The root mean square above which an update is scaled down, at least 1.
        weight_decay: A step shrinks a parameter by ``lr * weight_decay`` of itself.
        maximize: Ascend instead.
        policy: How parameters and state are stored: a policy, or the name of one in :mod:`everybit.policies`. None: as the model is, for
            float32 and float64 models alone.
        average: The decay rate of a moving average of the weights (EMA), such as 0.999; see :class:`TorchOptimizer`.
        compile: Compile the step; ``"auto"``: for large models.
        metrics: Measure every step; see :meth:`TorchOptimizer.metrics`.
        seed: The seed of stochastic rounding.
        options: See :class:`DropInOptions`.
    """

    torch_class = torch.optim.Adafactor
    torch_names = TorchNames(
        {"variance.rows": "row_var", "variance.columns": "col_var", "variance": "variance"}, True, {"foreach": None}
    )

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        policy: PolicyOrName | None = None,
        average: float | Tensor | None = None,
        compile: Compile = "auto",
        metrics: bool = False,
        seed: int = 0,
        **options: Unpack[DropInOptions],
    ) -> None:
        super().__init__(
            params, eb.torch_adafactor, lr=lr, beta2_decay=beta2_decay, eps=eps, d=d, weight_decay=weight_decay, maximize=maximize,
            policy=policy, average=average, compile=compile, metrics=metrics, seed=seed, **options,
        )  # fmt: skip
