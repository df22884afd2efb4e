"""LoRA adapters in bfloat16, on a frozen bfloat16 layer: what plain bfloat16 loses of their updates, and what a policy keeps.

    python docs/examples/lora.py --steps 500 --lr 1e-4

The target is the frozen layer plus a matrix of low rank, which the adapters can represent. At small learning rates their updates are below
half a unit in the last place of bfloat16, and plain bfloat16 (``PURE_BF16``) rounds them away.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import AdamW


class Adapted(nn.Module):
    """A frozen linear layer, and its adapters ``down`` (rank, inputs) and ``up`` (outputs, rank), from Hu et al., arXiv:2106.09685."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        like = {"dtype": frozen.weight.dtype}
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features, **like) / frozen.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank, **like))

    def forward(self, x: Tensor) -> Tensor:
        """The frozen layer's output, and the adapters' beside it."""
        out: Tensor = self.frozen(x) + (x @ self.down.T) @ self.up.T
        return out


def train(policy: str, steps: int, lr: float, width: int = 64, rank: int = 4) -> float:
    """Fit the adapters, and return their last mean squared error, relative to that of the frozen layer."""
    torch.manual_seed(0)
    dtype = torch.float32 if policy == "FP32" else torch.bfloat16
    frozen = nn.Linear(width, width)
    delta = torch.randn(width, 2) @ torch.randn(2, width) / width
    model = Adapted(frozen, rank).to(dtype)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = AdamW(
        adapters, lr=lr, weight_decay=0.0, betas=(0.9, 0.95), policy=eb.policies.PRESETS[policy], compile=False
    )
    first = last = 1.0
    for step in range(steps):
        x = torch.randn(256, width)
        error = model(x.to(dtype)).float() - (x @ (frozen.weight.detach().float() + delta).T + frozen.bias.float())
        loss = error.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        first, last = (float(loss.detach()), last) if step == 0 else (first, float(loss.detach()))
    return last / first


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Read the command line, train under each policy, and print what error is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument(
        "--policies", nargs="+", choices=list(eb.policies.PRESETS), default=["FP32", "LEAN_BF16", "PURE_BF16"]
    )
    given = parser.parse_args(arguments)
    left = {policy: train(policy, given.steps, given.lr) for policy in given.policies}
    for policy, error in left.items():
        print(f"{policy:10s} {error:7.1%} of the error is left")
    return left


if __name__ == "__main__":
    main()
