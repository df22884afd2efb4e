"""The gates of Trainer and Lightning, in their own training loops."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everybit_torch import LostUpdatesError
from tests.support.byte_windows import ByteWindows

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def trainer_with(folder: Path, gate: Any, **arguments: Any) -> Any:
    transformers = import_module("transformers")
    transformers.set_seed(0)
    config = transformers.GPT2Config(vocab_size=256, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    args = transformers.TrainingArguments(
        str(folder), max_steps=12, per_device_train_batch_size=8, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        gradient_accumulation_steps=2, lr_scheduler_type="constant", **arguments,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).to(torch.bfloat16)
    return transformers.Trainer(model, args, train_dataset=ByteWindows(__file__), callbacks=[gate])


def test_trainers_own_optimizer_is_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    gate = import_module("everybit_torch.audit.trainer_gate").PrecisionGate
    import_module("everybit_torch.names.trainer")
    trainer_with(tmp_path, gate(after=4, every=4), optim="adamw_torch", learning_rate=1e-6).train()
    printed = capsys.readouterr().out
    assert [f"Step {step}: Updates are lost: " in printed for step in (4, 8, 12)] == [True] * 3
    assert "LEAN_BF16 would mend it" in printed
    ours = {"optim": "everybit_adamw", "optim_args": "policy=LEAN_BF16", "learning_rate": 1e-6}
    trainer_with(tmp_path, gate(after=4, stop=True), **ours).train()
    assert "Step 4: Nothing is lost: the updates reach the weights." in capsys.readouterr().out
    with pytest.raises(LostUpdatesError, match="Step 4: Updates are lost"):
        trainer_with(tmp_path, gate(after=4, stop=True), optim="adamw_torch", learning_rate=1e-6).train()


@pytest.mark.parametrize("automatic", [True, False])
def test_lightnings_optimizers_are_watched(automatic: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lightning computes gradients in a closure, and clips them there."""
    lightning = pytest.importorskip("lightning.pytorch")
    gate = import_module("everybit_torch.audit.lightning_gate").PrecisionGate

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.automatic_optimization = nn.Linear(64, 8, dtype=torch.bfloat16), automatic

        def training_step(self, batch: Tensor) -> Tensor:
            out: Tensor = self.layer(batch.bfloat16()).square().mean()
            if not automatic:
                self.optimizers().zero_grad()
                self.manual_backward(out)
                self.optimizers().step()
            return out

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-6)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.randn(32, 64), batch_size=4)  # type: ignore[arg-type]

    clip = {"gradient_clip_val": 0.1} if automatic else {}
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[gate(after=3)], default_root_dir=tmp_path, **clip,
    )  # fmt: skip
    trainer.fit(Module())
    printed = capsys.readouterr().out
    assert printed.count("Updates are lost") == 1
    assert "Step 3: Updates are lost: " in printed
    assert "  layer.weight: " in printed
