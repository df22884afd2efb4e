"""The options of ``everybit sweep``, and the checks that come before any work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

import everybit as eb
from everybit_torch.cli.compare.model import ModelName, ModelSize
from everybit_torch.cli.compare.options import CompareOptions, check
from everybit_torch.cli.errors import OptionError
from everybit_torch.cli.optimizers import Chosen, named_optimizer, require_policies
from everybit_torch.cli.output import Output

DEFAULT_OPTIMIZERS = (
    "adamw", "lion", "ademamix", "adopt", "adan", "lamb", "laprop", "mars", "schedule_free_adamw", "prodigy",
)  # fmt: skip
DEFAULT_FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions(Output):
    """Train one small language model by several optimizers, each at the same number of learning rates, and show the best of each.

    The learning rates are each optimizer's default times the same factors for all; its other hyperparameters are its defaults, or what
    stands behind its name. All have the same first weights, batches and schedule. Writes sweep.json (all raw numbers) and sweep.png to
    --out.
    """

    optimizers: tuple[str, ...] = DEFAULT_OPTIMIZERS
    """Names of everybit.optimizers(), with hyperparameters if they are wanted, such as sgd,momentum=0.9."""

    factors: tuple[float, ...] = DEFAULT_FACTORS
    """What each optimizer's default learning rate is multiplied by."""

    extend: int = 0
    """How many further factors an optimizer may have whose best learning rate is the least or the greatest: the row goes on there."""

    policy: str = "FP32"
    """The policy of all: a preset of everybit.policies, AMP, or a .toml, .json or .yaml file."""

    steps: int = 400
    """Optimizer steps of each run."""

    model: ModelName = "mini"
    """Width and blocks, as for everybit compare."""

    seeds: int = 1
    """The number of seeds to train from at each learning rate. The spread over seeds shows which differences say something."""

    final_seeds: int = 0
    """Then train every optimizer at its best learning rate from so many other seeds, side by side, and time it."""

    target: float | None = None
    """The loss to which steps and seconds are counted with --final-seeds; none: that of the first optimizer's worst seed."""

    device: str = "cpu"
    """Where to train: cpu, cuda or cuda:N."""

    out: Path = Path("runs/sweep")
    """Folder for the results; created if it does not exist."""

    batch: int = 8
    """Windows of text per step."""

    context: int = 128
    """Bytes in a window."""

    clip: float = 1.0
    """Largest norm of the gradient; 0: not clipped."""

    threads: int = 1
    """CPU threads; 0: torch's default."""


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """Options that have been checked, and what they mean.

    Attributes:
        options: As given.
        training: How each run is trained.
        optimizers: By the name they are shown under, in order, without a learning rate.
        policy: Its name, and it.
        size: Of the model.
        device: Where to train.
    """

    options: SweepOptions
    training: CompareOptions
    optimizers: dict[str, Chosen]
    policy: tuple[str, eb.Policy]
    size: ModelSize
    device: torch.device


def checked(options: SweepOptions) -> SweepPlan:
    """Look at every option.

    Raises:
        OptionError: One that cannot be used.
    """
    if not options.optimizers:
        raise OptionError("--optimizers", "none", "at least one")
    optimizers: dict[str, Chosen] = {}
    for text in options.optimizers:
        chosen = named_optimizer(text, "--optimizers")
        if "learning_rate" in chosen.given:
            raise OptionError("--optimizers", text, "optimizers without a learning rate, which --factors chooses")
        if chosen.learning_rate is None:
            raise OptionError(
                "--optimizers", text, "optimizers with a default learning rate, which --factors multiplies"
            )
        if chosen.shown in optimizers:
            raise OptionError("--optimizers", f"{chosen.shown} twice", "each once")
        optimizers[chosen.shown] = chosen
    good = all(math.isfinite(factor) and factor > 0 for factor in options.factors)
    if not options.factors or not good or len(set(options.factors)) != len(options.factors):
        got = " ".join(f"{factor:g}" for factor in options.factors) or "none"
        raise OptionError("--factors", got, "different finite numbers above 0, at least one")
    if len(options.factors) < 2 and options.extend:
        raise OptionError("--extend", options.extend, "0 with a single factor: a row goes on from two or more")
    for name, count in (("--extend", options.extend), ("--final-seeds", options.final_seeds)):
        if count < 0:
            raise OptionError(name, count, "a whole number, at least 0")
    if options.target is not None:
        if not options.final_seeds:
            raise OptionError(
                "--target", f"{options.target:g} without --final-seeds", "both: the runs from those seeds are counted"
            )
        if not (math.isfinite(options.target) and options.target > 0):
            raise OptionError("--target", f"{options.target:g}", "a finite loss above 0, in nats per byte")
    training = CompareOptions(
        steps=options.steps, model=options.model, policies=(options.policy,), seeds=options.seeds, device=options.device,
        batch=options.batch, context=options.context, clip=options.clip, threads=options.threads,
    )  # fmt: skip
    try:
        plan = check(training)
    except OptionError as error:
        raise OptionError.saying(ValueError(str(error).replace("--policies", "--policy"))) from None
    for chosen in optimizers.values():
        require_policies(chosen, plan.policies, "--policy")
    ((name, policy),) = plan.policies.items()
    return SweepPlan(options, training, optimizers, (name, policy), plan.size, plan.device)
