"""The units of a model that FSDP2 shards: to which modules ``fully_shard`` is applied, and which parameters each of them has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard


@dataclass(frozen=True, slots=True)
class Unit:
    """A module to which ``fully_shard`` was applied.

    Attributes:
        name: The module's name in the model; empty for the model.
        module: It, an ``FSDPModule``.
        trained: The sharded parameters that it gathers and that require a gradient, by name.
    """

    name: str
    module: Any
    trained: Mapping[str, nn.Parameter]

    def __str__(self) -> str:
        return f"unit {self.name!r}" if self.name else "the model's own unit"


def homes_of(model: nn.Module, modules: Mapping[str, nn.Module], ignored: Collection[int]) -> dict[str, str]:
    """The unit of each parameter, by the parameter's name: the innermost one.

    Args:
        model: The model.
        modules: Each unit's module, by name.
        ignored: Ids of parameters that are left alone.

    Raises:
        ValueError: A parameter that several units share.
    """
    inside: dict[int, list[tuple[str, str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in ignored:
            home = max((unit for unit in modules if not unit or name.startswith(f"{unit}.")), key=len)
            inside.setdefault(id(parameter), []).append((name, home))
    for uses in inside.values():
        if len({home for _, home in uses}) > 1:
            first, other = uses[0], next(use for use in uses if use[1] != uses[0][1])
            both = " and ".join(repr(home) if home else "the model's own" for _, home in (first, other))
            raise ValueError(
                f"units: {first[0]} and {other[0]} are one parameter, and lie in the units {both}, which FSDP2 gathers and frees at"
                " different times. Accepted is one unit for both: leave these modules out of units, or make a module around them one."
            )
    return {uses[0][0]: uses[0][1] for uses in inside.values()}


def require_shardable(model: nn.Module, homes: Mapping[str, str]) -> None:
    """Refuse parameters that ``fully_shard`` does not take, before anything is changed.

    Args:
        model: A model with whole parameters.
        homes: The unit of each parameter.

    Raises:
        ValueError: On the meta device, of no dimension, not contiguous, or of several dtypes in a unit.
    """
    dtypes: dict[str, tuple[str, torch.dtype]] = {}
    for name, parameter in model.named_parameters():
        if name not in homes:
            continue
        if parameter.is_meta:
            raise ValueError(
                f"model: {name} is on the meta device and has no values. Accepted is to apply fully_shard first, then"
                " model.to_empty(device=...), to load or initialize the values, and to make the stepper of that."
            )
        if parameter.ndim == 0 or parameter.numel() == 0:
            what = "dimensions" if parameter.ndim == 0 else "elements"
            raise ValueError(
                f"{name}: got a parameter without {what}, of which FSDP2 cannot cut rows; accepted is one of shape (1,), or to leave it"
                " alone by ignored=."
            )
        if not parameter.is_contiguous():
            raise ValueError(
                f"{name}: got a parameter that is not contiguous; accepted is p.data = p.data.contiguous()."
            )
        if parameter.requires_grad:
            first, dtype = dtypes.setdefault(homes[name], (name, parameter.dtype))
            if dtype is not parameter.dtype:
                unit = repr(homes[name]) if homes[name] else "the model's own"
                raise ValueError(
                    f"units: {first} is {dtype} and {name} is {parameter.dtype}, both in the unit {unit}, and FSDP2 sends one dtype a unit."
                    " Accepted are modules of the other dtype as units of their own: units=[Block, nn.LayerNorm]."
                )


def shard(model: nn.Module, modules: Mapping[str, nn.Module], mesh: DeviceMesh, ignored: Collection[int]) -> None:
    """Apply ``fully_shard`` to units and model, the innermost first; see :func:`require_shardable`."""
    left_alone = {parameter for parameter in model.parameters() if id(parameter) in ignored}
    # named_modules has parents before their children.
    for module in reversed(list(modules.values())):
        fully_shard(module, mesh=mesh, ignored_params=left_alone)


def _is_fsdp(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def is_sharded(model: nn.Module) -> bool:
    """Whether the user has applied ``fully_shard``."""
    return any(map(_is_fsdp, model.modules()))


def sharded_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules to which ``fully_shard`` was applied, by name; the model first.

    Raises:
        ValueError: ``fully_shard`` was not applied to the model itself.
    """
    if not _is_fsdp(model):
        raise ValueError(
            "model: fully_shard was applied to modules in it, and not to the model; accepted is fully_shard(model) too, or a model to"
            " which it was not applied."
        )
    return {name: module for name, module in model.named_modules() if _is_fsdp(module)}


def units_of(model: nn.Module, ignored: Collection[int]) -> list[Unit]:
    """The units of a model that is sharded, the model's own first.

    Raises:
        ValueError: A parameter is neither sharded nor ignored.
    """
    modules = sharded_modules(model)
    homes = homes_of(model, modules, ignored)
    trained: dict[str, dict[str, nn.Parameter]] = {name: {} for name in modules}
    for name, parameter in model.named_parameters():
        if name in homes and parameter.requires_grad:
            trained[homes[name]][name] = parameter
    return [Unit(name, module, trained[name]) for name, module in modules.items()]
