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
from everybit_torch.checkpoint.single_file import load_checkpoint, save_checkpoint
from everybit_torch.drop_ins import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    AnyPrecisionAdamW,
    Lion,
    Muon,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
    create,
)
from everybit_torch.interop.bitsandbytes import bitsandbytes_state_dict, load_bitsandbytes_state_dict
from everybit_torch.interop.torchao import load_torchao_state_dict, torchao_state_dict
from everybit_torch.interop.weights import export_weights, import_weights, load_safetensors, save_safetensors
from everybit_torch.optim import GradientRelease, LoadReport, RoundingLoss, TorchOptimizer, enable_gradient_release
from everybit_torch.routing import routing
from everybit_torch.torch_internals.compiler import EXACT_OPTIONS
from everybit_torch.training.evaluation import evaluation_weights
from everybit_torch.training.freezing import freeze, unfreeze
from everybit_torch.training.outer import OuterOptimizer
from everybit_torch.training.sharpness import sam_weights
from everybit_torch.training.weight_decay import weight_decay_groups

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


def __getattr__(name: str) -> Any:
    """Import the names for sharded training when they are first used."""
    if name not in _LATE:
        raise AttributeError(f"module 'everybit_torch' has no attribute {name!r}")
    return getattr(import_module(f"everybit_torch.{_LATE[name]}"), name)


def __dir__() -> list[str]:
    """The public names; rooms are imported by their own."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


__all__ = [
    "ASGD",
    "EXACT_OPTIONS",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "AnyPrecisionAdamW",
    "Audit",
    "ExactReduceScatter",
    "FlatStepper",
    "Gate",
    "GradientRelease",
    "LayerAudit",
    "Lion",
    "LoadReport",
    "LostUpdatesError",
    "MixedPrecision",
    "Muon",
    "NAdam",
    "NonFinite",
    "NonFiniteState",
    "OuterOptimizer",
    "Plan",
    "RAdam",
    "RMSprop",
    "RoundingLoss",
    "Rprop",
    "StepReport",
    "StepperOptions",
    "TorchOptimizer",
    "audit_checkpoint",
    "bitsandbytes_state_dict",
    "create",
    "enable_gradient_release",
    "evaluation_weights",
    "export_weights",
    "freeze",
    "import_weights",
    "latest_checkpoint",
    "load_audit",
    "load_bitsandbytes_state_dict",
    "load_checkpoint",
    "load_safetensors",
    "load_sharded",
    "load_sharded_into",
    "load_torchao_state_dict",
    "nonfinite_state",
    "plan",
    "routing",
    "sam_weights",
    "save_checkpoint",
    "save_safetensors",
    "save_sharded",
    "torchao_state_dict",
    "unfreeze",
    "weight_decay_groups",
]
