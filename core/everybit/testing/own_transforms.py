"""Everybit's own transforms and aliases, by name, as the battery takes them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from everybit.combinators import (
    accumulate,
    apply_if_finite,
    cautious,
    chain,
    ema_nesterov,
    lookahead,
    masked,
    named_chain,
    partition,
    skip_large_updates,
)
from everybit.linalg import Kronecker, NewtonSchulz
from everybit.optimizers import (
    adabelief,
    adadelta,
    adafactor,
    adagrad,
    adam,
    adam_atan2,
    adamax,
    adamw,
    adan,
    ademamix,
    adopt,
    asgd,
    came,
    dion,
    kron,
    lamb,
    laprop,
    lars,
    lion,
    mars,
    muon,
    nadam,
    normuon,
    radam,
    rmsprop,
    rprop,
    schedule_free_adamw,
    schedule_free_radam,
    schedule_free_sgd,
    sgd,
    shampoo,
    signum,
    soap,
    stable_adamw,
    tiger,
    torch_adafactor,
    torch_muon,
    yogi,
)
from everybit.schedules import (
    cosine_restarts_schedule,
    exponential_decay_schedule,
    inverse_sqrt_schedule,
    one_cycle_schedule,
    piecewise_constant_schedule,
    polynomial_schedule,
    warmup_cosine_decay_schedule,
)
from everybit.testing.examples import Build
from everybit.transforms import (
    Grafting,
    add_cautious_decay,
    add_corrected_decay,
    add_decayed_weights,
    amplify_slow_gradients,
    average_weights,
    centralize,
    clip,
    clip_by_global_norm,
    clip_by_rms,
    clip_by_unit_norm,
    identity,
    normalize_by_global_norm,
    power_average_weights,
    prodigy,
    scale,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_normuon,
    scale_by_rms,
    scale_by_sign,
    set_to_zero,
    trace,
    zero_nans,
)


def _is_matrix(_path: str, leaf: Tensor) -> bool:
    return leaf.ndim > 1


def _kind(_path: str, leaf: Tensor) -> str:
    return "matrix" if leaf.ndim > 1 else "vector" if leaf.ndim else "number"


_decay = warmup_cosine_decay_schedule(0.1, 3, steps=50, end=0.01)
_schedules = (
    exponential_decay_schedule(1.0, 0.9, 3, end=0.2),
    polynomial_schedule(1.0, 0.1, steps=20, power=1.5),
    piecewise_constant_schedule(1.0, {2: 0.5}),
    one_cycle_schedule(1.0, 20),
    cosine_restarts_schedule(1.0, 2, growth=2),
    inverse_sqrt_schedule(1.0, 2, start=0.1),
)

_BUILDS: dict[str, Build] = {
    "sgd": sgd,
    "sgd momentum": lambda lr: sgd(lr, momentum=0.9, weight_decay=0.01),
    "sgd dampening": lambda lr: sgd(lr, momentum=0.9, dampening=0.3, maximize=True),
    "sgd nesterov": lambda lr: sgd(lr, momentum=0.9, nesterov=True),
    "adam": lambda lr: adam(lr, weight_decay=0.01),
    "adamw": adamw,
    "adamw fully decoupled": lambda lr: adamw(lr, eps_root=1e-12, weight_decay=_decay, fully_decoupled=True),
    "adamw scheduled": lambda lr: adamw(lr, b1=lambda step: 0.8 + 0.1 * _decay(step), weight_decay=_decay),
    "lion": lambda lr: lion(lr, weight_decay=0.1),
    "rmsprop": rmsprop,
    "rmsprop centered": lambda lr: rmsprop(lr, centered=True, momentum=0.9),
    "rmsprop eps inside": lambda lr: rmsprop(lr, eps_inside_root=True, maximize=True),
    "sign": lambda lr: chain(scale_by_sign(), scale_by_learning_rate(lr)),
    "scale": lambda lr: chain(identity(), clip(0.5), scale(_decay), scale_by_learning_rate(lr)),
    "schedules": lambda lr: chain(*(scale(one) for one in _schedules), scale_by_learning_rate(lr)),
    "named chain": lambda lr: named_chain({"momentum": trace(0.9), "descent": scale_by_learning_rate(lr)}),
    "clipped": lambda lr: chain(clip_by_global_norm(1.0), scale_by_adam(b2=0.95), scale_by_learning_rate(lr)),
    "masked": lambda lr: chain(
        scale_by_adam(), masked(add_decayed_weights(0.1), where=_is_matrix), scale_by_learning_rate(lr)
    ),
    "partition": lambda lr: partition(
        {"matrix": adamw(lr), "vector": sgd(lr, momentum=0.9), "number": set_to_zero()}, _kind
    ),
    "accumulate": lambda lr: accumulate(adamw(lr), every=2),
    "averaged": lambda lr: chain(sgd(lr), average_weights(lambda step: 0.9 - _decay(step), start=2)),
    "averaged by a power": lambda lr: chain(sgd(lr), power_average_weights()),
    "adam amsgrad": lambda lr: adam(lr, amsgrad=True),
    "adam amsgrad corrected": lambda lr: adam(lr, amsgrad="corrected"),
    "nadam": lambda lr: nadam(lr, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda lr: radam(lr, b2=0.9, weight_decay=0.1),
    "adagrad": lambda lr: adagrad(lr, lr_decay=0.01, initial_accumulator_value=0.1),
    "adamax": adamax,
    "adadelta": adadelta,
    "torch adafactor": lambda lr: torch_adafactor(lr, weight_decay=0.1),
    "rprop": rprop,
    "asgd": lambda lr: asgd(lr, lambd=0.1, t0=1.0, maximize=True),
    "cautious": lambda lr: chain(cautious(scale_by_adam()), add_cautious_decay(0.1), scale_by_learning_rate(lr)),
    "cautious by count": lambda lr: chain(
        cautious(scale_by_adam(), "count"), add_cautious_decay(0.1, at_zero=True), scale_by_learning_rate(lr)
    ),
    "corrected decay": lambda lr: chain(
        cautious(trace(0.9), "none"), add_corrected_decay(0.1, lr, 0.5), scale_by_learning_rate(lr)
    ),
    "unit norms clipped": lambda lr: chain(clip_by_unit_norm(0.1), clip_by_unit_norm(0.05, units="last"), sgd(lr)),
    "rms clipped": lambda lr: chain(clip_by_rms(0.5), sgd(lr)),
    "cleaned": lambda lr: chain(zero_nans(infinite=True), normalize_by_global_norm(2.0), sgd(lr)),
    "centralized": lambda lr: chain(centralize(), sgd(lr, momentum=0.9)),
    "slow gradients": lambda lr: chain(amplify_slow_gradients(), sgd(lr)),
    "lookahead": lambda lr: chain(lookahead(sgd(lr, momentum=0.9), period=2, share=0.3)),
    "large updates skipped": lambda lr: skip_large_updates(adamw(lr), 20.0),
    "ema nesterov": lambda lr: chain(ema_nesterov(adamw(lr), lambda done: 0.1 * _decay(done) + 0.3, 0.9)),
    "ademamix": lambda lr: ademamix(lr, b3=0.99, alpha_warmup=3, b3_warmup=4, eps_root=1e-12),
    "adopt": lambda lr: adopt(lr, nesterov=True, weight_decay=0.1),
    "adopt unclipped": lambda lr: adopt(lr, eps=0.1, clip_power=None, weight_decay=0.1, decay_at_first=True),
    "schedule-free sgd": lambda lr: schedule_free_sgd(lr, r=1.0, weight_decay=0.1),
    "schedule-free adamw": lambda lr: schedule_free_adamw(lr, warmup_steps=2, weight_decay=0.1),
    "prodigy": lambda lr: prodigy(lr, d0=1e-2, weight_decay=0.1),
    "prodigy limited": lambda lr: prodigy(lr, d0=1e-2, growth_rate=1.5, bias_correction=True, safeguard_warmup=True),
    "lamb": lambda lr: lamb(lr, max_grad_norm=1.0),
    "lambc": lambda lr: lamb(lr, max_ratio=1.0),
    "lars": lambda lr: lars(lr, weight_decay=0.1, trust_coefficient=0.1),
    "lars joint": lambda lr: lars(lr, weight_decay=0.1, nesterov=True, joint_norm=True, rate_inside=True),
    "adan": lambda lr: adan(lr, weight_decay=0.1),
    "adan as optax": lambda lr: adan(lr, look_ahead=0.08, eps_root=1e-12, weight_decay=0.1, proximal=False),
    "adabelief": lambda lr: adabelief(lr, eps=1e-8, eps_root=1e-12),
    "yogi": lambda lr: yogi(lr, initial_mean=1e-6, weight_decay=0.1),
    "laprop": lambda lr: laprop(lr, eps=1e-8, weight_decay=0.1),
    "signum": lambda lr: signum(lr, weight_decay=0.1),
    "tiger": tiger,
    "stable adamw": stable_adamw,
    "mars": lambda lr: mars(lr, weight_decay=0.1),
    "mars lion": lambda lr: mars(lr, gamma=0.1, max_norm=None, zero_before=True, sign=True),
    "adafactor": lambda lr: adafactor(lr, weight_decay=0.1),
    "adafactor momentum": lambda lr: adafactor(lr, b1=0.9, b2_cap=0.95, weight_decay=0.1, dimensions="largest"),
    "adafactor directions": lambda lr: adafactor(
        lr, b1=0.9, momentum_of="directions", clip_threshold=None, scale_parameter=False, weight_decay=0.1
    ),
    "came": lambda lr: came(lr, weight_decay=0.1),
    "muon": lambda lr: muon(
        lr,
        averaged=False,
        nesterov=False,
        iteration=NewtonSchulz(coefficients="polar_express", arithmetic="float64", normalization="polar_express"),
        scale="match_rms_adamw",
        decay_kind="cautious",
        others=sgd,
    ),
    "torch muon": lambda lr: partition(
        {"matrix": torch_muon(lr, arithmetic="float64"), "tensor": sgd(lr)},
        lambda _, leaf: "matrix" if leaf.ndim == 2 else "tensor",
    ),
    "muon with others": lambda lr: muon(lr, iteration=NewtonSchulz(arithmetic="float64"), others=adamw),
    "muon equalized": lambda lr: muon(
        lr,
        iteration=NewtonSchulz(arithmetic="float64", batching="together"),
        before="both",
        after="columns_then_rows",
        others_rate=0.5,
    ),
    "muon after": lambda lr: muon(
        lr,
        iteration=NewtonSchulz(arithmetic="float64"),
        after=lambda view: scale_by_normuon(view, side="longer", norm="exact", debias=True),
        weight_decay=0.0,
    ),
    "normuon": lambda lr: normuon(lr, iteration=NewtonSchulz(arithmetic="float64"), side="longer", norm="exact"),
    "soap": lambda lr: soap(lr, period=2, where=Kronecker(sides="smaller"), weight_decay=0.1),
    "soap corrected": lambda lr: soap(
        lr,
        b1=0.8,
        period=2,
        where=Kronecker(max_dimension=5),
        correction="kl",
        normalize=True,
        weight_decay=1.0,
        decay_moved=False,
    ),
    "shampoo": lambda lr: shampoo(lr, period=2, where=Kronecker(sides="smaller", max_dimension=8192), weight_decay=0.1),
    "shampoo of sums": lambda lr: shampoo(
        lr,
        b1=None,
        b2=None,
        eps=0.1,
        damping="start",
        period=2,
        graft=Grafting(of="none"),
        momentum=trace(0.5, nesterov=True),
        where=Kronecker(max_dimension=5),
    ),
    "kron": lambda lr: kron(lr, period=2, where=Kronecker(max_dimension=5), weight_decay=0.1),
    "kron of gradients": lambda lr: kron(
        lr,
        of_momentum=False,
        normalize=True,
        max_rms=None,
        where=Kronecker(vectors=True, merge=True, max_dimension=2048),
    ),
    "dion": lambda lr: dion(lr, rank_divisor=2, others=adamw),
    "adam atan2": lambda lr: adam_atan2(lr, weight_decay=0.1),
    "schedule-free radam": lambda lr: schedule_free_radam(lr, b2=0.9, r=1.0, weight_decay=0.1),
    "schedule-free radam sgd": lambda lr: schedule_free_radam(lr, b2=0.9, sgd_phase=True),
    "apply if finite": lambda lr: apply_if_finite(chain(scale_by_rms(), scale_by_learning_rate(lr)), max_consecutive=5),
}

REGISTRY: Mapping[str, Build] = MappingProxyType(_BUILDS)
"""The builders of the transforms that are checked, by name."""
