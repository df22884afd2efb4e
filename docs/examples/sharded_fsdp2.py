"""FSDP2 with AdamW of everybit in place of torch's; ``LEAN_BF16`` keeps 8 bytes per parameter and gives a rank its part of them.

torchrun --nproc-per-node=2 docs/examples/sharded_fsdp2.py --steps 50
python docs/examples/sharded_fsdp2.py --steps 50                        # one process
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import everybit as eb
from everybit_torch import AdamW

sys.path.insert(0, str(Path(__file__).parents[1] / "coming-from"))

from language_model import Block, LanguageModel, sequences, text


def train(steps: int, policy: str, compile: bool) -> list[float]:
    """Train on this rank's sequences, and return this rank's losses."""
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    model, data, losses = LanguageModel().to(torch.bfloat16), text(), []
    mesh = init_device_mesh("cpu", (size,))
    for module in [*(one for one in model.modules() if isinstance(one, Block)), model]:
        fully_shard(module, mesh=mesh)
    optimizer = AdamW(
        model.parameters(), lr=3e-3, weight_decay=0.1, policy=eb.policies.PRESETS[policy], compile=compile
    )
    for step in range(steps):
        loss = model(sequences(data, step, 16 * size)[rank::size])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if rank == 0:
        print(f"{size} ranks: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


def main(arguments: list[str] | None = None) -> list[float]:
    """Read the command line, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--policy", choices=list(eb.policies.PRESETS), default="LEAN_BF16")
    parser.add_argument("--compile", action="store_true", help="compile the optimizer's step")
    given = parser.parse_args(arguments)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:  # without torchrun this process is the only rank
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return train(given.steps, given.policy, given.compile)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
