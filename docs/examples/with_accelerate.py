"""A loop with accelerate: prepare, accumulate, clip; a model in bfloat16 and a policy.

accelerate launch docs/examples/with_accelerate.py --steps 50 --policy LEAN_BF16
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

import everybit as eb
from everybit_torch import AdamW

sys.path.insert(0, str(Path(__file__).parents[1] / "coming-from"))

from language_model import LanguageModel, sequences, text


def main(arguments: list[str] | None = None) -> list[float]:
    """Read the command line, train, and return the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--policy", choices=list(eb.policies.PRESETS), default="LEAN_BF16")
    parser.add_argument("--accumulate", type=int, default=2, help="microbatches in a step")
    given = parser.parse_args(arguments)
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=given.accumulate, cpu=True)  # no mixed_precision
    model = LanguageModel().to(torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, policy=eb.policies.PRESETS[given.policy])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps * accelerator.num_processes)
    data = text()
    batches = [sequences(data, number, 16) for number in range(given.steps * given.accumulate)]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    accelerator.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
