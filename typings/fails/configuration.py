"""Misuse of configurations, at the line that a type checker must refuse."""

from everybit_torch.config import AdamWConfig, OptimizerConfig, PolicyRule, SGDConfig, StepperConfig, load_config

OptimizerConfig(policy="LEEN_BF16")  # E: arg-type "incompatible type"
OptimizerConfig(algorithm="adamw")  # E: arg-type "incompatible type str"
OptimizerConfig(AdamWConfig())  # E: call-arg "positional"
AdamWConfig(lr="3e-4")  # E: arg-type "incompatible type str"
SGDConfig(betas=(0.9, 0.99))  # E: call-arg "betas"
StepperConfig(strategy="zero3")  # E: arg-type "incompatible type"
PolicyRule(pattern="*")  # E: call-arg "policy"
load_config(OptimizerConfig, "run.toml").lr = 1.0  # E: attr-defined "lr"
