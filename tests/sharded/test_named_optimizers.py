"""Every optimizer under every policy: the weights of a model in shards are those of the whole model, on one rank or several."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import everybit as eb
from everybit_torch import FlatStepper, create
from tests.support.exact_models import whole_of
from tests.support.ranks import run
from tests.support.weights import Weights, equal

STEPS = 3
PRESETS: tuple[eb.PolicyName, ...] = ("FP32", "LEAN_BF16", "KAHAN_BF16", "FLOOR_BF16")
SAMPLE: tuple[eb.OptimizerName, ...] = ("ademamix", "lamb", "prodigy")


class Layer(nn.Module):
    """Its gradient is its input, exact in every dtype and order of addition."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape))

    def forward(self, x: Tensor) -> Tensor:
        flat: Tensor = self.weight.reshape(-1)
        return (flat * x[: flat.numel()]).sum()


class Model(nn.Module):
    """Sizes that no number of ranks divides, of tensors that are cut, and of whole tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(3, 5), Layer(17), Layer(2, 2, 3), Layer(1)])

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = sum((layer(x) for layer in self.layers), torch.zeros((), dtype=x.dtype))
        return total


def model_for(preset: eb.PolicyName) -> Model:
    return Model().to(getattr(torch, eb.policies.PRESETS[preset].model_dtype))


def inputs(step: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return (torch.randint(-8, 9, (20,), generator=generator).float() / 4).to(dtype)


def rate_of(name: eb.OptimizerName) -> float:
    """Large enough to be felt in bfloat16."""
    return max(0.02, eb.optimizers()[name].learning_rate or 0.02)


def whole(name: eb.OptimizerName, preset: eb.PolicyName) -> Weights:
    model = model_for(preset)
    optimizer = create(name, model, policy=preset, lr=rate_of(name), seed=5, compile=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(inputs(step, model.layers[0].get_parameter("weight").dtype)).backward()
        optimizer.step()
    return {path: p.detach().clone() for path, p in model.named_parameters()}


def in_shards(cases: Sequence[tuple[eb.OptimizerName, eb.PolicyName]]) -> list[Weights]:
    found: list[Weights] = []
    for name, preset in cases:
        model = model_for(preset)
        transform = eb.optimizers()[name].function(rate_of(name))
        stepper = FlatStepper(
            model, transform, policy=preset, strategy="optim_grads_params", units=[Layer], divisor=1.0, seed=5
        )
        for step in range(STEPS):
            x = inputs(step, torch.float32 if preset == "FP32" else torch.bfloat16)
            with stepper.microbatch(last=True):
                # One rank has all of the gradient, so that no sum rounds.
                model(x if dist.get_rank() == 0 else torch.zeros_like(x)).backward()
            stepper.step()
        found.append({path: whole_of(p).clone() for path, p in stepper.model.named_parameters()})
        stepper.close()
    return found


@pytest.mark.parametrize(
    ("size", "names", "presets"),
    [
        (2, SAMPLE, ("LEAN_BF16",)),
        *(
            pytest.param(
                size, tuple(eb.optimizers()), (preset,), marks=pytest.mark.exhaustive, id=f"all-{size}-{preset}"
            )
            for size in (1, 2, 3)
            for preset in PRESETS
        ),
    ],
)
def test_shards_equal_the_whole(
    size: int, names: tuple[eb.OptimizerName, ...], presets: tuple[eb.PolicyName, ...]
) -> None:
    cases = list(itertools.product(names, presets))
    expected = [whole(*case) for case in cases]
    first = [{path: p.detach() for path, p in model_for(preset).named_parameters()} for _, preset in cases]
    assert not all(equal(*pair) for pair in zip(expected, first, strict=True))
    for found in run(size, in_shards, cases):
        wrong = [case for case, one, other in zip(cases, found, expected, strict=True) if not equal(one, other)]
        assert wrong == []
