"""Wrong compositions."""

from __future__ import annotations

import everybit as eb
import torch

opt = eb.with_policy(eb.adamw(1e-3), eb.policies.FP32)
params = {"w": torch.ones(2)}
state = opt.init(params)

eb.chain(eb.clip(1.0), opt)  # E: arg-type "Optimizer"
eb.masked(opt, {"w": True})  # E: arg-type "Optimizer"
eb.with_policy(opt, eb.policies.FP32)  # E: arg-type "Optimizer"
eb.with_policy(eb.adamw(1e-3), "FP32")  # E: arg-type "Policy | ByLabel"
eb.with_metrics(eb.adamw(1e-3))  # E: arg-type "Chain"
eb.adamw(learning_rte=1e-3)  # E: call-arg "learning_rte"
eb.adamw("0.1")  # E: arg-type "float | Tensor"
eb.Context(loss=torch.ones(()))  # E: call-arg "loss"
new: list[torch.Tensor] = opt.step(params, params, state)[0]  # E: assignment "list[Tensor]"
opt.step(params, params)  # E: call-arg "state"
