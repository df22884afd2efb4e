"""State on the host on a GPU: the bits of a step without it, the time and memory of a step, and what the bus allows.

``--device cpu`` rehearses it, with ordinary memory and without streams.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import everybit as eb
from everybit_torch import AdamW, TorchOptimizer, create
from everybit_torch.segments import host_state
from machine import describe

STATE = {"LEAN_BF16": 6, "EXACT_BF16": 10}
"""Bytes of AdamW's state for each element, beside the model's tensor, which travel both ways in a step."""


def clipped(learning_rate: float = 1e-3) -> Any:
    return eb.chain(eb.clip_by_global_norm(0.1), eb.adamw(learning_rate))


MAKE: dict[str, Callable[..., TorchOptimizer]] = {
    "adamw": lambda model, **options: create("adamw", model, lr=1e-3, **options),
    "muon": lambda model, **options: create("muon", model, lr=1e-3, **options),
    "soap": lambda model, **options: create("soap", model, lr=1e-3, **options),
    "clip": lambda model, **options: TorchOptimizer(model.named_parameters(), clipped, **options),
}


def bits(device: torch.device) -> dict[str, bool]:
    """Whether five steps end in the same weights and state."""
    found = {}
    for name, make in MAKE.items():
        for policy in STATE:
            results = []
            for offload in (None, "state"):
                torch.manual_seed(0)
                model = nn.Sequential(nn.Linear(512, 700), nn.Linear(700, 256)).to(device, torch.bfloat16)
                optimizer = make(model, policy=policy, offload=offload)
                for _ in range(5):
                    for parameter in model.parameters():
                        parameter.grad = torch.randn_like(parameter)
                    optimizer.step()
                state = [x.cpu() for one in optimizer.state_dict()["state"].values() for x in one.values()]
                results.append([*(p.detach().cpu() for p in model.parameters()), *state])
            found[f"{name}, {policy}"] = all(map(torch.equal, *results))
    return found


def bus(device: torch.device, nbytes: int) -> float:
    """Bytes per second of copies both ways at once, each on a stream of its own."""
    if device.type != "cuda":
        return float("nan")
    there = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    here = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    one, other = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy() -> None:
        with torch.cuda.stream(one):
            here[0].copy_(there[0], non_blocking=True)
        with torch.cuda.stream(other):
            there[1].copy_(here[1], non_blocking=True)

    return 2 * nbytes / timed(copy, device, 5)


def timed(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The median time of some work, after two rounds."""
    times = []
    for number in range(rounds + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= 2:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def _step_of(options: dict[str, Any], parameter: nn.Parameter) -> Callable[[], object]:
    return AdamW([parameter], **options).step


def steps(device: torch.device, numel: int, rounds: int) -> list[dict[str, Any]]:
    """A step of one long tensor: with state on the device, on the host, and moved by hand around torch's AdamW."""
    rows: list[dict[str, Any]] = []

    def measured(name: str, dtype: torch.dtype, make: Callable[[nn.Parameter], Callable[[], object]]) -> None:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        parameter = nn.Parameter(torch.zeros(numel, dtype=dtype, device=device))
        parameter.grad = torch.full_like(parameter, 1e-3)
        seconds = timed(make(parameter), device, rounds)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        rows.append({"name": name, "seconds": seconds, "peak": peak})
        print(rows[-1], flush=True)

    for policy in STATE:
        for offload in (None, "state"):
            options: Any = {"policy": policy, "compile": True, "offload": offload}
            where = offload or "on the device"
            measured(f"{policy}, {where}", torch.bfloat16, partial(_step_of, options))

    def by_hand(parameter: nn.Parameter) -> Callable[[], object]:
        optimizer = torch.optim.AdamW([parameter], fused=True)
        held: dict[str, Tensor] = {}

        def step() -> None:
            state = optimizer.state[parameter]
            for name, x in held.items():
                state[name] = x.to(device, non_blocking=True)
            optimizer.step()
            for name in ("exp_avg", "exp_avg_sq"):
                pinned = held.setdefault(name, torch.empty(numel, pin_memory=device.type == "cuda"))
                pinned.copy_(state[name], non_blocking=True)
                state[name] = pinned

        return step

    measured("torch, moved by hand", torch.float32, by_hand)
    return rows


def cpu_offload_policy(device: torch.device, width: int, rounds: int) -> dict[str, float]:
    """Seconds of FSDP2's CPUOffloadPolicy on one rank, for a square matrix in float32: a whole pass, and torch's fused step on the host."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    model = nn.Linear(width, width, bias=False, device=device)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    fully_shard(model, mesh=init_device_mesh(device.type, (1,)), offload_policy=offload)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(1, width, device=device)

    def work() -> None:
        model(x).sum().backward()
        optimizer.step()

    found = {"elements": float(width * width), "pass": timed(work, device, rounds)}
    found["step"] = timed(optimizer.step, device, rounds)
    dist.destroy_process_group()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--numel", type=int, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    device = torch.device(given.device)
    host_state.IN_TESTS = device.type == "cpu"
    found: dict[str, Any] = {"machine": describe(), "bits": bits(device), "numel": given.numel}
    print(found["bits"], flush=True)
    found["bus"] = bus(device, min(given.numel, 1 << 28))
    found["steps"] = steps(device, given.numel, given.rounds)
    found["cpu_offload_policy"] = cpu_offload_policy(device, math.isqrt(given.numel), given.rounds)
    print(found["cpu_offload_policy"], flush=True)
    for row in found["steps"]:
        policy, _, where = row["name"].partition(", ")
        if where == "state":
            row["of_the_bus"] = 2 * STATE[policy] * given.numel / row["seconds"] / found["bus"]
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not all(found["bits"].values()):
        raise SystemExit("bits differ")


if __name__ == "__main__":
    main()
