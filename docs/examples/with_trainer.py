"""Hugging Face's Trainer with an optimizer of everybit by name, on a small GPT-2 in bfloat16; nothing is downloaded.

python docs/examples/with_trainer.py --steps 50 --policy LEAN_BF16
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import everybit as eb
import everybit_torch.names.trainer  # noqa: F401 (adds the name "everybit_adamw")

sys.path.insert(0, str(Path(__file__).parents[1] / "coming-from"))

from language_model import text


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Windows of 32 bytes."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data) // 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.data[32 * index : 32 * index + 32]
        return {"input_ids": window, "labels": window}


def main(arguments: list[str] | None = None) -> list[float]:
    """Read the command line, train, and return the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--policy", choices=list(eb.policies.PRESETS), default="LEAN_BF16")
    parser.add_argument("--out", default="runs/trainer", help="where Trainer writes its checkpoints")
    given = parser.parse_args(arguments)
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=4))
    trainer = Trainer(
        model=model.to(torch.bfloat16),  # the policy chooses the precision: no fp16=True, no bf16=True
        args=TrainingArguments(
            output_dir=given.out, max_steps=given.steps, per_device_train_batch_size=16, learning_rate=3e-3,
            optim="everybit_adamw", optim_args=f"policy={given.policy}", lr_scheduler_type="cosine", weight_decay=0.1,
            max_grad_norm=1.0, logging_steps=max(1, given.steps // 10), save_strategy="no", report_to=[], use_cpu=True,
        ),
        train_dataset=Windows(text()),
    )  # fmt: skip
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
