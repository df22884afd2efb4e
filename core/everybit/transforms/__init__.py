"""Transforms: the mathematics of optimizers. One module each has a state, a formula, ``init`` and ``update``."""

from everybit.transforms.adadelta import scale_by_adadelta
from everybit.transforms.adafactor import scale_by_factored_rms, scale_by_parameter_rms, subtract_relative_decay
from everybit.transforms.adagrad import scale_by_adagrad
from everybit.transforms.adam import Amsgrad, scale_by_adam
from everybit.transforms.adam_atan2 import scale_by_adam_atan2
from everybit.transforms.adam_mini import AdamMiniBlocks, scale_by_adam_mini
from everybit.transforms.adamax import scale_by_adamax
from everybit.transforms.adan import proximal_decay, scale_by_adan
from everybit.transforms.adaptive_clipping import clip_by_rms, clip_by_unit_norm, clip_by_z_score
from everybit.transforms.ademamix import scale_by_ademamix
from everybit.transforms.adopt import begin_after, scale_by_adopt
from everybit.transforms.apollo import ScaledBy, scale_by_apollo
from everybit.transforms.asgd import averaged_descent
from everybit.transforms.averages import average_weights, mean_weights, power_average_weights
from everybit.transforms.belief import scale_by_belief
from everybit.transforms.came import scale_by_came
from everybit.transforms.cleaning import add_noise, centralize, normalize_by_global_norm, zero_nans
from everybit.transforms.d_adaptation import dadapt_adam
from everybit.transforms.decay_variants import add_cautious_decay, add_corrected_decay, subtract_decay_of_moved
from everybit.transforms.dion import scale_by_dion
from everybit.transforms.equalize import Sides, equalize, require_sides
from everybit.transforms.grokfast import amplify_slow_gradients
from everybit.transforms.kron import scale_by_kron
from everybit.transforms.lion import scale_by_lion
from everybit.transforms.matrix_wise import MatrixWise, Scale, scale_by_shape
from everybit.transforms.nadam import scale_by_nadam
from everybit.transforms.normuon import Norm, Side, scale_by_normuon
from everybit.transforms.novograd import scale_by_novograd
from everybit.transforms.orthogonalize import orthogonalize
from everybit.transforms.prodigy import prodigy
from everybit.transforms.radam import scale_by_radam
from everybit.transforms.rms import scale_by_rms
from everybit.transforms.rprop import scale_by_rprop
from everybit.transforms.running_mean import running_mean, scale_by_running_square
from everybit.transforms.schedule_free import schedule_free
from everybit.transforms.shampoo import Damping, Graft, scale_by_shampoo
from everybit.transforms.sm3 import scale_by_sm3
from everybit.transforms.soap import Correction, scale_by_soap
from everybit.transforms.stable_adam import scale_by_stable_adam
from everybit.transforms.stateless import (
    ClipByGlobalNorm,
    clip,
    clip_by_global_norm,
    identity,
    scale,
    scale_by_learning_rate,
    scale_by_sign,
    set_to_zero,
)
from everybit.transforms.torch_adafactor import scale_by_torch_adafactor
from everybit.transforms.trace import trace
from everybit.transforms.trust_ratio import scale_by_lars, scale_by_trust_ratio
from everybit.transforms.variance_reduction import reduce_variance
from everybit.transforms.weight_decay import add_decayed_weights, not_norm_or_bias, subtract_decayed_weights
from everybit.transforms.yogi import scale_by_yogi

__all__ = [
    "AdamMiniBlocks", "Amsgrad", "ClipByGlobalNorm", "Correction", "Damping", "Graft", "MatrixWise", "Norm", "Scale", "ScaledBy",
    "Side", "Sides", "add_cautious_decay", "add_corrected_decay", "add_decayed_weights", "add_noise", "amplify_slow_gradients",
    "average_weights", "averaged_descent", "begin_after", "centralize", "clip", "clip_by_global_norm", "clip_by_rms",
    "clip_by_unit_norm", "clip_by_z_score", "dadapt_adam", "equalize", "identity", "mean_weights", "normalize_by_global_norm",
    "not_norm_or_bias", "orthogonalize", "power_average_weights", "prodigy", "proximal_decay", "reduce_variance", "require_sides",
    "running_mean", "scale", "scale_by_adadelta", "scale_by_adagrad", "scale_by_adam", "scale_by_adam_atan2", "scale_by_adam_mini",
    "scale_by_adamax", "scale_by_adan", "scale_by_ademamix", "scale_by_adopt", "scale_by_apollo", "scale_by_belief", "scale_by_came",
    "scale_by_dion", "scale_by_factored_rms", "scale_by_kron", "scale_by_lars", "scale_by_learning_rate", "scale_by_lion",
    "scale_by_nadam", "scale_by_normuon", "scale_by_novograd", "scale_by_parameter_rms", "scale_by_radam", "scale_by_rms",
    "scale_by_rprop", "scale_by_running_square", "scale_by_shampoo", "scale_by_shape", "scale_by_sign", "scale_by_sm3", "scale_by_soap",
    "scale_by_stable_adam", "scale_by_torch_adafactor", "scale_by_trust_ratio", "scale_by_yogi", "schedule_free", "set_to_zero",
    "subtract_decay_of_moved", "subtract_decayed_weights", "subtract_relative_decay", "trace", "zero_nans",
]  # fmt: skip
