"""The options of ``everybit plan``, and the model and policies that they stand for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from everybit.base import FloatDType
from everybit_cli.errors import OptionError
from everybit_cli.models import build
from everybit_cli.optimizers import Chosen, named_optimizer
from everybit_cli.output import Output
from everybit_cli.plan.advice import parsed_size
from everybit_cli.policies import named_policy
from everybit_torch.segments import Offload
from everybit_torch.sharded.labelling import AnyPrecision
from everybit_torch.sharded.mixed_precision import MixedPrecision
from everybit_torch.sharded.strategies import STRATEGIES, OuterStrategy, Strategy

DTypeName = Literal["float64", "float32", "bfloat16", "float16", "auto"]
DEFAULT_POLICIES = ("MIXED_BF16", "KAHAN_BF16", "LEAN_BF16", "FLOOR_BF16")
PREFERRED = {
    "bfloat16": ("EXACT_BF16", "LEAN_BF16", "TIGHT_BF16", "FLOOR_BF16"),
    "float32": ("FP32",),
    "float64": ("FP64",),
}
"""By dtype of the model, the policies that are advised, the most precise first."""
THREE_DTYPES = "three-dtypes"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(Output):
    """Print, to the byte, the memory that each rank keeps, its peak and its traffic, for a model under several policies and strategies.

    With --memory: advise the most precise policy that fits, and of its strategies the strategy with the fewest bytes sent. The exit code is
    then 1 if no policy fits.

    No memory is allocated: the model is built on the meta device. Activations, buffers and the memory of the device's libraries are not
    counted (--reserve keeps memory free for them), and under optim_grads_params peaks are estimates. Writes plan.json and plan.png to
    --out, if it is given.
    """

    model: str = "llama-3-8b"
    """A known model (llama-3.2-1b, llama-3-8b, llama-3-70b, llama-3-405b, mixtral-8x22b, deepseek-v2; or one of everybit compare's: mini,
    large, ...), the folder or config.json of a Hugging Face model (needs transformers), or module:function, which is called and returns a
    torch.nn.Module."""

    dtype: Literal["bfloat16", "float16", "float32", "float64", "model"] = "bfloat16"
    """Dtype of the model's weights; model: the dtype with which it is built."""

    ranks: int = 8
    """The number of ranks that buffers are sharded over."""

    outer: int = 1
    """The number of groups of --ranks ranks, the outer dimension of HSDP and HFSDP. There are --outer x --ranks ranks in all."""

    outer_strategy: OuterStrategy = "no_shard"
    """The strategy of the outer dimension; optim (HFSDP) needs optim_grads_params."""

    strategies: tuple[Strategy, ...] = ()
    """The strategies to plan. Default: all of them; on one rank, where there is nothing to shard, no_shard."""

    optimizer: str = "adamw"
    """The optimizer whose state is counted: a name of everybit.optimizers(), with hyperparameters if they are wanted, such as
    sgd,momentum=0.9."""

    policies: tuple[str, ...] = ()
    """Names of presets of everybit.policies, .toml, .json and .yaml files; or three-dtypes, as --main-params and the next two options
    say. With --memory, in order of preference. Default: MIXED_BF16, KAHAN_BF16, LEAN_BF16 and FLOOR_BF16; with --memory from EXACT_BF16 to
    FLOOR_BF16, or FP32 for a float32 model."""

    main_params: DTypeName = "float32"
    """For three-dtypes: dtype of the main weights; auto: the model's weights are the main weights."""

    main_grads: DTypeName | None = None
    """Dtype in which gradients are summed, under every policy; auto: the model's. Default: that of each policy (three-dtypes: float32)."""

    grad_comm: DTypeName | None = None
    """Dtype in which gradients are sent, under every policy; auto: that of the main gradients. Default: that of each policy."""

    reduce: Literal["native", "float32"] | None = None
    """How 16-bit gradients are summed; float32: at the receiver, exactly. Default: as each policy says."""

    units: tuple[str, ...] = ()
    """Names of module classes whose parameters are gathered and reduced together, such as LlamaDecoderLayer. Default: the blocks of a
    known or Hugging Face model, otherwise the whole model."""

    microbatches: int = 1
    """Backward passes in a step."""

    device: Literal["cuda", "cpu"] = "cuda"
    """Device of the training run; a step on a CPU works on smaller pieces at a time."""

    offload: Offload | None = None
    """state: the optimizer's state lies in the host's memory, and two pieces of it on the device."""

    memory: str | None = None
    """Memory of one rank's device, to be advised: a number with GB (1000**3 bytes) or GiB (1024**3)."""

    reserve: str = "0GB"
    """Of --memory, what is kept free for activations and everything else that is not counted."""

    out: Path | None = None
    """Folder for plan.json and plan.png; created if it does not exist."""

    @property
    def planned_strategies(self) -> tuple[Strategy, ...]:
        """The strategies that are planned."""
        alone: tuple[Strategy, ...] = ("no_shard",)
        return self.strategies or (alone if self.ranks * self.outer == 1 else STRATEGIES)


@dataclass(frozen=True, slots=True)
class Subject:
    """The subject of a plan.

    Attributes:
        model: On the meta device.
        units: The classes of its units.
        optimizer: Its optimizer.
        policies: The policies by name.
        budget: Bytes of one rank that may be used; None: no advice is wanted.
    """

    model: nn.Module
    units: list[type[nn.Module]]
    optimizer: Chosen
    policies: dict[str, AnyPrecision]
    budget: int | None

    @property
    def unit_names(self) -> str:
        """The argument of a stepper that makes these units, for a title."""
        return f"units=[{', '.join(kind.__name__ for kind in self.units)}]" if self.units else "units=None"


def subject(options: PlanOptions) -> Subject:
    """Build the model, and turn the other options into objects.

    Raises:
        OptionError: An option that cannot be used.
    """
    for name in ("ranks", "outer", "microbatches"):
        if getattr(options, name) < 1:
            raise OptionError(f"--{name}", getattr(options, name), "a whole number, at least 1")
    if options.outer_strategy == "optim":
        accepted = "optim with --outer 2 or more, and with optim_grads_params among --strategies"
        if options.outer == 1:
            raise OptionError("--outer-strategy", "optim with --outer 1", accepted)
        if "optim_grads_params" not in options.planned_strategies:
            raise OptionError("--outer-strategy", f"optim with --strategies {' '.join(options.strategies)}", accepted)
    budget = None
    if options.memory is not None:
        budget = parsed_size("--memory", options.memory) - parsed_size("--reserve", options.reserve)
        if budget <= 0:
            raise OptionError("--reserve", options.reserve, f"less than --memory, which is {options.memory}")
    optimizer = named_optimizer(options.optimizer)
    dtype = None if options.dtype == "model" else getattr(torch, options.dtype)
    model, blocks = build(options.model, dtype)
    kinds = {type(module).__name__: type(module) for module in model.modules()}
    for name in options.units:
        if name not in kinds:
            raise OptionError("--units", name, f"classes of the model's modules: {', '.join(sorted(kinds))}")
    names = options.policies or (DEFAULT_POLICIES if budget is None else _preferred(model))
    units = [kinds[name] for name in options.units] or blocks
    return Subject(model, units, optimizer, _policies(options, names), budget)


def _preferred(model: nn.Module) -> tuple[str, ...]:
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    if len(dtypes) != 1 or not dtypes <= PREFERRED.keys():
        got = f"nothing, for parameters in {', '.join(sorted(dtypes))}"
        raise OptionError(
            "--policies", got, f"policies for these dtypes: presets are for one of {', '.join(PREFERRED)}"
        )
    return PREFERRED[dtypes.pop()]


def _policies(options: PlanOptions, names: tuple[str, ...]) -> dict[str, AnyPrecision]:
    found: dict[str, AnyPrecision] = {}
    for name in names:
        if name.lower() == THREE_DTYPES:
            found[THREE_DTYPES] = MixedPrecision(
                main_params=_dtype(options.main_params),
                main_grads=_dtype(options.main_grads or "float32"),
                grad_comm=_dtype(options.grad_comm or "auto"),
                reduce=options.reduce or "native",
            )
            continue
        shown, policy = named_policy(name)
        grads = policy.grads
        if options.main_grads is not None:
            grads = dataclasses.replace(grads, main=_dtype(options.main_grads))
        if options.grad_comm is not None:
            grads = dataclasses.replace(grads, comm=_dtype(options.grad_comm))
        if options.reduce is not None:
            grads = dataclasses.replace(grads, reduce=options.reduce)
        found[shown] = dataclasses.replace(policy, grads=grads)
    return found


def _dtype(name: DTypeName) -> FloatDType | None:
    return None if name == "auto" else name
