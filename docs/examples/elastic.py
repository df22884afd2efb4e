"""Training that may be killed at any time, and goes on from its last checkpoint with any number of processes.

    torchrun --nproc-per-node=2 docs/examples/elastic.py --out runs/elastic --steps 40
    torchrun --nproc-per-node=3 docs/examples/elastic.py --out runs/elastic --steps 80

``--die-at 17`` has the last process kill itself at that step, to see it happen; ``torchrun --max-restarts=1`` starts all of them again.
``losses.txt`` has the loss of each step, in hexadecimal: no digit is left out.

A step has ``BATCH`` sequences, whatever the number of processes. Each sequence is a microbatch, and its gradient is the same on whatever
rank it is computed. These are added up in float64, where sums of float32 numbers of like size are exact, so that the order in which
they are added, and with it the number of processes, does not show in the weights.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import everybit as eb
from everybit_torch import FlatStepper, latest_checkpoint, load_sharded, save_sharded

sys.path.insert(0, str(Path(__file__).parents[1] / "coming-from"))

from language_model import Block, LanguageModel, sequences, text

BATCH = 8


class Resumable(nn.Module):
    """A model that knows how many steps it was trained: its buffers are in its checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LanguageModel()
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss of the model."""
        out: torch.Tensor = self.model(x)
        return out


def train(out: Path, steps: int, every: int, die_at: int | None = None) -> None:
    """Train up to so many steps in all, from the last checkpoint on if there is one.

    Args:
        out: A directory that all processes see.
        steps: In all, those of earlier runs included.
        every: A checkpoint is written after so many steps.
        die_at: The step at which the last process kills itself.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, data = Resumable(), text()
    grads = eb.Grads(main="float64", comm="float64")
    stepper = FlatStepper(
        model, eb.adamw(1e-3), policy=eb.Policy(compute="float64", grads=grads),
        strategy="optim_grads_params", units=[Block], divisor=BATCH,
    )  # fmt: skip
    try:
        latest_checkpoint(out / "checkpoints")
    except FileNotFoundError:
        pass
    else:
        load_sharded(stepper, out / "checkpoints")
    log = out / "losses.txt"
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        known = log.read_text().splitlines() if log.exists() else []
        log.write_text("".join(f"{line}\n" for line in known[: int(model.step)]))
    for step in range(int(model.step), steps):
        if step == die_at and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for group in stepper.as_optimizer().param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 10)
        batch = sequences(data, step, BATCH)
        losses = torch.zeros(BATCH, dtype=torch.float64)
        rounds = -(-BATCH // size)
        for number in range(rounds):
            with stepper.microbatch(last=number == rounds - 1):
                mine = number * size + rank
                counts = mine < BATCH  # if not, a sequence that counts nothing: FSDP2 gathers on all ranks
                loss = model(batch[mine : mine + 1] if counts else batch[:1])
                (loss * counts).backward()
                if counts:
                    losses[mine] = loss.detach()
        stepper.step()
        model.step += 1
        dist.all_reduce(losses)  # one rank has each of them, and the others zero
        if rank == 0:
            with log.open("a") as file:
                file.write(f"{float(losses.sum() / BATCH).hex()}\n")
        if (step + 1) % every == 0:
            save_sharded(stepper, out / "checkpoints")
    stepper.close()


def main() -> None:
    """Read the command line, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--die-at", type=int)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    train(given.out, given.steps, given.every, given.die_at)
    dist.barrier()  # nobody leaves while another still sends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
