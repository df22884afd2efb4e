"""How a bfloat16 momentum should be rounded: bias of the average, loss of a trained model, and time of a step.

The three questions behind decision 0020. All three are asked of rounding to nearest and of stochastic rounding, at the same two bytes.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn

import everybit as eb
from everybit_cli.compare.corpus import load_corpus
from everybit_cli.compare.model import SIZES, Transformer
from everybit_torch import TorchOptimizer
from machine import describe
from pages import insert, origin, table

ROUNDINGS: dict[str, eb.StateFormat] = {"nearest": eb.Nearest("bfloat16"), "stochastic": eb.Stochastic("bfloat16")}
RATES = (0.9, 0.95, 0.99, 0.995, 0.999)
OPTIMIZERS = {
    "AdamW, betas (0.9, 0.95)": (eb.adamw, {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}),
    "AdamW, betas (0.98, 0.95)": (eb.adamw, {"lr": 1e-3, "betas": (0.98, 0.95), "weight_decay": 0.1}),
    "Lion, betas (0.9, 0.99)": (eb.lion, {"lr": 2e-4, "betas": (0.9, 0.99), "weight_decay": 0.3}),
}


@dataclass(frozen=True)
class Arguments:
    """What to measure.

    Attributes:
        steps: Of each training run.
        seeds: Runs of each optimizer and rounding.
        elements: Of the tensor whose step is timed.
        repeats: Steps that are timed; the least counts.
        out: Where the raw results go.
        page: Where the tables go, as Markdown.
        run: False: show what ``out`` holds.
    """

    steps: int = 300
    seeds: int = 3
    elements: int = 1 << 22
    repeats: int = 30
    out: Path = Path("benchmarks/results/momentum-rounding-cpu.json")
    page: Path | None = None
    run: bool = True


def policy(momentum: eb.StateFormat) -> eb.Policy:
    """Exact weights, so that only the momentum's rounding differs."""
    return eb.Policy(params=eb.Split(16), momentum=momentum, variance=eb.Stochastic("bfloat16"))


def bias(rate: float, rounding: str, start: float, noise: float) -> dict[str, float]:
    """Relative error of an average of gradients around 1024 means, after 40 time constants, from ``start`` times the mean."""
    format = ROUNDINGS[rounding].for_slot("signed", "float32")
    mean = 1 + torch.arange(1024) / 1024
    generator = torch.Generator().manual_seed(1)
    momentum, wide = mean * start, (mean * start).double()
    total, wide_total, count = torch.zeros(1024, dtype=torch.float64), torch.zeros(1024, dtype=torch.float64), 0
    steps = int(40 / (1 - rate))
    for step in range(steps):
        gradient = mean * (1 + noise * torch.randn(1024, generator=generator))
        kept = format.decode(format.encode(momentum, eb.Key(0, torch.tensor(step), 1)), momentum.shape, "float32")
        momentum = rate * kept + (1 - rate) * gradient
        wide = rate * wide + (1 - rate) * gradient.double()
        if step >= steps // 2:
            total, wide_total, count = total + momentum, wide_total + wide, count + 1
    error = (total - wide_total) / count / mean
    return {"mean": float(error.mean()), "worst": float(error[error.abs().argmax()])}


def loss(optimizer: str, rounding: str | None, seed: int, steps: int) -> float:
    """Held-out loss of the demo's model, nats per byte; ``rounding`` None: everything in float32."""
    corpus = load_corpus()
    torch.manual_seed(seed)
    model = Transformer(SIZES["mini"])
    if rounding is not None:
        model = model.to(torch.bfloat16)
    factory, hyperparameters = OPTIMIZERS[optimizer]
    stored = eb.policies.FP32 if rounding is None else policy(ROUNDINGS[rounding])
    stepped = TorchOptimizer(
        model.parameters(), factory, policy=stored, seed=seed, unsafe="allow", **hyperparameters  # type: ignore[arg-type]
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(
        stepped, lambda step: min(1.0, (step + 1) / (0.1 * steps)) * (1 - 0.9 * step / steps)
    )
    generator = torch.Generator().manual_seed(1000 + seed)
    for _ in range(steps):
        stepped.zero_grad()
        torch.autograd.backward(_loss(model, _windows(corpus.training, generator)))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepped.step()
        schedule.step()
    held_out = torch.Generator().manual_seed(7)
    with torch.no_grad():
        return statistics.mean(float(_loss(model, _windows(corpus.held_out, held_out))) for _ in range(40))


def _windows(text: Tensor, generator: torch.Generator, batch: int = 8, context: int = 96) -> Tensor:
    starts = torch.randint(len(text) - context - 1, (batch,), generator=generator)
    return torch.stack([text[int(start) : int(start) + context + 1] for start in starts])


def _loss(model: nn.Module, windows: Tensor) -> Tensor:
    logits = model(windows[:, :-1].long())
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].long().flatten())


def seconds(rounding: str, compile: bool, elements: int, repeats: int) -> float:
    """The least time of an AdamW step on one tensor."""
    torch._dynamo.reset()
    parameter = nn.Parameter(torch.randn(elements, dtype=torch.bfloat16))
    parameter.grad = torch.randn(elements, dtype=torch.bfloat16)
    stepped = TorchOptimizer([parameter], eb.adamw, policy=policy(ROUNDINGS[rounding]), compile=compile, lr=1e-3)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        stepped.step()
        times.append(time.perf_counter() - start)
    return min(times[2:])


def measure(arguments: Arguments) -> dict[str, Any]:
    torch.set_num_threads(1)
    biases = [
        {"rate": rate, "rounding": rounding, "start": start, "noise": noise} | bias(rate, rounding, start, noise)
        for rate in RATES
        for rounding in ROUNDINGS
        for start, noise in ((0.0, 0.0), (3.0, 0.0), (3.0, 0.1))
    ]
    print("biases measured", flush=True)
    losses = []
    for optimizer in OPTIMIZERS:
        for seed in range(arguments.seeds):
            for rounding in (None, *ROUNDINGS):
                found = loss(optimizer, rounding, seed, arguments.steps)
                losses.append({"optimizer": optimizer, "rounding": rounding, "seed": seed, "loss": found})
                print(f"{optimizer}, seed {seed}, {rounding}: {found:.4f}", flush=True)
    times = [
        {"rounding": rounding, "compile": compile, "turn": turn}
        | {"seconds": seconds(rounding, compile, arguments.elements, arguments.repeats)}
        for compile in (True, False)
        for turn in range(3)
        for rounding in ROUNDINGS
    ]
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(arguments).items()}
    return {"machine": describe(), "arguments": settings, "bias": biases, "loss": losses, "time": times}


def markdown(results: dict[str, Any]) -> str:
    def percent(one: dict[str, float]) -> str:
        return f"{100 * one['mean']:+.1f} / {100 * one['worst']:+.1f}"

    rows = []
    for rate in RATES:
        for rounding in ROUNDINGS:
            found = [one for one in results["bias"] if one["rate"] == rate and one["rounding"] == rounding]
            rows.append([f"{rate:g}", rounding, *(percent(one) for one in found)])
    text = table(
        ["rate", "rounding", "from 0", "from 3 times the mean", "from 3 times, gradients with 10 % of noise"], rows
    )
    text += "\nRelative error of the average, mean / worst of 1024 mantissas, percent.\n\n"
    rows = []
    for optimizer in OPTIMIZERS:
        by = {
            rounding: [o["loss"] for o in results["loss"] if o["optimizer"] == optimizer and o["rounding"] == rounding]
            for rounding in (None, *ROUNDINGS)
        }
        differences = [
            ", ".join(f"{a - b:+.4f}" for a, b in zip(by[rounding], by[None], strict=True)) for rounding in ROUNDINGS
        ]
        rows.append([optimizer, f"{statistics.mean(by[None]):.4f}", *differences])
    text += table(["optimizer", "float32", *(f"{rounding}, less float32" for rounding in ROUNDINGS)], rows)
    text += (
        f"\nHeld-out loss, nats per byte, of each seed; {results['arguments']['steps']} steps of the demo's model.\n\n"
    )
    rows = []
    for compile in (True, False):
        best = {
            rounding: min(
                o["seconds"] for o in results["time"] if o["rounding"] == rounding and o["compile"] is compile
            )
            for rounding in ROUNDINGS
        }
        rows.append([
            "compiled" if compile else "not compiled",
            *(f"{1e3 * best[rounding]:.2f}" for rounding in ROUNDINGS),
            f"{best['stochastic'] / best['nearest']:.2f}",
        ])  # fmt: skip
    text += table(["AdamW's step", "nearest, ms", "stochastic, ms", "ratio"], rows)
    text += f"\n{results['arguments']['elements']:,} elements, one thread, the least of all steps.\n"
    return text + origin(results["machine"])


def main(arguments: Arguments) -> None:
    if arguments.run:
        arguments.out.write_text(json.dumps(measure(arguments), indent=1) + "\n")
    results = json.loads(arguments.out.read_text())
    text = markdown(results)
    print(text)
    if arguments.page is not None:
        insert(arguments.page, "momentum-rounding", text)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
