"""Further optimizers with ``torch.optim``'s signatures, plus :class:`~everybit_torch.drop_ins.drop_in.Options`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Unpack

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

import everybit as eb
from everybit_torch.drop_ins.drop_in import IMPLEMENTATION, DropIn, Options
from everybit_torch.optim import Params, TorchNames

_MOMENTS = {"momentum": "exp_avg", "variance": "exp_avg_sq"}


class NAdam(DropIn):
    """Adam with Nesterov momentum, as ``torch.optim.NAdam``; see :func:`everybit.nadam` and :class:`~everybit_torch.TorchOptimizer`.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate, at least zero.
        betas: Decay rates of the first and the second moment, in [0, 1).
        eps: Added outside the root.
        weight_decay: L2 penalty.
        momentum_decay: How fast momentum rises to the first of ``betas``.
        decoupled_weight_decay: A step shrinks a parameter by ``lr * weight_decay`` of itself, in the place of the penalty.
        maximize: Ascend instead.
        options: See :class:`Options`.
    """

    torch_class = torch.optim.NAdam
    torch_names = TorchNames(_MOMENTS, True, IMPLEMENTATION, shared={"mu_product": "mu_product"})

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 2e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params, eb.nadam, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, momentum_decay=momentum_decay,
            decoupled_weight_decay=decoupled_weight_decay, maximize=maximize, **options,
        )  # fmt: skip


class RAdam(DropIn):
    """Rectified Adam, as ``torch.optim.RAdam``; see :func:`everybit.radam` and :class:`~everybit_torch.TorchOptimizer`.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate, at least zero.
        betas: Decay rates of the first and the second moment, in [0, 1).
        eps: Added outside the root.
        weight_decay: L2 penalty.
        decoupled_weight_decay: A step shrinks a parameter by ``lr * weight_decay`` of itself, in the place of the penalty.
        maximize: Ascend instead.
        options: See :class:`Options`.
    """

    torch_class = torch.optim.RAdam
    torch_names = TorchNames(_MOMENTS, True, IMPLEMENTATION, {"threshold": 5.0, "eps_after_correction": False})

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params, eb.radam, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled_weight_decay=decoupled_weight_decay,
            maximize=maximize, **options,
        )  # fmt: skip


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
        options: See :class:`Options`.
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
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params, eb.adagrad, lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, initial_accumulator_value=initial_accumulator_value,
            eps=eps, maximize=maximize, **options,
        )  # fmt: skip


class Adamax(DropIn):
    """Adam with the maximum norm, as ``torch.optim.Adamax``; see :func:`everybit.adamax` and :class:`~everybit_torch.TorchOptimizer`.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate, at least zero.
        betas: Decay rates of the mean and of the maximum, in [0, 1).
        eps: Added to the magnitudes of the gradients.
        weight_decay: L2 penalty.
        maximize: Ascend instead.
        options: See :class:`Options`.
    """

    torch_class = torch.optim.Adamax
    torch_names = TorchNames({"momentum": "exp_avg", "maximum": "exp_inf"}, True, IMPLEMENTATION)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 2e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params, eb.adamax, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize, **options,
        )  # fmt: skip


class Adadelta(DropIn):
    """Adadelta, as ``torch.optim.Adadelta``; see :func:`everybit.adadelta` and :class:`~everybit_torch.TorchOptimizer`.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate, at least zero.
        rho: Decay rate of the running squares, in [0, 1].
        eps: Added inside the roots.
        weight_decay: L2 penalty.
        maximize: Ascend instead.
        options: See :class:`Options`.
    """

    torch_class = torch.optim.Adadelta
    torch_names = TorchNames({"variance": "square_avg", "update_variance": "acc_delta"}, True, IMPLEMENTATION)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params, eb.adadelta, lr=lr, rho=rho, eps=eps, weight_decay=weight_decay, maximize=maximize, **options,
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
        options: See :class:`Options`.
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
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params, eb.torch_adafactor, lr=lr, beta2_decay=beta2_decay, eps=eps, d=d, weight_decay=weight_decay, maximize=maximize,
            **options,
        )  # fmt: skip


class Rprop(DropIn):
    """Resilient backpropagation, as ``torch.optim.Rprop``; see :func:`everybit.rprop` and :class:`~everybit_torch.TorchOptimizer`.

    Args:
        params: Parameters, or param groups.
        lr: The size of the first step, at least zero; it has no effect after that.
        etas: Factors of a step's size where the gradient's sign changes, and where it stays.
        step_sizes: The least and the greatest size of a step.
        maximize: Ascend instead.
        options: See :class:`Options`.
    """

    torch_class = torch.optim.Rprop
    torch_names = TorchNames({"previous": "prev", "step_size": "step_size"}, True, IMPLEMENTATION)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50.0),
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, eb.rprop, lr=lr, etas=etas, step_sizes=step_sizes, maximize=maximize, **options)


def _mu(group: Mapping[str, Any], step: int) -> float:
    """The share of the weights after the next step in the average."""
    return 1 / max(1.0, step - float(group["t0"]))


class ASGD(DropIn):
    """Averaged stochastic gradient descent, as ``torch.optim.ASGD``; see :func:`everybit.asgd` and :class:`~everybit_torch.TorchOptimizer`.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate, at least zero.
        lambd: Weight decay, and how fast the learning rate falls.
        alpha: The power by which the learning rate falls.
        t0: The number of steps before averaging begins.
        weight_decay: L2 penalty.
        maximize: Ascend instead.
        options: See :class:`Options`.
    """

    torch_class = torch.optim.ASGD
    torch_names = TorchNames({"average": "ax"}, True, IMPLEMENTATION, shared={"eta": "eta"}, computed={"mu": _mu})

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        lambd: float = 1e-4,
        alpha: float = 0.75,
        t0: float = 1e6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params, eb.asgd, lr=lr, lambd=lambd, alpha=alpha, t0=t0, weight_decay=weight_decay, maximize=maximize, **options,
        )  # fmt: skip


class Muon(DropIn):
    """Muon of matrices, as ``torch.optim.Muon``; see :func:`everybit.torch_muon` and :class:`~everybit_torch.TorchOptimizer`.

    It orthogonalizes every parameter that it is given; embeddings and heads are another optimizer's. ``create("muon", model)`` is for all.

    Args:
        params: Parameters of two dimensions, or param groups.
        lr: Learning rate, at least zero.
        weight_decay: A step shrinks a parameter by ``lr * weight_decay`` of itself.
        momentum: Decay rate of the running mean of gradients, in [0, 1).
        nesterov: Look a step ahead.
        ns_coefficients: a, b, c of each step of the iteration that orthogonalizes.
        eps: The least norm that a matrix is divided by, above zero.
        ns_steps: Steps of the iteration, from 1 to 99.
        adjust_lr_fn: Factor of the update, from rows and columns: ``"original"``, the default, or ``"match_rms_adamw"``.
        options: See :class:`Options`.
    """

    torch_class = torch.optim.Muon
    torch_names = TorchNames({"momentum": "momentum_buffer"}, False, {})

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params, eb.torch_muon, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov,
            ns_coefficients=ns_coefficients, eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn, **options,
        )  # fmt: skip

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group. All of its parameters have to be matrices."""
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        for index, parameter in enumerate(self.param_groups[number]["params"]):
            if not is_lazy(parameter) and parameter.ndim != 2:
                raise ValueError(
                    f"Muon: param group {number}, parameter {index}: got shape {tuple(parameter.shape)}; accepted are matrices."
                    " create('muon', model) steps a whole model, with AdamW for other parameters."
                )
