"""Classes with torch's names and arguments, and optimizers by name."""

from everybit_torch.drop_ins.adam import Adam, AdamW
from everybit_torch.drop_ins.adaptive import Adafactor, Adagrad
from everybit_torch.drop_ins.any_precision import AnyPrecisionAdamW
from everybit_torch.drop_ins.creating import CLASSES, create, for_model
from everybit_torch.drop_ins.momentum import SGD, Lion, Muon, RMSprop, lion

__all__ = [
    "CLASSES", "SGD", "Adafactor", "Adagrad", "Adam", "AdamW", "AnyPrecisionAdamW", "Lion", "Muon", "RMSprop", "create", "for_model",
    "lion",
]  # fmt: skip
