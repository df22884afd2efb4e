"""Random bits of optimizers with labels: those of the core, wherever the engine leaves out the transforms of labels that it lacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import TorchOptimizer


def three(lr: float) -> Any:
    """Three parts with a slot ``momentum`` each, of which one has no parameters."""
    parts = {name: eb.chain(eb.trace(0.9), eb.sgd(lr)) for name in ("vector", "cube", "matrix")}
    return eb.partition(
        parts, lambda path, p: {1: "vector", 2: "matrix", 3: "cube"}[p.ndim], optional=("cube", "vector")
    )


@pytest.mark.parametrize("alone", [False, True], indirect=True)
@pytest.mark.parametrize("policy", ["LEAN_BF16", "KAHAN_BF16", "LEAN_8BIT"])
@pytest.mark.parametrize("factory", [three])
@pytest.mark.parametrize("shapes", [[(5, 4), (7,)], [(7,), (3, 3)], [(5, 4), (3, 6)]])
def test_core_and_adapter_draw_the_same_bits(
    factory: Any, policy: str, alone: bool, shapes: list[tuple[int, ...]]
) -> None:
    begun = [torch.sin(torch.arange(torch.Size(shape).numel()) + 1.0).view(shape).bfloat16() for shape in shapes]
    params = [nn.Parameter(p.clone()) for p in begun]
    optimizer = TorchOptimizer(params, factory, lr=0.01, policy=getattr(eb.policies, policy), seed=3)
    core = eb.with_policy(factory(0.01), getattr(eb.policies, policy), seed=3)
    pure: list[Tensor] = [p.clone() for p in begun]
    state = core.init(pure)
    for step in range(3):
        grads = [torch.cos(torch.arange(p.numel()) + step).view(p.shape).bfloat16() for p in begun]
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        optimizer.step()
        pure, state = core.step(pure, grads, state)
    assert all(torch.equal(a, b) for a, b in zip(params, pure, strict=True))
    ours = [x for p in params for name, x in optimizer.state[p].items() if name == "momentum"]
    theirs = [x for name, x in eb.state_dict(state).items() if "momentum" in name and "scale" not in name and x.ndim]
    theirs = [x for x in theirs if x.dtype is ours[0].dtype]
    assert len(ours) == 2
    assert sorted(x.flatten().tolist() for x in ours) == sorted(x.flatten().tolist() for x in theirs)
