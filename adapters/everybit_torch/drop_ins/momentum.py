"""Descent along gradients, momentum, signs and orthogonalized matrices, with the signatures of ``torch.optim`` and of Lion's authors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Unpack

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

import everybit as eb
from everybit.base import Hyperparameter
from everybit.policies import PolicyOrName
from everybit_torch.drop_ins.drop_in import IMPLEMENTATION, DropIn, DropInOptions
from everybit_torch.optim import Params, TorchNames, TorchOptimizer
from everybit_torch.segments import Compile


class _WithOptionalMomentum(DropIn):
    """Whether there is momentum decides what state there is; so a momentum of zero is absence, not a number."""

    def factory_arguments(self, group: Mapping[str, Any]) -> dict[str, Any]:
        arguments = super().factory_arguments(group)
        momentum = arguments["momentum"]
        if isinstance(momentum, (int, float)) and not isinstance(momentum, bool) and momentum == 0:
            arguments["momentum"] = None
        return arguments


class SGD(_WithOptionalMomentum):
    """Gradient descent with optional momentum, as ``torch.optim.SGD``; see :func:`everybit.sgd` and :class:`TorchOptimizer`.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate, at least zero.
        momentum: Decay of the momentum; 0: no momentum.
        dampening: Torch's dampening: not applied to the first gradient.
        weight_decay: L2 penalty.
        nesterov: Look ahead; needs momentum, and zero dampening.
        maximize: Ascend instead.
        policy: How parameters and state are stored: a policy, or the name of one in :mod:`everybit.policies`. None: as the model is, for
            float32 and float64 models alone.
        average: The decay rate of a moving average of the weights (EMA), such as 0.999; see :class:`TorchOptimizer`.
        compile: Compile the step; ``"auto"``: for large models.
        metrics: Measure every step; see :meth:`TorchOptimizer.metrics`.
        seed: The seed of stochastic rounding.
        options: See :class:`DropInOptions`.
    """

    torch_class = torch.optim.SGD
    torch_names = TorchNames(
        {"momentum": "momentum_buffer"}, False, {"foreach": None, "differentiable": False, "fused": None}
    )

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float | Tensor = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
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
            params, eb.sgd, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov,
            maximize=maximize, policy=policy, average=average, compile=compile,
            metrics=metrics, seed=seed, **options,
        )  # fmt: skip


class RMSprop(_WithOptionalMomentum):
    """RMSprop, as ``torch.optim.RMSprop``; see :func:`everybit.rmsprop` and :class:`TorchOptimizer`.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate, at least zero.
        alpha: Decay rate of the running square, in [0, 1).
        eps: Added outside the root.
        weight_decay: L2 penalty.
        momentum: Decay of the momentum; 0: no momentum.
        centered: Divide by the root of the variance instead of the square.
        maximize: Ascend instead.
        policy: How parameters and state are stored: a policy, or the name of one in :mod:`everybit.policies`. None: as the model is, for
            float32 and float64 models alone.
        average: The decay rate of a moving average of the weights (EMA), such as 0.999; see :class:`TorchOptimizer`.
        compile: Compile the step; ``"auto"``: for large models.
        metrics: Measure every step; see :meth:`TorchOptimizer.metrics`.
        seed: The seed of stochastic rounding.
        options: See :class:`DropInOptions`.
    """

    torch_class = torch.optim.RMSprop
    torch_names = TorchNames(
        {"variance": "square_avg", "mean": "grad_avg", "momentum": "momentum_buffer"}, True, IMPLEMENTATION
    )

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float | Tensor = 0.0,
        centered: bool = False,
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
            params, eb.rmsprop, lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum, centered=centered,
            maximize=maximize, policy=policy, average=average, compile=compile,
            metrics=metrics, seed=seed, **options,
        )  # fmt: skip


def lion(
    learning_rate: Hyperparameter = 1e-4,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.99,
    weight_decay: Hyperparameter = 0.0,
    fully_decoupled: bool = False,
    max_learning_rate: float | None = None,
    maximize: bool = False,
) -> eb.Transform[Any]:
    """:func:`everybit.lion`, with a decay that may be fully decoupled, as :func:`everybit.adamw`'s."""
    if not fully_decoupled:
        if max_learning_rate is not None:
            raise ValueError(
                f"max_learning_rate: got {max_learning_rate!r} without fully_decoupled=True, where it has no meaning."
            )
        return eb.lion(learning_rate, b1=b1, b2=b2, weight_decay=weight_decay, maximize=maximize)
    relative = None if max_learning_rate is None else learning_rate
    return eb.chain(
        *((eb.scale(-1.0),) if maximize else ()),
        eb.scale_by_lion(b1, b2),
        eb.scale_by_learning_rate(learning_rate),
        eb.subtract_decayed_weights(weight_decay, relative, max_learning_rate),
    )


class Lion(TorchOptimizer):
    """Lion (Chen et al. 2023); see :func:`everybit.lion` and :class:`TorchOptimizer`.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate; about a tenth to a third of AdamW's.
        betas: Weight of the momentum in the direction, and its decay rate, in [0, 1).
        weight_decay: Decoupled decay; about three to ten times AdamW's.
        maximize: Ascend instead.
        fully_decoupled: See :class:`AdamW`.
        max_learning_rate: See there.
        policy: How parameters and state are stored: a policy, or the name of one in :mod:`everybit.policies`. None: as the model is, for
            float32 and float64 models alone.
        average: The decay rate of a moving average of the weights (EMA), such as 0.999; see :class:`TorchOptimizer`.
        compile: Compile the step; ``"auto"``: for large models.
        metrics: Measure every step; see :meth:`TorchOptimizer.metrics`.
        seed: The seed of stochastic rounding.
        options: See :class:`DropInOptions`.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        fully_decoupled: bool = False,
        max_learning_rate: float | None = None,
        policy: PolicyOrName | None = None,
        average: float | Tensor | None = None,
        compile: Compile = "auto",
        metrics: bool = False,
        seed: int = 0,
        **options: Unpack[DropInOptions],
    ) -> None:
        super().__init__(
            params, lion, lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize, fully_decoupled=fully_decoupled,
            max_learning_rate=max_learning_rate, policy=policy, average=average, compile=compile,
            metrics=metrics, seed=seed, **options,
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
        policy: How parameters and state are stored: a policy, or the name of one in :mod:`everybit.policies`. None: as the model is, for
            float32 and float64 models alone.
        average: The decay rate of a moving average of the weights (EMA), such as 0.999; see :class:`TorchOptimizer`.
        compile: Compile the step; ``"auto"``: for large models.
        metrics: Measure every step; see :meth:`TorchOptimizer.metrics`.
        seed: The seed of stochastic rounding.
        options: See :class:`DropInOptions`.
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
        *,
        policy: PolicyOrName | None = None,
        average: float | Tensor | None = None,
        compile: Compile = "auto",
        metrics: bool = False,
        seed: int = 0,
        **options: Unpack[DropInOptions],
    ) -> None:
        super().__init__(
            params, eb.torch_muon, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov,
            ns_coefficients=ns_coefficients, eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn,
            policy=policy, average=average, compile=compile, metrics=metrics, seed=seed, **options,
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
