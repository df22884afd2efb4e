"""Named optimizers, each a composition of transforms, in modules by family; and their registry."""

from everybit.optimizers.adam import adam, adam_atan2, adamw, stable_adamw
from everybit.optimizers.adam_variants import adabelief, adan, ademamix, adopt, laprop, mars, yogi
from everybit.optimizers.layerwise import lamb, lars
from everybit.optimizers.matrices import HiddenMatrices, Matrices, clip_beside_matrices
from everybit.optimizers.memory import adafactor, came
from everybit.optimizers.muon import muon, normuon, torch_muon
from everybit.optimizers.preconditioned import dion, kron, shampoo, soap
from everybit.optimizers.registry import Argument, NamedOptimizer, OptimizerName, optimizer_named, optimizers
from everybit.optimizers.schedule_free import schedule_free_adamw, schedule_free_radam, schedule_free_sgd
from everybit.optimizers.sgd import rmsprop, sgd
from everybit.optimizers.sign import lion, signum, tiger
from everybit.optimizers.torch_optim import adadelta, adagrad, adamax, asgd, nadam, radam, rprop, torch_adafactor

__all__ = [
    "Argument", "HiddenMatrices", "Matrices", "NamedOptimizer", "OptimizerName", "adabelief", "adadelta", "adafactor", "adagrad", "adam",
    "adam_atan2", "adamax", "adamw", "adan", "ademamix", "adopt", "asgd", "came", "clip_beside_matrices", "dion", "kron", "lamb", "laprop",
    "lars", "lion", "mars", "muon", "nadam", "normuon", "optimizer_named", "optimizers", "radam", "rmsprop", "rprop", "schedule_free_adamw",
    "schedule_free_radam", "schedule_free_sgd", "sgd", "shampoo", "signum", "soap", "stable_adamw", "tiger", "torch_adafactor",
    "torch_muon", "yogi",
]  # fmt: skip
