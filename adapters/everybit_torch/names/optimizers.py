"""Optimizers whose arguments are all plain values, so that other programs can give them from a command line or a file."""

from __future__ import annotations

from torch import Tensor

from everybit.policy_names import PolicyName
from everybit_torch import drop_ins
from everybit_torch.optimizer import Layout
from everybit_torch.param_groups import Params
from everybit_torch.stepping import Compile


class EverybitAdamW(drop_ins.AdamW):
    """:class:`everybit_torch.AdamW`, with the policy by name.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate, at least zero.
        betas: Decay rates of the first and the second moment, in [0, 1).
        eps: Added outside the root.
        weight_decay: A step shrinks a parameter by ``lr * weight_decay`` of itself.
        policy: A preset's name, such as ``"LEAN_BF16"``; None for float32 and float64 models only.
        layout: ``"auto"``, ``"flat"`` or ``"tree"``.
        flat_gradients: Accumulate gradients in one buffer.
        compile: Compile the step.
        metrics: Measure every step.
        seed: Of stochastic rounding.

    Raises:
        ValueError: A name of no preset, or what :class:`everybit_torch.AdamW` refuses.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        policy: PolicyName | None = None,
        layout: Layout = "auto",
        flat_gradients: bool = False,
        compile: Compile = "auto",
        metrics: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, policy=policy, layout=layout, flat_gradients=flat_gradients,
            compile=compile, metrics=metrics, seed=seed,
        )  # fmt: skip


class EverybitLion(drop_ins.Lion):
    """:class:`everybit_torch.Lion`, with the policy by name; see :class:`EverybitAdamW`."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        policy: PolicyName | None = None,
        layout: Layout = "auto",
        flat_gradients: bool = False,
        compile: Compile = "auto",
        metrics: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, lr, betas, weight_decay, policy=policy, layout=layout, flat_gradients=flat_gradients,
            compile=compile, metrics=metrics, seed=seed,
        )  # fmt: skip


class EverybitSGD(drop_ins.SGD):
    """:class:`everybit_torch.SGD`, with the policy by name; see :class:`EverybitAdamW`."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        policy: PolicyName | None = None,
        layout: Layout = "auto",
        flat_gradients: bool = False,
        compile: Compile = "auto",
        metrics: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov, policy=policy, layout=layout,
            flat_gradients=flat_gradients, compile=compile, metrics=metrics, seed=seed,
        )  # fmt: skip


OPTIMIZERS = {"adamw": EverybitAdamW, "lion": EverybitLion, "sgd": EverybitSGD}
