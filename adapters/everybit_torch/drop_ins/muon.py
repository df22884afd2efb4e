"""Muon with ``torch.optim``'s signature: for matrices alone."""

from __future__ import annotations

from typing import Any, Literal, Unpack

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

import everybit as eb
from everybit_torch.drop_ins.drop_in import DropIn, Options
from everybit_torch.optim import Params, TorchNames


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
