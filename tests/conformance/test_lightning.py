"""Lightning: automatic and manual optimization, a schedule, clipping, and a run that is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import AdamW

lightning = pytest.importorskip("lightning")

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A small network; ``manual`` steps by hand."""

    def __init__(self, policy: eb.Policy, *, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        dtype = torch.float32 if policy == eb.policies.FP32 else torch.bfloat16
        self.network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
        self.policy = policy
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, index: int) -> Tensor | None:
        (x,) = batch
        loss: Tensor = self.network(x.to(self.network[0].weight.dtype)).float().square().mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=1e-2, policy=self.policy)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Constant(Module):
    """Without a schedule, which Lightning leaves to the user in manual optimization."""

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=1e-2, policy=self.policy)


def data() -> Any:
    generator = torch.Generator().manual_seed(1)
    dataset = torch.utils.data.TensorDataset(torch.randn(16, 6, generator=generator))
    return torch.utils.data.DataLoader(dataset, batch_size=4)


def fit(module: Module, directory: Path, epochs: int, **arguments: Any) -> Any:
    checkpoint = arguments.pop("ckpt_path", None)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=str(directory), **arguments,
    )  # fmt: skip
    trainer.fit(module, data(), ckpt_path=checkpoint)
    return trainer


@pytest.mark.parametrize("name", ["FP32", "LEAN_BF16"])
def test_resume_is_continue(tmp_path: Path, name: str) -> None:
    policy = eb.policies.PRESETS[name]
    whole = Module(policy)
    fit(whole, tmp_path, 4, gradient_clip_val=0.5, enable_checkpointing=False)
    half = Module(policy)
    trainer = fit(half, tmp_path, 2, gradient_clip_val=0.5)
    trainer.save_checkpoint(str(tmp_path / "half.ckpt"))
    resumed = Module(policy)
    fit(resumed, tmp_path, 4, gradient_clip_val=0.5, enable_checkpointing=False, ckpt_path=str(tmp_path / "half.ckpt"))
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not all(torch.equal(a, b) for a, b in zip(half.parameters(), whole.parameters(), strict=True))


def test_manual_optimization_is_automatic_optimization(tmp_path: Path) -> None:
    results = []
    for manual in (False, True):
        module = Constant(eb.policies.KAHAN_BF16, manual=manual)
        fit(module, tmp_path, 2, enable_checkpointing=False)
        results.append([p.detach().clone() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
