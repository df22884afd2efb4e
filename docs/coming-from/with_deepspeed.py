"""Sharded training with DeepSpeed's ZeRO-3: ``deepspeed --num_gpus=2 with_deepspeed.py``."""

import deepspeed
import torch
import torch.distributed as dist
from language_model import LanguageModel, sequences, text


def train(steps: int, checkpoint: str | None = None) -> list[float]:
    """Train, and return the losses of this rank."""
    torch.manual_seed(0)
    model, data, losses = LanguageModel(), text(), []
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}},
    }
    engine, _, _, _ = deepspeed.initialize(model=model, config=config)
    for step in range(steps):
        x = sequences(data, step, 4 * dist.get_world_size())[dist.get_rank() :: dist.get_world_size()]
        loss = engine(x.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    if checkpoint is not None:
        engine.save_checkpoint(checkpoint)
    return losses


if __name__ == "__main__":
    deepspeed.init_distributed()
    print(train(20))  # noqa: T201
    dist.destroy_process_group()
