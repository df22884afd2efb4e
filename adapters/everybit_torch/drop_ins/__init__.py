"""Classes with torch's names and arguments, and optimizers by name."""

from everybit_torch.drop_ins.adam import Adam, Adamax, AdamW, NAdam, RAdam
from everybit_torch.drop_ins.adaptive import Adadelta, Adafactor, Adagrad
from everybit_torch.drop_ins.any_precision import AnyPrecisionAdamW
from everybit_torch.drop_ins.creating import CLASSES, create, for_model
from everybit_torch.drop_ins.momentum import ASGD, SGD, Lion, Muon, RMSprop, Rprop, lion

__all__ = [
    "ASGD", "CLASSES", "SGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "AnyPrecisionAdamW", "Lion", "Muon", "NAdam",
    "RAdam", "RMSprop", "Rprop", "create", "for_model", "lion",
]  # fmt: skip
