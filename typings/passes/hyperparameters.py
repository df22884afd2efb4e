"""Hyperparameters are numbers, 0-d tensors, or schedules; a schedule is any function from a tensor to a tensor."""

import torch
from torch import Tensor

import everybit as eb


def inverse_root(step: Tensor) -> Tensor:
    return 0.1 / (step.double() + 1).sqrt()


rates: list[eb.Hyperparameter] = [
    1,
    1e-3,
    torch.tensor(1e-3),
    eb.warmup_cosine_decay_schedule(1e-3, 10, steps=100),
    eb.join_schedules([eb.constant_schedule(0.1), inverse_root], [5]),
    inverse_root,
    lambda step: 0.9 * inverse_root(step),
]
transforms = [make(rate) for rate in rates for make in (eb.sgd, eb.adam, eb.adamw, eb.lion, eb.rmsprop)]
eb.adamw(inverse_root, b1=inverse_root, b2=torch.tensor(0.95), eps=1e-6, weight_decay=eb.linear_schedule(0.1, 0.0, 9))
eb.chain(eb.clip_by_global_norm(inverse_root), eb.clip(1.0), eb.scale(inverse_root))
