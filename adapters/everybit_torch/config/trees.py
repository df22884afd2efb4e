"""Configurations of an optimizer or a stepper, whole."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import everybit as eb
from everybit.policies import PolicyName, with_name_resolved
from everybit.stepping import Unsafe
from everybit_torch.config.algorithms import ALGORITHM, AdamWConfig, Algorithm
from everybit_torch.config.policies import POLICY_KINDS, PolicyByName, require_matches
from everybit_torch.config.reader import Kinds, Reader
from everybit_torch.optim import TorchOptimizer
from everybit_torch.segments import Compile, Offload, WatchedDType
from everybit_torch.sharded.strategies import PlainOptions

if TYPE_CHECKING:
    from everybit_torch.collectives import Mesh
    from everybit_torch.sharded.stepper import FlatStepper


AnyPolicyConfig = eb.Policy | PolicyByName | PolicyName | None
"""What a configuration may say of how parameters and state are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """A torch optimizer, its policy and its param groups, as data.

    Args:
        algorithm: An optimizer and its hyperparameters.
        policy: How parameters and state are stored: a policy, a preset's name, one for each pattern of names, or None for float32 and
            float64 models stored as they are.
        no_decay: Patterns of the names of parameters that do not decay, such as ``"*.bias"``; they form a param group of their own.
        compile: Compile the step; ``"auto"``: of large groups, where there is a compiler.
        metrics: Measure every step.
        seed: The seed of stochastic rounding.
        unsafe: The handling of a policy under which a slot of the state would stop moving.
        watch: The dtype in which changes of weights are noted, for ``take_changed()``.
        offload: ``"state"``: state lies in the host's memory, and is stepped on the device.

    Raises:
        ValueError: A name of no preset.
    """

    algorithm: Algorithm = AdamWConfig()
    policy: eb.Policy | PolicyByName | PolicyName | None = None
    no_decay: Sequence[str] = ()
    compile: Compile = "auto"
    metrics: bool = False
    seed: int = 0
    unsafe: Unsafe = "refuse"
    watch: WatchedDType | None = None
    offload: Offload | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", with_name_resolved(self.policy))
        object.__setattr__(self, "no_decay", tuple(self.no_decay))

    def build(self, model: nn.Module) -> TorchOptimizer:
        """Return the optimizer of the model's parameters, given with their names; frozen parameters are left out.

        Args:
            model: The model. Patterns are matched with its ``named_parameters()``.

        Raises:
            TypeError: A parameter that is not a real floating-point tensor.
            ValueError: A pattern that matches no name, or what cannot work with this model; see :class:`everybit_torch.TorchOptimizer`.
        """
        if self.no_decay:
            self.algorithm.without_decay()
        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        _require_patterns(self.policy, self.no_decay, model)
        exempt = {name for name, _ in named if _matches(self.no_decay, name)}
        groups: list[dict[str, Any]] = [{"params": [one for one in named if one[0] not in exempt]}]
        groups.append({"params": [one for one in named if one[0] in exempt], "weight_decay": 0.0})
        return self.algorithm.build(
            [group for group in groups if group["params"]], model,
            policy=_policy(self.policy), compile=self.compile,
            metrics=self.metrics, seed=self.seed, unsafe=self.unsafe, watch=self.watch, offload=self.offload,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepperConfig(PlainOptions):
    """A sharded stepper and its optimizer, as data.

    Args:
        algorithm: An optimizer and its hyperparameters.
        policy: How parameters, state and gradients are stored and sent: a policy, a preset's name, one for each pattern of names, or None
            for float32 and float64 models stored as they are.
        no_decay: Patterns of the names of parameters that do not decay, such as ``"*.bias"``.
        units: Names of classes of the model's modules, such as ``"Block"``, or of single modules, such as ``"layers.0"``. Their parameters
            are gathered and reduced together.
        ignored: Names of parameters and of modules that are left alone.

    The others are those of :class:`~everybit_torch.StepperOptions`.

    Raises:
        ValueError: A name of no preset.
    """

    algorithm: Algorithm = AdamWConfig()
    policy: eb.Policy | PolicyByName | PolicyName | None = None
    no_decay: Sequence[str] = ()
    units: Sequence[str] = ()
    ignored: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", with_name_resolved(self.policy))
        for name in ("no_decay", "units", "ignored"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def build(self, model: nn.Module, *, mesh: Mesh = None) -> FlatStepper:
        """Return the stepper of a model; every rank calls it.

        Args:
            model: As :class:`everybit_torch.FlatStepper` takes it.
            mesh: The ranks; None: all of them, or this process alone.

        Raises:
            ValueError: A pattern that matches no name, a unit that the model does not have, or an error of the stepper.
        """
        from everybit_torch.sharded.options import StepperOptions
        from everybit_torch.sharded.stepper import FlatStepper

        _require_patterns(self.policy, self.no_decay, model)
        transform: Any = self.algorithm.transform()
        if self.no_decay:
            transform = {"decay": transform, "no_decay": self.algorithm.without_decay().transform()}
        plain = {field.name: getattr(self, field.name) for field in fields(PlainOptions)}
        options = StepperOptions(
            **plain, policy=_policy(self.policy), mesh=mesh, units=_units(self.units, model) or None,
            labels=DecayLabels(tuple(self.no_decay)) if self.no_decay else None, ignored=self.ignored or None,
        )  # fmt: skip
        return FlatStepper(model, transform, options)


@dataclass(frozen=True, slots=True)
class DecayLabels:
    """Labels a stepper's parameters: ``"no_decay"`` if a pattern matches the name, else ``"decay"``."""

    patterns: tuple[str, ...]

    def __call__(self, name: str, parameter: torch.Tensor) -> str:  # noqa: ARG002 (a stepper's signature)
        """Return the label of a parameter."""
        return "no_decay" if _matches(self.patterns, name) else "decay"


def _matches(patterns: Sequence[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _policy(policy: AnyPolicyConfig) -> eb.Policy | eb.ByLabel | None:
    if isinstance(policy, PolicyByName):
        return policy.build()
    found: eb.Policy | None = with_name_resolved(policy)
    return found


def _require_patterns(policy: AnyPolicyConfig, no_decay: Sequence[str], model: nn.Module) -> None:
    patterns = {f"no_decay[{number}]": pattern for number, pattern in enumerate(no_decay)}
    if isinstance(policy, PolicyByName):
        patterns |= {f"policy.rules[{number}].pattern": rule.pattern for number, rule in enumerate(policy.rules)}
    require_matches(patterns, [name for name, _ in model.named_parameters()])


def _units(names: Sequence[str], model: nn.Module) -> list[type[nn.Module] | nn.Module]:
    classes: Mapping[str, type[nn.Module]] = {type(module).__name__: type(module) for module in model.modules()}
    modules = dict(model.named_modules())
    found: list[type[nn.Module] | nn.Module] = []
    for number, name in enumerate(names):
        one = classes.get(name) or modules.get(name)
        if one is None:
            close = difflib.get_close_matches(name, [*classes, *modules], n=1)
            meant = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(
                f"units[{number}]: got {name!r}{meant}; accepted are names of the model's modules and of their classes:"
                f" {', '.join(classes)}."
            )
        found.append(one)
    return found


KINDS: Kinds = {**POLICY_KINDS, Algorithm: ALGORITHM}
READER = Reader(KINDS)
