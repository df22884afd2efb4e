"""Schedules: hyperparameters as functions of the step."""

from everybit.schedules.basic import (
    constant_schedule, cosine_decay_schedule, join_schedules, linear_schedule, warmup_cosine_decay_schedule, warmup_stable_decay_schedule,
)  # fmt: skip
from everybit.schedules.decay import (
    exponential_decay_schedule, inverse_sqrt_schedule, polynomial_schedule, power_cooldown_schedule, relative_step_schedule,
    warmup_constant_schedule, warmup_exponential_decay_schedule,
)  # fmt: skip
from everybit.schedules.piecewise import (
    cosine_one_cycle_schedule, cosine_restarts_schedule, linear_one_cycle_schedule, one_cycle_schedule, piecewise_constant_schedule,
    piecewise_interpolate_schedule, sgdr_schedule,
)  # fmt: skip

__all__ = [
    "constant_schedule", "cosine_decay_schedule", "cosine_one_cycle_schedule", "cosine_restarts_schedule", "exponential_decay_schedule",
    "inverse_sqrt_schedule", "join_schedules", "linear_one_cycle_schedule", "linear_schedule", "one_cycle_schedule",
    "piecewise_constant_schedule", "piecewise_interpolate_schedule", "polynomial_schedule", "power_cooldown_schedule",
    "relative_step_schedule", "sgdr_schedule", "warmup_constant_schedule", "warmup_cosine_decay_schedule",
    "warmup_exponential_decay_schedule", "warmup_stable_decay_schedule",
]  # fmt: skip
