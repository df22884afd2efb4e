"""Metrics against the same sums written out in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import everybit as eb

BF16 = torch.bfloat16


def tree(seed: int, dtype: torch.dtype, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: (torch.randn(n, generator=generator) * scale).to(dtype) for name, n in (("a", 33), ("b", 7))}


@pytest.mark.parametrize("name", ["PURE_BF16", "KAHAN_BF16", "LEAN_BF16", "FLOOR_BF16", "TIGHT_BF16", "MIXED_BF16"])
@pytest.mark.parametrize("lr", [1e-5, 1e-3, 1e-1])
def test_they_are_the_sums_written_out(name: str, lr: float) -> None:
    opt = eb.with_policy(eb.sgd(lr), eb.policies.PRESETS[name])
    params, grads = tree(0, BF16), tree(1, BF16)
    grads["a"][::3] = 0.0  # which loses nothing
    state = opt.init(params)
    measured = eb.with_metrics(opt)
    new, new_state = measured.step(params, grads, measured.init(params))
    reached = opt.export_fp32(*opt.step(params, grads, state))

    x = torch.cat([p.double() for p in params.values()])
    # The update as computed: one product in float32.
    u = torch.cat([-lr * g.float() for g in grads.values()]).double()
    y = torch.cat([w.double() for w in reached.values()])
    metrics = new_state.metrics
    assert float(metrics.moved) == int((u != 0).sum())
    assert float(metrics.lost) == int(((u != 0) & (x == y)).sum())
    assert float(metrics.lost_share) == pytest.approx(float(metrics.lost) / float(metrics.moved))
    # Sums of 40 float64 terms.
    assert float(metrics.edq) == pytest.approx(float(((y - x) * u).sum() / (u * u).sum()), rel=1e-12)
    assert float(metrics.update_norm) == pytest.approx(float(u.norm()), rel=1e-12)
    gradient = torch.cat([g.double() for g in grads.values()])
    assert float(metrics.gradient_norm) == pytest.approx(float(gradient.norm()), rel=1e-12)
    assert all(torch.equal(new[key], value) for key, value in opt.step(params, grads, state)[0].items())


@pytest.mark.parametrize("name", ["PURE_BF16", "KAHAN_BF16", "FLOOR_BF16"])
def test_measuring_changes_no_bit(name: str) -> None:
    opt = eb.with_policy(eb.adamw(1e-3, b2=0.95), eb.policies.PRESETS[name])
    measured = eb.with_metrics(opt)
    a = b = tree(0, BF16)
    state_a, state_b = opt.init(a), measured.init(b)
    for seed in range(5):
        a, state_a = opt.step(a, tree(seed, BF16), state_a)
        b, state_b = measured.step(b, tree(seed, BF16), state_b)
    pairs = zip(eb.tree.leaves((a, state_a)), eb.tree.leaves((b, state_b.optimizer)), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)
    assert int(state_b.step) == 5


def test_a_policy_that_fails_is_seen_to_fail_and_one_that_works_to_work() -> None:
    params, grads = {"w": torch.ones(64, dtype=BF16)}, {"w": torch.ones(64, dtype=BF16)}
    shares = {}
    for name in ("PURE_BF16", "KAHAN_BF16", "LEAN_BF16"):
        opt = eb.with_metrics(eb.with_policy(eb.sgd(1e-4), eb.policies.PRESETS[name]))
        metrics = opt.step(params, grads, opt.init(params))[1].metrics
        shares[name] = float(metrics.lost_share), float(metrics.edq)
    assert shares["PURE_BF16"] == (1.0, 0.0)
    for name in ("KAHAN_BF16", "LEAN_BF16"):
        assert shares[name][0] == 0.0
        # The residual -1e-4 keeps 8 bits of its own (2**-9 relative); the split weight keeps float32's ulp at 1, 2**-24 of 1e-4.
        assert shares[name][1] == pytest.approx(1.0, abs=2.0**-8)


def test_nothing_to_move_is_nothing_lost() -> None:
    opt = eb.with_metrics(eb.with_policy(eb.sgd(0.0), eb.policies.FP32))
    params = {"w": torch.ones(3)}
    metrics = opt.step(params, params, opt.init(params))[1].metrics
    assert (float(metrics.lost_share), float(metrics.edq), float(metrics.update_norm)) == (0.0, 1.0, 0.0)


def test_those_of_parts_add_up_to_the_wholes() -> None:
    opt = eb.with_policy(eb.sgd(1e-3), eb.policies.KAHAN_BF16)
    measured = eb.with_metrics(opt)
    params, grads = tree(0, BF16), tree(1, BF16)
    whole = measured.step(params, grads, measured.init(params))[1].metrics
    parts = []
    for key in params:
        p, g = {key: params[key]}, {key: grads[key]}
        parts.append(measured.step(p, g, measured.init(p))[1].metrics)
    total = parts[0] + parts[1]
    assert float(total.lost_share) == float(whole.lost_share)
    assert float(total.edq) == pytest.approx(float(whole.edq), rel=1e-14)


def test_full_precision_weights_pass_through() -> None:
    opt = eb.with_metrics(eb.with_policy(eb.sgd(1e-3), eb.policies.EXACT_BF16))
    params = tree(0, BF16)
    weights = {key: p.float() + 1e-5 for key, p in params.items()}
    new, state = opt.import_fp32(weights, params)
    assert all(torch.equal(opt.export_fp32(new, state)[key], w) for key, w in weights.items())


def test_only_an_optimizer_can_be_measured() -> None:
    with pytest.raises(TypeError, match=r"with_metrics: got Chain.*; accepted is what with_policy\(...\) returns"):
        eb.with_metrics(eb.adamw(1e-3))  # type: ignore[arg-type]


def test_they_are_python_numbers_by_name_for_a_logger() -> None:
    opt = eb.with_metrics(eb.with_policy(eb.sgd(1e-3), "PURE_BF16"))
    _, state = opt.step(tree(0, BF16), tree(1, BF16), opt.init(tree(0, BF16)))
    logged = state.metrics.asdict()
    assert logged == {name: float(getattr(state.metrics, name)) for name in logged}
    assert {type(value) for value in logged.values()} == {float}
    assert 0 < logged["lost"] < logged["moved"]
    assert logged["lost_share"] == logged["lost"] / logged["moved"]
