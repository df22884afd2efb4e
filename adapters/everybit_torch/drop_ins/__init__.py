"""Classes with torch's names and arguments, and optimizers by name."""

from everybit_torch.drop_ins.any_precision import AnyPrecisionAdamW
from everybit_torch.drop_ins.classes import SGD, Adam, AdamW, Lion, RMSprop, lion
from everybit_torch.drop_ins.creating import CLASSES, create, for_model
from everybit_torch.drop_ins.more_classes import (
    ASGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adamax,
    Muon,
    NAdam,
    RAdam,
    Rprop,
)

__all__ = [
    "ASGD", "CLASSES", "SGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "AnyPrecisionAdamW", "Lion", "Muon", "NAdam",
    "RAdam", "RMSprop", "Rprop", "create", "for_model", "lion",
]  # fmt: skip
