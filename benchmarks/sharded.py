"""Sharded training, side by side: everybit's stepper, FSDP2, DDP and ZeroRedundancyOptimizer, on two processes over gloo, or over NCCL.

Every contestant trains the same transformer on the same text, in a pair of processes of its own; contestants take turns, several times,
and medians are compared. Memory is the kernel's count: the most that a process held since its warm-up, above what it held before its model
was made. By then every process has compiled something, so that the compiler itself is in nobody's count. It is measured in turns of their
own, in which the C library gives freed memory back at once: it counts what is in use then, and steps are slow.

On GPUs (``--device cuda``, as many as ``--ranks``) memory is what torch's allocator held at most, and times end when the device is done.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import everybit as eb
from everybit_cli.compare.corpus import load_corpus
from everybit_cli.compare.model import SIZES, Block, ModelSize, Transformer
from everybit_torch import AdamW, FlatStepper
from machine import describe, synchronize
from pages import insert, origin, table

MODELS = {
    "tiny": SIZES["tiny"],
    "demo": SIZES["mini"],
    "10M": ModelSize(width=320, layers=8, heads=8),
    "50M": ModelSize(width=640, layers=10, heads=10),
    "85M": SIZES["large"],
}
LR, BETAS, DECAY = 1e-3, (0.9, 0.95), 0.1
ADAMW: dict[str, Any] = {"lr": LR, "betas": BETAS, "weight_decay": DECAY}


@dataclass(frozen=True)
class Arguments:
    """What to measure.

    Attributes:
        models: tiny (28,768 parameters), demo (459,392), 10M, 50M, and 85M, which has the blocks of OPT-125m.
        contestants: By name; none: all.
        device: cpu or cuda.
        ranks: Processes; on cuda each has a device.
        rounds: Times that each contestant has its turn.
        steps: Timed in each turn, after three that are not.
        batch: Windows of text for each process and step.
        context: Bytes in a window.
        offload: Whether FSDP2's contestants, and everybit's under optim_grads_params, keep shards by CPUOffloadPolicy.
        limit: Seconds after which a turn is given up.
        out: Where the raw results go.
        page: Where the tables go, as Markdown.
        run: False: show what ``out`` holds.
    """

    models: tuple[str, ...] = ("demo", "50M")
    contestants: tuple[str, ...] = ()
    device: str = "cpu"
    ranks: int = 2
    rounds: int = 3
    steps: int = 8
    batch: int = 2
    context: int = 64
    offload: bool = False
    limit: float = 600.0
    out: Path = Path("benchmarks/results/sharded-cpu.json")
    page: Path | None = None
    run: bool = True


class Trainer:
    """One contestant on one rank."""

    def __init__(self, name: str, model: nn.Module, device: str = "cpu", *, offload: bool = False) -> None:
        self.name, self.model, self.device, self.offload = name, model, device, offload
        kind, _, detail = name.partition(", ")
        self.stepper: FlatStepper | None = None
        if kind == "everybit":
            strategy, _, policy = detail.partition(", ")
            if policy:
                self.model = model.bfloat16()
            if offload:
                self._shard()
            self.stepper = FlatStepper(
                self.model, eb.adamw(LR, b1=BETAS[0], b2=BETAS[1], weight_decay=DECAY), strategy=strategy,  # type: ignore[arg-type]
                units=None if offload else [Block], compile=True, policy=eb.policies.PRESETS[policy] if policy else None,
            )  # fmt: skip
        elif kind == "FSDP2":
            self._shard()
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
            if detail == "everybit AdamW":
                self.optimizer: torch.optim.Optimizer = AdamW(model.parameters(), **ADAMW)
            else:
                self.optimizer = torch.optim.AdamW(model.parameters(), **(ADAMW | {detail: True}))
        else:
            self.model = DistributedDataParallel(model)
            if detail == "ZeroRedundancyOptimizer":
                self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.AdamW, **ADAMW)
            else:
                self.optimizer = torch.optim.AdamW(self.model.parameters(), **(ADAMW | {detail: True}))

    def _shard(self) -> None:
        mesh = init_device_mesh(self.device, (dist.get_world_size(),))
        policy = CPUOffloadPolicy(pin_memory=self.device == "cuda") if self.offload else OffloadPolicy()
        for module in (*self.model.blocks, self.model):  # type: ignore[misc]
            fully_shard(module, mesh=mesh, offload_policy=policy)

    def step(self, windows: Tensor) -> tuple[float, float, float]:
        """Loss, seconds of the whole step, seconds of the optimizer's."""
        start = self._now()
        if self.stepper is not None:
            with self.stepper.microbatch(last=True):
                loss = self._loss(windows)
                torch.autograd.backward(loss)
            middle = self._now()
            self.stepper.step()
        else:
            loss = self._loss(windows)
            torch.autograd.backward(loss)
            middle = self._now()
            self.optimizer.step()
            self.optimizer.zero_grad()
        end = self._now()
        return float(loss.detach()), end - start, end - middle

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    def _loss(self, windows: Tensor) -> Tensor:
        logits = self.model(windows[:, :-1].long())
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].long().flatten())


CONTESTANTS = (
    "FSDP2, foreach", "FSDP2, fused", "DDP, foreach", "DDP, fused", "DDP, ZeroRedundancyOptimizer",
    "everybit, no_shard", "everybit, optim", "everybit, optim_grads", "everybit, optim_grads_params",
    "FSDP2, everybit AdamW", "everybit, optim_grads_params, LEAN_BF16",
)  # fmt: skip


@dataclass
class Turn:
    """One contestant's turn, on its first rank; seconds are medians of the steps."""

    model: str
    contestant: str
    round: int
    step_seconds: float
    optimizer_seconds: float
    peak_bytes: int
    losses: list[float]
    memory: bool = False


def held(device: str) -> tuple[int, int]:
    """Bytes in use now, and the most since the last reset: resident ones, or those that torch has allocated on a GPU."""
    if device == "cuda":
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    found = {
        line.split(":")[0]: int(line.split()[1]) * 1024
        for line in status.splitlines()
        if line.startswith(("VmRSS", "VmHWM"))
    }
    return found["VmRSS"], found["VmHWM"]


def forget_peak(device: str) -> None:
    """Count the most that is held from now on."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def worker(
    rank: int, store: str, arguments: Arguments, model_name: str, contestant: str, number: int, out: Any
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    device = torch.device(arguments.device, rank) if arguments.device == "cuda" else torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks,
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip
    text = load_corpus().training
    generator = torch.Generator().manual_seed(rank)
    warm = nn.Parameter(torch.ones(64, device=device))
    warm.grad = torch.ones(64, device=device)
    AdamW([warm], compile=True).step()
    torch._dynamo.reset()
    before, _ = held(device.type)
    torch.manual_seed(0)
    trainer = Trainer(contestant, Transformer(MODELS[model_name]).to(device), device.type, offload=arguments.offload)
    seconds, optimizer_seconds, losses = [], [], []
    for step in range(3 + arguments.steps):
        if step == 3:
            forget_peak(device.type)  # of compiling
        starts = torch.randint(len(text) - arguments.context - 1, (arguments.batch,), generator=generator)
        windows = torch.stack([text[int(start) : int(start) + arguments.context + 1] for start in starts]).to(device)
        dist.barrier()
        loss, whole, part = trainer.step(windows)
        losses.append(loss)
        if step >= 3:
            seconds.append(whole)
            optimizer_seconds.append(part)
    _, peak = held(device.type)
    if rank == 0:
        out.send(
            Turn(
                model_name,
                contestant,
                number,
                statistics.median(seconds),
                statistics.median(optimizer_seconds),
                peak - before,
                losses,
            )
        )
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}


class TurnFailedError(RuntimeError):
    """A contestant that gave no result."""


def receive(receiver: Any, limit: float) -> Any:
    """What is sent.

    Raises:
        EOFError: The sender died.
        TimeoutError: It sent nothing in time.
    """
    if not receiver.poll(limit):
        raise TimeoutError(f"no result after {limit:g} s")
    return receiver.recv()


def take_turn(arguments: Arguments, model_name: str, contestant: str, number: int, *, memory: bool) -> Turn:
    for name, value in AT_ONCE.items():
        os.environ.pop(name, None)
        if memory:
            os.environ[name] = value
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        receiver, sender = context.Pipe(duplex=False)
        processes = [
            context.Process(
                target=worker, args=(rank, f"{directory}/store", arguments, model_name, contestant, number, sender)
            )
            for rank in range(arguments.ranks)
        ]
        for process in processes:
            process.start()
        sender.close()  # so that a process that dies is noticed
        try:
            turn: Turn = receive(receiver, arguments.limit)
        except (EOFError, TimeoutError) as error:
            for process in processes:
                process.kill()
            raise TurnFailedError(f"{contestant} on {model_name}: {str(error) or 'its process died'}") from None
        for process in processes:
            process.join()
    turn.memory = memory
    return turn


def measure(arguments: Arguments) -> dict[str, Any]:
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(arguments).items()}
    results: dict[str, Any] = {"machine": describe(), "arguments": settings, "turns": [], "failures": []}
    contestants = arguments.contestants or CONTESTANTS
    for model_name in arguments.models:
        # What a GPU's memory holds at most is counted without slowing anything down.
        for number in range(arguments.rounds + (arguments.device == "cpu")):
            for contestant in contestants:
                memory = number == arguments.rounds
                given = replace(arguments, steps=2) if memory else arguments
                try:
                    turn = take_turn(given, model_name, contestant, number, memory=memory)
                except TurnFailedError as error:
                    print(error, flush=True)
                    results["failures"].append(str(error))
                    continue
                results["turns"].append(asdict(turn))
                write(arguments.out, results)  # in case that somebody stops this
                print(
                    f"{model_name:5} {number} {contestant:40} step {1e3 * turn.step_seconds:8.1f} ms, optimizer"
                    f" {1e3 * turn.optimizer_seconds:7.1f} ms, peak {turn.peak_bytes / 2**20:7.1f} MiB, loss {turn.losses[-1]:.4f}",
                    flush=True,
                )
    write(arguments.out, results)
    return results


def write(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def markdown(results: dict[str, Any]) -> str:
    text = ""
    models = list(dict.fromkeys(turn["model"] for turn in results["turns"]))
    for model_name in [name for name in models if name != "demo"] or models:
        turns = [turn for turn in results["turns"] if turn["model"] == model_name]

        def median(contestant: str, key: str, turns: list[dict[str, Any]] = turns) -> float:
            memory = key == "peak_bytes" and results["arguments"].get("device", "cpu") == "cpu"
            found = [turn[key] for turn in turns if turn["contestant"] == contestant and turn["memory"] is memory]
            return float(statistics.median(found)) if found else math.nan

        names = list(dict.fromkeys(turn["contestant"] for turn in turns))
        reference = "FSDP2, fused" if "FSDP2, fused" in names else names[0]
        rows = []
        for name in names:
            whole, part, peak = (median(name, key) for key in ("step_seconds", "optimizer_seconds", "peak_bytes"))
            rows.append([
                name,
                f"{1e3 * whole:.1f} ({whole / median(reference, 'step_seconds'):.2f})",
                f"{1e3 * part:.2f} ({part / median(reference, 'optimizer_seconds'):.2f})",
                f"{peak / 2**20:.1f} ({peak / median(reference, 'peak_bytes'):.2f})",
            ])  # fmt: skip
        parameters = sum(p.numel() for p in Transformer(MODELS[model_name]).parameters())
        text += f"\n**{model_name}**, {parameters:,} parameters; in brackets: over {reference}'s.\n\n"
        text += table(["", "step, ms", "optimizer, ms", "peak, MiB"], rows)
    arguments = results["arguments"]
    several = "es" if arguments["ranks"] > 1 else ""
    wire = "nccl" if arguments.get("device") == "cuda" else "gloo"
    text += (
        f"\n{arguments['ranks']} process{several} with one thread each, {wire}, {arguments['batch']} x {arguments['context']} bytes"
        f" for each; medians of {arguments['rounds']} turns of {arguments['steps']} steps.\n"
    )
    return text + origin(results["machine"])


def main(arguments: Arguments) -> None:
    if arguments.run:
        results = measure(arguments)
        if not results["turns"]:
            raise SystemExit("; ".join(results["failures"]))
    results = json.loads(arguments.out.read_text())
    text = markdown(results)
    print(text)
    if arguments.page is not None:
        insert(arguments.page, "offload" if results["arguments"]["offload"] else "sharded", text)
    if arguments.run and results.get("failures"):
        raise SystemExit("; ".join(results["failures"]))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main(tyro.cli(Arguments))
