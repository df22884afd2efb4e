"""AnyPrecisionAdamW against torch, and against torchdistX's update order written down here."""

from __future__ import annotations

import inspect
import math
import warnings

import pytest
import torch
from torch import Tensor

from everybit_torch import AnyPrecisionAdamW
from tests.support.small_models import Awkward, train


def torchdistx_step(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, c: Tensor, step: int, lr: float, weight_decay: float
) -> None:
    """torchdistX's order with Kahan summation: decay in the weight's dtype, the update into the compensation, then the weight."""
    b1, b2, eps = 0.9, 0.999, 1e-8
    p.mul_(1 - lr * weight_decay)
    m.mul_(b1).add_(g, alpha=1 - b1)
    v.mul_(b2).addcmul_(g, g, value=1 - b2)
    denominator = v.sqrt() / math.sqrt(1 - b2**step) + eps
    c.add_((-lr / (1 - b1**step)) * (m / denominator))
    before = p.clone()
    p.add_(c)
    c.add_(before.sub_(p))


def both(weight_decay: float, steps: int, lr: float = 1e-4) -> tuple[Tensor, Tensor, Tensor]:
    """(ours, torchdistX's, plain float64), each weight plus compensation."""
    generator = torch.Generator().manual_seed(0)
    start = (1 + torch.rand(512, generator=generator)).bfloat16()
    mine = torch.nn.Parameter(start.clone())
    optimizer = AnyPrecisionAdamW(
        [mine], lr=lr, weight_decay=weight_decay, use_kahan_summation=True, variance_dtype=torch.float32
    )
    exact = torch.nn.Parameter(start.double())
    reference = torch.optim.AdamW([exact], lr=lr, weight_decay=weight_decay)
    p, c = start.clone(), torch.zeros_like(start)
    m, v = torch.zeros(512), torch.zeros(512)
    for step in range(1, steps + 1):
        g = torch.randn(512, generator=generator).bfloat16()
        mine.grad, exact.grad = g, g.double()
        optimizer.step()
        reference.step()
        torchdistx_step(p, g.float(), m, v, c, step, lr, weight_decay)
    return optimizer.export_fp32()[0][0].double(), p.double() + c.double(), exact.detach()


def test_the_signature_and_its_defaults_are_torchdistxs() -> None:
    parameters = inspect.signature(AnyPrecisionAdamW.__init__).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    del defaults["self"], defaults["params"]
    assert defaults == {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "use_kahan_summation": False,
        "momentum_dtype": torch.float32,
        "variance_dtype": torch.bfloat16,
        "compensation_buffer_dtype": torch.bfloat16,
    }
    assert list(defaults)[:4] == ["lr", "betas", "eps", "weight_decay"]


def test_float32_states_without_kahan_are_torchs_adamw() -> None:
    mine, reference = Awkward(), Awkward()
    optimizer = AnyPrecisionAdamW(mine.parameters(), lr=1e-2, weight_decay=0.1, variance_dtype=torch.float32)
    got = train(mine, optimizer, 100)
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1), 100)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(
            a, b, rtol=0, atol=16 * 2.0**-23 * 4
        )  # values stay below 4; see test_parity for the 16


def test_kahan_follows_torchdistx_to_one_residual_rounding_a_step() -> None:
    steps, lr = 300, 1e-4
    ours, theirs, _ = both(0.0, steps, lr)
    # A step's roundings: torchdistX rounds the compensation plus the update to bfloat16, twice; we round the residual once. Each is of
    # a number of at most half an ulp of a weight below 2 (2**-8) plus the update (below 4 lr), to 8 bits: 2**-9 of it.
    per_step = 3 * 2.0**-9 * (2.0**-8 + 4 * lr)
    assert (ours - theirs).abs().max() <= steps * per_step
    # A bound that grows with steps is loose; roundings are as often up as down. Six sigma of the walk:
    assert (ours - theirs).abs().max() <= 6 * math.sqrt(steps) * per_step


def test_weight_decay_reaches_the_weights_where_torchdistx_loses_it() -> None:
    steps, lr, weight_decay = 300, 1e-4, 0.1
    ours, theirs, exact = both(weight_decay, steps, lr)
    ours_plain, theirs_plain, exact_plain = both(0.0, steps, lr)
    intended = (exact - exact_plain).mean()
    assert (theirs - theirs_plain).mean() == 0.0
    assert abs(((ours - ours_plain).mean() / intended) - 1) < 0.01


def test_the_broken_default_warns_once_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AnyPrecisionAdamW, "_warned", False)
    with pytest.warns(UserWarning, match=r"variance_rounding='stochastic'"):
        AnyPrecisionAdamW(Awkward().parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AnyPrecisionAdamW(Awkward().parameters())


@pytest.mark.slow
def test_the_remedy_does_not_warn_and_works() -> None:
    parameter = torch.nn.Parameter(torch.zeros(256, dtype=torch.bfloat16))
    optimizer = AnyPrecisionAdamW([parameter], lr=0.0, variance_rounding="stochastic")
    for step in range(2000):
        parameter.grad = torch.full_like(parameter, 1.0 if step < 200 else 0.01)
        optimizer.step()
    # 0.1814 * 0.999**1800 + 1e-4 * (1 - 0.999**1800); the noise of 256 elements is below a few percent.
    expected = (1 - 0.999**200) * 0.999**1800 + 1e-4 * (1 - 0.999**1800)
    assert abs(optimizer.state[parameter]["variance"].double().mean() / expected - 1) < 0.05


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Kahan splits a number .* got a float32 tensor"):
        AnyPrecisionAdamW(Awkward().parameters(), use_kahan_summation=True, variance_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"compensation_buffer_dtype: got torch.float64"):
        AnyPrecisionAdamW(Awkward().parameters(), compensation_buffer_dtype=torch.float64)
    with pytest.raises(TypeError, match=r"momentum_dtype: got torch.int8"):
        AnyPrecisionAdamW(Awkward().parameters(), momentum_dtype=torch.int8)
