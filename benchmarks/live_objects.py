"""Objects that 40 steps over FSDP2's parameters leave behind: of everybit, and of torch's fused and foreach AdamW (torchtitan #3790).

python benchmarks/live_objects.py        # adds a row for the torch that runs it; `make matrix` runs it on each torch
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pages

RESULTS = Path(__file__).parent / "results/live-objects.json"
FIRST, STEPS = 10, 40

Make = Callable[[nn.Module], torch.optim.Optimizer]


def growth(make: Make, dtype: torch.dtype) -> int:
    """Return how many more objects there are after 40 steps than after 10."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).to(dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, counts = make(model), {}
    for step in range(1, STEPS + 1):
        model(torch.ones(2, 8, dtype=dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (FIRST, STEPS):
            gc.collect()
            counts[step] = len(gc.get_objects())
    return counts[STEPS] - counts[FIRST]


def ours(name: str, policy: str) -> Make:
    import everybit_torch as et

    created: Any = et.create
    return lambda model: created(name, model, policy=policy, compile=False)


def theirs(**options: Any) -> Make:
    return lambda model: torch.optim.AdamW(model.parameters(), **options)


CASES: dict[str, tuple[Make, torch.dtype]] = {
    "torch fused": (theirs(fused=True), torch.float32),
    "torch foreach": (theirs(foreach=True), torch.float32),
    "everybit AdamW, FP32": (ours("adamw", "FP32"), torch.float32),
    "everybit AdamW, LEAN_BF16": (ours("adamw", "LEAN_BF16"), torch.bfloat16),
    "everybit Muon, LEAN_BF16": (ours("muon", "LEAN_BF16"), torch.bfloat16),
}


def table(found: dict[str, dict[str, int]]) -> str:
    """Return Markdown: a row for each version of torch."""
    rows = [[version, *(str(row[name]) for name in CASES)] for version, row in sorted(found.items())]
    return pages.table(["torch", *CASES], rows)


def main() -> None:
    """Measure all cases in a group of one rank, and keep them with those of other versions."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29551")
    dist.init_process_group("gloo", rank=0, world_size=1)
    found: dict[str, dict[str, int]] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    found[torch.__version__.partition("+")[0]] = {name: growth(*case) for name, case in CASES.items()}
    RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    sys.stdout.write(table(found))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
