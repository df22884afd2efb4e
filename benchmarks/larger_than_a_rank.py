"""A model that no rank may hold: constructed from the meta device, trained, saved, and resumed on fewer ranks, under a limit on memory.

Each rank's data segment (``RLIMIT_DATA``: the heap and private writable memory, which is what tensors on the host lie in) is limited, when
torch is loaded, to what it has then and a share of the model. A control tries to make the whole model under this limit, and has to fail.
On two ranks each one's weights and gradients are as much as the whole model's weights, so the limit there is above these, and below what a
rank would need that trains the whole model.

    python benchmarks/larger_than_a_rank.py --gigabytes 2 --out benchmarks/results/larger-than-a-rank.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import everybit as eb
from everybit_torch import FlatStepper, FromInitializers, load_sharded, save_sharded


class Block(nn.Module):
    """A gated feed-forward layer with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.gate, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        out: Tensor = x + self.down(self.up(y) * torch.sigmoid(self.gate(y)))
        return out


def build(width: int, blocks: int) -> nn.Sequential:
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


def data_bytes() -> int:
    """Of this process: what RLIMIT_DATA limits."""
    return 1024 * next(
        int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line
    )


def resident_peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def steps(model: nn.Module, stepper: FlatStepper, width: int, first: int, count: int) -> list[float]:
    """The losses of some steps on the same data on every rank."""
    losses = []
    for step in range(first, first + count):
        with stepper.microbatch(last=True):
            loss = loss_of(model, width, step)
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        stepper.step()
        print(f"rank {dist.get_rank()}: step {step}, loss {losses[-1]}", file=sys.stderr, flush=True)
    return losses


def loss_of(model: nn.Module, width: int, step: int) -> Tensor:
    x = torch.randn(2, width, generator=torch.Generator().manual_seed(step))
    loss: Tensor = (model(x) - x.roll(1, 0)).square().mean()
    return loss


def rank_program(rank: int, size: int, store: str, given: dict[str, Any], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    limit = data_bytes() + given["allowed"]
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    width, blocks = given["width"], given["blocks"]
    found: dict[str, Any] = {"rank": rank, "data before": limit - given["allowed"], "limit": limit}
    if given["control"]:
        try:
            build(width, blocks)
            found["the whole model"] = "was made"
        except RuntimeError as error:
            found["the whole model"] = str(error).splitlines()[0][:120]
        results.put(found)
        return
    with torch.device("meta"):
        model = build(width, blocks)
    started = time.perf_counter()
    stepper = FlatStepper(
        model, eb.sgd(1e-2), strategy="optim_grads_params", units=[Block], keep_gradients=False, values=FromInitializers(seed=1),
    )  # fmt: skip
    found["seconds to construct"] = round(time.perf_counter() - started, 1)
    plan = stepper.plan()
    found["planned"] = {"persistent": plan.persistent_bytes, "transient": dict(plan.transient)}
    found["data when constructed"], found["resident peak when constructed"] = data_bytes(), resident_peak()
    if given["resume"]:
        load_sharded(stepper, given["folder"])
        found["losses"] = steps(model, stepper, width, 3, 2)
    else:
        found["losses"] = steps(model, stepper, width, 0, 3)
        save_sharded(stepper, given["folder"])
        with torch.no_grad():
            found["loss on the next batch"] = float(loss_of(model, width, 3))
    found["resident peak"] = resident_peak()
    results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def run(size: int, given: dict[str, Any]) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_program, (size, f"{folder}/store", given, results), nprocs=size, join=True)  # type: ignore[no-untyped-call]
        return sorted((results.get() for _ in range(size)), key=lambda one: one["rank"])


def measure(gigabytes: float, ranks: int, resumed_on: int, folder: str, blocks: int = 64) -> dict[str, Any]:
    """Construct, train and save on ``ranks``, and resume on fewer, each allowed less than the whole model."""
    width = round((gigabytes * 2**30 / (4 * 3 * blocks)) ** 0.5)
    whole = sum(p.numel() * p.element_size() for p in build_on_meta(width, blocks).parameters())
    unit = whole // blocks
    given = {"width": width, "blocks": blocks, "folder": folder, "resume": False, "control": True}

    def allowed(size: int) -> int:
        # This rank's weights and gradients; units that are gathered or reduced, of which gloo makes copies; threads.
        return 2 * whole // size + 12 * unit + (160 << 20)

    found: dict[str, Any] = {
        "model bytes": whole, "width": width, "blocks": blocks, "unit bytes": unit, "training": "float32, SGD",
        "machine": platform.processor() or platform.machine(), "torch": torch.__version__,
    }  # fmt: skip
    for size, resume in ((ranks, False), (resumed_on, True)):
        given = {**given, "allowed": allowed(size), "resume": resume}
        name = "resumed" if resume else "trained"
        found[name] = {
            "ranks": size,
            "allowed beside torch itself": allowed(size),
            "as a share of the model's weights": round(allowed(size) / whole, 3),
            "and of its weights and gradients": round(allowed(size) / (2 * whole), 3),
        }
        if not resume:
            assert allowed(size) < whole, "the limit has to be below the whole model: take a larger one, or more ranks"
            found[name]["making the whole model under this limit"] = run(1, {**given, "control": True})[0][
                "the whole model"
            ]
        found[name]["of each rank"] = run(size, {**given, "control": False})
    found["the first resumed loss is the saved model's"] = (
        found["resumed"]["of each rank"][0]["losses"][0]
        == found["trained"]["of each rank"][0]["loss on the next batch"]
    )
    return found


def build_on_meta(width: int, blocks: int) -> nn.Module:
    with torch.device("meta"):
        return build(width, blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the model's weights")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--resumed-on", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = (
        "131072"  # for the ranks: freed memory goes back to the system, and is not kept by the heap
    )
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.gigabytes, options.ranks, options.resumed_on, folder)
    text = json.dumps(found, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
