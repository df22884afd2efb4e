"""What is compiled: every policy with four optimizers, and every optimizer of the registry with one policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import everybit as eb
from everybit.policies import PRESETS
from everybit.policy import Policy
from everybit.testing.registry import REGISTRY
from everybit_torch.choosing import Decision, choices


@dataclass(frozen=True, slots=True)
class Case:
    """A step to be compiled.

    Attributes:
        optimizer: Name of the optimizer.
        policy_name: Name of the policy.
        policy: How everything is stored.
        factory: From hyperparameters to a transform.
        arguments: The hyperparameters. Numbers are data of the step, and not part of its code.
    """

    optimizer: str
    policy_name: str
    policy: Policy
    factory: Callable[..., eb.Transform[Any]]
    arguments: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The case in one line."""
        return f"{self.optimizer} under {self.policy_name}"

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters and gradients."""
        return {"FP64": torch.float64, "FP32": torch.float32}.get(self.policy_name, torch.bfloat16)

    @property
    def decision(self) -> Decision | None:
        """What masks and labels say of the parameters, which are those of a matrix."""
        asked = choices(self.factory(**self.arguments))
        matrix = torch.empty(2, 2, device="meta")
        return Decision(tuple(choice("", matrix) for choice in asked), None) if asked else None

    @property
    def built(self) -> eb.Optimizer[Any]:
        """The optimizer of uncompiled steps."""
        optimizer: eb.Optimizer[Any] = eb.Optimizer(self.factory(**self.arguments), self.policy, 7)
        return optimizer if self.decision is None else self.decision.applied(optimizer)


def _clipped_adamw(learning_rate: Any, max_norm: Any, b1: Any, b2: Any, eps: Any, weight_decay: Any) -> Any:
    adamw = eb.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    return eb.chain(eb.clip_by_global_norm(max_norm), adamw)


_ADAM = {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.01}

MAIN: Mapping[str, tuple[Callable[..., eb.Transform[Any]], Mapping[str, Any]]] = {
    "adamw": (eb.adamw, _ADAM),
    "lion": (eb.lion, {"learning_rate": 1e-4, "b1": 0.9, "b2": 0.95, "weight_decay": 0.1}),
    "sgd with momentum": (eb.sgd, {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "clip and adamw": (_clipped_adamw, {**_ADAM, "max_norm": 1.0}),
}
"""Optimizers that are compiled under every policy, with their hyperparameters."""


def cases() -> list[Case]:
    """All cases."""
    of_policies = [
        Case(name, policy_name, policy, factory, arguments)
        for policy_name, policy in PRESETS.items()
        for name, (factory, arguments) in MAIN.items()
    ]
    lean = eb.policies.LEAN_BF16
    of_registry = [
        Case(f"registry: {name}", "LEAN_BF16", lean, _of_registry(name), {"learning_rate": 1e-3}) for name in REGISTRY
    ]
    return of_policies + of_registry


def _of_registry(name: str) -> Callable[..., eb.Transform[Any]]:
    def build(learning_rate: Any) -> eb.Transform[Any]:
        return REGISTRY[name](learning_rate)

    return build
