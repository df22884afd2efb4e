"""Sharded training: what a type checker knows."""

from typing import assert_type

from torch import Tensor, nn

import everybit as eb
from everybit_torch import FlatStepper, MixedPrecision, NonFinite, Plan, StepReport, plan

model = nn.Linear(2, 2)
stepper = FlatStepper(
    model,
    {"decay": eb.adamw(1e-3), "plain": eb.sgd(1e-3)},
    labels=lambda name, p: "decay" if p.ndim > 1 else "plain",
    policy=MixedPrecision(grad_comm="bfloat16", reduce="float32"),
    strategy=3,
    units=[nn.Linear, model],
)
report = stepper.step()
assert_type(report, StepReport)
assert_type(report.grad_norm, Tensor)
assert_type(report.nonfinite, tuple[NonFinite, ...])
assert_type(stepper.plan(), Plan)
assert_type(plan(model, eb.adamw(1e-3), ranks=(2, 4)), Plan)
assert_type(stepper.as_optimizer().step(lambda: 1.0), float | None)
