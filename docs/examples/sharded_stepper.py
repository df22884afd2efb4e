"""Everybit's stepper: parameters, gradients and state sharded over the ranks, 16 bits on the wire, sums exact to float32.

torchrun --nproc-per-node=2 docs/examples/sharded_stepper.py --steps 50
python docs/examples/sharded_stepper.py --steps 50                      # one process
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import everybit as eb
from everybit_torch import FlatStepper, save_sharded

sys.path.insert(0, str(Path(__file__).parents[1] / "coming-from"))

from language_model import Block, LanguageModel, sequences, text


def train(steps: int, accumulate: int, out: str | None) -> list[float]:
    """Train on this rank's sequences, and return this rank's losses."""
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    model, data, losses = LanguageModel().to(torch.bfloat16), text(), []
    grads = eb.Grads(main="float32", comm="bfloat16", reduce="float32")
    transform = eb.chain(eb.clip_by_global_norm(1.0), eb.adamw(3e-3, weight_decay=0.1))
    stepper = FlatStepper(
        model, transform, policy=replace(eb.policies.LEAN_BF16, grads=grads),
        strategy="optim_grads_params", units=[Block], divisor=size * accumulate, nan="step",
    )  # fmt: skip
    for step in range(steps):
        total = 0.0
        for part in range(accumulate):
            with stepper.microbatch(last=part == accumulate - 1):
                loss = model(sequences(data, step * accumulate + part, 16 * size)[rank::size])
                loss.backward()
            total += float(loss.detach()) / accumulate
        stepper.step()
        losses.append(total)
    if rank == 0:
        print(f"{size} ranks: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    if out is not None:
        save_sharded(stepper, out)
    stepper.close()
    return losses


def main(arguments: list[str] | None = None) -> list[float]:
    """Read the command line, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--accumulate", type=int, default=2, help="microbatches in a step")
    parser.add_argument("--out", help="where a checkpoint is written at the end")
    given = parser.parse_args(arguments)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:  # without torchrun this process is the only rank
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return train(given.steps, given.accumulate, given.out)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
