"""A Lightning module in bfloat16 with AdamW and a policy.

python docs/examples/with_lightning.py --steps 50 --policy LEAN_BF16
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import lightning
import torch
from torch import Tensor

import everybit as eb
from everybit_torch import AdamW

sys.path.insert(0, str(Path(__file__).parents[1] / "coming-from"))

from language_model import LanguageModel, sequences, text


class Task(lightning.LightningModule):
    """Predicts the next byte."""

    def __init__(self, policy: eb.Policy) -> None:
        super().__init__()
        self.model = LanguageModel().to(torch.bfloat16)
        self.policy = policy
        self.losses: list[float] = []

    def training_step(self, batch: Tensor) -> Tensor:
        """The loss of a batch."""
        loss: Tensor = self.model(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW of everybit, where torch's would stand."""
        return AdamW(self.parameters(), lr=3e-3, weight_decay=0.1, policy=self.policy)


def main(arguments: list[str] | None = None) -> list[float]:
    """Read the command line, train, and return the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--policy", choices=list(eb.policies.PRESETS), default="LEAN_BF16")
    given = parser.parse_args(arguments)
    lightning.seed_everything(0)
    data = text()
    batches = [sequences(data, step, 16) for step in range(given.steps)]
    task = Task(eb.policies.PRESETS[given.policy])
    # precision stays at its default: the policy chooses the precision.
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(task, torch.utils.data.DataLoader(batches, batch_size=None))
    print(f"loss {task.losses[0]:.4f} -> {task.losses[-1]:.4f}")
    return task.losses


if __name__ == "__main__":
    main()
