"""verl's deltas of weights for an inference engine: its own, found by a snapshot, and those that an optimizer of everybit names.

    python verl_delta.py RANKS      # 0: a plain model; else FSDP2's, one process for each rank

After each sync both have the same indices, values and dtypes, and a receiver's copy is equal bit for bit.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from absent import stand_in

stand_in(
    "ray", "pyvers", "tensordict", "orjson", "codetiming", "hydra", "vllm", "sglang", "cachetools", "aiohttp", "pydantic",
    "peft", "torchdata", "datasets", "flash_attn", "liger_kernel",
    "zmq", "fastapi", "uvicorn", "starlette", "pyzmq", "tensorboard", "wandb", "dill", "pylatexenc", "uvloop",
)  # fmt: skip

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from verl.workers.engine.spec import ShardSpec, derive_dtensor_placement  # noqa: E402
from verl.workers.engine.utils import _hf_entry_identity, hf_delta_export, prime_delta_snapshots  # noqa: E402

import everybit as eb  # noqa: E402
from everybit_torch import AdamW, TorchOptimizer  # noqa: E402


@dataclass
class Case:
    """A run: how weights are stored, steps between two syncs, the rate by step, and what is special at a step."""

    policy: Any
    steps_a_sync: int = 1
    rate: Callable[[int], float] = lambda step: 1e-4
    syncs: int = 50
    clips: bool = False
    skips: bool = False


CASES = {
    "FP32": Case("FP32"),
    "LEAN": Case("LEAN_BF16", clips=True),
    "FLOOR": Case("FLOOR_BF16", skips=True),
    "8 bits": Case("LEAN_8BIT"),
    "four steps": Case("LEAN_BF16", 4, syncs=13),
    # Wrong answers of others, who computed the changes from the optimizer's state.
    "the next step's rate": Case(
        "LEAN_BF16", rate=lambda step: 1e-3 if step % 2 else 1e-7
    ),  # TRL #5937 reads the rate of the next step
    "the last step alone": Case(
        "FP32", 4, rate=lambda step: 1e-3 if step % 4 == 0 else 0.0, syncs=13
    ),  # and sees one step of several
    "a rate that grows": Case("FP32", rate=lambda step: 10.0 ** (step / 10 - 7)),  # AReaL #1604 breaks with the rate
    "changes that are few": Case("FP32", rate=lambda step: 1e-7),  # TRL #5417 predicts, and finds 30 %
}


class Model(nn.Module):
    """Rows that ranks cannot share out evenly, a weight with two names, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.frozen, self.up = nn.Embedding(19, 16), nn.Linear(16, 16), nn.Linear(16, 37)
        self.down, self.head = nn.Linear(37, 16, bias=False), nn.Linear(16, 19, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        found: Tensor = self.head(self.down(self.up(self.frozen(self.embed(x))).relu()))
        return found


# -- the engine's two functions --------------------------------------------------------------------------------------------------


def shards(model: nn.Module) -> Iterator[tuple[str, Tensor, Any]]:
    """What ``FSDPEngine.get_per_tensor_param_shard`` yields."""
    for name, parameter in model.state_dict().items():
        exported = parameter.to(torch.bfloat16)
        here = exported.to_local() if isinstance(exported, DTensor) else exported
        yield name, here.reshape(-1), ShardSpec.from_param(parameter)


def named_by_the_optimizer(model: nn.Module, optimizer: TorchOptimizer) -> Iterator[tuple[Any, ...]]:
    """What ``FSDPEngine.get_per_tensor_param_delta_shard`` yields, without a snapshot."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, (_, indices, values) in zip(trained, optimizer.take_changed(), strict=True):
        spec = ShardSpec.from_param(parameter)
        _, contributes, group = derive_dtensor_placement(spec)
        if not contributes:
            indices, values = indices[:0], values[:0]
        counts = torch.tensor([indices.numel()])
        for name in names[parameter]:
            yield [(name, tuple(spec.full_shape))], "bfloat16", counts, indices, values, group


# -- a run ---------------------------------------------------------------------------------------------------------------------------


def train(case: Case, rank: int, ranks: int) -> float:
    """Train, compare each sync, and return the share of elements that changed in a sync."""
    torch.manual_seed(0)
    model = Model() if case.policy == "FP32" else Model().bfloat16()
    if ranks:
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in (model.up, model.down):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def finite(learning_rate: float = 1e-3) -> Any:
        return eb.apply_if_finite(eb.adamw(learning_rate))

    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer: TorchOptimizer = (
        TorchOptimizer(trained, finite, lr=1.0, policy=case.policy, watch="bfloat16")
        if case.skips
        else AdamW(trained, lr=1.0, policy=case.policy, watch="bfloat16")
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, case.rate)
    snapshots: dict[str, Tensor] = {}
    prime_delta_snapshots(shards(model), snapshots, pin=False)
    optimizer.take_changed().discard()  # the seed has sent all weights
    received = {name: whole(x).clone() for name, x in model.state_dict().items()}
    changed = 0
    for step in range(case.syncs * case.steps_a_sync):
        generator = torch.Generator().manual_seed(100 * step + rank)
        tokens = torch.randint(0, 19, (4, 9), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        (loss * torch.nan if case.skips and step % 5 == 2 else loss).backward()  # type: ignore[no-untyped-call]
        if case.clips:
            torch.nn.utils.clip_grad_norm_([p for _, p in trained], 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % case.steps_a_sync == 0:
            changed += compare(case, model, optimizer, snapshots, received)
    elements = sum(p.numel() for _, p in trained) * case.syncs
    return changed / elements


def whole(x: Tensor) -> Tensor:
    """A parameter in bfloat16, from all ranks."""
    found: Tensor = (x.full_tensor() if isinstance(x, DTensor) else x).to(torch.bfloat16)
    return found.reshape(-1)


def compare(
    case: Case, model: nn.Module, optimizer: TorchOptimizer, snapshots: dict[str, Tensor], received: dict[str, Tensor]
) -> int:
    """Compare what both find, send ours, and compare the receiver's copy."""
    theirs = {slots[0][0]: rest for slots, *rest in hf_delta_export(shards(model), snapshots, _hf_entry_identity)}
    ours = {slots[0][0]: (slots, rest) for slots, *rest in named_by_the_optimizer(model, optimizer)}
    assert all(int(theirs[name][1]) == 0 for name in theirs.keys() - ours.keys()), "frozen layers"
    total = 0
    for name, (slots, (dtype, counts, indices, values, group)) in ours.items():
        their_dtype, their_counts, their_indices, their_values, their_group = theirs[name]
        assert slots == [(name, tuple(model.state_dict()[name].shape))]
        assert (dtype, indices.dtype, values.dtype) == (their_dtype, their_indices.dtype, their_values.dtype)
        assert group is their_group
        known = torch.isin(indices, their_indices)
        assert torch.equal(indices[known], their_indices), name
        assert torch.equal(values[known].view(torch.int16), their_values.view(torch.int16)), name
        if case.steps_a_sync == 1:
            assert torch.equal(counts, their_counts), name
        sent = [(indices, values)]
        if dist.is_initialized():
            sent = [(torch.empty(0), torch.empty(0))] * dist.get_world_size()
            dist.all_gather_object(sent, (indices, values))
        for where, what in sent:
            received[name][where.long()] = what
            total += 0 if name == "head.weight" else where.numel()
    for name, x in model.state_dict().items():
        assert torch.equal(received[name].view(torch.int16), whole(x).view(torch.int16)), name
    return total


def on_rank(rank: int, ranks: int, port: int) -> None:
    """Train as one of several processes."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    train_all(rank, ranks)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may end a process that is torn down


def train_all(rank: int, ranks: int) -> None:
    """Train each case."""
    for name, case in CASES.items():
        changed = train(case, rank, ranks)
        if rank == 0:
            sys.stdout.write(f"{name}: {changed:.4f} of the elements changed in a sync\n")


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    if ranks:
        with socket.socket() as found:
            found.bind(("localhost", 0))
            port = found.getsockname()[1]
        torch.multiprocessing.spawn(on_rank, (ranks, port), nprocs=ranks)  # type: ignore[no-untyped-call, attr-defined]
    else:
        train_all(0, 0)
