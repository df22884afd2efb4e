"""everybit: optimizers for PyTorch that account for every bit.

An optimizer is a pure transform, written once in float32 mathematics; a typed policy says in which number format each tensor is
stored.

>>> import everybit as eb
>>> tx = eb.chain(eb.clip_by_global_norm(1.0), eb.scale_by_adam(b2=0.95), eb.add_decayed_weights(0.1), eb.scale_by_learning_rate(3e-4))
>>> opt = eb.with_policy(tx, eb.policies.LEAN_BF16)
"""

from typing import TYPE_CHECKING, Any

from everybit import policies
from everybit.base import (
    Hyperparameter, Key, Schedule, Slot, at, bias_correction, by_name, label_table, load_state_dict, require_step, sqrt, state, state_dict,
    tree,
)  # fmt: skip
from everybit.combinators import (
    accumulate, apply_if_finite, cautious, chain, ema_nesterov, layerwise_decay, lookahead, masked, mup_scales, named_chain, partition,
    routing, skip_large_updates,
)  # fmt: skip
from everybit.formats import (
    Blockwise, Format, Kahan, Master, Nearest, ParamFormat, PartSpec, SlotKind, Split, StateFormat, Stochastic,
)  # fmt: skip
from everybit.linalg import (
    Kronecker, MatrixView, NewtonSchulz, batched, flattened, heads, interleaved, matrix, row_blocks, transposed,
)  # fmt: skip
from everybit.optimizers import (
    HiddenMatrices, Matrices, NamedOptimizer, OptimizerName, adabelief, adadelta, adafactor, adagrad, adam, adam_atan2, adamax, adamw, adan,
    ademamix, adopt, asgd, came, dion, kron, lamb, laprop, lars, lion, mars, muon, nadam, normuon, optimizers, radam, rmsprop, rprop,
    schedule_free_adamw, schedule_free_radam, schedule_free_sgd, sgd, shampoo, signum, soap, stable_adamw, tiger, torch_adafactor,
    torch_muon, yogi,
)  # fmt: skip
from everybit.policies import ByLabel, Grads, Policy, PolicyName, by_dtype, by_label, keep_wide
from everybit.protocol import (
    Axis, Context, Cut, Elementwise, Local, Max, Pending, Request, SlotDecay, Sum, SumOfSquares, Transform, WholeTensors, fulfil, then,
)  # fmt: skip
from everybit.schedules import (
    constant_schedule, cosine_decay_schedule, cosine_one_cycle_schedule, cosine_restarts_schedule, exponential_decay_schedule,
    inverse_sqrt_schedule, join_schedules, linear_one_cycle_schedule, linear_schedule, one_cycle_schedule, piecewise_constant_schedule,
    piecewise_interpolate_schedule, polynomial_schedule, power_cooldown_schedule, relative_step_schedule, sgdr_schedule,
    warmup_constant_schedule, warmup_cosine_decay_schedule, warmup_exponential_decay_schedule, warmup_stable_decay_schedule,
)  # fmt: skip
from everybit.stepping import Metrics, Optimizer, OptimizerState, apply_updates, scale_rows, with_metrics, with_policy
from everybit.transforms import (
    Grafting, MatrixWise, add_cautious_decay, add_corrected_decay, add_decayed_weights, amplify_slow_gradients, average_weights,
    averaged_descent, begin_after, centralize, clip, clip_by_global_norm, clip_by_rms, clip_by_unit_norm, equalize, identity, mean_weights,
    normalize_by_global_norm, not_norm_or_bias, orthogonalize, power_average_weights, prodigy, proximal_decay, reduce_variance,
    running_mean, scale, scale_by_adadelta, scale_by_adagrad, scale_by_adam, scale_by_adam_atan2, scale_by_adamax, scale_by_adan,
    scale_by_ademamix, scale_by_adopt, scale_by_belief, scale_by_came, scale_by_dion, scale_by_factored_rms, scale_by_kron, scale_by_lars,
    scale_by_learning_rate, scale_by_lion, scale_by_nadam, scale_by_normuon, scale_by_parameter_rms, scale_by_radam, scale_by_rms,
    scale_by_rprop, scale_by_running_square, scale_by_shampoo, scale_by_shape, scale_by_sign, scale_by_soap, scale_by_stable_adam,
    scale_by_torch_adafactor, scale_by_trust_ratio, scale_by_yogi, schedule_free, set_to_zero, subtract_decay_of_moved,
    subtract_decayed_weights, subtract_relative_decay, trace, zero_nans,
)  # fmt: skip

__version__ = "0.3.0.dev0"

__all__ = [
    "Axis", "Blockwise", "ByLabel", "Context", "Cut", "Elementwise", "Format", "Grads", "Grafting", "HiddenMatrices", "Hyperparameter",
    "Kahan", "Key", "Kronecker", "Local", "Master", "Matrices", "MatrixView", "MatrixWise", "Max", "Metrics", "NamedOptimizer", "Nearest",
    "NewtonSchulz", "Optimizer", "OptimizerName", "OptimizerState", "ParamFormat", "PartSpec", "Pending", "Policy", "PolicyName",
    "Request", "Schedule", "Slot", "SlotDecay", "SlotKind", "Split", "StateFormat", "Stochastic", "Sum", "SumOfSquares", "Transform",
    "WholeTensors", "accumulate", "adabelief", "adadelta", "adafactor", "adagrad", "adam", "adam_atan2", "adamax", "adamw", "adan",
    "add_cautious_decay", "add_corrected_decay", "add_decayed_weights", "ademamix", "adopt", "amplify_slow_gradients", "apply_if_finite",
    "apply_updates", "asgd", "at", "average_weights", "averaged_descent", "batched", "begin_after", "bias_correction", "by_dtype",
    "by_label", "by_name", "came", "cautious", "centralize", "chain", "clip", "clip_by_global_norm", "clip_by_rms", "clip_by_unit_norm",
    "constant_schedule", "cosine_decay_schedule", "cosine_one_cycle_schedule", "cosine_restarts_schedule", "dion", "ema_nesterov",
    "equalize", "exponential_decay_schedule", "flattened", "fulfil", "heads", "identity", "interleaved", "inverse_sqrt_schedule",
    "join_schedules",
    "keep_wide", "kron", "label_table", "lamb", "laprop", "lars", "layerwise_decay", "linear_one_cycle_schedule", "linear_schedule",
    "lion", "load_state_dict", "lookahead", "mars", "masked", "matrix", "mean_weights", "muon", "mup_scales", "nadam", "named_chain",
    "normalize_by_global_norm", "normuon", "not_norm_or_bias", "one_cycle_schedule", "optimizers", "orthogonalize", "partition",
    "piecewise_constant_schedule", "piecewise_interpolate_schedule", "policies", "polynomial_schedule", "power_average_weights",
    "power_cooldown_schedule", "prodigy", "proximal_decay", "radam", "reduce_variance", "relative_step_schedule", "require_step",
    "rmsprop", "routing", "row_blocks", "rprop", "running_mean", "scale", "scale_by_adadelta", "scale_by_adagrad", "scale_by_adam",
    "scale_by_adam_atan2", "scale_by_adamax", "scale_by_adan", "scale_by_ademamix", "scale_by_adopt", "scale_by_belief", "scale_by_came",
    "scale_by_dion", "scale_by_factored_rms", "scale_by_kron", "scale_by_lars", "scale_by_learning_rate", "scale_by_lion",
    "scale_by_nadam", "scale_by_normuon", "scale_by_parameter_rms", "scale_by_radam", "scale_by_rms", "scale_by_rprop",
    "scale_by_running_square", "scale_by_shampoo", "scale_by_shape", "scale_by_sign", "scale_by_soap", "scale_by_stable_adam",
    "scale_by_torch_adafactor", "scale_by_trust_ratio", "scale_by_yogi", "scale_rows", "schedule_free",
    "schedule_free_adamw", "schedule_free_radam",
    "schedule_free_sgd", "set_to_zero", "sgd", "sgdr_schedule", "shampoo", "signum", "skip_large_updates", "soap", "sqrt", "stable_adamw",
    "state", "state_dict", "subtract_decay_of_moved", "subtract_decayed_weights", "subtract_relative_decay", "then", "tiger",
    "torch_adafactor", "torch_muon", "trace", "transposed", "tree", "warmup_constant_schedule", "warmup_cosine_decay_schedule",
    "warmup_exponential_decay_schedule", "warmup_stable_decay_schedule", "with_metrics", "with_policy", "yogi", "zero_nans",
]  # fmt: skip


_TORCH_NAMES = frozenset({
    "AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "Adafactor", "Muon", "Lion", "AnyPrecisionAdamW", "TorchOptimizer", "FlatStepper",
    "create",
    "evaluation_weights", "save_sharded", "load_sharded", "plan", "Audit", "Gate",
})  # fmt: skip


_OWN_PACKAGES = "its authors' package has it; LEAN_8BIT saves memory under any optimizer"
_GONE = {
    **dict.fromkeys(("galore", "apollo", "scale_by_apollo", "low_rank", "Projection"), _OWN_PACKAGES),
    **dict.fromkeys(("sm3", "scale_by_sm3"), "adafactor keeps as little"),
    **dict.fromkeys(("adam_mini", "scale_by_adam_mini", "AdamMiniBlocks"), "LEAN_8BIT, or adafactor, keeps as little"),
    **dict.fromkeys(("novograd", "scale_by_novograd"), "lamb adapts to each parameter"),
    "dadapt_adam": "prodigy estimates its own rate",
    **dict.fromkeys(
        ("conditionally", "freezable", "freeze", "unfreeze"), "apply_if_finite, masks and param groups stay"
    ),
    "inject_hyperparameters": "hyperparameters are fields: dataclasses.replace changes them, and functions of the step are schedules",
    "add_noise": "a transform of your own draws numbers by ctx.keys(...)",
    "clip_by_z_score": "skip_large_updates follows the norms",
    "outer_gradient": "torchft has DiLoCo",
    "sam_point": "docs/how-to/sharpness_aware.md has the twelve lines",
}
"""What stands in the place of names that are gone since version 0.3."""


if not TYPE_CHECKING:  # a type checker would take it for a module with any attribute

    def __getattr__(name: str) -> Any:
        """Say where a class is that users look for here, or what stands in the place of a name that is gone.

        Raises:
            ImportError: For a class of ``everybit_torch``, or a name that is gone: ``from everybit import AdamW`` shows the message of no
                AttributeError.
            AttributeError: For other names.
        """
        if name in _TORCH_NAMES:
            raise ImportError(f"everybit has no {name}; it is in everybit_torch: from everybit_torch import {name}")
        if name in _GONE:
            raise ImportError(f"everybit has no {name} since version 0.3; {_GONE[name]}.")
        raise AttributeError(f"module 'everybit' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names; rooms are imported by their own."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
