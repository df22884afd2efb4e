"""lerobot's ``--optimizer.type``: its parser, its files of state."""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absent import stand_in

stand_in("torchvision", "torchcodec", "imageio", "av", "cv2", "gymnasium", "rerun", "deepdiff", "jsonlines")

import small  # noqa: E402
from lerobot.configs import parser  # noqa: E402  # after the stand-ins
from lerobot.optim.optimizers import OptimizerConfig, load_optimizer_state, save_optimizer_state  # noqa: E402


@dataclass
class Job:
    """The part of lerobot's configuration that is looked at here."""

    optimizer: OptimizerConfig


sys.argv = [
    "train", "--optimizer.discover_packages_path=everybit_torch.names.lerobot", "--optimizer.type=everybit_adamw",
    "--optimizer.lr=0.01", "--optimizer.policy=LEAN_BF16",
]  # fmt: skip


@parser.wrap()
def build(job: Job) -> Any:
    """Return what was read."""
    return job.optimizer


chosen = build()
model = small.model()
optimizer = chosen.build(dict(model.named_parameters()))
small.require_policy(optimizer)
assert optimizer.param_groups[0]["lr"] == 0.01
small.train(model, optimizer)
with tempfile.TemporaryDirectory() as folder:
    save_optimizer_state(optimizer, Path(folder))
    again = small.model()
    again.load_state_dict(model.state_dict())
    resumed = load_optimizer_state(chosen.build(dict(again.named_parameters())), Path(folder))
small.require_same(small.train(model, optimizer), small.train(again, resumed))
