"""Adam and its variants with ``torch.optim``'s signatures, plus :class:`~everybit_torch.drop_ins.drop_in.Options`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

import everybit as eb
from everybit.policies import PolicyOrName
from everybit_torch.drop_ins.drop_in import IMPLEMENTATION, AdamOptions, DropIn
from everybit_torch.optim import Params, TorchNames
from everybit_torch.segments import Compile

_MOMENTS = {"momentum": "exp_avg", "variance": "exp_avg_sq", "max_variance": "max_exp_avg_sq"}
_FULLY_DECOUPLED: Mapping[str, Any] = {"fully_decoupled": False, "max_learning_rate": None}


class AdamW(DropIn):
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``; see :func:`everybit.adamw` and :class:`TorchOptimizer`.

    ``AdamW.from_torch(optimizer)`` takes over from an optimizer of torch's: :meth:`DropIn.from_torch`.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate, at least zero; a float or a 0-d tensor.
        betas: Decay rates of the first and the second moment, in [0, 1).
        eps: Added outside the root.
        weight_decay: A step shrinks a parameter by ``lr * weight_decay`` of itself.
        amsgrad: Divide by the greatest running square so far; one slot more.
        maximize: Ascend instead.
        fully_decoupled: A step shrinks a parameter by ``weight_decay`` of itself instead, scaled by ``lr / max_learning_rate`` if the
            latter is given.
        max_learning_rate: The schedule's greatest value; only with ``fully_decoupled``.
        policy: How parameters and state are stored: a policy, or the name of one in :mod:`everybit.policies`. None: as the model is, for
            float32 and float64 models alone.
        average: The decay rate of a moving average of the weights (EMA), such as 0.999; see :class:`TorchOptimizer`.
        compile: Compile the step; ``"auto"``: for large models.
        metrics: Measure every step; see :meth:`TorchOptimizer.metrics`.
        seed: The seed of stochastic rounding.
        options: See :class:`Options`. The other arguments of :func:`everybit.adamw` are taken, too.

    Raises:
        TypeError: A parameter that is not a real floating-point tensor; an unknown argument, with the nearest known argument.
        ValueError: A hyperparameter out of range, a policy that cannot work, or an argument of torch's that selects another
            implementation.

    Examples:
        >>> import torch, everybit as eb
        >>> from everybit_torch import AdamW
        >>> model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
        >>> optimizer = AdamW(model.parameters(), lr=3e-4, policy=eb.policies.KAHAN_BF16)
    """

    torch_class = torch.optim.AdamW
    torch_names = TorchNames(
        _MOMENTS,
        True,
        {**IMPLEMENTATION, "fused": None, "decoupled_weight_decay": True},
        _FULLY_DECOUPLED,
    )
    _decoupled = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        fully_decoupled: bool = False,
        max_learning_rate: float | None = None,
        policy: PolicyOrName | None = None,
        average: float | Tensor | None = None,
        compile: Compile = "auto",
        metrics: bool = False,
        seed: int = 0,
        **options: Unpack[AdamOptions],
    ) -> None:
        super().__init__(
            params, eb.adamw, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize,
            fully_decoupled=fully_decoupled, max_learning_rate=max_learning_rate, policy=policy, average=average, compile=compile,
            metrics=metrics, seed=seed, **options,
        )  # fmt: skip


class Adam(DropIn):
    """Adam with an L2 penalty, as ``torch.optim.Adam``; arguments as :class:`AdamW`'s.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate, at least zero.
        betas: Decay rates of the first and the second moment, in [0, 1).
        eps: Added outside the root.
        weight_decay: L2 penalty.
        amsgrad: Divide by the greatest running square so far.
        maximize: Ascend instead.
        policy: How parameters and state are stored: a policy, or the name of one in :mod:`everybit.policies`. None: as the model is, for
            float32 and float64 models alone.
        average: The decay rate of a moving average of the weights (EMA), such as 0.999; see :class:`TorchOptimizer`.
        compile: Compile the step; ``"auto"``: for large models.
        metrics: Measure every step; see :meth:`TorchOptimizer.metrics`.
        seed: The seed of stochastic rounding.
        options: See :class:`Options`.
    """

    torch_class = torch.optim.Adam
    torch_names = TorchNames(_MOMENTS, True, {**IMPLEMENTATION, "fused": None, "decoupled_weight_decay": False})
    _decoupled = False

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        policy: PolicyOrName | None = None,
        average: float | Tensor | None = None,
        compile: Compile = "auto",
        metrics: bool = False,
        seed: int = 0,
        **options: Unpack[AdamOptions],
    ) -> None:
        super().__init__(
            params, eb.adam, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize,
            policy=policy, average=average, compile=compile, metrics=metrics, seed=seed, **options,
        )  # fmt: skip
