"""Everybit's own transforms and aliases, by name, as the battery takes them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

import everybit as eb
from everybit.testing.examples import Build


def _is_matrix(_path: str, leaf: Tensor) -> bool:
    return leaf.ndim > 1


def _kind(_path: str, leaf: Tensor) -> str:
    return "matrix" if leaf.ndim > 1 else "vector" if leaf.ndim else "number"


_decay = eb.warmup_cosine_decay_schedule(0.1, 3, steps=50, end=0.01)
_schedules = (
    eb.exponential_decay_schedule(1.0, 0.9, 3, end=0.2),
    eb.polynomial_schedule(1.0, 0.1, steps=20, power=1.5),
    eb.piecewise_constant_schedule(1.0, {2: 0.5}),
    eb.one_cycle_schedule(1.0, 20),
    eb.cosine_restarts_schedule(1.0, 2, growth=2),
    eb.inverse_sqrt_schedule(1.0, 2, start=0.1),
)

_BUILDS: dict[str, Build] = {
    "sgd": eb.sgd,
    "sgd momentum": lambda lr: eb.sgd(lr, momentum=0.9, weight_decay=0.01),
    "sgd dampening": lambda lr: eb.sgd(lr, momentum=0.9, dampening=0.3, maximize=True),
    "sgd nesterov": lambda lr: eb.sgd(lr, momentum=0.9, nesterov=True),
    "adam": lambda lr: eb.adam(lr, weight_decay=0.01),
    "adamw": eb.adamw,
    "adamw fully decoupled": lambda lr: eb.adamw(lr, eps_root=1e-12, weight_decay=_decay, fully_decoupled=True),
    "adamw scheduled": lambda lr: eb.adamw(lr, b1=lambda step: 0.8 + 0.1 * _decay(step), weight_decay=_decay),
    "lion": lambda lr: eb.lion(lr, weight_decay=0.1),
    "rmsprop": eb.rmsprop,
    "rmsprop centered": lambda lr: eb.rmsprop(lr, centered=True, momentum=0.9),
    "rmsprop eps inside": lambda lr: eb.rmsprop(lr, eps_inside_root=True, maximize=True),
    "sign": lambda lr: eb.chain(eb.scale_by_sign(), eb.scale_by_learning_rate(lr)),
    "scale": lambda lr: eb.chain(eb.identity(), eb.clip(0.5), eb.scale(_decay), eb.scale_by_learning_rate(lr)),
    "schedules": lambda lr: eb.chain(*(eb.scale(one) for one in _schedules), eb.scale_by_learning_rate(lr)),
    "named chain": lambda lr: eb.named_chain({"momentum": eb.trace(0.9), "descent": eb.scale_by_learning_rate(lr)}),
    "clipped": lambda lr: eb.chain(
        eb.clip_by_global_norm(1.0), eb.scale_by_adam(b2=0.95), eb.scale_by_learning_rate(lr)
    ),
    "masked": lambda lr: eb.chain(
        eb.scale_by_adam(), eb.masked(eb.add_decayed_weights(0.1), where=_is_matrix), eb.scale_by_learning_rate(lr)
    ),
    "partition": lambda lr: eb.partition(
        {"matrix": eb.adamw(lr), "vector": eb.sgd(lr, momentum=0.9), "number": eb.set_to_zero()}, _kind
    ),
    "accumulate": lambda lr: eb.accumulate(eb.adamw(lr), every=2),
    "averaged": lambda lr: eb.chain(eb.sgd(lr), eb.average_weights(lambda step: 0.9 - _decay(step), start=2)),
    "averaged by a power": lambda lr: eb.chain(eb.sgd(lr), eb.power_average_weights()),
    "adam amsgrad": lambda lr: eb.adam(lr, amsgrad=True),
    "adam amsgrad corrected": lambda lr: eb.adam(lr, amsgrad="corrected"),
    "nadam": lambda lr: eb.nadam(lr, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda lr: eb.radam(lr, b2=0.9, weight_decay=0.1),
    "adagrad": lambda lr: eb.adagrad(lr, lr_decay=0.01, initial_accumulator_value=0.1),
    "adamax": eb.adamax,
    "adadelta": eb.adadelta,
    "torch adafactor": lambda lr: eb.torch_adafactor(lr, weight_decay=0.1),
    "rprop": eb.rprop,
    "asgd": lambda lr: eb.asgd(lr, lambd=0.1, t0=1.0, maximize=True),
    "cautious": lambda lr: eb.chain(
        eb.cautious(eb.scale_by_adam()), eb.add_cautious_decay(0.1), eb.scale_by_learning_rate(lr)
    ),
    "cautious by count": lambda lr: eb.chain(
        eb.cautious(eb.scale_by_adam(), "count"),
        eb.add_cautious_decay(0.1, at_zero=True),
        eb.scale_by_learning_rate(lr),
    ),
    "corrected decay": lambda lr: eb.chain(
        eb.cautious(eb.trace(0.9), "none"), eb.add_corrected_decay(0.1, lr, 0.5), eb.scale_by_learning_rate(lr)
    ),
    "unit norms clipped": lambda lr: eb.chain(
        eb.clip_by_unit_norm(0.1), eb.clip_by_unit_norm(0.05, units="last"), eb.sgd(lr)
    ),
    "rms clipped": lambda lr: eb.chain(eb.clip_by_rms(0.5), eb.sgd(lr)),
    "cleaned": lambda lr: eb.chain(eb.zero_nans(infinite=True), eb.normalize_by_global_norm(2.0), eb.sgd(lr)),
    "centralized": lambda lr: eb.chain(eb.centralize(), eb.sgd(lr, momentum=0.9)),
    "slow gradients": lambda lr: eb.chain(eb.amplify_slow_gradients(), eb.sgd(lr)),
    "lookahead": lambda lr: eb.chain(eb.lookahead(eb.sgd(lr, momentum=0.9), period=2, share=0.3)),
    "large updates skipped": lambda lr: eb.skip_large_updates(eb.adamw(lr), 20.0),
    "ema nesterov": lambda lr: eb.chain(eb.ema_nesterov(eb.adamw(lr), lambda done: 0.1 * _decay(done) + 0.3, 0.9)),
    "ademamix": lambda lr: eb.ademamix(lr, b3=0.99, alpha_warmup=3, b3_warmup=4, eps_root=1e-12),
    "adopt": lambda lr: eb.adopt(lr, nesterov=True, weight_decay=0.1),
    "adopt unclipped": lambda lr: eb.adopt(lr, eps=0.1, clip_power=None, weight_decay=0.1, decay_at_first=True),
    "schedule-free sgd": lambda lr: eb.schedule_free_sgd(lr, r=1.0, weight_decay=0.1),
    "schedule-free adamw": lambda lr: eb.schedule_free_adamw(lr, warmup_steps=2, weight_decay=0.1),
    "prodigy": lambda lr: eb.prodigy(lr, d0=1e-2, weight_decay=0.1),
    "prodigy limited": lambda lr: eb.prodigy(lr, d0=1e-2, growth_rate=1.5, bias_correction=True, safeguard_warmup=True),
    "lamb": lambda lr: eb.lamb(lr, max_grad_norm=1.0),
    "lambc": lambda lr: eb.lamb(lr, max_ratio=1.0),
    "lars": lambda lr: eb.lars(lr, weight_decay=0.1, trust_coefficient=0.1),
    "lars joint": lambda lr: eb.lars(lr, weight_decay=0.1, nesterov=True, joint_norm=True, rate_inside=True),
    "adan": lambda lr: eb.adan(lr, weight_decay=0.1),
    "adan as optax": lambda lr: eb.adan(lr, look_ahead=0.08, eps_root=1e-12, weight_decay=0.1, proximal=False),
    "adabelief": lambda lr: eb.adabelief(lr, eps=1e-8, eps_root=1e-12),
    "yogi": lambda lr: eb.yogi(lr, initial_mean=1e-6, weight_decay=0.1),
    "laprop": lambda lr: eb.laprop(lr, eps=1e-8, weight_decay=0.1),
    "signum": lambda lr: eb.signum(lr, weight_decay=0.1),
    "tiger": eb.tiger,
    "stable adamw": eb.stable_adamw,
    "mars": lambda lr: eb.mars(lr, weight_decay=0.1),
    "mars lion": lambda lr: eb.mars(lr, gamma=0.1, max_norm=None, zero_before=True, sign=True),
    "adafactor": lambda lr: eb.adafactor(lr, weight_decay=0.1),
    "adafactor momentum": lambda lr: eb.adafactor(lr, b1=0.9, b2_cap=0.95, weight_decay=0.1, dimensions="largest"),
    "adafactor directions": lambda lr: eb.adafactor(
        lr, b1=0.9, momentum_of="directions", clip_threshold=None, scale_parameter=False, weight_decay=0.1
    ),
    "came": lambda lr: eb.came(lr, weight_decay=0.1),
    "muon": lambda lr: eb.muon(
        lr,
        averaged=False,
        nesterov=False,
        iteration=eb.NewtonSchulz(coefficients="polar_express", arithmetic="float64", normalization="polar_express"),
        scale="match_rms_adamw",
        decay_kind="cautious",
        others=eb.sgd,
    ),
    "torch muon": lambda lr: eb.partition(
        {"matrix": eb.torch_muon(lr, arithmetic="float64"), "tensor": eb.sgd(lr)},
        lambda _, leaf: "matrix" if leaf.ndim == 2 else "tensor",
    ),
    "muon with others": lambda lr: eb.muon(lr, iteration=eb.NewtonSchulz(arithmetic="float64"), others=eb.adamw),
    "muon equalized": lambda lr: eb.muon(
        lr,
        iteration=eb.NewtonSchulz(arithmetic="float64", batching="together"),
        before="both",
        after="columns_then_rows",
        others_rate=0.5,
    ),
    "muon after": lambda lr: eb.muon(
        lr,
        iteration=eb.NewtonSchulz(arithmetic="float64"),
        after=lambda view: eb.scale_by_normuon(view, side="longer", norm="exact", debias=True),
        weight_decay=0.0,
    ),
    "normuon": lambda lr: eb.normuon(lr, iteration=eb.NewtonSchulz(arithmetic="float64"), side="longer", norm="exact"),
    "soap": lambda lr: eb.soap(lr, period=2, where=eb.Kronecker(sides="smaller"), weight_decay=0.1),
    "soap corrected": lambda lr: eb.soap(
        lr,
        b1=0.8,
        period=2,
        where=eb.Kronecker(max_dimension=5),
        correction="kl",
        normalize=True,
        weight_decay=1.0,
        decay_moved=False,
    ),
    "shampoo": lambda lr: eb.shampoo(
        lr, period=2, where=eb.Kronecker(sides="smaller", max_dimension=8192), weight_decay=0.1
    ),
    "shampoo of sums": lambda lr: eb.shampoo(
        lr,
        b1=None,
        b2=None,
        eps=0.1,
        damping="start",
        period=2,
        graft=eb.Grafting(of="none"),
        momentum=eb.trace(0.5, nesterov=True),
        where=eb.Kronecker(max_dimension=5),
    ),
    "kron": lambda lr: eb.kron(lr, period=2, where=eb.Kronecker(max_dimension=5), weight_decay=0.1),
    "kron of gradients": lambda lr: eb.kron(
        lr,
        of_momentum=False,
        normalize=True,
        max_rms=None,
        where=eb.Kronecker(vectors=True, merge=True, max_dimension=2048),
    ),
    "dion": lambda lr: eb.dion(lr, rank_divisor=2, others=eb.adamw),
    "adam atan2": lambda lr: eb.adam_atan2(lr, weight_decay=0.1),
    "schedule-free radam": lambda lr: eb.schedule_free_radam(lr, b2=0.9, r=1.0, weight_decay=0.1),
    "schedule-free radam sgd": lambda lr: eb.schedule_free_radam(lr, b2=0.9, sgd_phase=True),
    "apply if finite": lambda lr: eb.apply_if_finite(
        eb.chain(eb.scale_by_rms(), eb.scale_by_learning_rate(lr)), max_consecutive=5
    ),
}

REGISTRY: Mapping[str, Build] = MappingProxyType(_BUILDS)
"""The builders of the transforms that are checked, by name."""
