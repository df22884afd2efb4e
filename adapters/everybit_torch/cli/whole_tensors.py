"""The memory of optimizers that need whole tensors, which ranks do not share: that of a torch optimizer in one process."""

from __future__ import annotations

import torch
from torch import nn

import everybit as eb
from everybit.parts import needs_whole_tensors
from everybit_torch.cli.optimizers import Chosen
from everybit_torch.sharded.allocations import AllocationCounter
from everybit_torch.sharded.plan import Plan, Ranks
from everybit_torch.sharded.strategies import sharding

_NAMES = {"parameter": "parameters", "gradient": "gradients"}


def is_whole(optimizer: Chosen) -> bool:
    """Whether an optimizer, or a part of it, has to see whole tensors."""
    return needs_whole_tensors(optimizer.transform())


def plan_of_whole_tensors(model: nn.Module, optimizer: Chosen, policy: eb.Policy) -> Plan:
    """Plan the torch optimizer of a model, as one process or each rank of DDP keeps it: it is made, and steps, on the meta device.

    The copies of gradients that DDP sends are not counted, and nothing is sent by the optimizer itself.

    Raises:
        TypeError: A parameter that is not a real floating-point tensor.
        ValueError: The policy does not go with the model.
    """
    named = [
        (name, nn.Parameter(torch.empty_like(one, device="meta"), one.requires_grad))
        for name, one in model.named_parameters()
    ]
    made = optimizer.create(named, policy=policy, compile=False)
    table = made.bytes_table()
    trained = [one for _, one in named if one.requires_grad]
    for one in trained:
        one.grad = torch.empty_like(one, dtype=one.grad_dtype or one.dtype)
    made.step()
    with AllocationCounter() as counter:
        made.step()
    step: int = counter.peak
    # The optimizer counts what it steps; a frozen parameter is there all the same.
    frozen = sum(one.nbytes for _, one in named if not one.requires_grad)
    persistent = {_NAMES.get(use, use): size for use, size in table.items()}
    persistent["parameters"] = sum(one.nbytes for one in trained) + frozen
    elements = sum(one.numel() for _, one in named)
    return Plan(sharding("no_shard", "no_shard"), Ranks(), elements, 0, persistent, {"step": step}, {})
