"""Transforms: the mathematics of optimizers. One module each has a state, a formula, ``init`` and ``update``."""

from everybit.transforms.adam import Amsgrad, scale_by_adam, scale_by_adam_atan2, scale_by_adamax, scale_by_nadam
from everybit.transforms.adam_variants import (
    begin_after, scale_by_adopt, scale_by_belief, scale_by_radam, scale_by_stable_adam, scale_by_yogi,
)  # fmt: skip
from everybit.transforms.averages import (
    average_weights, averaged_descent, mean_weights, power_average_weights, schedule_free,
)  # fmt: skip
from everybit.transforms.clipping import clip_by_rms, clip_by_unit_norm
from everybit.transforms.differences import proximal_decay, reduce_variance, scale_by_adan
from everybit.transforms.dion import scale_by_dion
from everybit.transforms.factored import (
    scale_by_came, scale_by_factored_rms, scale_by_parameter_rms, scale_by_torch_adafactor, subtract_relative_decay,
)  # fmt: skip
from everybit.transforms.kron import scale_by_kron
from everybit.transforms.learning_rate_free import prodigy
from everybit.transforms.matrix_wise import MatrixScale, MatrixWise, scale_by_shape
from everybit.transforms.momentum import (
    Trace, amplify_slow_gradients, running_mean, scale_by_ademamix, scale_by_running_square, trace,
)  # fmt: skip
from everybit.transforms.orthogonalize import (
    Norm, Orthogonalize, Side, UnitSides, equalize, orthogonalize, scale_by_normuon,
)  # fmt: skip
from everybit.transforms.rms import scale_by_adadelta, scale_by_adagrad, scale_by_rms
from everybit.transforms.shampoo import Damping, Grafting, scale_by_shampoo
from everybit.transforms.signs import scale_by_lion, scale_by_rprop
from everybit.transforms.soap import Correction, scale_by_soap
from everybit.transforms.trust_ratio import scale_by_lars, scale_by_trust_ratio
from everybit.transforms.updates import (
    ClipByGlobalNorm, centralize, clip, clip_by_global_norm, identity, normalize_by_global_norm, scale, scale_by_learning_rate,
    scale_by_sign, set_to_zero, zero_nans,
)  # fmt: skip
from everybit.transforms.weight_decay import (
    add_cautious_decay, add_corrected_decay, add_decayed_weights, not_norm_or_bias, subtract_decay_of_moved, subtract_decayed_weights,
)  # fmt: skip

__all__ = [
    "Amsgrad", "ClipByGlobalNorm", "Correction", "Damping", "Grafting", "MatrixScale", "MatrixWise", "Norm",
    "Orthogonalize", "Side", "Trace", "UnitSides", "add_cautious_decay", "add_corrected_decay", "add_decayed_weights",
    "amplify_slow_gradients", "average_weights", "averaged_descent", "begin_after", "centralize", "clip",
    "clip_by_global_norm", "clip_by_rms", "clip_by_unit_norm", "equalize", "identity", "mean_weights",
    "normalize_by_global_norm", "not_norm_or_bias", "orthogonalize", "power_average_weights", "prodigy",
    "proximal_decay", "reduce_variance", "running_mean", "scale", "scale_by_adadelta", "scale_by_adagrad",
    "scale_by_adam", "scale_by_adam_atan2", "scale_by_adamax", "scale_by_adan", "scale_by_ademamix", "scale_by_adopt",
    "scale_by_belief", "scale_by_came", "scale_by_dion", "scale_by_factored_rms", "scale_by_kron", "scale_by_lars",
    "scale_by_learning_rate", "scale_by_lion", "scale_by_nadam", "scale_by_normuon", "scale_by_parameter_rms",
    "scale_by_radam", "scale_by_rms", "scale_by_rprop", "scale_by_running_square", "scale_by_shampoo", "scale_by_shape",
    "scale_by_sign", "scale_by_soap", "scale_by_stable_adam", "scale_by_torch_adafactor", "scale_by_trust_ratio",
    "scale_by_yogi", "schedule_free", "set_to_zero", "subtract_decay_of_moved", "subtract_decayed_weights",
    "subtract_relative_decay", "trace", "zero_nans",
]  # fmt: skip
