"""Steps over FSDP2's parameters leave no objects behind, as torch's optimizers over DTensors did (torchtitan #3790)."""

from __future__ import annotations

import pytest
import torch

from live_objects import FIRST, STEPS, growth, ours
from tests.support.ranks import run


def of_ours(name: str, policy: str) -> int:
    return growth(ours(name, policy), torch.float32 if policy == "FP32" else torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "policy"), [("adamw", "FP32"), ("adamw", "LEAN_BF16"), ("muon", "LEAN_BF16"), ("lamb", "FP32")]
)
@pytest.mark.sampled(3)
def test_forty_steps_leave_no_more_objects_than_ten(name: str, policy: str) -> None:
    # Torch's caches and its profiler may add a few, once; an object for each step and parameter would be 240.
    assert all(found < STEPS - FIRST for found in run(2, of_ours, name, policy))
