"""everybit for torch: optimizers that stand where ``torch.optim``'s stand.

>>> from everybit_torch import AdamW
>>> import everybit as eb, torch
>>> model = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
>>> optimizer = AdamW(model.parameters(), lr=3e-4, policy=eb.policies.KAHAN_BF16)
"""

from everybit_torch.any_precision import AnyPrecisionAdamW
from everybit_torch.checkpoint_file import load_checkpoint, save_checkpoint
from everybit_torch.drop_ins import SGD, Adam, AdamW, Lion, RMSprop
from everybit_torch.gradient_release import GradientRelease, enable_gradient_release
from everybit_torch.optimizer import TorchOptimizer
from everybit_torch.state_dicts import RoundingLoss
from everybit_torch.weights import export_weights, import_weights, load_safetensors, save_safetensors

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "AnyPrecisionAdamW",
    "GradientRelease",
    "Lion",
    "RMSprop",
    "RoundingLoss",
    "TorchOptimizer",
    "enable_gradient_release",
    "export_weights",
    "import_weights",
    "load_checkpoint",
    "load_safetensors",
    "save_checkpoint",
    "save_safetensors",
]
