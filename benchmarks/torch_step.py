"""Time of a step of ``everybit_torch.AdamW``, compiled or not, over torch's fused AdamW of float32, for few long and many short tensors.

    python benchmarks/torch_step.py --threads 2 --out benchmarks/results/torch-step-cpu.json
    TORCHINDUCTOR_CPP_MARCH=haswell ATEN_CPU_CAPABILITY=avx2 python benchmarks/torch_step.py --threads 2 --simdlen 256 \
        --out benchmarks/results/torch-step-cpu-avx2.json                    # as on a processor with AVX2

Both step in one process, in an order that is drawn anew each time, and the medians are compared. What a step of the other has left in the
caches is then the same for both.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
import time
from pathlib import Path

import torch

import everybit as eb
from everybit_torch import AdamW
from machine import describe

Shapes = list[tuple[int, ...]]


def _layer(width: int) -> Shapes:
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    return [*matrices, (width,), (width,), (3 * width,), (width,), (4 * width,), (width,)]


MODELS: dict[str, Shapes] = {
    "a Llama layer / 4": [(1024, 1024)] * 4 + [(2730, 1024)] * 3 + [(1024,)] * 2,
    "12 layers of width 384": [(8000, 384), *(_layer(384) * 12)],
    "20M in one tensor": [(20_000_000,)],
    "50 tensors of 70,000": [(70_000,)] * 50,
    "144 tensors, 0.6M": [(64, 64)] * 144,
    "10,000 tensors of 40": [(40,)] * 10_000,
}


POLICIES = ("FP32", "LEAN_BF16", "EXACT_BF16", "KAHAN_BF16", "TIGHT_BF16", "FLOOR_BF16")
"""The first two are measured on all models, and all of them on :data:`LONG`."""

LONG = ("a Llama layer / 4", "20M in one tensor")


def measured(shapes: Shapes, policy: eb.Policy, steps: int, *, compile: bool = True) -> dict[str, float]:
    """Milliseconds of a step of both, the ratio, and seconds of our first step."""
    dtype = torch.float32 if policy is eb.policies.FP32 else torch.bfloat16
    theirs, ours = ([torch.nn.Parameter((torch.randn(s) * 0.02).to(d)) for s in shapes] for d in (torch.float32, dtype))
    for parameter in (*theirs, *ours):
        parameter.grad = torch.full_like(parameter, 0.01)
    fused = torch.optim.AdamW(theirs, fused=True)
    everybit = AdamW(ours, policy=policy, compile=compile)
    started = time.perf_counter()
    everybit.step()
    first = time.perf_counter() - started
    times: dict[object, list[float]] = {fused: [], everybit: []}
    for number in range(steps + 5):
        for optimizer in random.sample(list(times), 2):
            started = time.perf_counter()
            optimizer.step()  # type: ignore[attr-defined]
            if number >= 5:
                times[optimizer].append(1e3 * (time.perf_counter() - started))
    theirs_ms, ours_ms = (statistics.median(times[one]) for one in (fused, everybit))
    return {"torch": theirs_ms, "everybit": ours_ms, "ratio": ours_ms / theirs_ms, "first": first}


def main() -> None:
    """Measure all models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--uncompiled", action="store_true")
    parser.add_argument("--simdlen", type=int)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.simdlen is not None:
        importlib.import_module("torch._inductor.config").cpp.simdlen = given.simdlen
    rows = []
    for name, shapes in MODELS.items():
        for policy in POLICIES if name in LONG else POLICIES[:2]:
            row = measured(shapes, eb.policies.PRESETS[policy], given.steps, compile=not given.uncompiled)
            print(
                f"{name}, {policy}: {row['ratio']:.2f} of {row['torch']:.2f} ms, first step {row['first']:.1f} s",
                flush=True,
            )
            rows.append({"model": name, "policy": policy, **row})
    if given.out is not None:
        given.out.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
