"""Optimizers for lerobot: ``--optimizer.discover_packages_path=everybit_torch.names.lerobot --optimizer.type=everybit_adamw``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lerobot.optim.optimizers import OptimizerConfig

from everybit.stepping.entries import VERSION, VERSION_KEY
from everybit_torch.drop_ins import AdamW
from everybit_torch.optim import LoadReport

__path__: list[str] = []  # lerobot looks for modules inside of what it imports


class EverybitAdamW(AdamW):
    """:class:`everybit_torch.AdamW` with a state dict for safetensors: of tensors with memory of their own, and of param groups."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict without the version of its format, which is no tensor."""
        found = super().state_dict()
        found["state"] = {number: {k: x.clone() for k, x in own.items()} for number, own in found["state"].items()}
        del found[VERSION_KEY]
        return found

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> LoadReport:  # type: ignore[override]
        """Load what :meth:`state_dict` returned."""
        return super().load_state_dict({VERSION_KEY: VERSION, **state_dict}, strict=strict)


@OptimizerConfig.register_subclass("everybit_adamw")
@dataclass
class EverybitAdamWConfig(OptimizerConfig):
    """:class:`everybit_torch.AdamW`, as lerobot's files and command line give it."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    grad_clip_norm: float = 10.0
    policy: str | None = None  # lerobot's parser knows no Literal
    seed: int = 0

    def build(self, params: Any) -> EverybitAdamW:
        """Return the optimizer; lerobot itself clips."""
        given: Any = params.items() if isinstance(params, dict) else params
        options: Any = {"policy": self.policy, "seed": self.seed}
        return EverybitAdamW(list(given), self.lr, self.betas, self.eps, self.weight_decay, **options)
