"""What the wire's precision does to training: gradients sent in float32, in bfloat16 summed exactly, and in bfloat16 summed on the way.

Several processes over gloo train the demo's transformer on the standard library's source text, from the same weights and on the same
batches; only the wire differs.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from matplotlib.figure import Figure
from torch import Tensor, nn

import everybit as eb
from everybit_cli.compare.corpus import load_corpus
from everybit_cli.compare.model import SIZES, Block, Transformer
from everybit_cli.compare.pictures import smooth
from everybit_torch import FlatStepper
from machine import describe
from pages import insert, origin, table

WIRES = {
    "float32": eb.Grads(main="float32"),
    "bfloat16, summed exactly": eb.Grads(main="float32", comm="bfloat16", reduce="float32"),
    "bfloat16, summed on the way": eb.Grads(main="float32", comm="bfloat16"),
}


@dataclass(frozen=True)
class Arguments:
    """What to train.

    Attributes:
        ranks: Processes.
        steps: Of each run.
        seeds: Runs of each wire.
        batch: Windows for each process and step.
        context: Bytes in a window.
        out: Where the raw results go.
        picture: Where the picture goes.
        page: Where the table goes, as Markdown.
        run: False: show what ``out`` holds.
    """

    ranks: int = 4
    steps: int = 200
    seeds: int = 2
    batch: int = 2
    context: int = 96
    out: Path = Path("benchmarks/results/sharded-loss-cpu.json")
    picture: Path = Path("docs/images/sharded-loss.png")
    page: Path | None = None
    run: bool = True


def worker(rank: int, store: str, arguments: Arguments, wire: str, seed: int, out: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks)
    corpus = load_corpus()
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    torch.manual_seed(seed)
    model = Transformer(SIZES["mini"])
    transform = eb.chain(eb.clip_by_global_norm(1.0), eb.adamw(_rate(arguments.steps), b2=0.95, weight_decay=0.1))
    stepper = FlatStepper(
        model,
        transform,
        policy=eb.Policy(params=eb.Nearest("float32"), grads=WIRES[wire]),
        strategy="optim_grads_params",
        units=[Block],
    )
    losses, norms = [], []
    for _ in range(arguments.steps):
        with stepper.microbatch(last=True):
            loss = _loss(model, _windows(corpus.training, arguments, generator))
            torch.autograd.backward(loss)
        norms.append(float(stepper.step().grad_norm))
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / arguments.ranks)
    held_out = torch.Generator().manual_seed(7)
    with torch.no_grad():
        final = statistics.mean(float(_loss(model, _windows(corpus.held_out, arguments, held_out))) for _ in range(40))
    if rank == 0:
        out.send({"wire": wire, "seed": seed, "losses": losses, "norms": norms, "final": final})
    dist.barrier()
    os._exit(0)


def _rate(steps: int) -> eb.Schedule:
    return eb.warmup_cosine_decay_schedule(1e-3, steps // 10, steps=steps, end=1e-4)


def _windows(text: Tensor, arguments: Arguments, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - arguments.context - 1, (arguments.batch,), generator=generator)
    return torch.stack([text[int(start) : int(start) + arguments.context + 1] for start in starts])


def _loss(model: nn.Module, windows: Tensor) -> Tensor:
    logits = model(windows[:, :-1].long())
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].long().flatten())


def train(arguments: Arguments) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    records = []
    for seed in range(arguments.seeds):
        for wire in WIRES:
            with tempfile.TemporaryDirectory() as directory:
                receiver, sender = context.Pipe(duplex=False)
                processes = [
                    context.Process(target=worker, args=(rank, f"{directory}/store", arguments, wire, seed, sender))
                    for rank in range(arguments.ranks)
                ]
                for process in processes:
                    process.start()
                if not receiver.poll(1800):
                    raise SystemExit(f"{wire}: no result after 1800 s")
                record = receiver.recv()
                for process in processes:
                    process.join()
            records.append(record)
            print(f"seed {seed}, {wire:28} held-out loss {record['final']:.4f}", flush=True)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(arguments).items()}
    return {"machine": describe(), "arguments": settings, "records": records}


def markdown(results: dict[str, Any]) -> str:
    by_wire = {wire: [r for r in results["records"] if r["wire"] == wire] for wire in WIRES}
    reference = by_wire["float32"]
    rows = []
    for wire, records in by_wire.items():
        away = [
            statistics.mean(abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True))
            for one, other in zip(records, reference, strict=True)
        ]
        norms = [
            statistics.mean(abs(a - b) / b for a, b in zip(one["norms"][:1], other["norms"][:1], strict=True))
            for one, other in zip(records, reference, strict=True)
        ]
        finals = ", ".join(
            f"{one['final'] - other['final']:+.5f}" for one, other in zip(records, reference, strict=True)
        )
        rows.append([
            wire,
            " / ".join(f"{one['final']:.4f}" for one in records),
            "" if wire == "float32" else finals,
            "" if wire == "float32" else f"{statistics.mean(away):.5f}",
            "" if wire == "float32" else f"{statistics.mean(norms):.1e}",
        ])  # fmt: skip
    arguments = results["arguments"]
    heads = [
        "wire",
        "held-out loss",
        "less float32's",
        "mean distance of the training losses",
        "first gradient norm, relative",
    ]
    text = table(heads, rows)
    text += (
        f"\n{arguments['ranks']} processes, {arguments['steps']} steps, {arguments['seeds']} seeds; nats per byte.\n"
    )
    return text + origin(results["machine"])


def draw(results: dict[str, Any], path: Path) -> None:
    import numpy as np

    figure = Figure(figsize=(9, 5.5), dpi=150, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    colours = {"float32": "#000000", "bfloat16, summed exactly": "#0072B2", "bfloat16, summed on the way": "#D55E00"}
    reference = {r["seed"]: np.array(r["losses"]) for r in results["records"] if r["wire"] == "float32"}
    for record in results["records"]:
        losses, wire = np.array(record["losses"]), record["wire"]
        label = wire if record["seed"] == 0 else None
        upper.plot(*smooth(losses), color=colours[wire], label=label, linewidth=1)
        if wire != "float32":
            lower.plot(*smooth(losses - reference[record["seed"]]), color=colours[wire], linewidth=1)
    upper.set_ylabel("training loss, nats per byte")
    upper.legend(frameon=False, title="gradients on the wire")
    lower.axhline(0, color="black", linewidth=0.8)
    lower.set_ylabel("less float32's")
    lower.set_xlabel("step")
    figure.savefig(path)


def main(arguments: Arguments) -> None:
    if arguments.run:
        arguments.out.write_text(json.dumps(train(arguments), indent=1) + "\n")
    results = json.loads(arguments.out.read_text())
    text = markdown(results)
    print(text)
    draw(results, arguments.picture)
    if arguments.page is not None:
        insert(arguments.page, "sharded-loss", text)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
