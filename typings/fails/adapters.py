"""Wrong arguments to the torch adapters."""

from __future__ import annotations

import torch

import everybit as eb
from everybit_torch import AdamW, AnyPrecisionAdamW, create

model = torch.nn.Linear(2, 2)

AdamW(model.parameters(), policy="KAHAN_BF61")  # E: arg-type "expected Policy | ByLabel | Literal['FP64'"
AdamW(model.parameters(), layout="flat")  # E: call-arg "layout"
AdamW(model.parameters(), learning_rate=0.1)  # E: call-arg "learning_rate"
AdamW(model.parameters(), betas=0.9)  # E: arg-type "tuple"
AdamW(model, policy=eb.policies.FP32)  # E: arg-type "Linear"
AnyPrecisionAdamW(model.parameters(), momentum_dtype="bfloat16")  # E: arg-type "dtype"
AnyPrecisionAdamW(model.parameters(), variance_rounding="up")  # E: arg-type "Literal['up']"
create("adammw", model)  # E: arg-type "Literal['adammw']"
create("adamw", model, policy="LEAN")  # E: arg-type "Literal['LEAN']"
create("adamw", model, betas="0.9, 0.95")  # E: arg-type "str"
create("adamw", model.state_dict())  # E: arg-type "dict[str, Any]"
eb.optimizers()["adammw"]  # E: index "Literal['adammw']"
