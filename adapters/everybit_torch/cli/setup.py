"""Options that choose a model, an optimizer and ranks to plan for, and the objects that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

from everybit.base import FloatDType
from everybit_torch.cli.errors import OptionError
from everybit_torch.cli.models import build
from everybit_torch.cli.optimizers import Chosen, named_optimizer
from everybit_torch.cli.output import Output
from everybit_torch.planning.plan import Plan, plan
from everybit_torch.sharded.labelling import AnyPrecision
from everybit_torch.sharded.options import StepperOptions
from everybit_torch.sharded.strategies import OuterStrategy, Strategy

DTYPES: dict[str, FloatDType] = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup(Output):
    """Options of commands that plan."""

    model: str = "llama-3-8b"
    """A known model (llama-3.2-1b, llama-3-8b, llama-3-70b, llama-3-405b, mixtral-8x22b, deepseek-v2; or one of everybit compare's: mini,
    large, ...), the folder or config.json of a Hugging Face model (needs transformers), or module:function, which is called and returns a
    torch.nn.Module."""

    dtype: Literal["bf16", "fp16", "fp32", "fp64", "model"] = "bf16"
    """Dtype of the model's weights; model: the dtype with which it is built."""

    ranks: int = 8
    """The number of ranks that buffers are sharded over."""

    optimizer: str = "adamw"
    """The optimizer whose state is counted: a name of everybit.optimizers(), with hyperparameters if they are wanted, such as
    sgd,momentum=0.9."""

    units: tuple[str, ...] = ()
    """Names of module classes whose parameters are gathered and reduced together, such as LlamaDecoderLayer. Default: the blocks of a
    known or Hugging Face model, otherwise the whole model."""

    microbatches: int = 1
    """Backward passes in a step."""

    device: Literal["cuda", "cpu"] = "cuda"
    """Device of the training run; a step on a CPU works on smaller pieces at a time."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The model of a plan, on the meta device, the classes of its units, and its optimizer."""

    model: nn.Module
    units: list[type[nn.Module]]
    optimizer: Chosen

    @property
    def unit_names(self) -> str:
        """The names of the units' classes, for a title."""
        return ", ".join(kind.__name__ for kind in self.units) or "the whole model"


@dataclass(frozen=True, slots=True)
class Planned:
    """One policy under one strategy."""

    policy: str
    strategy: Strategy
    plan: Plan


def subject(options: Setup) -> Subject:
    """Build the model.

    Raises:
        OptionError: There is no such model or optimizer, or the model has no such units; a number is not positive.
    """
    optimizer = named_optimizer(options.optimizer)
    for name in ("ranks", "microbatches"):
        if getattr(options, name) < 1:
            raise OptionError(f"--{name}", getattr(options, name), "a whole number, at least 1")
    dtype = None if options.dtype == "model" else getattr(torch, DTYPES[options.dtype])
    model, blocks = build(options.model, dtype)
    kinds = {type(module).__name__: type(module) for module in model.modules()}
    for name in options.units:
        if name not in kinds:
            raise OptionError("--units", name, f"classes of the model's modules: {', '.join(sorted(kinds))}")
    return Subject(model, [kinds[name] for name in options.units] or blocks, optimizer)


def planned(
    options: Setup, subject: Subject, name: str, policy: AnyPrecision, strategy: Strategy, *, ranks: int | tuple[int, int],
    outer: OuterStrategy = "no_shard",
) -> Plan:  # fmt: skip
    """Plan one policy under one strategy; of ranks with different numbers of whole tensors the one with the most elements.

    Raises:
        OptionError: The policy does not go with the model.
    """

    def of_rank(rank: int) -> Plan:
        chosen = StepperOptions(policy=policy, strategy=strategy, outer=outer, units=subject.units)
        return plan(
            subject.model, subject.optimizer.transform(), chosen, ranks=ranks, rank=rank,
            microbatches=options.microbatches, device=options.device,
        )  # fmt: skip

    try:
        first = of_rank(0)
        return of_rank(first.whole_tensors.fullest) if first.whole_tensors and first.whole_tensors.fullest else first
    except (TypeError, ValueError) as error:
        raise OptionError.saying(error, f"--policies: {name} does not go with the model") from None


def plan_all(
    policies: Mapping[str, AnyPrecision],
    strategies: Sequence[Strategy],
    function: Callable[[str, AnyPrecision, Strategy], Plan],
    console: Console,
) -> list[Planned]:
    """Plan every policy under every strategy, and show how far it is."""
    found = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("planning", total=len(policies) * len(strategies))
        for name, policy in policies.items():
            for strategy in strategies:
                found.append(Planned(name, strategy, function(name, policy, strategy)))
                progress.advance(task)
    return found


UNITS_OF_MEMORY = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("bytes", 1))


def unit_of(most: int) -> tuple[str, int]:
    """The largest unit of memory that ``most`` bytes are at least one of: its name and its bytes."""
    return next((name, size) for name, size in UNITS_OF_MEMORY if most >= size or size == 1)


def in_units(size: int, nbytes: int) -> str:
    """Bytes in units of ``size`` bytes, with three digits or more."""
    return f"{nbytes / size:.2f}" if nbytes < 100 * size else f"{nbytes / size:.1f}"
