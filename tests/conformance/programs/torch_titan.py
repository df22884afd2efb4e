"""torchtitan's ``--override.imports``: its parser, its registry, its container, its flat state dict."""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import small
import torch
from torchtitan.components.optimizer import OptimizersContainer, default_adamw
from torchtitan.config import Configurable, apply_overrides

parser: Any = import_module("torchtitan.config.override")


class Job(Configurable):
    """The two parts of torchtitan's configuration that are looked at here."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """An optimizer, and overrides."""

        optimizer: OptimizersContainer.Config
        override: Any = field(default_factory=parser.OverrideConfig)


job = Job.Config(optimizer=default_adamw(lr=1e-2))
given = ['everybit_torch.names.torchtitan.everybit={"policy": "LEAN_BF16", "seed": 3}']
job.override.imports = parser.parse_cli_imports(given)
apply_overrides(job.override, job)

model = small.model()
container = job.optimizer.build(model_parts=[model])
(optimizer,) = container.optimizers
small.require_policy(optimizer)
assert optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
small.train(model, container)
saved = {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in container.state_dict().items()}
assert int(saved["state.0.weight.step"]) == 3

again = small.model()
again.load_state_dict(model.state_dict())
resumed = job.optimizer.build(model_parts=[again])
resumed.load_state_dict(saved)
small.require_same(small.train(model, container), small.train(again, resumed))

job = Job.Config(optimizer=default_adamw(lr=1e-2))
job.optimizer.implementation = "fused_opt_states_bf16"
job.override.imports = parser.parse_cli_imports(given)
with pytest.raises(ValueError, match="accepted is 'fused', with a policy"):
    apply_overrides(job.override, job)
