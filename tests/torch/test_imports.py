"""What is loaded by `import everybit_torch`, and by an optimizer that is never compiled: torch, and nothing that takes long."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import everybit as eb

# Each of them takes a large part of the time of `import torch`, or more.
EXPENSIVE = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.onnx",
    "sympy",
    "triton",
)
OURS = {"everybit", "everybit_torch", "optree"}

PROGRAM = """
import json, sys
import torch

stages, known = {}, set(sys.modules)

def ended(stage):
    stages[stage] = sorted(set(sys.modules) - known)

import everybit as eb
ended("import everybit")
import everybit_torch
ended("import everybit_torch")

def clipped(lr):
    return eb.chain(eb.clip_by_global_norm(1.0), eb.adamw(lr))

for factory, policy in ((eb.adamw, eb.policies.LEAN_BF16), (clipped, None)):
    dtype = torch.float32 if policy is None else torch.bfloat16
    model = torch.nn.Linear(4, 4, dtype=dtype)
    optimizer = everybit_torch.TorchOptimizer(model.parameters(), factory, lr=1e-3, policy=policy)
    model(torch.ones(2, 4, dtype=dtype)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
ended("an uncompiled step")

stepper = everybit_torch.FlatStepper(torch.nn.Linear(4, 4), clipped(1e-3))
stepper.model(torch.ones(2, 4)).sum().backward()
stepper.step()
ended("a stepper's step")
print(json.dumps(stages))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """Names of the modules beyond torch's own, by what had been done in a fresh process."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=os.environ)
    stages: dict[str, list[str]] = json.loads(done.stdout)
    return stages


@pytest.mark.parametrize(
    "stage", ["import everybit", "import everybit_torch", "an uncompiled step", "a stepper's step"]
)
@pytest.mark.sampled(2)
@pytest.mark.slow
def test_nothing_that_takes_long_is_loaded_by(stage: str, loaded: dict[str, list[str]]) -> None:
    names = loaded[stage]
    assert "everybit" in names
    assert [name for name in names if name in EXPENSIVE] == []


@pytest.mark.parametrize("stage", ["import everybit", "import everybit_torch"])
@pytest.mark.slow
def test_beside_the_standard_library_only_optree_comes_with(stage: str, loaded: dict[str, list[str]]) -> None:
    roots = {name.partition(".")[0] for name in loaded[stage]}
    assert roots <= OURS | set(sys.stdlib_module_names)
    assert [name for name in loaded[stage] if name.startswith("torch.")] == []


def test_a_class_of_the_torch_package_that_is_looked_for_in_the_core_is_said_where_it_is() -> None:
    with pytest.raises(
        ImportError, match=r"everybit has no AdamW; it is in everybit_torch: from everybit_torch import AdamW"
    ):
        from everybit import AdamW  # type: ignore[attr-defined]  # noqa: F401
    assert not hasattr(eb, "no_such_optimizer")
