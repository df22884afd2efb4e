"""Random programs of sharded training: models, options and loops as users write them, drawn from a seed.

Gradients are small whole numbers, whatever the weights are, so that sums of them are exact in every order and on every wire. A program on
any number of ranks has to end with the bits of one process that accumulates all gradients by autograd.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import everybit as eb
from everybit_torch import FlatStepper, TorchOptimizer, load_sharded, load_sharded_into, save_sharded
from everybit_torch.sharded.strategies import STRATEGIES, OuterStrategy, Strategy
from tests.support.exact_models import Pattern, context_of, mesh_of, weights_of
from tests.support.weights import Weights

STEPS = 3
RESUMED = 2
"""Steps after a checkpoint."""

POLICIES = ("FP32", "KAHAN_BF16", "EXACT_BF16", "LEAN_BF16", "TIGHT_BF16", "FLOOR_BF16", "MIXED_BF16", "LEAN_8BIT")
TRANSFORMS: dict[str, eb.Transform[Any]] = {
    "adamw": eb.adamw(0.03, weight_decay=0.1),
    "clipped": eb.chain(eb.clip_by_global_norm(4.0), eb.adamw(0.03, weight_decay=0.1)),
    "lamb": eb.chain(eb.clip_by_global_norm(4.0), eb.lamb(0.03), eb.clip_by_global_norm(0.01)),
    "lars": eb.lars(0.03),
    "stable adamw": eb.stable_adamw(0.03),
    "lion": eb.lion(0.01),
    "muon": eb.chain(eb.clip_by_global_norm(4.0), eb.muon(0.03)),
    "soap": eb.soap(0.03),
    "adafactor": eb.adafactor(0.03),
    "novograd": eb.chain(eb.clip_by_global_norm(4.0), eb.novograd(0.03, weight_decay=0.1)),
    "normuon": eb.muon(0.03, before="rows", after=eb.scale_by_normuon, others_rate=0.5),
    "kron": eb.kron(0.03, period=2),
    "apollo": eb.apollo(0.03, rank=1, period=2),
    "low rank": eb.chain(eb.low_rank(eb.scale_by_lion(), rank=1, period=2), eb.scale_by_learning_rate(0.03)),
    "unit norms": eb.chain(eb.clip_by_unit_norm(0.1), eb.adamw(0.03)),
    "masked": eb.chain(eb.masked(eb.clip_by_global_norm(1.0), lambda _, p: p.ndim > 1), eb.sgd(0.03, momentum=0.9)),
    "every second step": eb.chain(eb.accumulate(eb.sgd(0.03, momentum=0.9), every=2)),
}  # fmt: skip
SHAPES = ((5, 3), (1, 4), (7,), (3, 2), (4, 4), (8,), (2, 6), (9,), (6, 1))


@dataclass(frozen=True, slots=True)
class Program:
    """A model and the loop that trains it.

    Attributes:
        seed: Of the model, and of its gradients.
        mesh: Sizes of the mesh.
        strategy: What is sharded.
        outer: What is sharded over the outer dimension.
        policy: Name of the policy.
        grads: The dtypes of gradients; None: the policy's own.
        transform: Name of the transform.
        microbatches: Backward passes in a step.
        pattern: The context that a pass is in.
        units: Whether each cell is a unit.
        nested: Whether the last cell lies in the one before it.
        frozen_step: The step in which one parameter is frozen; None: none.
    """

    seed: int
    mesh: tuple[int, ...]
    strategy: Strategy
    outer: OuterStrategy
    policy: str
    grads: eb.Grads | None
    transform: str
    microbatches: int
    pattern: Pattern
    units: bool
    nested: bool
    frozen_step: int | None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model."""
        return torch.float32 if self.policy == "FP32" else torch.bfloat16

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return torch.Size(self.mesh).numel()

    def policy_of(self, *, main: bool) -> eb.Policy:
        """The policy, with its gradients; ``main``: only the dtype in which they are accumulated, as in one process."""
        policy = eb.policies.PRESETS[self.policy]
        if self.grads is None:
            return policy
        grads = eb.Grads(main=self.grads.main) if main else self.grads
        return eb.Policy(
            compute=policy.compute, params=policy.params, momentum=policy.momentum, variance=policy.variance, state=policy.state,
            slots=policy.slots, grads=grads,
        )  # fmt: skip


def drawn(seed: int, ranks: int) -> Program:
    """The program of a seed, on this number of ranks."""
    draw = random.Random(seed)
    mesh: tuple[int, ...] = draw.choice([(ranks,), *([(2, 2)] if ranks == 4 else [(2, 1)] if ranks == 2 else [])])
    strategy = draw.choice(STRATEGIES)
    sharded = strategy == "optim_grads_params"
    policies = [one for one in POLICIES if not (sharded and len(mesh) == 2 and one == "LEAN_8BIT")]
    return Program(
        seed=seed,
        mesh=mesh,
        strategy=strategy,
        outer=draw.choice(["no_shard", "optim"]) if sharded and len(mesh) == 2 else "no_shard",
        policy=draw.choice(policies),
        grads=draw.choice([None, eb.Grads(main="float32"), eb.Grads(main="float32", comm="bfloat16", reduce="fp32")]),
        transform=draw.choice(list(TRANSFORMS)),
        microbatches=(number := draw.choice([1, 2, 3])),
        pattern=draw.choice(["microbatch", "no_sync", "neither"] if number > 1 else ["microbatch", "neither"]),
        units=draw.random() < 0.8,
        nested=draw.random() < 0.5,
        frozen_step=draw.choice([None, None, 1]),
    )


class Cell(nn.Module):
    """Parameters of several shapes, of which one has two names, one is frozen, and others are used in some passes only."""

    def __init__(self, number: int, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        draw = random.Random(1000 * seed + number)
        self.number = number
        self.inner: Cell | None = None
        for position, shape in enumerate(draw.sample(SHAPES, draw.randint(2, 5))):
            generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
            values = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(f"weight{position}", nn.Parameter(values))
        if draw.random() < 0.5:
            self.register_parameter("tied", self.get_parameter("weight0"))
        if draw.random() < 0.5:
            self.frozen = nn.Parameter(torch.ones(2, 2, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor, seed: int, uses_all: bool) -> Tensor:
        for position, (name, parameter) in enumerate(self.named_parameters(recurse=False, remove_duplicate=False)):
            if uses_all or name == "weight0" or (seed + self.number + position) % 3:
                generator = torch.Generator().manual_seed(1000 * seed + 10 * self.number + position)
                factor = torch.randint(-3, 4, tuple(parameter.shape), generator=generator).to(parameter.dtype)
                x = x + (parameter * factor).sum()
        return x if self.inner is None else self.inner(x, seed, uses_all)


class Cells(nn.Module):
    """Two to four cells, and parameters of the model's own, one of which is never used."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        draw, dtype = random.Random(program.seed + 1), program.dtype
        cells = [Cell(number, program.seed, dtype) for number in range(draw.randint(2, 4))]
        if program.nested:
            last = cells.pop()
            cells[-1].inner = last
        self.cells = nn.ModuleList(cells)
        self.own = nn.Parameter(torch.ones(6, 2, dtype=dtype))
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, seed: int, uses_all: bool) -> Tensor:
        x = (self.own * (seed % 5)).sum()
        for cell in self.cells:
            x = cell(x, seed, uses_all)
        return x


def elsewhere(program: Program, ranks: int) -> Program:
    """The same model and optimizer on another number of ranks, under another strategy, with other passes."""
    other = drawn(program.seed + 500_000, ranks)
    if program.policy == "LEAN_8BIT" and other.strategy == "optim_grads_params":
        other = replace(other, mesh=(ranks,), outer="no_shard")
    return replace(
        other, seed=program.seed, policy=program.policy, grads=program.grads, transform=program.transform, nested=program.nested
    )  # fmt: skip


def passes(program: Program, step: int, rank: int) -> Iterator[tuple[int, bool]]:
    """Of one rank's backward passes in a step: the seed of the gradients, and whether all parameters are used."""
    for number in range(program.microbatches):
        yield 1 + 7 * step + 3 * number + 2 * rank, (rank + number + step) % 2 == 0


def freeze(program: Program, model: Cells, step: int) -> None:
    """Freeze one parameter for the step that the program says."""
    model.own.requires_grad_(step != program.frozen_step)


Outcome = tuple[Weights, list[float]]
"""The weights at the end, and the norms of the steps."""


def on_ranks(programs: Sequence[Program], save: Path | None = None, load: Path | None = None) -> list[Outcome]:
    """Carry out programs, one after the other, on this rank.

    Args:
        programs: The programs.
        save: Where to save a checkpoint of each at its end.
        load: Where checkpoints are, from which each goes on.
    """
    found = []
    for number, program in enumerate(programs):
        model = Cells(program)
        stepper = FlatStepper(
            model, TRANSFORMS[program.transform], policy=program.policy_of(main=False), strategy=program.strategy,
            outer=program.outer, mesh=mesh_of(program.mesh) if program.ranks > 1 or len(program.mesh) > 1 else None,
            units=[Cell] if program.units else None, divisor=1.0,
        )  # fmt: skip
        if load is not None:
            load_sharded(stepper, load / str(number))
        norms = []
        for step in range(STEPS) if load is None else range(STEPS, STEPS + RESUMED):
            freeze(program, model, step)
            for place, (seed, uses_all) in enumerate(passes(program, step, dist.get_rank())):
                with context_of(stepper, program.pattern, last=place == program.microbatches - 1):
                    model(seed, uses_all).backward()
            norms.append(float(stepper.step().grad_norm))
        if save is not None:
            save_sharded(stepper, save / str(number))
        found.append((weights_of(model), norms))
        stepper.close()
    return found


def alone(program: Program, then: Program | None = None, load: Path | None = None) -> Outcome:
    """The same in torch's loop on one process: autograd accumulates the gradients of all ranks.

    Args:
        program: The program.
        then: The program that goes on after it; None: none.
        load: Where a checkpoint of ``program`` is, after which ``then`` goes on; None: both are carried out here.
    """
    model = Cells(program)
    optimizer = TorchOptimizer(
        model.named_parameters(),
        lambda: TRANSFORMS[program.transform],
        policy=program.policy_of(main=True),
        compile=False,
    )
    steps = [(program, step) for step in range(STEPS if load is None else 0)]
    if load is not None:
        load_sharded_into(model, optimizer, load)
    if then is not None:
        steps += [(then, step) for step in range(STEPS, STEPS + RESUMED)]
    norms = []
    for one, step in steps:
        optimizer.zero_grad()
        freeze(one, model, step)
        for rank in range(one.ranks):
            for seed, uses_all in passes(one, step, rank):
                model(seed, uses_all).backward()
        squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.stack(squares).sum().sqrt()))
        optimizer.step()
    return weights_of(model), norms
