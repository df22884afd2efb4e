"""Policies, optimizers and steppers as plain data: dicts, TOML, JSON, YAML and the flags of a command line.

A format is written as a table with its name under ``format``, every other key a field of its dataclass; a bare name stands for its
defaults::

    params   = { format = "Kahan", residual = "bfloat16", rounding = "stochastic" }
    momentum = { format = "Nearest", dtype = "bfloat16" }
    variance = "Stochastic"
    [grads]
    main = "float32"
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import everybit as eb
from everybit_torch.config.algorithms import (
    AdamConfig, AdamWConfig, Algorithm, LionConfig, RMSpropConfig, SGDConfig, algorithm, register_algorithm,
)  # fmt: skip
from everybit_torch.config.files import parsed, written
from everybit_torch.config.flags import config_from_flags
from everybit_torch.config.policies import PolicyByName, PolicyRule
from everybit_torch.config.schema import schema_of
from everybit_torch.config.trees import READER, OptimizerConfig, StepperConfig

C = TypeVar("C")

__all__ = [
    "AdamConfig", "AdamWConfig", "Algorithm", "LionConfig", "OptimizerConfig", "PolicyByName", "PolicyRule",
    "RMSpropConfig", "SGDConfig", "StepperConfig", "algorithm", "config_from_dict", "config_from_flags",
    "config_to_dict", "json_schema", "load_config", "load_policy", "policy_from_dict", "policy_to_dict",
    "register_algorithm", "save_config", "save_policy",
]  # fmt: skip


def config_from_dict(kind: type[C], data: Mapping[str, Any]) -> C:
    """A configuration from the result of :func:`config_to_dict`, or from a part of it: missing fields have their defaults.

    Args:
        kind: ``OptimizerConfig``, ``StepperConfig``, or another dataclass with fields of the kinds that these have.
        data: Nested tables.

    Raises:
        ValueError: A field that there is not, or a value that is not accepted; the message begins with its dotted path.

    Examples:
        >>> from everybit_torch.config import OptimizerConfig, config_from_dict
        >>> config = config_from_dict(OptimizerConfig, {"algorithm": {"name": "lion", "lr": 1e-4}, "policy": "LEAN_BF16"})
        >>> config.algorithm.lr
        0.0001
    """
    return READER.read(kind, data, "")


def config_to_dict(config: object) -> dict[str, Any]:
    """A configuration as nested dicts of lists, strings, numbers and bools; fields that hold None are left out.

    Raises:
        ValueError: A format or an optimizer of the user's own, which no file can name; the message begins with the dotted path.
    """
    data: dict[str, Any] = READER.write(config, "")
    return data


def load_config(kind: type[C], path: str | Path) -> C:
    """Read a configuration from a ``.toml``, ``.json``, ``.yaml`` or ``.yml`` file.

    Args:
        kind: See :func:`config_from_dict`.
        path: YAML needs PyYAML (``pip install pyyaml``).

    Raises:
        ValueError: The file is of another kind, cannot be parsed, or holds something else; the message begins with the path of the file.
        OSError: The file cannot be read.
        ModuleNotFoundError: A YAML file, without PyYAML.
    """
    found: C = parsed(path, lambda data: config_from_dict(kind, data))
    return found


def save_config(config: object, path: str | Path) -> None:
    """Write a configuration, to be read by :func:`load_config`.

    Raises:
        ValueError: Another suffix, or what no file can name, as :func:`config_to_dict` says.
        ModuleNotFoundError: A YAML file without PyYAML, or a TOML file without tomli-w.
    """
    written(path, config_to_dict(config))


def json_schema(kind: type[Any]) -> dict[str, Any]:
    """A JSON Schema (draft 2020-12) of such configurations, by which editors complete and check files.

    Examples:
        >>> import json
        >>> from everybit_torch.config import StepperConfig, json_schema
        >>> text = json.dumps(json_schema(StepperConfig), indent=2)
    """
    return schema_of(kind, READER)


def policy_to_dict(policy: eb.Policy) -> dict[str, Any]:
    """A policy as nested dicts of strings and numbers; fields that hold None are left out, as TOML has no word for it.

    Raises:
        ValueError: A field holds a format of the user's own, which no file can name.
    """
    return READER.table_of(policy, "Policy")


def policy_from_dict(data: Mapping[str, Any]) -> eb.Policy:
    """A policy from the result of :func:`policy_to_dict`, or from a part of it: missing fields have their defaults.

    Raises:
        ValueError: No table, a field that does not exist, or a value that it does not accept, of whatever type; the message begins with the
            dotted path.
    """
    return READER.read_table(eb.Policy, data, "Policy")


def load_policy(path: str | Path) -> eb.Policy:
    """Read a policy from a ``.toml``, ``.json``, ``.yaml`` or ``.yml`` file.

    Raises:
        ValueError: The file is of another kind, cannot be parsed, or holds no policy; the message begins with the path of the file.
        OSError: The file cannot be read.
        ModuleNotFoundError: A YAML file, without PyYAML.
    """
    found: eb.Policy = parsed(path, policy_from_dict)
    return found


def save_policy(policy: eb.Policy, path: str | Path) -> None:
    """Write a policy, to be read by :func:`load_policy`.

    Raises:
        ValueError: Another suffix, or a format of the user's own, which no file can name.
        ModuleNotFoundError: A YAML file without PyYAML, or a TOML file without tomli-w.
    """
    written(path, policy_to_dict(policy))


def __dir__() -> list[str]:
    """The public names; modules are imported by their own."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
