"""The options of the command ``everybit plan``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from everybit_torch.cli.setup import Setup
from everybit_torch.sharded.strategies import STRATEGIES, OuterStrategy, Strategy

DTypeName = Literal["fp64", "fp32", "bf16", "fp16", "auto"]
DEFAULT_POLICIES = ("MIXED_BF16", "KAHAN_BF16", "LEAN_BF16", "FLOOR_BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(Setup):
    """Print, to the byte, the memory that each rank keeps, its peak, and what it sends, for a model under several policies and strategies.

    Nothing is allocated: the model is built on the meta device. Activations, buffers and the memory of the device's libraries are not
    counted, and under optim_grads_params peaks are estimates. Writes plan.json and plan.png to --out, if it is given.
    """

    outer: int = 1
    """The number of groups of --ranks ranks, the outer dimension of HSDP and HFSDP. There are --outer x --ranks ranks in all."""

    outer_strategy: OuterStrategy = "no_shard"
    """The strategy of the outer dimension; optim (HFSDP) needs optim_grads_params."""

    strategies: tuple[Strategy, ...] = STRATEGIES
    """The strategies to plan."""

    policies: tuple[str, ...] = DEFAULT_POLICIES
    """Names of presets of everybit.policies, .toml, .json and .yaml files; or three-dtypes, as --main-params and the next two options
    say."""

    main_params: DTypeName = "fp32"
    """For three-dtypes: dtype of the main weights; auto: the model's weights are the main weights."""

    main_grads: DTypeName | None = None
    """Dtype in which gradients are summed, under every policy; auto: the model's. Default: that of each policy (three-dtypes: fp32)."""

    grad_comm: DTypeName | None = None
    """Dtype in which gradients are sent, under every policy; auto: that of the main gradients. Default: that of each policy."""

    reduce: Literal["native", "fp32"] | None = None
    """How 16-bit gradients are summed; fp32: at the receiver, exactly. Default: as each policy says."""

    out: Path | None = None
    """Folder for plan.json and plan.png; created if it does not exist."""
