"""Sharded training with FSDP2: ``torchrun --nproc-per-node=2 with_fsdp2.py``."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from language_model import Block, LanguageModel, sequences, text
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def train(steps: int, checkpoint: str | None = None) -> list[float]:
    """Train, and return the losses of this rank."""
    torch.manual_seed(0)
    model, data, losses = LanguageModel(), text(), []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in [*(one for one in model.modules() if isinstance(one, Block)), model]:
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        x = sequences(data, step, 4 * dist.get_world_size())[dist.get_rank() :: dist.get_world_size()]
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    if checkpoint is not None:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=checkpoint)
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(train(20))  # noqa: T201
    dist.destroy_process_group()
