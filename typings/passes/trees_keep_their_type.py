"""What goes through a step comes out with its type: dicts, named tuples, dataclasses, nested lists."""

from __future__ import annotations

from typing import Any, NamedTuple, assert_type

import torch
from torch import Tensor

import everybit as eb


class Pair(NamedTuple):
    weight: Tensor
    bias: Tensor


@eb.state
class Layer:
    weight: Tensor
    inner: list[Pair]


opt = eb.with_policy(eb.adamw(1e-3), eb.policies.KAHAN_BF16)

weights = {"w": torch.ones(2)}
state = opt.init(weights)
assert_type(opt.step(weights, weights, state)[0], dict[str, Tensor])

pair = Pair(torch.ones(2), torch.ones(1))
new_pair, _ = opt.step(pair, pair, opt.init(pair))
assert_type(new_pair, Pair)

layer = Layer(torch.ones(2), [pair])
new_layer, _ = opt.step(layer, layer, opt.init(layer))
assert_type(new_layer, Layer)
assert_type(opt.export_fp32(layer, opt.init(layer)), Layer)
assert_type(eb.apply_updates(pair, pair), Pair)

transform: eb.Transform[Any] = eb.chain(eb.clip(1.0), eb.scale_by_learning_rate(torch.tensor(0.1)))
updates, _ = transform.update(pair, transform.init(pair), pair, eb.Context())
assert_type(updates, Pair)

new_weights, state = opt.import_fp32(weights, weights, state)
assert_type(new_weights, dict[str, Tensor])
assert_type(opt.step([weights["w"]], [weights["w"]], opt.init([weights["w"]]))[0], list[Tensor])
assert_type(opt.step(weights["w"], weights["w"], opt.init(weights["w"]))[0], Tensor)

measured = eb.with_metrics(opt)
assert_type(measured.step(layer, layer, measured.init(layer))[0], Layer)
assert_type(measured.init(layer).metrics.lost_share, Tensor)

assert_type(eb.tree.map(torch.neg, layer), Layer)
momentum = eb.trace(0.9)
assert_type(momentum.init(weights).momentum, dict[str, Tensor])
assert_type(momentum.update(layer, momentum.init(layer), layer)[0], Layer)
