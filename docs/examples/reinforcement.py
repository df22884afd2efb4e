"""Policy gradients with a small learning rate: in plain bfloat16 the agent stops learning, under a policy it follows float32.

    python docs/examples/reinforcement.py --updates 300 --lr 1e-4

A walker in a corridor moves left or right and is paid for reaching the right end (REINFORCE, Williams 1992, with the mean return as
baseline). Fine-tuning with reinforcement learning takes learning rates like these; updates are then below half a unit in the last place of
bfloat16 weights.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import AdamW

CELLS, HORIZON = 6, 12


def episodes(agent: nn.Module, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Let ``count`` walkers walk; the log probability of each one's moves, and its return (both of shape (count,))."""
    at = torch.zeros(count, dtype=torch.int64)
    log_probability, paid = torch.zeros(count), torch.zeros(count)
    for _ in range(HORIZON):
        choices = torch.distributions.Categorical(logits=agent(nn.functional.one_hot(at, CELLS).to(dtype)).float())
        move = choices.sample()
        log_probability = log_probability + choices.log_prob(move)
        at = (at + 2 * move - 1).clamp(0, CELLS - 1)
        paid = paid + (at == CELLS - 1)
    return log_probability, paid / HORIZON


def train(policy: str, updates: int, lr: float, count: int = 128) -> float:
    """Train, and return the mean return of the last ten updates."""
    torch.manual_seed(0)
    dtype = torch.float32 if policy == "FP32" else torch.bfloat16
    agent = nn.Sequential(nn.Linear(CELLS, 64), nn.Tanh(), nn.Linear(64, 2)).to(dtype)
    optimizer = AdamW(
        agent.parameters(),
        lr=lr,
        weight_decay=0.0,
        betas=(0.9, 0.95),
        policy=eb.policies.PRESETS[policy],
        compile=False,
    )
    returns = []
    for _ in range(updates):
        log_probability, paid = episodes(agent, count, dtype)
        loss = -(log_probability * (paid - paid.mean()) / (paid.std() + 1e-6)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        returns.append(float(paid.mean()))
    return sum(returns[-10:]) / len(returns[-10:])


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Read the command line, train under each policy, and print the returns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument(
        "--policies", nargs="+", choices=list(eb.policies.PRESETS), default=["FP32", "LEAN_BF16", "PURE_BF16"]
    )
    given = parser.parse_args(arguments)
    found = {policy: train(policy, given.updates, given.lr) for policy in given.policies}
    for policy, paid in found.items():
        print(f"{policy:10s} return {paid:.3f}")
    return found


if __name__ == "__main__":
    main()
