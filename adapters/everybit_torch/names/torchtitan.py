"""Optimizers for torchtitan.

    --override.imports 'everybit_torch.names.torchtitan.everybit={"policy": "LEAN_BF16"}' --training.dtype bfloat16

``optimizer_name`` of a param group may be any of :func:`everybit.optimizers`; ``Adam`` and ``AdamW`` are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import derive, override

from everybit_torch.drop_ins import create


class EverybitOptimizers(OptimizersContainer):
    """torchtitan's container of optimizers, with everybit's in it."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """torchtitan's options."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        def factory(groups: list[dict[str, Any]], **options: Any) -> Optimizer:
            named = [dict(one, params=list(zip(one.pop("param_names"), one["params"], strict=True))) for one in groups]
            return create(name.lower(), named, **options)  # type: ignore[arg-type]  # which refuses others by name

        return factory

    @staticmethod
    def _build_impl_kwargs(config: Any) -> dict[str, Any]:  # noqa: ARG004  # fused and foreach choose among torch's
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return torchtitan's state dict, after making state without a step: torchtitan's way is a step, which counts."""
        for optimizer in self.optimizers:
            optimizer.prepare()
        return super().state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torchtitan's state dict."""
        for optimizer in self.optimizers:
            optimizer.prepare()
        super().load_state_dict(state_dict)


@override(target=OptimizersContainer.Config, description="everybit's optimizers, under a policy")
def everybit(config: Any, **options: Any) -> Any:
    """Return a configuration of everybit's optimizers; ``options`` are those of :func:`everybit_torch.create`: a policy, a seed."""
    if config.implementation == "fused_opt_states_bf16":
        raise ValueError("implementation: got 'fused_opt_states_bf16'; accepted is 'fused', with a policy.")
    names = {group.optimizer_name for group in config.param_groups}
    return derive(config, EverybitOptimizers.Config, optimizer_factory_kwargs_by_name=dict.fromkeys(names, options))
