"""Every optimizer under every preset: a step runs, or the preset is refused for a slot that the message names."""

from __future__ import annotations

import re

import pytest
import torch

import everybit as eb
import safe_policies
from everybit.protocol import decays
from everybit.testing import assert_same_bits, example_grads, example_params

PRESETS: tuple[eb.PolicyName, ...] = ("FP32", "LEAN_BF16", "KAHAN_BF16", "FLOOR_BF16", "PURE_BF16", "ANYPRECISION")
ACCEPTED = PRESETS[:4]


def refusal(one: eb.NamedOptimizer, policy: eb.Policy) -> str | None:
    """Why a policy is refused for an optimizer; None: it is not."""
    try:
        eb.with_policy(one.function(), policy)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", eb.optimizers())
@pytest.mark.sampled(5)
def test_a_step_runs_or_the_slot_that_would_stop_is_named(name: eb.OptimizerName, preset: eb.PolicyName) -> None:
    one, policy = eb.optimizers()[name], eb.policies.PRESETS[preset]
    message = refusal(one, policy)
    if message is not None:
        assert preset not in ACCEPTED, message
        (slot,) = {slot for slot in one.slots() if f"'{slot}'" in message}
        assert re.match(r"Policy\.(momentum|variance|state): got Nearest\(dtype='bfloat16'\)", message)
        # Parts of a partition may have slots of the same name.
        rates = [decay.rate for decay in decays(one.function()) if decay.slot == slot]
        assert any(not isinstance(rate, float) or rate > 0.96875 for rate in rates)
        return
    optimizer = eb.with_policy(one.function(), policy)
    # What is accepted and rounded to nearest moves fast enough, or is replaced at each step.
    for decay in decays(one.function()):
        if policy.resolved_slot(decay.slot).resolution(policy.compute) > 0:
            assert isinstance(decay.rate, (int, float))
            assert decay.rate <= 0.96875
    params = example_params(getattr(torch, policy.model_dtype))
    state = optimizer.init(params)
    first = params
    for step in range(1, 8):  # some wait for a few
        params, state = optimizer.step(params, example_grads(params, step), state)
    assert all(bool(leaf.isfinite().all()) for leaf in eb.tree.leaves(params))
    found = eb.tree.leaves(optimizer.export_fp32(params, state))
    moved = [bool((a != b.float()).any()) for a, b in zip(found, eb.tree.leaves(first), strict=True) if a.numel()]
    # Of bfloat16 weights that are rounded stochastically, steps of a millionth move none of the few that there are here.
    assert any(moved) or (name in ("prodigy", "dadapt_adam") and preset == "FLOOR_BF16")
    with pytest.raises(AssertionError):
        assert_same_bits(state, optimizer.init(first), "the state after three steps and before")


def test_what_is_refused_is_what_stops() -> None:
    """The slow average of AdEMAMix, to nearest in bfloat16: refused, and it misses a good part of what float32 has."""
    found = safe_policies.examined("ademamix", steps=120)
    assert found["LEAN_BF16"].refused is None
    assert found["LEAN_BF16"].moves
    assert found["PURE_BF16"].refused == "slow"
    assert found["PURE_BF16"].deviation > 10 * found["LEAN_BF16"].deviation


def test_the_page_has_every_optimizer_and_what_is_refused() -> None:
    page = safe_policies.PAGE.read_text(encoding="utf-8")
    table = page.partition(safe_policies.BEGIN)[2].partition(safe_policies.END)[0]
    rows = {match[1]: match[0] for match in re.finditer(r"^\| `(\w+)` \|.*$", table, re.MULTILINE)}
    assert list(rows) == list(eb.optimizers()), "run: python benchmarks/safe_policies.py --write"
    for name, one in eb.optimizers().items():
        cells = [cell.strip() for cell in rows[name].strip("|").split("|")][1:]
        for preset, cell in zip(safe_policies.PRESETS, cells, strict=True):
            slot = safe_policies.refused_for(one, eb.policies.PRESETS[preset])
            assert cell.startswith(f"refused for `{slot}`; ") == (slot is not None), (name, preset)
