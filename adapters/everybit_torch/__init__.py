"""everybit for torch: optimizers that stand where ``torch.optim``'s stand.

>>> from everybit_torch import AdamW
>>> import everybit as eb, torch
>>> model = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
>>> optimizer = AdamW(model.parameters(), lr=3e-4, policy=eb.policies.KAHAN_BF16)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from everybit_torch.audit.checkpoints import audit_checkpoint
from everybit_torch.audit.gate import Gate, LostUpdatesError
from everybit_torch.audit.layers import Audit, LayerAudit, load_audit
from everybit_torch.decay_groups import weight_decay_groups
from everybit_torch.drop_ins import (
    SGD,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    AnyPrecisionAdamW,
    Lion,
    Muon,
    RMSprop,
    create,
)
from everybit_torch.evaluation import evaluation_weights
from everybit_torch.optim import GradientRelease, LoadReport, RoundingLoss, TorchOptimizer, enable_gradient_release
from everybit_torch.routed import routing
from everybit_torch.torch_internals.compiler import EXACT_OPTIONS
from everybit_torch.weights import export_weights, import_weights, load_safetensors, save_safetensors

if TYPE_CHECKING:
    from everybit_torch.checkpoint.sharded import latest_checkpoint, load_sharded, load_sharded_into, save_sharded
    from everybit_torch.fsdp2 import ExactReduceScatter
    from everybit_torch.planning.plan import Plan, plan
    from everybit_torch.sharded.mixed_precision import MixedPrecision
    from everybit_torch.sharded.nonfinite_state import NonFiniteState, nonfinite_state
    from everybit_torch.sharded.options import StepperOptions
    from everybit_torch.sharded.reports import NonFinite, StepReport
    from everybit_torch.sharded.stepper import FlatStepper

# Imported on first use: torch.distributed takes a while.
_LATE = {
    "ExactReduceScatter": "fsdp2.exact_reduce_scatter",
    "FlatStepper": "sharded.stepper",
    "MixedPrecision": "sharded.mixed_precision",
    "NonFinite": "sharded.reports",
    "NonFiniteState": "sharded.nonfinite_state",
    "Plan": "planning.plan",
    "StepReport": "sharded.reports",
    "StepperOptions": "sharded.options",
    "latest_checkpoint": "checkpoint.sharded",
    "load_sharded": "checkpoint.sharded",
    "load_sharded_into": "checkpoint.sharded",
    "nonfinite_state": "sharded.nonfinite_state",
    "plan": "planning.plan",
    "save_sharded": "checkpoint.sharded",
}


_EIGHT_BITS = "load_full_state_dict takes their state in float32: docs/coming-from/eight_bit.md"
_SAVE = "torch.save and torch.load keep state dicts bit for bit; export_weights, safetensors and save_sharded stay"
_GONE = {
    **dict.fromkeys(("bitsandbytes_state_dict", "load_bitsandbytes_state_dict"), _EIGHT_BITS),
    **dict.fromkeys(("torchao_state_dict", "load_torchao_state_dict"), _EIGHT_BITS),
    **dict.fromkeys(("save_checkpoint", "load_checkpoint"), _SAVE),
    **dict.fromkeys(("freeze", "unfreeze"), "p.requires_grad_(False) freezes a parameter"),
    **{
        name: f"create({name.lower()!r}, model) makes it"
        for name in ("ASGD", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop")
    },
    "OuterOptimizer": "torchft has DiLoCo",
    "sam_weights": "docs/how-to/sharpness_aware.md has the twelve lines",
}
"""What stands in the place of names that are gone since version 0.3."""


def __getattr__(name: str) -> Any:
    """Import the names for sharded training when they are first used.

    Raises:
        ImportError: The name is gone; the message says what stands in its place.
        AttributeError: There is no such name.
    """
    if name in _GONE:
        raise ImportError(f"everybit_torch has no {name} since version 0.3; {_GONE[name]}.")
    if name not in _LATE:
        raise AttributeError(f"module 'everybit_torch' has no attribute {name!r}")
    return getattr(import_module(f"everybit_torch.{_LATE[name]}"), name)


def __dir__() -> list[str]:
    """The public names; rooms are imported by their own."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


__all__ = [
    "EXACT_OPTIONS", "SGD", "Adafactor", "Adagrad", "Adam", "AdamW", "AnyPrecisionAdamW", "Audit", "ExactReduceScatter",
    "FlatStepper", "Gate", "GradientRelease", "LayerAudit", "Lion", "LoadReport", "LostUpdatesError", "MixedPrecision",
    "Muon", "NonFinite", "NonFiniteState", "Plan", "RMSprop", "RoundingLoss", "StepReport", "StepperOptions",
    "TorchOptimizer", "audit_checkpoint", "create", "enable_gradient_release", "evaluation_weights", "export_weights",
    "import_weights", "latest_checkpoint", "load_audit", "load_safetensors", "load_sharded", "load_sharded_into",
    "nonfinite_state", "plan", "routing", "save_safetensors", "save_sharded", "weight_decay_groups",
]  # fmt: skip
