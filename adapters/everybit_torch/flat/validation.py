"""The options of a stepper on flat buffers, which are judged on all ranks before anything is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from everybit.base import dtype_name
from everybit.combinators import needs_whole_tensors, step_cost
from everybit.policies import LOW, resolve
from everybit_torch.collectives import Communicator, GradientWires, communicators
from everybit_torch.flat.places import Buffer, Spec, lay_out
from everybit_torch.sharded.fingerprint import Facts, facts_of, looked_at
from everybit_torch.sharded.labelling import Labelled, LabelledTransform, Transforms, label_parameters
from everybit_torch.sharded.models import find_units, ignored_ids, require_model, require_some
from everybit_torch.sharded.options import StepperOptions
from everybit_torch.sharded.strategies import Sharding
from everybit_torch.torch_internals.dtensors import is_dtensor


@dataclass(frozen=True, slots=True)
class JudgedBuffers:
    """Options that can work.

    Attributes:
        options: The stepper's.
        ranks: The inner and the outer ranks.
        device: The device of the parameters.
        parameters: Those that are managed, by name, in the model's order.
        labelled: The labels of those that are trained.
        buffers: Their places.
        divisor: The number by which sums of gradients are divided.
    """

    options: StepperOptions
    ranks: tuple[Communicator, Communicator]
    device: torch.device
    parameters: Mapping[str, nn.Parameter]
    labelled: Labelled
    buffers: tuple[Buffer, ...]
    divisor: float

    @property
    def mixed(self) -> bool:
        """Whether some parameters are of 16 bits."""
        return any(parameter.dtype in LOW for parameter in self.parameters.values())

    def grads_under(self, meaning: Mapping[str, LabelledTransform]) -> list[GradientWires]:
        """How gradients of each buffer are kept and sent, under these policies."""
        sizes = self.ranks[0].size, self.ranks[1].size
        firsts = [buffer.places[0].spec for buffer in self.buffers]
        return [
            GradientWires.of(resolve(meaning[one.label].policy, dtype_name(one.dtype, field=one.name)), *sizes)
            for one in firsts
        ]


def judge(model: nn.Module, transform: Transforms, options: StepperOptions) -> JudgedBuffers:
    """Check all options, on all ranks. The model is unchanged.

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
    ranks = communicators(options.mesh, next((p.device for p in model.parameters()), None))

    def look() -> JudgedBuffers:
        return _look_at(model, transform, options, ranks)

    def facts(judged: JudgedBuffers) -> Facts:
        homes = {place.spec.name: place.spec.unit for buffer in judged.buffers for place in buffer.places}
        return facts_of(model, options, judged.parameters, homes, judged.labelled, ranks)

    return looked_at(look, facts, ranks)


def _look_at(
    model: nn.Module, transform: Transforms, options: StepperOptions, ranks: tuple[Communicator, Communicator]
) -> JudgedBuffers:
    left_alone, units = ignored_ids(model, options.ignored), find_units(model, options.units)
    parameters = {name: p for name, p in model.named_parameters() if id(p) not in left_alone}
    require_some(parameters.values())
    for name, parameter in parameters.items():
        if is_dtensor(parameter):
            raise ValueError(
                f"{name}: is a DTensor, of which this rank has a part; accepted under this strategy are whole parameters, or"
                " strategy='optim_grads_params' for a model to which fully_shard was applied."
            )
    device = _device_of(parameters)
    options.require_usable(model, parameters)
    labelled = label_parameters(model, parameters, transform, options.policy, options.labels)
    options.require_safe(labelled, parameters)
    sizes = ranks[0].size, ranks[1].size
    buffers = laid_out(model, parameters, labelled, units, left_alone, options.sharding, sizes)
    return JudgedBuffers(options, ranks, device, parameters, labelled, buffers, options.divisor_of(sizes[0] * sizes[1]))


def laid_out(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    labelled: Labelled,
    units: Mapping[str, nn.Module],
    left_alone: Collection[int],
    kind: Sharding,
    sizes: tuple[int, int],
) -> tuple[Buffer, ...]:
    """Lay the parameters of a model out, which may be on the meta device.

    Args:
        model: The model.
        parameters: Those that are managed, by name, in the model's order.
        labelled: The labels of those that are trained.
        units: Modules by name. The parameters of each are reduced together.
        left_alone: The others, by id.
        kind: The tensors that are sharded.
        sizes: The numbers of inner and outer ranks.
    """
    shares = kind.shares(sizes[0])
    specs = _specs(parameters, _homes(model, units, left_alone), labelled)
    return lay_out(specs, shares, sizes[0] * sizes[1] // shares)


def _device_of(parameters: Mapping[str, nn.Parameter]) -> torch.device:
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        raise ValueError(f"model: has parameters on {', '.join(sorted(map(str, devices)))}; accepted is one device.")
    (device,) = devices
    if device.type == "meta":
        raise ValueError(
            "model: is on the meta device, without values; accepted is a model with values. (everybit_torch.plan and `everybit plan` take"
            " one on the meta device.)"
        )
    return device


def _homes(model: nn.Module, units: Mapping[str, nn.Module], left_alone: Collection[int]) -> dict[int, str]:
    """The innermost unit of each parameter, by id; the model's own unit for a parameter of several units."""
    homes: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in left_alone:
            inside = [unit for unit in units if not unit or name.startswith(f"{unit}.")]
            homes.setdefault(id(parameter), set()).add(max(inside, key=len))
    return {key: next(iter(found)) if len(found) == 1 else "" for key, found in homes.items()}


def _specs(parameters: Mapping[str, nn.Parameter], homes: Mapping[int, str], labelled: Labelled) -> Sequence[Spec]:
    specs, counted = [], Counter[torch.dtype]()
    for name, parameter in parameters.items():
        if name in labelled.of:
            one, shape = labelled.meaning[labelled.of[name]], tuple(parameter.shape)
            whole = needs_whole_tensors(one.transform)
            cost = step_cost(one.transform, shape) if whole and parameter.numel() else 0.0
            unit, first = homes[id(parameter)], counted[parameter.dtype]
            specs.append(
                Spec(name, shape, parameter.dtype, unit, labelled.of[name], first, one.policy.block, whole, cost)
            )
        counted[parameter.dtype] += parameter.numel()
    return specs
