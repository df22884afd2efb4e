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
    """Print to the byte what each rank keeps, needs at its peak and sends, for a model under several policies and strategies.

    Nothing is allocated: the model is built on the meta device. Activations, buffers and what the device's own libraries take are not
    counted. Writes plan.json and plan.png to --out, if it is given.
    """

    outer: int = 1
    """How many such groups there are, each with copies: the outer dimension of HSDP and HFSDP. The ranks are --outer x --ranks."""

    outer_strategy: OuterStrategy = "no_shard"
    """The strategy of the outer dimension; optim (HFSDP) goes with optim_grads_params."""

    strategies: tuple[Strategy, ...] = STRATEGIES
    """The strategies to plan, of the four."""

    policies: tuple[str, ...] = DEFAULT_POLICIES
    """Presets of everybit.policies by name, .toml and .json files; or three-dtypes: what --main-params and the next two say."""

    main_params: DTypeName = "fp32"
    """For three-dtypes: of the main weights; auto: the model's own are the main weights."""

    main_grads: DTypeName | None = None
    """Of the sums of gradients, under every policy; auto: the model's dtype. Not given: as each policy says (three-dtypes: fp32)."""

    grad_comm: DTypeName | None = None
    """Of gradients on the wire, under every policy; auto: as the main gradients. Not given: as each policy says."""

    reduce: Literal["native", "fp32"] | None = None
    """How low-precision gradients are summed; fp32: at the receiver, exactly. Not given: as each policy says."""

    keep_weights: bool = False
    """With optim_grads_params: keep weights after the forward pass instead of gathering them twice."""

    keep_weights_after_backward: bool = False
    """With optim_grads_params: keep weights after a backward pass, for the forward pass of the next microbatch."""

    defer_reduction: bool = False
    """With sharded gradients: sum them over the ranks in the last backward pass of a step, and keep whole gradients until then."""

    offload: Literal["nothing", "state", "everything"] = "nothing"
    """What lies in the host's memory: the optimizer's state and main weights; with optim_grads_params alone, weights and main gradients
    too."""

    out: Path | None = None
    """Folder for plan.json and plan.png; made if need be."""
