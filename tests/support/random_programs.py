"""Random programs of sharded training: models, options and loops as users write them, drawn from a seed.

Gradients are small whole numbers, whatever the weights are, so that sums of them are exact in every order and on every wire. A program on
any number of ranks has to end with the bits of one process that accumulates all gradients by autograd.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
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
RATE = 0.03
TRANSFORMS: dict[str, Callable[[eb.Hyperparameter], eb.Transform[Any]]] = {
    "adamw": lambda lr: eb.adamw(lr, weight_decay=0.1),
    "clipped": lambda lr: eb.chain(eb.clip_by_global_norm(4.0), eb.adamw(lr, weight_decay=0.1)),
    "lamb": lambda lr: eb.chain(eb.clip_by_global_norm(4.0), eb.lamb(lr), eb.clip_by_global_norm(0.01)),
    "lars": eb.lars,
    "stable adamw": eb.stable_adamw,
    "lion": eb.lion,
    "muon": lambda lr: eb.chain(eb.clip_by_global_norm(4.0), eb.muon(lr)),
    "soap": eb.soap,
    "adafactor": eb.adafactor,
    "normuon": lambda lr: eb.muon(lr, before="rows", after=eb.scale_by_normuon, others_rate=0.5),
    "kron": lambda lr: eb.kron(lr, period=2),
    "unit norms": lambda lr: eb.chain(eb.clip_by_unit_norm(0.1), eb.adamw(lr)),
    "masked": lambda lr: eb.chain(eb.masked(eb.clip_by_global_norm(1.0), lambda _, p: p.ndim > 1), eb.sgd(lr, momentum=0.9)),
    "every second step": lambda lr: eb.chain(eb.accumulate(eb.sgd(lr, momentum=0.9), every=2)),
}  # fmt: skip
DRAWING = ("kron",)
"""Transforms with random numbers, which depend on where they stand: alone, or inside of a partition."""
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
        labelled: Whether what is no matrix has an optimizer of its own.
        scheduled: Whether the learning rate falls.
        odd: Whether there are parameters without elements, without dimensions, and of float32 beside others.
        idle: Whether the first rank leaves out the last backward pass of the second step.
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
    labelled: bool = False
    scheduled: bool = False
    odd: bool = False
    idle: bool = False

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
    patterns: tuple[Pattern, ...] = ("microbatch", "neither", "no_sync")
    return Program(
        seed=seed,
        mesh=mesh,
        strategy=strategy,
        outer=draw.choice(["no_shard", "optim"]) if sharded and len(mesh) == 2 else "no_shard",
        policy=draw.choice(policies),
        grads=draw.choice(
            [None, eb.Grads(main="float32"), eb.Grads(main="float32", comm="bfloat16", reduce="float32")]
        ),
        transform=(transform := draw.choice(list(TRANSFORMS))),
        microbatches=(number := draw.choice([1, 2, 3])),
        pattern=(pattern := draw.choice(patterns[: 3 if number > 1 else 2])),
        units=draw.random() < 0.8,
        nested=draw.random() < 0.5,
        frozen_step=draw.choice([None, None, 1]),
        labelled=draw.random() < 0.3 and transform not in DRAWING,
        scheduled=draw.random() < 0.3,
        odd=not sharded and draw.random() < 0.5,
        idle=not sharded and number > 1 and pattern == "microbatch" and draw.random() < 0.5,
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
        self.odd = program.odd
        if program.odd:
            self.empty = nn.Parameter(torch.ones(0, 4, dtype=dtype))
            self.scalar = nn.Parameter(torch.ones((), dtype=dtype))
            self.wide = nn.Parameter(torch.ones(5))

    def forward(self, seed: int, uses_all: bool) -> Tensor:
        x = (self.own * (seed % 5)).sum()
        for cell in self.cells:
            x = cell(x, seed, uses_all)
        if self.odd:
            x = x.float() + self.empty.float().sum() + self.scalar.float() * (seed % 3) + (self.wide * (seed % 4)).sum()
        return x


def elsewhere(program: Program, ranks: int) -> Program:
    """The same model and optimizer on another number of ranks, under another strategy, with other passes."""
    other = drawn(program.seed + 500_000, ranks)
    if program.odd and other.strategy == "optim_grads_params":
        other = replace(other, strategy="optim_grads", outer="no_shard")
    if program.policy == "LEAN_8BIT" and other.strategy == "optim_grads_params":
        other = replace(other, mesh=(ranks,), outer="no_shard")
    return replace(
        other, seed=program.seed, policy=program.policy, grads=program.grads, transform=program.transform, nested=program.nested,
        labelled=program.labelled, scheduled=program.scheduled, odd=program.odd,
    )  # fmt: skip


def passes(program: Program, step: int, rank: int) -> Iterator[tuple[int, bool] | None]:
    """Of one rank's backward passes in a step: the seed of the gradients, and whether all parameters are used; None: it is left out."""
    for number in range(program.microbatches):
        leaves_out = program.idle and step == 1 and rank == 0 and number == program.microbatches - 1
        yield None if leaves_out else (1 + 7 * step + 3 * number + 2 * rank, (rank + number + step) % 2 == 0)


def prepare(program: Program, model: Cells, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Freeze one parameter for the step that the program says, and set the learning rate."""
    model.own.requires_grad_(step != program.frozen_step)
    if step == program.frozen_step:
        model.own.grad = None
    for group in optimizer.param_groups if program.scheduled else ():
        group["lr"] = RATE / 2**step


def label(_: str, parameter: Tensor) -> str:
    """The label of a parameter."""
    return "matrix" if parameter.ndim > 1 else "other"


def labelled(program: Program, lr: eb.Hyperparameter) -> dict[str, eb.Transform[Any]]:
    """The transforms by label."""
    return {"matrix": TRANSFORMS[program.transform](lr), "other": eb.adamw(lr, weight_decay=0.1)}


def partitioned(program: Program, lr: eb.Hyperparameter) -> eb.Transform[Any]:
    """The program's optimizer as one transform."""
    return eb.partition(labelled(program, lr), label) if program.labelled else TRANSFORMS[program.transform](lr)


Reported = tuple[float, frozenset[str]]
"""The norm of a step's gradients, and the names of parameters without one."""

Outcome = tuple[Weights, list[Reported]]
"""The weights at the end, and what the steps reported."""


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
            model, labelled(program, RATE) if program.labelled else TRANSFORMS[program.transform](RATE),
            labels=label if program.labelled else None, policy=program.policy_of(main=False), strategy=program.strategy,
            outer=program.outer, mesh=mesh_of(program.mesh) if program.ranks > 1 or len(program.mesh) > 1 else None,
            units=[Cell] if program.units else None, divisor=1.0,
        )  # fmt: skip
        if load is not None:
            load_sharded(stepper, load / str(number))
        reported = []
        for step in range(STEPS) if load is None else range(STEPS, STEPS + RESUMED):
            prepare(program, model, stepper.as_optimizer(), step)
            for place, one in enumerate(passes(program, step, dist.get_rank())):
                with context_of(stepper, program.pattern, last=place == program.microbatches - 1):
                    if one is not None:
                        model(*one).backward()
            report = stepper.step()
            reported.append((float(report.grad_norm), frozenset(report.untouched)))
        if save is not None:
            save_sharded(stepper, save / str(number))
        found.append((weights_of(model), reported))
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
        lambda lr: partitioned(program, lr),
        lr=RATE,
        policy=program.policy_of(main=True),
        compile=False,
    )
    steps = [(program, step) for step in range(STEPS if load is None else 0)]
    if load is not None:
        load_sharded_into(model, optimizer, load, hyperparameters=False)
    if then is not None:
        steps += [(then, step) for step in range(STEPS, STEPS + RESUMED)]
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    reported = []
    for one, step in steps:
        optimizer.zero_grad()
        prepare(one, model, optimizer, step)
        for rank in range(one.ranks):
            for drawn_pass in passes(one, step, rank):
                if drawn_pass is not None:
                    model(*drawn_pass).backward()
        squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
        without = frozenset(name for name, p in model.named_parameters() if name in trained and p.grad is None)
        reported.append((float(torch.stack(squares).sum().sqrt()), without))
        optimizer.step()
    return weights_of(model), reported
