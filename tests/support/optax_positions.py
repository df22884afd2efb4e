"""What functions of optax take by position, for those whose names everybit has too.

The facts are of optax 0.2.8 and stand here so that ``make test`` needs no JAX; ``make conformance`` compares them with the installed optax.
"""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.2.8"

POSITIONS: Final[dict[str, tuple[str, str]]] = {
    "adabelief": ("optax.adabelief", "learning_rate b1 b2 eps eps_root"),
    "adadelta": ("optax.adadelta", "learning_rate rho eps weight_decay weight_decay_mask"),
    "adafactor": (
        "optax.adafactor",
        "learning_rate min_dim_size_to_factor decay_rate decay_offset multiply_by_parameter_scale clipping_threshold "
        "momentum dtype_momentum weight_decay_rate eps factored weight_decay_mask",
    ),
    "adagrad": ("optax.adagrad", "learning_rate initial_accumulator_value eps"),
    "adam": ("optax.adam", "learning_rate b1 b2 eps eps_root mu_dtype"),
    "adamax": ("optax.adamax", "learning_rate b1 b2 eps"),
    "adamw": ("optax.adamw", "learning_rate b1 b2 eps eps_root mu_dtype weight_decay mask"),
    "adan": ("optax.adan", "learning_rate b1 b2 b3 eps eps_root weight_decay mask"),
    "add_decayed_weights": ("optax.add_decayed_weights", "weight_decay mask"),
    "ademamix": ("optax.contrib.ademamix", "learning_rate b1 b2 b3 alpha eps eps_root mu_dtype weight_decay mask"),
    "adopt": ("optax.contrib.adopt", "learning_rate b1 b2 eps mu_dtype"),
    "apply_if_finite": ("optax.apply_if_finite", "inner max_consecutive_errors"),
    "apply_updates": ("optax.apply_updates", "params updates"),
    "bias_correction": ("optax.bias_correction", "moment decay count"),
    "centralize": ("optax.centralize", ""),
    "chain": ("optax.chain", ""),
    "clip": ("optax.clip", "max_delta"),
    "clip_by_global_norm": ("optax.clip_by_global_norm", "max_norm"),
    "constant_schedule": ("optax.constant_schedule", "value"),
    "cosine_decay_schedule": ("optax.cosine_decay_schedule", "init_value decay_steps alpha exponent"),
    "identity": ("optax.identity", ""),
    "join_schedules": ("optax.join_schedules", "schedules boundaries"),
    "lamb": ("optax.lamb", "learning_rate b1 b2 eps eps_root weight_decay mask"),
    "lars": (
        "optax.lars",
        "learning_rate weight_decay weight_decay_mask trust_coefficient eps trust_ratio_mask momentum nesterov",
    ),
    "linear_schedule": ("optax.linear_schedule", "init_value end_value transition_steps transition_begin"),
    "lion": ("optax.lion", "learning_rate b1 b2 mu_dtype weight_decay mask"),
    "lookahead": ("optax.lookahead", "fast_optimizer sync_period slow_step_size reset_state"),
    "masked": ("optax.masked", "inner mask"),
    "muon": ("optax.contrib.muon", "learning_rate ns_coeffs ns_steps beta eps weight_decay weight_decay_mask mu_dtype"),
    "nadam": ("optax.nadam", "learning_rate b1 b2 eps eps_root mu_dtype"),
    "named_chain": ("optax.named_chain", ""),
    "partition": ("optax.partition", "transforms param_labels"),
    "piecewise_constant_schedule": ("optax.piecewise_constant_schedule", "init_value boundaries_and_scales"),
    "piecewise_interpolate_schedule": (
        "optax.piecewise_interpolate_schedule",
        "interpolate_type init_value boundaries_and_scales",
    ),
    "polynomial_schedule": (
        "optax.polynomial_schedule",
        "init_value end_value power transition_steps transition_begin",
    ),
    "prodigy": (
        "optax.contrib.prodigy",
        "learning_rate betas beta3 eps estim_lr0 estim_lr_coef weight_decay safeguard_warmup",
    ),
    "radam": ("optax.radam", "learning_rate b1 b2 eps eps_root threshold"),
    "rmsprop": (
        "optax.rmsprop",
        "learning_rate decay eps initial_scale eps_in_sqrt centered momentum nesterov bias_correction",
    ),
    "rprop": ("optax.rprop", "learning_rate eta_minus eta_plus min_step_size max_step_size"),
    "scale": ("optax.scale", "step_size"),
    "scale_by_adadelta": ("optax.scale_by_adadelta", "rho eps"),
    "scale_by_adam": ("optax.scale_by_adam", "b1 b2 eps eps_root mu_dtype"),
    "scale_by_adamax": ("optax.scale_by_adamax", "b1 b2 eps"),
    "scale_by_adan": ("optax.scale_by_adan", "b1 b2 b3 eps eps_root"),
    "scale_by_ademamix": ("optax.contrib.scale_by_ademamix", "b1 b2 b3 alpha eps eps_root mu_dtype"),
    "scale_by_adopt": ("optax.contrib.scale_by_adopt", "b1 b2 eps mu_dtype"),
    "scale_by_belief": ("optax.scale_by_belief", "b1 b2 eps eps_root"),
    "scale_by_factored_rms": (
        "optax.scale_by_factored_rms",
        "factored decay_rate step_offset min_dim_size_to_factor epsilon decay_rate_fn",
    ),
    "scale_by_learning_rate": ("optax.scale_by_learning_rate", "learning_rate"),
    "scale_by_lion": ("optax.scale_by_lion", "b1 b2 mu_dtype"),
    "scale_by_radam": ("optax.scale_by_radam", "b1 b2 eps eps_root threshold"),
    "scale_by_rms": ("optax.scale_by_rms", "decay eps initial_scale eps_in_sqrt bias_correction"),
    "scale_by_rprop": ("optax.scale_by_rprop", "learning_rate eta_minus eta_plus min_step_size max_step_size"),
    "scale_by_sign": ("optax.scale_by_sign", ""),
    "scale_by_trust_ratio": ("optax.scale_by_trust_ratio", "min_norm trust_coefficient eps"),
    "scale_by_yogi": ("optax.scale_by_yogi", "b1 b2 eps eps_root initial_accumulator_value"),
    "schedule_free": ("optax.contrib.schedule_free", "base_optimizer learning_rate b1 weight_lr_power state_dtype"),
    "schedule_free_adamw": (
        "optax.contrib.schedule_free_adamw",
        "learning_rate warmup_steps b1 b2 eps weight_decay weight_lr_power state_dtype",
    ),
    "schedule_free_sgd": (
        "optax.contrib.schedule_free_sgd",
        "learning_rate warmup_steps b1 weight_decay weight_lr_power state_dtype",
    ),
    "set_to_zero": ("optax.set_to_zero", ""),
    "sgd": ("optax.sgd", "learning_rate momentum nesterov accumulator_dtype"),
    "sgdr_schedule": ("optax.sgdr_schedule", "cosine_kwargs"),
    "signum": ("optax.signum", "learning_rate beta accumulator_dtype"),
    "skip_large_updates": ("optax.skip_large_updates", "updates gradient_step params max_squared_norm"),
    "trace": ("optax.trace", "decay nesterov accumulator_dtype"),
    "warmup_constant_schedule": ("optax.warmup_constant_schedule", "init_value peak_value warmup_steps"),
    "warmup_cosine_decay_schedule": (
        "optax.warmup_cosine_decay_schedule",
        "init_value peak_value warmup_steps decay_steps end_value exponent",
    ),
    "warmup_exponential_decay_schedule": (
        "optax.warmup_exponential_decay_schedule",
        "init_value peak_value warmup_steps transition_steps decay_rate transition_begin staircase end_value",
    ),
    "yogi": ("optax.yogi", "learning_rate b1 b2 eps"),
    "zero_nans": ("optax.zero_nans", ""),
    "tree.get": ("optax.tree.get", "tree key default filtering"),
    "tree.norm": ("optax.tree.norm", "tree ord squared"),
    "tree.set": ("optax.tree.set", "tree filtering"),
    "tree.size": ("optax.tree.size", "tree"),
    "tree.where": ("optax.tree.where", "condition tree_x tree_y"),
    "tree.zeros_like": ("optax.tree.zeros_like", "tree dtype"),
}
"""By everybit's name: the function of optax, and what it takes by position, in order."""
