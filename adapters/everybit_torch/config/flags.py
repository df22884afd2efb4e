"""Configurations from the flags of a command line, by tyro."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, get_args

import everybit as eb
from everybit.policies import describe
from everybit_torch.config.algorithms import ALGORITHMS, Algorithm
from everybit_torch.config.files import SUFFIXES, parsed
from everybit_torch.config.policies import PolicyByName
from everybit_torch.config.trees import READER, AnyPolicyConfig

T = TypeVar("T")


def config_from_flags(
    kind: type[T], arguments: Sequence[str] | None = None, *, default: T | None = None, prog: str | None = None
) -> T:
    """A configuration from the flags of a command line; ``--help`` lists them.

    A field is a flag with its dotted path: ``--algorithm.lr 3e-4 --algorithm.betas 0.9 0.95 --metrics``. Three flags take names:
    ``--config FILE`` is where the others' defaults come from, ``--algorithm NAME`` chooses the optimizer, and ``--policy`` is a preset's
    name, a file, or None.

    Args:
        kind: ``OptimizerConfig``, ``StepperConfig``, or a dataclass with such fields and others that tyro takes.
        arguments: The command line; by default that of the process.
        default: Values of the fields that are not given; None: the defaults of ``kind``.
        prog: The program's name in its help.

    Raises:
        SystemExit: After ``--help``, or with code 2 where the command line cannot be parsed.
        ModuleNotFoundError: Without tyro.
    """
    try:
        tyro: Any = import_module("tyro")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("flags need tyro: pip install tyro.", name="tyro") from error
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, prog=prog)
    first.add_argument("--config", type=Path)
    first.add_argument("--algorithm", choices=list(ALGORITHMS))
    names, rest = first.parse_known_args(arguments)
    try:
        start: Any = default if default is not None else kind()
        if names.config is not None:
            start = parsed(names.config, lambda data: READER.read(kind, data, ""))
        if names.algorithm is not None:
            start = _with_algorithm(start, ALGORITHMS[names.algorithm])
        registry = tyro.constructors.ConstructorRegistry()
        registry.primitive_rule(_policy_rule(tyro))
        with registry:
            found: T = tyro.cli(kind, args=rest, default=start, prog=prog, config=(tyro.conf.AvoidSubcommands,))
        _require_own_fields(found)
    except (OSError, ValueError) as error:
        first.exit(2, f"{first.prog}: {error}\n")
    return found


def _with_algorithm(config: Any, kind: type[Algorithm]) -> Any:
    """The same configuration with another optimizer's defaults, in whatever field it has one."""
    changes = {one.name: kind() for one in fields(config) if isinstance(getattr(config, one.name), Algorithm)}
    return replace(config, **changes)


def _require_own_fields(config: Any) -> None:
    """Refuse hyperparameters that this optimizer does not have and all others have: tyro has flags for them."""
    for one in fields(config):
        algorithm = getattr(config, one.name)
        for field in fields(algorithm) if isinstance(algorithm, Algorithm) else ():
            if not field.init and getattr(algorithm, field.name) != field.default:
                listed = ", ".join(algorithm.hyperparameters())
                raise ValueError(f"{one.name}.{field.name}: there is no such field; fields are {listed}.")


def _policy_rule(tyro: Any) -> Any:
    """Return tyro's rule for policies, which are too large for flags: by name or by file."""

    def read(given: list[str]) -> Any:
        if given[0] == "None":
            return None
        if Path(given[0]).suffix in SUFFIXES:
            return parsed(given[0], lambda data: READER.read_as(AnyPolicyConfig, data, "policy"))
        return READER.read_as(AnyPolicyConfig, given[0], "policy")

    def rule(info: Any) -> Any:
        if eb.Policy not in (info.type, *get_args(info.type)):
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="PRESET|FILE|None",
            instance_from_str=read,
            is_instance=lambda value: value is None or isinstance(value, (eb.Policy, PolicyByName)),
            str_from_instance=lambda value: [_shown(value)],
        )

    return rule


def _shown(policy: eb.Policy | PolicyByName | None) -> str:
    """A default in a line of help."""
    if isinstance(policy, PolicyByName):
        return f"{len(policy.rules)} rules by name, otherwise {describe(policy.otherwise)}"
    return "None" if policy is None else describe(policy)
