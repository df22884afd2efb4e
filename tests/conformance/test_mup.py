"""The authors' package as an oracle for learning rates by width. Run by ``make conformance``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import everybit as eb

mup = pytest.importorskip("mup")


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.hidden = nn.Linear(width, 4 * width)
        self.back = nn.Linear(4 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.head = mup.MuReadout(width, 3)
        self.scale = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_learning_rates_and_decay_are_those_of_the_package(kind: Any) -> None:
    torch.manual_seed(0)
    wide, narrow = Model(24), Model(8)
    mup.set_base_shapes(wide, narrow, delta=Model(16))
    named = {name: p.detach().double() for name, p in wide.named_parameters()}
    rate, decay = 0.1, 0.01
    make = mup.MuAdamW if kind == "adam" else mup.MuSGD
    theirs = make(wide.double().parameters(), lr=rate, weight_decay=decay)
    of_package = {id(p): group for group in theirs.param_groups for p in group["params"]}
    scales = eb.mup_scales(named, dict(narrow.named_parameters()), kind)
    ones = eb.tree.map(torch.ones_like, named)
    factors, _ = scales.update(ones, scales.init(named), named)
    for name, parameter in wide.named_parameters():
        assert of_package[id(parameter)]["lr"] == pytest.approx(rate * float(factors[name].mean()), rel=1e-15), name
    if kind == "sgd":
        return
    # Whole steps: decay is as strong as without muP, since the package divides by what it multiplies with.
    tx = eb.chain(eb.scale_by_adam(), scales, eb.add_decayed_weights(decay), eb.scale_by_learning_rate(rate))
    state = tx.init(named)
    for step in range(50):
        generator = torch.Generator().manual_seed(step)
        grads = {name: torch.randn(p.shape, generator=generator, dtype=torch.float64) for name, p in named.items()}
        updates, state = tx.update(grads, state, named)
        named = eb.apply_updates(named, updates)
        for name, parameter in wide.named_parameters():
            parameter.grad = grads[name].clone()
        theirs.step()
    for name, parameter in wide.named_parameters():
        torch.testing.assert_close(named[name], parameter.detach(), rtol=1e-12, atol=1e-12)
