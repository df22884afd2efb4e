"""The demo model trained with 8- and 4-bit state of bitsandbytes and torchao, as ``everybit compare`` trains it with everybit's policies.

    python benchmarks/eight_bit_loss.py --out benchmarks/results/eight-bit-peers-cpu.json

Weights, batches, schedule, clipping and hyperparameters are those of ``everybit compare --seeds 3``; ``torch.optim.AdamW`` stands for its
``FP32``. It needs the packages ``bitsandbytes`` and ``torchao``; ``everybit[peers]`` has both.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everybit_cli.compare.corpus import Batches, even_windows, load_corpus
from everybit_cli.compare.model import SIZES, loss_of
from everybit_cli.compare.training import VALIDATION_BYTES, learning_rate_share, new_model
from machine import describe

CONTEXT, BATCH, CLIP = 128, 8, 1.0
HYPERPARAMETERS: Mapping[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Subject:
    """An optimizer, and the dtype of the weights that it trains.

    Attributes:
        module: Of its class.
        kind: Its class.
        dtype: Of weights and gradients.
        options: Of its class, besides the hyperparameters.
    """

    module: str
    kind: str
    dtype: torch.dtype = torch.float32
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Make it."""
        made: Callable[..., torch.optim.Optimizer] = getattr(import_module(self.module), self.kind)
        return made(groups, **HYPERPARAMETERS, **dict(self.options))


SUBJECTS: Mapping[str, Subject] = {
    "torch AdamW": Subject("torch.optim", "AdamW"),
    "bitsandbytes AdamW8bit": Subject("bitsandbytes.optim", "AdamW8bit"),
    "torchao AdamW8bit": Subject("torchao.optim", "AdamW8bit"),
    "torchao AdamW4bit": Subject("torchao.optim", "AdamW4bit"),
    "bitsandbytes AdamW8bit, bfloat16 weights": Subject("bitsandbytes.optim", "AdamW8bit", torch.bfloat16),
    "torchao AdamW8bit, bfloat16 weights rounded at random": Subject(
        "torchao.optim", "AdamW8bit", torch.bfloat16, (("bf16_stochastic_round", True),)
    ),
}


@dataclass(frozen=True)
class Arguments:
    """What to train.

    Attributes:
        subjects: Names of optimizers; none: all.
        seeds: How many seeds, from 0.
        steps: Of each training.
        out: Where the results go.
    """

    subjects: tuple[str, ...] = ()
    seeds: int = 3
    steps: int = 400
    out: Path | None = None


def train(subject: Subject, seed: int, steps: int) -> float:
    """The loss on held-out text after training, in nats per byte."""
    torch.manual_seed(seed)
    corpus = load_corpus()
    model = new_model(SIZES["mini"], seed).to(subject.dtype)
    named = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in named if p.ndim > 1]},
        {"params": [p for p in named if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = subject(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_share(step, steps))
    batches = Batches(corpus.training, batch=BATCH, context=CONTEXT, seed=seed)
    for _ in range(steps):
        torch.autograd.backward(loss_of(model, batches.next()))
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    held_out = even_windows(corpus.held_out, count=VALIDATION_BYTES // CONTEXT, context=CONTEXT)
    total = 0.0
    with torch.no_grad():
        for some in torch.split(held_out, 4 * BATCH):
            total += float(loss_of(model, some)) * len(some)
    return total / len(held_out)


def main(arguments: Arguments) -> None:
    """Train, print, write."""
    from rich.console import Console
    from rich.progress import track

    if unknown := [name for name in arguments.subjects if name not in SUBJECTS]:
        raise SystemExit(f"--subjects: got {', '.join(unknown)}; accepted are {', '.join(SUBJECTS)}.")
    torch.set_num_threads(1)
    chosen = arguments.subjects or tuple(SUBJECTS)
    work = [(name, seed) for name in chosen for seed in range(arguments.seeds)]
    losses: dict[str, list[float]] = {name: [] for name in chosen}
    for name, seed in track(work, description="training", console=Console(stderr=True)):
        losses[name].append(train(SUBJECTS[name], seed, arguments.steps))
    for name, found in losses.items():
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        print(f"{name:56} {statistics.fmean(found):.4f} ± {spread:.4f}   {' '.join(f'{one:.4f}' for one in found)}")
    if arguments.out is not None:
        held = {"machine": describe(), "steps": arguments.steps, "losses": losses}
        arguments.out.write_text(json.dumps(held, indent=1))


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Arguments))
