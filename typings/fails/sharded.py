"""Sharded training: what a type checker refuses."""

from __future__ import annotations

from torch import nn

import everybit as eb
from everybit_torch import ExactReduceScatter, FlatStepper, MixedPrecision, plan

model = nn.Linear(2, 2)
FlatStepper(model, eb.adamw(1e-3), strategy="zero3")  # E: arg-type "Literal['zero3']"
FlatStepper(model, eb.adamw(1e-3), outer="all")  # E: arg-type "Literal['no_shard', 'optim']"
FlatStepper(model, eb.adamw(1e-3), nan="always")  # E: arg-type "Literal['off', 'step', 'param']"
FlatStepper(model, eb.adamw(1e-3), policy="bf16")  # E: arg-type "expected Policy | ByLabel | Literal['FP64'"
FlatStepper(model, eb.adamw)  # E: arg-type "def adamw"
FlatStepper(model, eb.adamw(1e-3), units=["Block"])  # E: list-item "type[Module] | Module"
MixedPrecision(main_params="bf16")  # E: arg-type "Literal['float64', 'float32', 'bfloat16', 'float16'] | None"
MixedPrecision(reduce="fp64")  # E: arg-type "Literal['native', 'float32']"
ExactReduceScatter("float32")  # E: arg-type "Literal['bfloat16', 'float16']"
plan(model, eb.adamw(1e-3), ranks="all")  # E: arg-type "int | tuple[int, int]"
stepper = FlatStepper(model, eb.adamw(1e-3))
stepper.microbatch()  # E: call-arg "last"
stepper.set_grad_comm("fp8")  # E: arg-type "Literal['fp8']"
