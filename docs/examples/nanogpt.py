"""A training loop in the style of nanoGPT, in bfloat16: accumulation, clipping, warm-up and cosine decay, no decay on norms and biases.

python docs/examples/nanogpt.py --steps 200 --policy LEAN_BF16
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch

import everybit as eb
from everybit_torch import AdamW

sys.path.insert(0, str(Path(__file__).parents[1] / "coming-from"))

from language_model import LanguageModel, sequences, text


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Linearly up to ``peak`` in ``warmup`` steps, then along half a cosine to a tenth of it."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(steps: int, policy: str, peak: float, accumulate: int, batch: int, compile: bool) -> list[float]:
    """Train, and return the loss of each step."""
    torch.manual_seed(0)
    model, data, losses = LanguageModel().to(torch.bfloat16), text(), []
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=peak, betas=(0.9, 0.95), policy=eb.policies.PRESETS[policy], compile=compile,
    )  # fmt: skip
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak, warmup=max(1, steps // 10))
        total = 0.0
        for part in range(accumulate):
            loss = model(sequences(data, step * accumulate + part, batch)) / accumulate
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {total:.4f}  lr {optimizer.param_groups[0]['lr']:.1e}")
    return losses


def main(arguments: list[str] | None = None) -> list[float]:
    """Read the command line, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--policy", choices=list(eb.policies.PRESETS), default="LEAN_BF16")
    parser.add_argument("--lr", type=float, default=3e-3, help="the schedule's greatest learning rate")
    parser.add_argument("--accumulate", type=int, default=2, help="microbatches in a step")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a microbatch")
    parser.add_argument("--compile", action="store_true", help="compile the optimizer's step")
    given = parser.parse_args(arguments)
    return train(given.steps, given.policy, given.lr, given.accumulate, given.batch, given.compile)


if __name__ == "__main__":
    main()
