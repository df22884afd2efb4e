"""The transformer is causal, knows where bytes are only relative to each other, and starts from its seed."""

from __future__ import annotations

import math

import pytest
import torch

from everybit_cli.compare.model import SIZES, ModelSize, Transformer, loss_of, rotary, rotate
from everybit_cli.compare.training import new_model

SIZE = ModelSize(width=32, layers=2, heads=2)


def test_no_logit_knows_what_comes_after() -> None:
    model = new_model(SIZE, 0).double()
    tokens = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=0)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(dim=(0, 2)).min() > 0


def test_rotation_makes_products_depend_on_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(16, dtype=torch.float64, generator=generator) for _ in range(2))
    rotation = rotary(64, 16, torch.device("cpu"))
    queries, keys = (rotate(x.expand(64, 16), rotation) for x in (query, key))
    products = queries @ keys.T
    for distance in (0, 1, 17):
        diagonal = products.diagonal(distance)
        # The angles are float32, at most 64 radians: a relative error of 2**-24 each.
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=16 * 64 * 2.0**-23)
    assert (products.diagonal(1)[0] - products.diagonal(17)[0]).abs() > 1e-2


def test_weights_depend_on_the_seed_and_leave_torchs_generator_alone() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    one, same, other = new_model(SIZE, 5), new_model(SIZE, 5), new_model(SIZE, 6)
    assert torch.equal(torch.rand(3), expected)
    pairs = list(zip(one.parameters(), same.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert all(not torch.equal(a, c) for a, _, c in pairs if a.ndim == 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_model_knows_nothing_and_its_loss_is_float32(dtype: torch.dtype) -> None:
    model = new_model(SIZE, 0).to(dtype)
    windows = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(0))
    assert model(windows).dtype == dtype
    loss = loss_of(model, windows)
    assert loss.dtype == torch.float32
    assert abs(float(loss.detach()) - math.log(256)) < 0.05


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_sizes_have_the_weights_they_should(size: ModelSize) -> None:
    with torch.device("meta"):
        model = Transformer(size)
    d = size.width
    assert d % size.heads == 0
    assert sum(p.numel() for p in model.parameters()) == 2 * 256 * d + size.layers * (12 * d * d + 2 * d) + d
