"""The optimizer: a transform under a policy, its state by name, its metrics, and updates without a policy."""

from everybit.stepping.applying import apply_updates
from everybit.stepping.edits import require_factors, scale_rows
from everybit.stepping.metrics import Metrics, with_metrics
from everybit.stepping.optimizer import Optimizer, OptimizerState, StepTrace, Unsafe, nbytes, state_bytes, with_policy

__all__ = [
    "Metrics", "Optimizer", "OptimizerState", "StepTrace", "Unsafe", "apply_updates", "nbytes", "require_factors", "scale_rows",
    "state_bytes", "with_metrics", "with_policy",
]  # fmt: skip
