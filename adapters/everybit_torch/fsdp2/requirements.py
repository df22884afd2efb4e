"""The options of a stepper over FSDP2, which are judged on all ranks before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from everybit.base import dtype_name
from everybit.combinators import needs_whole_tensors
from everybit.policies import LOW, resolve
from everybit_torch.collectives import Communicator, GradientWires, Mesh, communicators
from everybit_torch.fsdp2.units import Unit, homes_of, is_sharded, require_shardable, shard, sharded_modules, units_of
from everybit_torch.sharded.fingerprint import Facts, facts_of, looked_at
from everybit_torch.sharded.labelling import Labelled, LabelledTransform, Transforms, label_parameters
from everybit_torch.sharded.models import find_units, ignored_ids, require_model, require_some
from everybit_torch.sharded.options import StepperOptions
from everybit_torch.torch_internals.dtensors import is_dtensor, local


@dataclass(frozen=True, slots=True)
class JudgedUnits:
    """Options that can work, and a model that is sharded.

    Attributes:
        mesh: The ranks, (outer, inner) if there are two dimensions.
        ranks: The inner and the outer ranks.
        device: On which they send; rows may lie on the host.
        homes: The unit of each parameter that is managed, by name, in the model's order.
        units: FSDP2's.
        labelled: The labels of the parameters that are trained.
        grads: How gradients are kept and sent, by unit.
        divisor: The number by which sums of gradients are divided.
        options: The stepper's.
        mixed: Whether some parameters are of 16 bits.
    """

    mesh: DeviceMesh
    ranks: tuple[Communicator, Communicator]
    device: torch.device
    homes: Mapping[str, str]
    units: Sequence[Unit]
    labelled: Labelled
    grads: Mapping[str, GradientWires]
    divisor: float
    options: StepperOptions
    mixed: bool

    def grads_under(self, meaning: Mapping[str, LabelledTransform]) -> dict[str, GradientWires]:
        """How gradients are kept and sent, by unit, under other policies."""
        dtypes = {name: p.dtype for unit in self.units for name, p in unit.trained.items()}
        return _grads(dtypes, self.homes, self.labelled.of, meaning, (self.ranks[0].size, self.ranks[1].size))


def judge(model: nn.Module, transform: Transforms, options: StepperOptions) -> JudgedUnits:
    """Look at all options, on all ranks; then shard the model, unless the user has.

    Args:
        model: The model.
        transform: The transform, or one for each label.
        options: The stepper's.

    Raises:
        TypeError: See the stepper.
        ValueError: See the stepper.
        RuntimeError: Another rank cannot make its stepper.
    """
    require_model(model)
    if options.sharding.outer == "optim" and not (isinstance(options.mesh, DeviceMesh) and options.mesh.ndim == 2):
        raise ValueError(
            "outer: got 'optim' without an outer dimension; accepted with it is a DeviceMesh of two dimensions."
        )
    mesh = _mesh_of(model, options.mesh, next((p.device for p in model.parameters()), torch.device("cpu")))
    device = torch.device(mesh.device_type)
    ranks = communicators(mesh, device)

    def look() -> _Model:
        return _look_at(model, transform, options, ranks)

    def facts(found: _Model) -> Facts:
        return facts_of(model, options, found.by_name, found.homes, found.labelled, ranks)

    plan = looked_at(look, facts, ranks)
    _send_first(model, plan.left_alone, (ranks[1], ranks[0]), device)
    if not is_sharded(model):
        shard(model, plan.modules, _inner_mesh(mesh), plan.left_alone)
    return JudgedUnits(
        mesh,
        ranks,
        device,
        plan.homes,
        units_of(model, plan.left_alone),
        plan.labelled,
        plan.grads,
        plan.divisor,
        options,
        plan.mixed,
    )


@dataclass(frozen=True, slots=True)
class _Model:
    """A model before it is sharded.

    Attributes:
        left_alone: Ids of the parameters that are ignored.
        modules: Each unit's module, by name.
        homes: The unit of each parameter.
        by_name: The parameters.
        labelled: Their labels.
        grads: The gradients' dtypes and wires, by unit.
        divisor: The number by which sums of gradients are divided.
        mixed: Whether some parameters are of 16 bits.
    """

    left_alone: set[int]
    modules: Mapping[str, nn.Module]
    homes: Mapping[str, str]
    by_name: Mapping[str, nn.Parameter]
    labelled: Labelled
    grads: Mapping[str, GradientWires]
    divisor: float
    mixed: bool


def _look_at(
    model: nn.Module, transform: Transforms, options: StepperOptions, ranks: tuple[Communicator, Communicator]
) -> _Model:
    inner, outer = ranks
    left_alone, found = ignored_ids(model, options.ignored), is_sharded(model)
    if found and options.units is not None:
        raise ValueError(
            "units: got some for a model to which fully_shard was applied; accepted is None: its units are FSDP2's."
        )
    modules: Mapping[str, nn.Module] = sharded_modules(model) if found else find_units(model, options.units)
    homes = homes_of(model, modules, left_alone)
    if not found:
        require_shardable(model, homes)
    by_name = {name: p for name, p in model.named_parameters() if name in homes}
    require_some(by_name.values())
    for name, parameter in by_name.items() if found else ():
        _require_rows(name, parameter, inner)
    options.require_usable(model, by_name)
    labelled = label_parameters(model, by_name, transform, options.policy, options.labels)
    options.require_safe(labelled, by_name)
    _require_uncut_blocks(labelled, options)
    dtypes = {name: p.dtype for name, p in by_name.items() if p.requires_grad}
    grads = _grads(dtypes, homes, labelled.of, labelled.meaning, (inner.size, outer.size))
    mixed = any(p.dtype in LOW for p in by_name.values())
    divisor = options.divisor_of(inner.size * outer.size)
    return _Model(left_alone, modules, homes, by_name, labelled, grads, divisor, mixed)


def _require_uncut_blocks(labelled: Labelled, options: StepperOptions) -> None:
    """Refuse formats with blocks where outer ranks cut each rank's rows once more: blocks are brought together along one dimension.

    Raises:
        ValueError: The message names a parameter and its policy.
    """
    if options.sharding.outer != "optim":
        return
    for name, label in labelled.of.items():
        one = labelled.meaning[label]
        if one.policy.block > 1 and not needs_whole_tensors(one.transform):
            raise ValueError(
                f"outer: got 'optim', and {name} is stored with a number for each block of {one.policy.block} elements, which both"
                " dimensions of the mesh would cut. Accepted are outer='no_shard', or a policy without blocks, such as LEAN_BF16."
            )


def _mesh_of(model: nn.Module, mesh: Mesh, device: torch.device) -> DeviceMesh:
    """Return the mesh as a ``DeviceMesh``; by default that of parameters which the user has sharded.

    Raises:
        ValueError: There is no process group.
    """
    communicators(mesh)  # which refuses what is no mesh
    if isinstance(mesh, DeviceMesh):
        return mesh
    sharded = [p for p in model.parameters() if is_dtensor(p)]
    if mesh is None and sharded:
        return sharded[0].device_mesh
    if not dist.is_initialized():
        raise ValueError(
            "strategy: got 'optim_grads_params' without a process group, which FSDP2 needs; accepted is after"
            " torch.distributed.init_process_group(), or strategy='no_shard'."
        )
    group = dist.group.WORLD if mesh is None else mesh
    assert group is not None
    return DeviceMesh.from_group(group, device.type)


def _inner_mesh(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.ndim == 1:
        return mesh
    names = mesh.mesh_dim_names
    return mesh[names[1]] if names else DeviceMesh.from_group(mesh.get_group(1), mesh.device_type)


def _require_rows(name: str, parameter: nn.Parameter, inner: Communicator) -> None:
    """Refuse what FSDP2 has not cut into rows, over the inner ranks alone.

    Raises:
        ValueError: It is otherwise.
    """
    if not is_dtensor(parameter):
        raise ValueError(f"{name}: is not sharded, and not ignored; accepted is what fully_shard has sharded.")
    mesh, placements = parameter.device_mesh, tuple(parameter.placements)
    alone = len(placements) == 1 and placements[0].is_shard(0)
    ranks = dist.get_process_group_ranks(inner.group) if inner.group is not None else [0]
    if not alone or mesh.mesh.flatten().tolist() != ranks:
        raise ValueError(
            f"{name}: has the placements {placements} over ranks {mesh.mesh.tolist()}; accepted is Shard(0) over the mesh's inner ranks"
            f" {ranks}, as fully_shard(module, mesh=mesh['inner']) cuts. The stepper itself sums over the outer ranks."
        )


def _grads(
    dtypes: Mapping[str, torch.dtype],
    homes: Mapping[str, str],
    labels: Mapping[str, str],
    meaning: Mapping[str, LabelledTransform],
    sizes: tuple[int, int],
) -> dict[str, GradientWires]:
    """How gradients are kept and sent, by unit.

    Raises:
        ValueError: Two parameters of one unit have policies with different ``Grads``.
    """
    found: dict[str, tuple[str, GradientWires]] = {}
    for name, dtype in dtypes.items():
        own = GradientWires.of(resolve(meaning[labels[name]].policy, dtype_name(dtype, field=name)), *sizes)
        first, grads = found.setdefault(homes[name], (name, own))
        if grads != own:
            raise ValueError(
                f"policy: {first} and {name} are in one unit, whose gradients are sent at once, and their policies have different Grads;"
                " accepted is one Grads for each unit."
            )
    return {unit: grads for unit, (_, grads) in found.items()}


def _send_first(model: nn.Module, left_alone: set[int], ranks: Sequence[Communicator], device: torch.device) -> None:
    """Make parameters and buffers those of the first rank; rows, where they are cut already, those of the first outer rank."""
    tensors: list[tuple[Any, Any]] = [
        (p, ranks[:1] if is_dtensor(p) else ranks) for p in model.parameters() if id(p) not in left_alone
    ]
    with torch.no_grad():
        for tensor, over in [*tensors, *((b, ranks) for b in model.buffers())]:
            own = local(tensor).detach()
            whole = own.to(device).contiguous()
            for communicator in over:
                communicator.broadcast(whole, "the first rank's values")
            if whole is not own:
                own.copy_(whole)
