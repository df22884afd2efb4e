"""Wrong compositions."""

from __future__ import annotations

import torch

import everybit as eb

opt = eb.with_policy(eb.adamw(1e-3), eb.policies.FP32)
params = {"w": torch.ones(2)}
state = opt.init(params)

eb.chain(eb.clip(1.0), opt)  # E: arg-type "Optimizer"
eb.masked(opt, {"w": True})  # E: arg-type "Optimizer"
eb.with_policy(opt, eb.policies.FP32)  # E: arg-type "Optimizer"
eb.with_policy(eb.adamw(1e-3), "FP23")  # E: arg-type "expected Policy | ByLabel | Literal['FP64'"
eb.with_metrics(eb.adamw(1e-3))  # E: arg-type "Chain"
eb.adamw(learning_rte=1e-3)  # E: call-arg "learning_rte"
eb.adamw("0.1")  # E: arg-type "float | Tensor"
eb.Context(loss=torch.ones(()))  # E: call-arg "loss"
new: list[torch.Tensor] = opt.step(params, params, state)[0]  # E: assignment "list[Tensor]"
opt.step(params, params)  # E: call-arg "state"
opt.step(params, [torch.ones(2)], state)[0]["w"]  # E: index "is not indexable"
opt.update(params, state, params)  # E: attr-defined "has no attribute update"
eb.chain([eb.clip(1.0), eb.trace(0.9)])  # E: arg-type "incompatible type list["
eb.named_chain({"end": opt})  # E: dict-item "Optimizer"
eb.partition({"all": opt}, "all")  # E: dict-item "Optimizer"
eb.accumulate(opt, every=2)  # E: arg-type "Optimizer"
eb.apply_if_finite(opt)  # E: arg-type "Optimizer"
eb.with_policy(eb.adamw(1e-3), eb.policies.FP32, unsafe="ignore")  # E: arg-type "Literal['refuse', 'warn', 'allow']"
eb.adamw(1e-3, betas=(0.9, 0.95))  # E: call-arg "betas"
eb.adamw(1e-3, 0.9)  # E: call-arg "Too many positional arguments"
eb.linear_schedule(1.0, 0.0, 2.5)  # E: arg-type "expected int"
eb.scale(2.0).factor = 3.0  # E: misc "read-only"


def small(step: torch.Tensor) -> str:
    return "small"


eb.sgd(small)  # E: arg-type "Callable[[Tensor], str]"
