"""Sharded training with everybit's stepper: ``torchrun --nproc-per-node=2 with_stepper.py``."""

import torch
import torch.distributed as dist
from language_model import Block, LanguageModel, sequences, text

import everybit as eb
from everybit_torch import FlatStepper, save_sharded


def train(steps: int, checkpoint: str | None = None) -> list[float]:
    """Train, and return the losses of this rank."""
    torch.manual_seed(0)
    model, data, losses = LanguageModel(), text(), []
    stepper = FlatStepper(model, eb.adamw(1e-3), strategy="optim_grads_params", units=[Block])
    for step in range(steps):
        x = sequences(data, step, 4 * dist.get_world_size())[dist.get_rank() :: dist.get_world_size()]
        with stepper.microbatch(last=True):
            loss = model(x)
            loss.backward()
        stepper.step()
        losses.append(float(loss))
    if checkpoint is not None:
        save_sharded(stepper, checkpoint)
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(train(20))  # noqa: T201
    dist.destroy_process_group()
