"""SAM: the point of the second gradient, functional and in a torch loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import AdamW, FlatStepper, sam_weights

Params = dict[str, Tensor]
SHAPES = {"w": (4, 3), "b": (5,), "s": ()}


def draws(seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_point_is_that_of_the_papers(adaptive: bool) -> None:
    params, grads = draws(0), draws(1)
    flat_w, flat_g = (torch.cat([x.reshape(-1) for x in each.values()]) for each in (params, grads))
    t = flat_w.abs() if adaptive else torch.ones_like(flat_w)
    expected = flat_w + 0.3 * t**2 * flat_g / (t * flat_g).norm()
    found = eb.sam_point(params, grads, 0.3, adaptive=adaptive)
    torch.testing.assert_close(torch.cat([x.reshape(-1) for x in found.values()]), expected, rtol=1e-12, atol=1e-14)
    away = torch.cat([(found[name] - p).reshape(-1) for name, p in params.items()])
    # It is as far away as the radius says, and uphill.
    assert float((away / t).norm()) == pytest.approx(0.3, rel=1e-11)
    assert float(away @ flat_g) > 0


def test_a_gradient_of_zero_leads_nowhere_and_nothing_is_written() -> None:
    params = draws(0)
    zeros = eb.tree.zeros_like(params)
    found = eb.sam_point(params, zeros)
    assert all(torch.equal(found[name], p) for name, p in params.items())
    assert all(found[name].data_ptr() != p.data_ptr() for name, p in params.items())


def test_the_norm_is_that_of_all_shards() -> None:
    class Twice(eb.Local):
        @staticmethod
        def sum(value: Tensor) -> Tensor:
            return 4 * value

    here = eb.sam_point(torch.zeros(2), torch.tensor([3.0, 4.0]), 1.0, axis=Twice())
    assert here.tolist() == pytest.approx([0.3, 0.4])


def test_sixteen_bits_have_a_coarse_neighbourhood() -> None:
    params, grads = torch.full((64,), 1.0, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    # 0.01 / 8 for each element is less than half of 2**-7.
    assert torch.equal(eb.sam_point(params, grads, 0.01), params)
    wide = eb.sam_point(params.float(), grads, 0.01)
    torch.testing.assert_close(wide, torch.full((64,), 1 + 0.01 / 8), rtol=2.0**-23, atol=0)


def test_a_tensor_is_a_radius_and_it_can_be_differentiated() -> None:
    params, grads = draws(0), draws(1)

    def length(radius: Tensor) -> Tensor:
        found = eb.sam_point(params, grads, radius)
        return torch.stack([((found[name] - p) ** 2).sum() for name, p in params.items()]).sum().sqrt()

    assert float(torch.func.grad(length)(torch.tensor(0.1, dtype=torch.float64))) == pytest.approx(1.0, rel=1e-9)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^radius: got -1"):
        eb.sam_point(torch.ones(1), torch.ones(1), -1)
    with pytest.raises(ValueError, match=r"^grads: structure differs from params: no tensor at grads\['b'\]"):
        eb.sam_point({"w": torch.ones(1), "b": torch.ones(1)}, {"w": torch.ones(1)})


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


INPUTS = torch.randn(16, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def loss(network: nn.Module) -> Tensor:
    out: Tensor = network(INPUTS.to(next(network.parameters()).dtype))
    return (out - 1).square().mean()


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("make", [AdamW, torch.optim.AdamW])
def test_a_torch_loop_follows_the_pure_one(make: Any, adaptive: bool) -> None:
    network = model()
    optimizer = make(network.parameters(), lr=0.01)
    opt = eb.with_policy(eb.adamw(0.01), eb.policies.FP64)
    params = {name: p.detach().clone() for name, p in network.named_parameters()}
    state = opt.init(params)

    def pure(params: Params) -> Tensor:
        out: Tensor = torch.func.functional_call(network, params, (INPUTS,))
        return (out - 1).square().mean()

    for _ in range(20):
        optimizer.zero_grad()
        loss(network).backward()  # type: ignore[no-untyped-call]
        with sam_weights(optimizer, 0.1, adaptive=adaptive):
            loss(network).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        there = eb.sam_point(params, torch.func.grad(pure)(params), 0.1, adaptive=adaptive)
        with torch.no_grad():
            params, state = opt.step(params, torch.func.grad(pure)(there), state)
    for name, p in network.named_parameters():
        # 20 steps of some 50 roundings, of numbers of about 1.
        torch.testing.assert_close(p.detach(), params[name], rtol=1e-12, atol=1e-13)


def test_weights_come_back_bit_for_bit_also_after_an_error() -> None:
    network = model(torch.bfloat16)
    optimizer = AdamW(network.parameters(), lr=0.01, policy="LEAN_BF16")
    for _ in range(2):
        optimizer.zero_grad()
        loss(network).backward()  # type: ignore[no-untyped-call]
        before = [p.detach().clone() for p in network.parameters()]
        with sam_weights(optimizer, 1.0):
            assert not all(map(torch.equal, network.parameters(), before))
            loss(network).backward()  # type: ignore[no-untyped-call]
        assert all(map(torch.equal, network.parameters(), before))
        with pytest.raises(ZeroDivisionError), sam_weights(optimizer, 1.0):
            raise ZeroDivisionError
        assert all(map(torch.equal, network.parameters(), before))
        loss(network).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def test_without_gradients_it_is_refused() -> None:
    network = model()
    optimizer = AdamW(network.parameters(), lr=0.01)
    with pytest.raises(RuntimeError, match=r"^sam_weights: no parameter has a gradient"), sam_weights(optimizer):
        pass


def test_shards_are_refused() -> None:
    stepper = FlatStepper(model(), eb.sgd(0.1), policy=eb.policies.FP64, strategy="no_shard")
    with (
        pytest.raises(TypeError, match=r"^sam_weights: got parameters that are shards"),
        sam_weights(stepper.as_optimizer()),
    ):
        pass
