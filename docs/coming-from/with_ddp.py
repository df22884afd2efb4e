"""Training with DDP, where every rank has all of it: ``torchrun --nproc-per-node=2 with_ddp.py``."""

import torch
import torch.distributed as dist
from language_model import LanguageModel, sequences, text
from torch.nn.parallel import DistributedDataParallel


def train(steps: int, checkpoint: str | None = None) -> list[float]:
    """Train, and return the losses of this rank."""
    torch.manual_seed(0)
    plain, data, losses = LanguageModel(), text(), []
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        x = sequences(data, step, 4 * dist.get_world_size())[dist.get_rank() :: dist.get_world_size()]
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    if checkpoint is not None and dist.get_rank() == 0:
        torch.save({"model": plain.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(train(20))  # noqa: T201
    dist.destroy_process_group()
