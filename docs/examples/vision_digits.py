"""A small convolutional network in bfloat16 on the 1797 handwritten digits that come with scikit-learn; nothing is downloaded.

python docs/examples/vision_digits.py --epochs 20 --lr 1e-3
python docs/examples/vision_digits.py --epochs 20 --lr 5e-5      # updates that plain bfloat16 (PURE_BF16) rounds away
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import everybit as eb
from everybit_torch import AdamW


def train(policy: str, epochs: int, lr: float) -> float:
    """Train on 1437 images of 8 x 8 pixels, and return the share of the other 360 that is classified correctly."""
    torch.manual_seed(0)
    dtype = torch.float32 if policy == "FP32" else torch.bfloat16
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1).to(dtype)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels))
    seen, unseen = order[:1437], order[1437:]
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10),
    ).to(dtype)  # fmt: skip
    optimizer = AdamW(model.parameters(), lr=lr, policy=eb.policies.PRESETS[policy], compile=False, betas=(0.9, 0.95))
    for _ in range(epochs):
        for batch in seen[torch.randperm(len(seen))].split(64):
            loss = nn.functional.cross_entropy(model(images[batch]).float(), labels[batch])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return float((model(images[unseen]).argmax(1) == labels[unseen]).double().mean())


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Read the command line, train under each policy, and print the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--policies", nargs="+", choices=list(eb.policies.PRESETS), default=["FP32", "LEAN_BF16", "PURE_BF16"]
    )
    given = parser.parse_args(arguments)
    found = {policy: train(policy, given.epochs, given.lr) for policy in given.policies}
    for policy, right in found.items():
        print(f"{policy:10s} {right:6.1%} of unseen digits right")
    return found


if __name__ == "__main__":
    main()
