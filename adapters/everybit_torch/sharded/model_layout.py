"""Describes a model for its layout: its parameters, their units and their labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from everybit.combinators import atoms, needs_whole_tensors, of_atoms, of_row_blocks, row_blocks, step_cost
from everybit_torch.dtensors import is_dtensor
from everybit_torch.sharded.ignored_parameters import Ignored, ignored_ids
from everybit_torch.sharded.labelling import AnyPrecision, LabelledTransform, Labels, Transforms, label_parameters
from everybit_torch.sharded.layout import ParameterSpec
from everybit_torch.sharded.model_units import Units, find_units
from everybit_torch.sharded.row_blocks import RowBlocks


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The parameters of a model and their units, before the number of ranks is known.

    Attributes:
        specs: Each parameter once, in the model's order.
        parameters: The same, as the model's.
        units: Name and module of each unit, the model first.
        labelled: The transform and policy of each label.
    """

    specs: tuple[ParameterSpec, ...]
    parameters: tuple[nn.Parameter, ...]
    units: tuple[tuple[str, nn.Module], ...]
    labelled: Mapping[str, LabelledTransform]


def require_model(model: object) -> None:
    """Refuse what is no module, and a module whose parameters have no shapes yet.

    Raises:
        TypeError: No module.
        ValueError: A parameter or buffer of a lazy module that was never called.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got a {type(model).__name__}; accepted is a module, before the transform.")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"model: call it once with a batch, model(batch), and then make the stepper. {name} belongs to a lazy module, and"
                " has no shape before that."
            )


def describe(
    model: nn.Module,
    transform: Transforms,
    policy: AnyPrecision,
    units: Units | None = None,
    labels: Labels | None = None,
    ignored: Ignored | None = None,
) -> ModelLayout:
    """Look at a model, which may be on the meta device.

    Args:
        model: The model.
        transform: As the stepper's.
        policy: As the stepper's.
        units: As the stepper's.
        labels: As the stepper's.
        ignored: As the stepper's.

    Raises:
        TypeError: A unit that is no module, a parameter that is not floating-point, or a transform that is none.
        ValueError: A unit that the model does not have, a DTensor, a label without transform or without parameters, a parameter that
            cannot be seen as the matrices that are asked for, or a policy that does not fit a parameter. Messages name what it is about.
    """
    require_model(model)
    found, left_alone = find_units(model, units), ignored_ids(model, ignored)
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in left_alone:
            continue
        if is_dtensor(parameter):
            raise ValueError(
                f"{name}: is a DTensor, of which this rank has a part; accepted under this strategy are whole parameters, or"
                " strategy='optim_grads_params' for a model to which fully_shard was applied."
            )
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    require_some(parameters.values())
    homes = _homes(found)
    by_name = {names[key][0]: parameter for key, parameter in parameters.items()}
    labelled = label_parameters(model, by_name, transform, policy, labels)
    trained = {name: p for name, p in by_name.items() if name in labelled.of}
    parts_of, meaning = _cut_into_atoms(trained, labelled.of, labelled.meaning)
    specs, counted = [], dict.fromkeys((p.dtype for p in parameters.values()), 0)
    for key, parameter in parameters.items():
        name = names[key][0]
        one = meaning[labelled.of[name]] if parameter.requires_grad else None
        specs.append(
            ParameterSpec(
                tuple(names[key]),
                tuple(parameter.shape),
                parameter.dtype,
                parameter.requires_grad,
                homes[key],
                labelled.of.get(name, ""),
                counted[parameter.dtype],
                1 if one is None else one.policy.block,
                one is not None and needs_whole_tensors(one.transform),
                *parts_of.get(name, _Parts()),
            )
        )
        counted[parameter.dtype] += parameter.numel()
    return ModelLayout(tuple(specs), tuple(parameters.values()), tuple(found.items()), meaning)


def require_some(parameters: Iterable[nn.Parameter]) -> None:
    """Refuse a model of which nothing is trained.

    Raises:
        ValueError: It has no parameters, or all of them are frozen.
    """
    given = list(parameters)
    if not given:
        raise ValueError("model: has no parameters (that are not ignored); accepted is a module with at least one.")
    if not any(parameter.requires_grad for parameter in given):
        raise ValueError(
            "model: all of its parameters are frozen; accepted is a module with at least one that requires a gradient."
        )


def _homes(units: Mapping[str, nn.Module]) -> dict[int, int]:
    """The innermost unit of each parameter, by id; the model's own for one that several units share."""
    numbers = {id(module): number for number, module in enumerate(units.values())}
    homes: dict[int, int] = {}

    def walk(module: nn.Module, unit: int, seen: set[int]) -> None:
        unit = numbers.get(id(module), unit)
        for parameter in module.parameters(recurse=False):
            homes[id(parameter)] = 0 if homes.get(id(parameter), unit) != unit else unit
        for child in module.children():
            if id(child) not in seen:
                walk(child, unit, seen | {id(child)})

    walk(units[""], 0, set())
    return homes


class _Parts(NamedTuple):
    """Into what a whole parameter may be cut, and what a step on it costs."""

    atoms: int = 1
    cost: float = 0.0
    row_blocks: RowBlocks | None = None


def _cut_into_atoms(
    trained: Mapping[str, nn.Parameter], label_of: Mapping[str, str], labelled: Mapping[str, LabelledTransform]
) -> tuple[dict[str, _Parts], dict[str, LabelledTransform]]:
    """Into what each whole parameter may be cut, by name; and the labels' transforms, some of which then step such parts."""
    found: dict[str, dict[str, _Parts]] = {}
    for name, parameter in trained.items():
        one = labelled[label_of[name]]
        if parameter.numel() and needs_whole_tensors(one.transform):
            try:
                parts = _parts(one.transform, tuple(parameter.shape))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            found.setdefault(label_of[name], {})[name] = parts
    parts_of: dict[str, _Parts] = {}
    changed = dict(labelled)
    for label, members in found.items():
        # All of a label are stepped as batches of parts, or all as blocks of rows, or none is.
        in_atoms = all(one.atoms > 1 for one in members.values())
        in_blocks = not in_atoms and all(one.row_blocks is not None for one in members.values())
        for name, own in members.items():
            parts_of[name] = _Parts(own.atoms if in_atoms else 1, own.cost, own.row_blocks if in_blocks else None)
        transform = labelled[label].transform
        if in_atoms or in_blocks:
            changed[label] = replace(
                labelled[label], transform=of_atoms(transform) if in_atoms else of_row_blocks(transform)
            )
    return parts_of, changed


def _parts(transform: Any, shape: tuple[int, ...]) -> _Parts:
    count, rows = atoms(transform, shape), row_blocks(transform, shape)
    blocks = None
    if count == 1 and len(rows) > 1:
        of_blocks = of_row_blocks(transform)
        shapes = [(*(1,) * number, size, *shape[1:]) for number, size in enumerate(rows)]
        sizes = tuple(math.prod(one) for one in shapes)
        blocks = RowBlocks(sizes, tuple(step_cost(of_blocks, one) for one in shapes))
    return _Parts(count, step_cost(transform, shape), blocks)
