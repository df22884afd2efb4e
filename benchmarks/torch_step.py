"""Time of a step of ``everybit_torch.AdamW``, compiled or not, over torch's fused AdamW of float32, for few long and many short tensors.

    python benchmarks/torch_step.py --threads 2 --out benchmarks/results/torch-step-cpu.json
    TORCHINDUCTOR_CPP_MARCH=haswell ATEN_CPU_CAPABILITY=avx2 python benchmarks/torch_step.py --threads 2 --simdlen 256 \
        --out benchmarks/results/torch-step-cpu-avx2.json                    # as on a processor with AVX2
    python benchmarks/torch_step.py --threads 2 --clipped --out benchmarks/results/torch-step-clipped-cpu.json

With ``--clipped`` both clip the norm of all gradients: torch by ``clip_grad_norm_`` before its step, ours in the transform.

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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import everybit as eb
from everybit_torch import AdamW, TorchOptimizer
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


CLIP = 1.0


def clipped(learning_rate: float) -> eb.Transform[Any]:
    """AdamW behind a clip."""
    return eb.chain(eb.clip_by_global_norm(CLIP), eb.adamw(learning_rate))


def measured(
    shapes: Shapes, policy: eb.Policy, steps: int, *, compile: bool = True, clips: bool = False
) -> dict[str, float]:
    """Milliseconds of a step of both, the ratio, and seconds of our first step."""
    dtype = torch.float32 if policy is eb.policies.FP32 else torch.bfloat16
    theirs, ours = ([torch.nn.Parameter((torch.randn(s) * 0.02).to(d)) for s in shapes] for d in (torch.float32, dtype))
    for parameter in (*theirs, *ours):
        parameter.grad = torch.full_like(parameter, 0.01)
    fused = torch.optim.AdamW(theirs, fused=True)
    made: Callable[..., TorchOptimizer] = partial(TorchOptimizer, factory=clipped) if clips else AdamW
    everybit = made(ours, lr=1e-3, policy=policy, compile=compile)
    started = time.perf_counter()
    everybit.step()
    first = time.perf_counter() - started
    times: dict[object, list[float]] = {fused: [], everybit: []}
    for number in range(steps + 5):
        for optimizer in random.sample(list(times), 2):
            started = time.perf_counter()
            if clips and optimizer is fused:
                torch.nn.utils.clip_grad_norm_(theirs, CLIP)
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
    parser.add_argument("--clipped", action="store_true")
    parser.add_argument("--simdlen", type=int)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.simdlen is not None:
        importlib.import_module("torch._inductor.config").cpp.simdlen = given.simdlen
    rows = []
    for name, shapes in MODELS.items():
        for policy in POLICIES if name in LONG and not given.clipped else POLICIES[:2]:
            chosen = eb.policies.PRESETS[policy]
            row = measured(shapes, chosen, given.steps, compile=not given.uncompiled, clips=given.clipped)
            print(
                f"{name}, {policy}: {row['ratio']:.2f} of {row['torch']:.2f} ms, first step {row['first']:.1f} s",
                flush=True,
            )
            rows.append({"model": name, "policy": policy, **row})
    if given.out is not None:
        given.out.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
