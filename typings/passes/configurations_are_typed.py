"""Configurations as users write them."""

from __future__ import annotations

from typing import assert_type

from torch import nn

import everybit as eb
from everybit_torch import FlatStepper, TorchOptimizer
from everybit_torch.config import (
    AdamWConfig,
    OptimizerConfig,
    PolicyByName,
    PolicyRule,
    StepperConfig,
    config_from_dict,
    load_config,
)

by_name = PolicyByName(
    rules=[PolicyRule(pattern="*norm*", policy="EXACT_BF16"), PolicyRule(pattern="embed.*", policy=eb.Policy())],
    otherwise=eb.policies.LEAN_BF16,
)
config = OptimizerConfig(algorithm=AdamWConfig(lr=3e-4, betas=(0.9, 0.95)), policy=by_name, no_decay=["*.bias"])
assert_type(config.build(nn.Linear(1, 1)), TorchOptimizer)
assert_type(load_config(StepperConfig, "run.toml"), StepperConfig)
stepper = config_from_dict(StepperConfig, {"units": ["Block"]})
assert_type(stepper.build(nn.Linear(1, 1)), FlatStepper)
StepperConfig(policy="LEAN_BF16", strategy="optim_grads_params", units=("Block",))
