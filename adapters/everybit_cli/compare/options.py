"""The options of ``everybit compare``, and the checks that come before any work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import everybit as eb
from everybit_cli.compare.corpus import Corpus
from everybit_cli.compare.model import SIZES, ModelName, ModelSize
from everybit_cli.errors import OptionError
from everybit_cli.machine import parsed_device
from everybit_cli.optimizers import Chosen, named_optimizer, refusal, require_policies
from everybit_cli.output import Output
from everybit_cli.policies import named_policy

DEFAULT_POLICIES = ("FP32", "MIXED_BF16", "PURE_BF16", "KAHAN_BF16", "LEAN_BF16", "FLOOR_BF16")
USUAL: Mapping[str, Mapping[str, Any]] = {"adamw": {"betas": (0.9, 0.95), "weight_decay": 0.1}}
"""Hyperparameters that are usual for models this small, where they are not the optimizer's defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions(Output):
    """Train one small language model under several policies, side by side, and compare loss, lost updates, bytes and time.

    The optimizer is AdamW, or that of --optimizer.

    The text is the Python standard library's own source. Every policy starts from the same weights, rounded to its model's dtype,
    and sees the same batches. Writes compare.json (all raw numbers) and compare.png to --out.
    """

    steps: int = 400
    """Optimizer steps, for each policy and seed."""

    model: ModelName = "mini"
    """Width and blocks: tiny 32 x 1, mini 128 x 2, small 256 x 4, medium 512 x 8, large 768 x 12 (OPT-125m's blocks)."""

    optimizer: str = "adamw"
    """A name of everybit.optimizers(), with hyperparameters if they are wanted, such as sgd,momentum=0.9 or
    adamw,betas=0.9:0.95,weight_decay=0.1, which are the defaults here. Norms do not decay."""

    policies: tuple[str, ...] = ()
    """Names of presets of everybit.policies, AMP (FP32 under torch.autocast), .toml, .json and .yaml files. The reference is FP32, or the
    first one if FP32 is not among them. Default: FP32, MIXED_BF16, PURE_BF16, KAHAN_BF16, LEAN_BF16 and FLOOR_BF16, without those that the
    optimizer refuses."""

    seeds: int = 1
    """The number of seeds to train each policy with: 0, 1, and so on."""

    seed_list: tuple[int, ...] = ()
    """The seeds to train with, instead of --seeds."""

    device: str = "cpu"
    """Where to train: cpu, cuda or cuda:N."""

    out: Path = Path("runs/compare")
    """Folder for the results; created if it does not exist."""

    # AdamW's of 1e-3 is usual for models this small. At the lower rates of large models and long runs, rounding loses more of the updates.
    lr: float | None = None
    """Highest learning rate, reached after a tenth of the steps; it then falls along a cosine to a tenth. Default: the optimizer's."""

    batch: int = 8
    """Windows of text per step."""

    context: int = 128
    """Bytes in a window."""

    clip: float = 1.0
    """Largest norm of the gradient; 0: not clipped."""

    compile: bool = False
    """Whether the optimizer's step is compiled."""

    threads: int = 1
    """CPU threads; 0: torch's default. A second thread makes mini a third faster on an idle machine, and much slower on a busy one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Options that have been checked, and their values as objects.

    Attributes:
        options: The options as given, with the resulting learning rate.
        optimizer: The optimizer with its hyperparameters.
        size: The size of the model.
        policies: The policies by the name they are shown under, in order.
        reference: Name of the policy that others are compared with.
        seeds: The seeds, in order.
        device: Where to train.
    """

    options: CompareOptions
    optimizer: Chosen
    size: ModelSize
    policies: dict[str, eb.Policy]
    reference: str
    seeds: tuple[int, ...]
    device: torch.device


def optimizer_of(options: CompareOptions) -> Chosen:
    """The optimizer with all its hyperparameters.

    Raises:
        OptionError: The optimizer does not exist, or does not take an option.
    """
    chosen = named_optimizer(options.optimizer, usual=USUAL)
    return chosen if options.lr is None else chosen.with_given({"lr": options.lr}, "--lr")


def check(options: CompareOptions) -> Plan:
    """Check every option; only ``out`` is touched.

    Raises:
        OptionError: One that cannot be used.
    """
    for name in ("steps", "batch", "context"):
        _require(f"--{name}", getattr(options, name), getattr(options, name) >= 1, "a whole number, at least 1")
    _require("--threads", options.threads, options.threads >= 0, "a whole number, at least 1, or 0 for torch's choice")
    if options.lr is not None:
        _require("--lr", options.lr, math.isfinite(options.lr) and options.lr > 0, "a finite number above 0")
    _require("--clip", options.clip, math.isfinite(options.clip) and options.clip >= 0, "a finite number, at least 0")
    optimizer = optimizer_of(options)
    policies = _policies(options, optimizer)
    return Plan(
        options=replace(options, lr=optimizer.algorithm.lr),
        optimizer=optimizer,
        size=SIZES[options.model],
        policies=policies,
        reference="FP32" if "FP32" in policies else next(iter(policies)),
        seeds=_seeds(options),
        device=parsed_device(options.device),
    )


def check_context(options: CompareOptions, corpus: Corpus) -> None:
    """Refuse windows longer than the text.

    Raises:
        OptionError: They are.
    """
    longest = min(len(corpus.training), len(corpus.held_out)) - 1
    _require(
        "--context",
        options.context,
        options.context <= longest,
        f"at most {longest}, as the text to validate on has no longer window",
    )


def _policies(options: CompareOptions, optimizer: Chosen) -> dict[str, eb.Policy]:
    if not options.policies:
        presets = eb.policies.PRESETS
        return {name: presets[name] for name in DEFAULT_POLICIES if refusal(optimizer, presets[name]) is None}
    policies: dict[str, eb.Policy] = {}
    for name in options.policies:
        shown, policy = named_policy(name, autocast=True)
        if shown in policies:
            raise OptionError(
                "--policies", f"{shown} twice", "names that differ (a file goes by its name without ending)"
            )
        policies[shown] = policy
    # The optimizer knows whether a policy works with its decay rates.
    require_policies(optimizer, policies)
    return policies


def _seeds(options: CompareOptions) -> tuple[int, ...]:
    _require("--seeds", options.seeds, options.seeds >= 1, "a whole number, at least 1")
    seeds = options.seed_list
    if not seeds:
        return tuple(range(options.seeds))
    _require("--seeds", options.seeds, options.seeds == 1, "nothing, with --seed-list")
    good = min(seeds) >= 0 and len(set(seeds)) == len(seeds)
    _require("--seed-list", " ".join(map(str, seeds)), good, "different whole numbers, at least 0")
    return seeds


def _require(option: str, got: object, good: bool, accepted: str) -> None:
    if not good:
        raise OptionError(option, got, accepted)
