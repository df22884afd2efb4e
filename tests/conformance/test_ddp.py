"""DistributedDataParallel over gloo with two processes: both step alike, and as one process with the whole batch does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import everybit as eb
from everybit_torch import AdamW
from tests.support.ports import free_port

CASES = {
    "FP32": ("FP32", False, False), "FP32, gradients in buckets": ("FP32", True, False), "FP32, compiled": ("FP32", False, True),
    "KAHAN_BF16": ("KAHAN_BF16", False, False), "LEAN_BF16": ("LEAN_BF16", True, False), "FLOOR_BF16": ("FLOOR_BF16", False, False),
    "FP32, ZeRO": ("FP32", False, False), "SGD": ("SGD", False, False),
}  # fmt: skip
"""The policy of AdamW, whether gradients lie in DDP's buckets, whether steps are compiled; or ``SGD``. With ZeRO ranks share state out."""

# One rank: its half of every batch. Everything is done under the same seed, so that the processes differ by their data alone.
RANK = textwrap.dedent(
    """
    import json, sys, torch, everybit as eb
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel
    from everybit_torch import SGD, AdamW
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    for case, (name, bucket_view, compile) in json.loads(sys.argv[1]).items():
        torch.manual_seed(0)
        dtype = torch.float32 if name in ("FP32", "SGD") else torch.bfloat16
        network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
        model = DistributedDataParallel(network, gradient_as_bucket_view=bucket_view)
        if name == "SGD":
            optimizer = SGD(model.parameters(), lr=1e-2, momentum=0.9)
        elif "ZeRO" in case:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2, policy=name)
        else:
            optimizer = AdamW(model.parameters(), lr=1e-2, policy=eb.policies.PRESETS[name], compile=compile)
        generator = torch.Generator().manual_seed(3)
        for step in range(5):
            x = torch.randn(8, 6, generator=generator)[4 * rank : 4 * rank + 4].to(dtype)
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            optimizer.step()
        found[case] = {"weights": [p.detach().clone() for p in network.parameters()],
                       "state": [] if "ZeRO" in case else [x for p in network.parameters() for x in optimizer.state[p].values()]}
    torch.save(found, f"{sys.argv[2]}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    """
)

Ranks = list[dict[str, dict[str, list[torch.Tensor]]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Weights and state of both ranks, by case."""
    out = tmp_path_factory.mktemp("ddp")
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = [sys.executable, "-W", "ignore", "-c", RANK, json.dumps(CASES), str(out)]
    started = [
        subprocess.Popen(command, env=environment | {"RANK": str(r)}, stderr=subprocess.PIPE, text=True) for r in (0, 1)
    ]
    ends = [rank.communicate(timeout=240) for rank in started]
    assert all(rank.returncode == 0 for rank in started), "\n".join(error[-1500:] for _, error in ends)
    return [torch.load(out / f"{r}.pt", weights_only=True) for r in (0, 1)]


@pytest.mark.parametrize("case", [case for case in CASES if case != "SGD"])
def test_ranks_agree_bit_for_bit_and_with_one_process(ranks: Ranks, case: str) -> None:
    first, second = (rank[case] for rank in ranks)
    name = CASES[case][0]
    for key in ("weights", "state"):
        assert all(torch.equal(a, b) for a, b in zip(first[key], second[key], strict=True))
    torch.manual_seed(0)
    dtype = torch.float32 if name == "FP32" else torch.bfloat16
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
    optimizer = AdamW(model.parameters(), lr=1e-2, policy=eb.policies.PRESETS[name])
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        x = torch.randn(8, 6, generator=generator).to(dtype)
        optimizer.zero_grad()
        # The mean of the halves' means, each with its own backward pass in the model's dtype, as the ranks have.
        halves = []
        for half in x.chunk(2):
            model.zero_grad()
            model(half).float().square().mean().backward()
            halves.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for parameter, a, b in zip(model.parameters(), *halves, strict=True):
            # What DDP does: divided on each rank in the gradient's dtype, then added. Halves are exact.
            parameter.grad = a / 2 + b / 2
        optimizer.step()
    # Two addends: no order of addition to differ in. So these are equal bits, stochastic rounding included.
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], model.parameters(), strict=True))


def test_it_is_the_whole_batch_in_one_process_up_to_rounding(ranks: Ranks) -> None:
    """SGD, whose step is linear in the gradient: a gradient that is off by a rounding moves a weight by lr times that."""
    first = ranks[0]["SGD"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    for a, b in zip(first["weights"], model.parameters(), strict=True):
        # Gradients here are below 1 and sums of at most 16 products: off by less than 16 * 2**-24 each. Momentum adds five steps'
        # up to 10-fold, and lr is 1e-2; weights below 1 are rounded by 2**-25 at each step, of both runs.
        torch.testing.assert_close(a, b.detach(), rtol=0, atol=5 * (10 * 1e-2 * 16 * 2**-24 + 2 * 2**-25))
