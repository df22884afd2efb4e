"""everybit: optimizers for PyTorch that account for every bit.

An optimizer is a pure transform, written once in float32 mathematics; a typed policy says in which number format each tensor is
stored.

>>> import everybit as eb
>>> tx = eb.chain(eb.clip_by_global_norm(1.0), eb.scale_by_adam(b2=0.95), eb.add_decayed_weights(0.1), eb.scale_by_learning_rate(3e-4))
>>> opt = eb.with_policy(tx, eb.policies.LEAN_BF16)
"""

from everybit import policies, tree
from everybit.adaptive_aliases import adam_atan2, schedule_free_radam
from everybit.aliases import adam, adamw, lion, rmsprop, sgd
from everybit.barriers import sqrt
from everybit.combinators.accumulate import accumulate
from everybit.combinators.cautious import cautious
from everybit.combinators.chain import chain, named_chain
from everybit.combinators.conditional import conditionally, freezable, freeze, unfreeze
from everybit.combinators.ema_nesterov import ema_nesterov
from everybit.combinators.finite import apply_if_finite
from everybit.combinators.injected import inject_hyperparameters
from everybit.combinators.lookahead import lookahead
from everybit.combinators.low_rank import low_rank
from everybit.combinators.masked import masked, partition
from everybit.combinators.skipping import skip_large_updates
from everybit.context import Context
from everybit.decay_schedules import (
    exponential_decay_schedule,
    inverse_sqrt_schedule,
    polynomial_schedule,
    power_cooldown_schedule,
    relative_step_schedule,
    warmup_constant_schedule,
    warmup_exponential_decay_schedule,
)
from everybit.formats import (
    Blockwise,
    Format,
    Kahan,
    Master,
    Nearest,
    ParamFormat,
    PartSpec,
    SlotKind,
    Split,
    StateFormat,
    Stochastic,
)
from everybit.kronecker import Kronecker
from everybit.labels import by_name, label_table, layerwise_decay, mup_scales
from everybit.matrix_aliases import HiddenMatrices, muon, normuon, torch_muon
from everybit.matrix_views import MatrixView, batched, flattened, heads, matrix, row_blocks
from everybit.memory_aliases import adafactor, adam_mini, came, sm3
from everybit.metrics import Metrics, with_metrics
from everybit.more_aliases import (
    adabelief,
    adan,
    ademamix,
    adopt,
    lamb,
    laprop,
    lars,
    mars,
    novograd,
    schedule_free_adamw,
    schedule_free_sgd,
    signum,
    stable_adamw,
    tiger,
    yogi,
)
from everybit.named_optimizers import NamedOptimizer, OptimizerName, optimizers
from everybit.named_tensors import load_state_dict, state_dict
from everybit.optimizer import Optimizer, OptimizerState, with_policy
from everybit.outer import outer_gradient
from everybit.per_tensor import Members
from everybit.piecewise_schedules import (
    cosine_one_cycle_schedule,
    cosine_restarts_schedule,
    linear_one_cycle_schedule,
    one_cycle_schedule,
    piecewise_constant_schedule,
    piecewise_interpolate_schedule,
    sgdr_schedule,
)
from everybit.policy import ByLabel, Grads, Policy, by_dtype, by_label
from everybit.policy_names import PolicyName
from everybit.preconditioned_aliases import apollo, dion, galore, kron, shampoo, soap
from everybit.projections import Projection
from everybit.random_bits import Key
from everybit.requests import Axis, Local, Max, Pending, Request, Sum, SumOfSquares, fulfil, then
from everybit.routing import routing
from everybit.scalars import Hyperparameter, Schedule, at, bias_correction, require_step
from everybit.schedules import (
    constant_schedule,
    cosine_decay_schedule,
    join_schedules,
    linear_schedule,
    warmup_cosine_decay_schedule,
    warmup_stable_decay_schedule,
)
from everybit.sharpness import sam_point
from everybit.torch_aliases import adadelta, adagrad, adamax, asgd, nadam, radam, rprop, torch_adafactor
from everybit.transform import Cut, Elementwise, SlotDecay, Transform, WholeTensors
from everybit.transforms.adadelta import scale_by_adadelta
from everybit.transforms.adafactor import scale_by_factored_rms, scale_by_parameter_rms, subtract_relative_decay
from everybit.transforms.adagrad import scale_by_adagrad
from everybit.transforms.adam import scale_by_adam
from everybit.transforms.adam_atan2 import scale_by_adam_atan2
from everybit.transforms.adam_mini import AdamMiniBlocks, scale_by_adam_mini
from everybit.transforms.adamax import scale_by_adamax
from everybit.transforms.adan import proximal_decay, scale_by_adan
from everybit.transforms.adaptive_clipping import clip_by_rms, clip_by_unit_norm, clip_by_z_score
from everybit.transforms.ademamix import scale_by_ademamix
from everybit.transforms.adopt import begin_after, scale_by_adopt
from everybit.transforms.apollo import scale_by_apollo
from everybit.transforms.asgd import averaged_descent
from everybit.transforms.averages import average_weights, mean_weights, power_average_weights
from everybit.transforms.belief import scale_by_belief
from everybit.transforms.came import scale_by_came
from everybit.transforms.cleaning import add_noise, centralize, normalize_by_global_norm, zero_nans
from everybit.transforms.d_adaptation import dadapt_adam
from everybit.transforms.decay_variants import add_cautious_decay, add_corrected_decay, subtract_decay_of_moved
from everybit.transforms.dion import scale_by_dion
from everybit.transforms.equalize import equalize
from everybit.transforms.grokfast import amplify_slow_gradients
from everybit.transforms.kron import scale_by_kron
from everybit.transforms.lion import scale_by_lion
from everybit.transforms.matrix_wise import MatrixWise, scale_by_shape
from everybit.transforms.nadam import scale_by_nadam
from everybit.transforms.normuon import scale_by_normuon
from everybit.transforms.novograd import scale_by_novograd
from everybit.transforms.orthogonalize import orthogonalize
from everybit.transforms.prodigy import prodigy
from everybit.transforms.radam import scale_by_radam
from everybit.transforms.rms import scale_by_rms
from everybit.transforms.rprop import scale_by_rprop
from everybit.transforms.running_mean import running_mean, scale_by_running_square
from everybit.transforms.schedule_free import schedule_free
from everybit.transforms.shampoo import scale_by_shampoo
from everybit.transforms.sm3 import scale_by_sm3
from everybit.transforms.soap import scale_by_soap
from everybit.transforms.stable_adam import scale_by_stable_adam
from everybit.transforms.stateless import (
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
from everybit.tree import Slot, state
from everybit.update import apply_updates

__version__ = "0.3.0.dev0"
from everybit.wide_parameters import keep_wide

__all__ = [
    "AdamMiniBlocks", "Axis", "Blockwise", "ByLabel", "Context", "Cut", "Elementwise", "Format", "Grads", "HiddenMatrices",
    "Hyperparameter", "Kahan", "Key", "Kronecker", "Local", "Master", "MatrixView", "MatrixWise", "Max", "Members", "Metrics",
    "NamedOptimizer", "Nearest", "Optimizer", "OptimizerName", "OptimizerState", "ParamFormat", "PartSpec", "Pending", "Policy",
    "PolicyName", "Projection", "Request", "Schedule", "Slot", "SlotDecay", "SlotKind", "Split", "StateFormat", "Stochastic", "Sum",
    "SumOfSquares", "Transform", "WholeTensors", "accumulate", "adabelief", "adadelta", "adafactor", "adagrad", "adam", "adam_atan2",
    "adam_mini", "adamax", "adamw", "adan", "add_cautious_decay", "add_corrected_decay", "add_decayed_weights", "add_noise", "ademamix",
    "adopt", "amplify_slow_gradients", "apollo", "apply_if_finite", "apply_updates", "asgd", "at", "average_weights", "averaged_descent",
    "batched", "begin_after", "bias_correction", "by_dtype", "by_label", "by_name", "came", "cautious", "centralize", "chain", "clip",
    "clip_by_global_norm", "clip_by_rms", "clip_by_unit_norm", "clip_by_z_score", "conditionally", "constant_schedule",
    "cosine_decay_schedule", "cosine_one_cycle_schedule", "cosine_restarts_schedule", "dadapt_adam", "dion", "ema_nesterov", "equalize",
    "exponential_decay_schedule", "flattened", "freezable", "freeze", "fulfil", "galore", "heads", "identity", "inject_hyperparameters",
    "inverse_sqrt_schedule", "join_schedules", "keep_wide", "kron", "label_table", "lamb", "laprop", "lars", "layerwise_decay",
    "linear_one_cycle_schedule", "linear_schedule", "lion", "load_state_dict", "lookahead", "low_rank", "mars", "masked", "matrix",
    "mean_weights", "muon", "mup_scales", "nadam", "named_chain", "normalize_by_global_norm", "normuon", "not_norm_or_bias", "novograd",
    "one_cycle_schedule", "optimizers", "orthogonalize", "outer_gradient", "partition", "piecewise_constant_schedule",
    "piecewise_interpolate_schedule", "policies", "polynomial_schedule", "power_average_weights", "power_cooldown_schedule", "prodigy",
    "proximal_decay", "radam", "reduce_variance", "relative_step_schedule", "require_step", "rmsprop", "routing", "row_blocks", "rprop",
    "running_mean", "sam_point", "scale", "scale_by_adadelta", "scale_by_adagrad", "scale_by_adam", "scale_by_adam_atan2",
    "scale_by_adam_mini", "scale_by_adamax", "scale_by_adan", "scale_by_ademamix", "scale_by_adopt", "scale_by_apollo", "scale_by_belief",
    "scale_by_came", "scale_by_dion", "scale_by_factored_rms", "scale_by_kron", "scale_by_lars", "scale_by_learning_rate", "scale_by_lion",
    "scale_by_nadam", "scale_by_normuon", "scale_by_novograd", "scale_by_parameter_rms", "scale_by_radam", "scale_by_rms", "scale_by_rprop",
    "scale_by_running_square", "scale_by_shampoo", "scale_by_shape", "scale_by_sign", "scale_by_sm3", "scale_by_soap",
    "scale_by_stable_adam", "scale_by_torch_adafactor", "scale_by_trust_ratio", "scale_by_yogi", "schedule_free", "schedule_free_adamw",
    "schedule_free_radam", "schedule_free_sgd", "set_to_zero", "sgd", "sgdr_schedule", "shampoo", "signum", "skip_large_updates", "sm3",
    "soap", "sqrt", "stable_adamw", "state", "state_dict", "subtract_decay_of_moved", "subtract_decayed_weights", "subtract_relative_decay",
    "then", "tiger", "torch_adafactor", "torch_muon", "trace", "tree", "unfreeze", "warmup_constant_schedule",
    "warmup_cosine_decay_schedule", "warmup_exponential_decay_schedule", "warmup_stable_decay_schedule", "with_metrics", "with_policy",
    "yogi", "zero_nans",
]  # fmt: skip
