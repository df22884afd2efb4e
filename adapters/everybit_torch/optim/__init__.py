"""``torch.optim.Optimizer`` over everybit's transforms: param groups, state dicts, and steps of parameters where they lie."""

from everybit_torch.optim.changes import Changed
from everybit_torch.optim.gradient_release import GradientRelease, enable_gradient_release
from everybit_torch.optim.groups import Group, GroupMaker
from everybit_torch.optim.interfaces import TorchNames
from everybit_torch.optim.param_groups import Params, named_by, names_of, require_float64
from everybit_torch.optim.parameters import Own, Stepped
from everybit_torch.optim.planned import parameters_of
from everybit_torch.optim.state_dicts.full_precision import (
    LoadReport, RoundingLoss, decoded_all, load_all, rounding_loss,
)  # fmt: skip
from everybit_torch.optim.state_dicts.full_weights import FLOATS
from everybit_torch.optim.state_dicts.saved_structure import Saved, names, read, shown
from everybit_torch.optim.state_dicts.state_schema import as_count, require_tensor
from everybit_torch.optim.torch_optimizer import TorchOptimizer
from everybit_torch.optim.watching import require_watched

__all__ = [
    "FLOATS", "Changed", "GradientRelease", "Group", "GroupMaker", "LoadReport", "Own", "Params",
    "RoundingLoss", "Saved", "Stepped", "TorchNames", "TorchOptimizer", "as_count", "decoded_all",
    "enable_gradient_release", "load_all", "named_by", "names", "names_of", "parameters_of", "read", "require_float64",
    "require_tensor", "require_watched", "rounding_loss", "shown",
]  # fmt: skip
