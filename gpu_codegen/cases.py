"""What is compiled: every policy with four optimizers, every optimizer of the registry with one policy, and units of a sharded stepper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import everybit as eb
from everybit.combinators import needs_whole_tensors
from everybit.policies import Policy
from everybit.policies.presets import PRESETS
from everybit.protocol import any_per_tensor
from everybit.testing.own_transforms import REGISTRY
from everybit_torch import FlatStepper, MixedPrecision
from everybit_torch.flat.buffer_stepper import BufferStepper
from everybit_torch.label_resolution import Decision, choices


@dataclass(frozen=True, slots=True)
class Case:
    """A step to be compiled.

    Attributes:
        optimizer: Name of the optimizer.
        policy_name: Name of the policy.
        policy: How everything is stored.
        factory: From hyperparameters to a transform.
        arguments: The hyperparameters. Numbers are data of the step, and not part of its code.
        dtype: Of the parameters.
        gradient: dtype of the gradients.
    """

    optimizer: str
    policy_name: str
    policy: Policy
    factory: Callable[..., eb.Transform[Any]]
    arguments: Mapping[str, Any]
    dtype: torch.dtype
    gradient: torch.dtype

    @property
    def name(self) -> str:
        """The case in one line."""
        return f"{self.optimizer} under {self.policy_name}"

    @property
    def whole(self) -> bool:
        """Whether what is stepped is a matrix, which the transform must see whole, and not elements of a flat unit."""
        return needs_whole_tensors(self.factory(**self.arguments))

    @property
    def has_sums(self) -> bool:
        """Whether a step adds up elements of a tensor between its kernels: a whole tensor's, or for numbers of each parameter."""
        return self.whole or any_per_tensor([self.factory(**self.arguments)])

    @property
    def decision(self) -> Decision | None:
        """What masks and labels say of the parameters, which are those of a matrix."""
        asked = choices(self.factory(**self.arguments))
        matrix = torch.empty(2, 2, device="meta")
        return Decision(tuple(choice("weight", matrix) for choice in asked), None) if asked else None

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


_MIXED = MixedPrecision(grad_comm="bfloat16", reduce="float32")
_WIDE = eb.Grads(main="float32", comm="bfloat16", reduce="float32")

SHARDED: Sequence[tuple[str, str, eb.Policy | MixedPrecision, torch.dtype]] = (
    ("adamw", "LEAN_BF16", replace(eb.policies.LEAN_BF16, grads=_WIDE), torch.bfloat16),
    ("lion", "EXACT_BF16", replace(eb.policies.EXACT_BF16, grads=_WIDE), torch.bfloat16),
    ("adamw", "FLOOR_BF16", replace(eb.policies.FLOOR_BF16, grads=_WIDE), torch.bfloat16),
    ("clip and adamw", "TIGHT_BF16", replace(eb.policies.TIGHT_BF16, grads=_WIDE), torch.bfloat16),
    ("adamw", "MixedPrecision", _MIXED, torch.bfloat16),
    ("adamw", "MixedPrecision, float32", _MIXED, torch.float32),
)
"""Units of a sharded stepper that are compiled: main gradients of float32, sent in bfloat16; and main weights beside the model's."""


def without_blocks() -> dict[str, Policy]:
    """The presets that store one number for each element; those with blocks, whose kernels go through rows, are in ``blocks.py``."""
    return {name: policy for name, policy in PRESETS.items() if policy.block == 1}


def cases() -> list[Case]:
    """All cases."""
    dtypes = {"FP64": torch.float64, "FP32": torch.float32}
    of_policies = [
        Case(name, policy_name, policy, factory, arguments, dtype, dtype)
        for policy_name, policy in without_blocks().items()
        for dtype in [dtypes.get(policy_name, torch.bfloat16)]
        for name, (factory, arguments) in MAIN.items()
    ]
    lean, low = eb.policies.LEAN_BF16, torch.bfloat16
    of_registry = [
        Case(f"registry: {name}", "LEAN_BF16", lean, _of_registry(name), {"learning_rate": 1e-3}, low, low)
        for name in REGISTRY
    ]
    return of_policies + of_registry + [_of_stepper(*one) for one in SHARDED]


def _of_stepper(optimizer: str, policy_name: str, policy: eb.Policy | MixedPrecision, dtype: torch.dtype) -> Case:
    """The step of a unit as a stepper takes it, found out from one."""
    factory, arguments = MAIN[optimizer]
    stepper = FlatStepper(torch.nn.Linear(4, 4, bias=False, dtype=dtype), factory(**arguments), policy=policy)
    assert isinstance(stepper.engine, BufferStepper)
    made = stepper.engine.as_optimizer()
    made.place()
    (one,), (buffer,) = made.own.stepped, stepper.engine.buffers
    group, stored = one.group, one.group.policies[dtype]
    assert isinstance(stored, Policy)
    name = f"stepper: {optimizer}"
    found = Case(
        name, policy_name, stored, group.factory, group.arguments, one.of.segment.tensor.dtype, buffer.own.dtype
    )
    stepper.close()
    return found


def _of_registry(name: str) -> Callable[..., eb.Transform[Any]]:
    def build(learning_rate: Any) -> eb.Transform[Any]:
        return REGISTRY[name](learning_rate)

    return build
