"""Optimizers with ``torch.optim``'s signatures, plus ``policy``, ``layout``, ``compile``, ``metrics`` and ``seed``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

import everybit as eb
from everybit.policy import AnyPolicy
from everybit_torch.optimizer import Layout, Params, TorchOptimizer
from everybit_torch.state_dicts import TorchNames

_IMPLEMENTATION = {"foreach": None, "capturable": False, "differentiable": False}
_MOMENTS = {"momentum": "exp_avg", "variance": "exp_avg_sq"}


class AdamW(TorchOptimizer):
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``; see :func:`everybit.adamw` and :class:`TorchOptimizer`.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate, at least zero; a float or a 0-d tensor.
        betas: Decay rates of the first and the second moment, in [0, 1).
        eps: Added outside the root.
        weight_decay: A step shrinks a parameter by ``lr * weight_decay`` of itself.
        maximize: Ascend instead.
        policy: How parameters and state are stored; None for float32 and float64 models only.
        layout: See :class:`TorchOptimizer`.
        flat_gradients: See there.
        compile: Compile the step.
        metrics: Measure each step.
        seed: Of stochastic rounding.

    Raises:
        TypeError: A parameter that is not a real floating-point tensor.
        ValueError: A hyperparameter out of range, or a policy that cannot work.

    Example:
        >>> import torch, everybit as eb
        >>> from everybit_torch import AdamW
        >>> model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
        >>> optimizer = AdamW(model.parameters(), lr=3e-4, policy=eb.policies.KAHAN_BF16)
    """

    torch_names = TorchNames(
        _MOMENTS, True, _IMPLEMENTATION | {"fused": None, "amsgrad": False, "decoupled_weight_decay": True}
    )

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        policy: AnyPolicy | None = None,
        layout: Layout = "auto",
        flat_gradients: bool = False,
        compile: bool = False,
        metrics: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, eb.adamw, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize,
            policy=policy, layout=layout, flat_gradients=flat_gradients, compile=compile, metrics=metrics, seed=seed,
        )  # fmt: skip


class Adam(TorchOptimizer):
    """Adam with an L2 penalty, as ``torch.optim.Adam``; arguments as :class:`AdamW`'s."""

    torch_names = TorchNames(
        _MOMENTS, True, _IMPLEMENTATION | {"fused": None, "amsgrad": False, "decoupled_weight_decay": False}
    )

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        policy: AnyPolicy | None = None,
        layout: Layout = "auto",
        flat_gradients: bool = False,
        compile: bool = False,
        metrics: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, eb.adam, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize,
            policy=policy, layout=layout, flat_gradients=flat_gradients, compile=compile, metrics=metrics, seed=seed,
        )  # fmt: skip


class Lion(TorchOptimizer):
    """Lion (Chen et al. 2023); see :func:`everybit.lion` and :class:`TorchOptimizer`.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate; about a tenth to a third of AdamW's.
        betas: Weight of the momentum in the direction, and its decay rate, in [0, 1).
        weight_decay: Decoupled decay; about three to ten times AdamW's.
        maximize: Ascend instead.
        policy: See :class:`AdamW`, as for all that follow.
        layout: See there.
        flat_gradients: See there.
        compile: See there.
        metrics: See there.
        seed: See there.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        policy: AnyPolicy | None = None,
        layout: Layout = "auto",
        flat_gradients: bool = False,
        compile: bool = False,
        metrics: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, eb.lion, lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize,
            policy=policy, layout=layout, flat_gradients=flat_gradients, compile=compile, metrics=metrics, seed=seed,
        )  # fmt: skip


class _WithOptionalMomentum(TorchOptimizer):
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
        momentum: Decay of the momentum; 0 keeps none.
        dampening: As torch's: not applied to the first gradient.
        weight_decay: L2 penalty.
        nesterov: Look ahead; needs momentum, and zero dampening.
        maximize: Ascend instead.
        policy: See :class:`AdamW`, as for all that follow.
        layout: See there.
        flat_gradients: See there.
        compile: See there.
        metrics: See there.
        seed: See there.
    """

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
        policy: AnyPolicy | None = None,
        layout: Layout = "auto",
        flat_gradients: bool = False,
        compile: bool = False,
        metrics: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, eb.sgd, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov,
            maximize=maximize, policy=policy, layout=layout, flat_gradients=flat_gradients, compile=compile, metrics=metrics, seed=seed,
        )  # fmt: skip


class RMSprop(_WithOptionalMomentum):
    """RMSprop, as ``torch.optim.RMSprop``; see :func:`everybit.rmsprop` and :class:`TorchOptimizer`.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate, at least zero.
        alpha: Decay rate of the running square, in [0, 1).
        eps: Added outside the root.
        weight_decay: L2 penalty.
        momentum: Decay of the momentum; 0 keeps none.
        centered: Divide by the root of the variance instead of the square.
        maximize: Ascend instead.
        policy: See :class:`AdamW`, as for all that follow.
        layout: See there.
        flat_gradients: See there.
        compile: See there.
        metrics: See there.
        seed: See there.
    """

    torch_names = TorchNames(
        {"variance": "square_avg", "mean": "grad_avg", "momentum": "momentum_buffer"}, True, _IMPLEMENTATION
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
        policy: AnyPolicy | None = None,
        layout: Layout = "auto",
        flat_gradients: bool = False,
        compile: bool = False,
        metrics: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, eb.rmsprop, lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum, centered=centered,
            maximize=maximize, policy=policy, layout=layout, flat_gradients=flat_gradients, compile=compile, metrics=metrics, seed=seed,
        )  # fmt: skip
