"""Describes a model for its layout: its parameters, their units and their labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

import everybit as eb
from everybit.base import dtype_name
from everybit.combinators import atoms, matrices_of, needs_whole_tensors, of_atoms, of_row_blocks, row_blocks, step_cost
from everybit.policies import LOW, ByLabel, Policy, PolicyOrName, for_dtype, native, resolve, with_name_resolved
from everybit.protocol import any_per_tensor, require_transform
from everybit_torch.choosing import choices, chosen, require_labels_used
from everybit_torch.dtensors import local, mesh_of
from everybit_torch.embeddings import embeddings_of, policy_with_embeddings, with_embeddings
from everybit_torch.sharded.ignored_parameters import Ignored, ignored_ids
from everybit_torch.sharded.layout import ParameterSpec
from everybit_torch.sharded.mixed_precision import MixedPrecision
from everybit_torch.sharded.row_blocks import RowBlocks
from everybit_torch.sharded.shard_optimizer import LabelledTransform
from everybit_torch.sharded.tensor_parallel import (
    first_element_of_part,
    part_beside,
    replicated,
    require_as_cut,
    require_in_parts,
)

Transforms = eb.Transform[Any] | Mapping[str, eb.Transform[Any]]
Units = Sequence[type[nn.Module] | nn.Module]
Labels = Callable[[str, nn.Parameter], str]


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


AnyPrecision = PolicyOrName | MixedPrecision | None


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
    ranks: Collection[int] = (),
    copies: Collection[str] = (),
    *,
    is_part: bool = False,
) -> ModelLayout:
    """Look at a model, which may be on the meta device.

    Args:
        model: The model.
        transform: As the stepper's.
        policy: As the stepper's.
        units: As the stepper's.
        labels: As the stepper's.
        ignored: As the stepper's.
        ranks: Those that the stepper shards over, numbered as in the world, if they are known.
        copies: As the stepper's.
        is_part: Whether other ranks have other parts of the model, such as stages: there may be the parameters of a label that none has
            here.

    Raises:
        TypeError: A unit that is no module, a parameter that is not floating-point, or a transform that is none.
        ValueError: A unit that the model does not have, a transform that must see whole tensors for a parameter that tensor parallelism
            cuts, a label without transform or without parameters, a parameter that cannot be seen as the matrices that are asked for, or
            a policy that does not fit a parameter. Messages name what it is about.
    """
    require_model(model)
    found, left_alone = _find_units(model, units), ignored_ids(model, ignored)
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in left_alone:
            continue
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    if not parameters:
        raise ValueError("model: has no parameters (that are not ignored); accepted is a module with at least one.")
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ValueError(
            "model: all of its parameters are frozen; accepted is a module with at least one that requires a gradient."
        )
    homes = _homes(found)
    by_name = {names[key][0]: parameter for key, parameter in parameters.items()}
    require_in_parts(by_name, ranks)
    transform, policy = _for_model(model, transform, policy)
    label_of, labelled = _label(by_name, transform, policy, labels, _require_names(copies, by_name), is_part=is_part)
    if copies and any_per_tensor(one.transform for one in labelled.values()):
        raise ValueError(
            f"copies: got {', '.join(map(repr, copies))} with a transform that reduces over each parameter, and nothing says of which"
            " parameter of another rank each of them is a copy; accepted with it is none. (Norms count copies twice then.)"
        )
    for name in copies if not isinstance(copies, Mapping) else ():
        if by_name[name].requires_grad and labelled[label_of[name]].draws_bits:
            raise ValueError(
                f"copies: got {name!r}, of which a step draws random bits under its policy, and nothing says which parameter's they have to"
                f" be; accepted with it is a dict with the name in the other part of the model: {{{name!r}: 'embed.weight'}}."
            )
    parts_of, labelled = _cut_into_atoms(
        {name: p for name, p in by_name.items() if name in label_of}, label_of, labelled
    )
    mesh = mesh_of(list(parameters.values()))
    specs, counted = [], dict.fromkeys((p.dtype for p in parameters.values()), 0)
    for key, parameter in parameters.items():
        name = names[key][0]
        one = labelled[label_of[name]] if parameter.requires_grad else None
        block = 1 if one is None else one.policy.block
        require_as_cut(name, parameter)
        part = part_beside(parameter, mesh)
        first = first_element_of_part(name, parameter, block, draws_bits=one is not None and one.draws_bits)
        whole = one is not None and needs_whole_tensors(one.transform)
        shape = tuple(local(parameter).shape)
        if whole and part is not None and part.sizes != part.whole:
            raise ValueError(
                f"transform: got one that must see whole tensors (its cut is 'tensor') for {name}, of which tensor parallelism gives this"
                f" rank {part.sizes} of {part.whole}; accepted for it is a transform whose parts all have the cut 'element'."
            )
        specs.append(
            ParameterSpec(
                tuple(names[key]),
                shape,
                parameter.dtype,
                parameter.requires_grad,
                homes[key],
                "" if one is None else label_of[name],
                counted[parameter.dtype] + first,
                block,
                part,
                name not in copies and (part is None or part.counted),
                whole,
                *parts_of.get(name, _Parts()),
            )
        )
        if name not in copies:  # whose places are those of another part's parameter
            counted[parameter.dtype] += parameter.numel()
    return ModelLayout(tuple(specs), tuple(parameters.values()), tuple(found.items()), labelled)


def _for_model(model: nn.Module, transform: Transforms, policy: AnyPrecision) -> tuple[Transforms, AnyPrecision]:
    """Transforms and policy whose labels know the embeddings of a model."""
    names = embeddings_of(model)
    if isinstance(transform, Mapping):
        return {label: with_embeddings(one, names) for label, one in transform.items()}, policy_with_embeddings(
            policy, names
        )
    return with_embeddings(transform, names), policy_with_embeddings(policy, names)


def _find_units(model: nn.Module, units: Units | None) -> dict[str, nn.Module]:
    if isinstance(units, (type, nn.Module, str)):
        raise TypeError(
            f"units: got {units!r}; accepted is a list of modules of the model, and classes of modules: units=[Block]."
        )
    wanted = list(units or ())
    for one in wanted:
        if not (isinstance(one, nn.Module) or (isinstance(one, type) and issubclass(one, nn.Module))):
            raise TypeError(f"units: got {one!r}; accepted are modules of the model, and classes of modules.")
    classes = tuple(one for one in wanted if isinstance(one, type))
    single = {id(one) for one in wanted if not isinstance(one, type)}
    found = {"": model} | {
        name: module
        for name, module in model.named_modules()
        if name and (isinstance(module, classes) or id(module) in single)
    }
    for one in wanted:
        if not any(module is one or (isinstance(one, type) and isinstance(module, one)) for module in model.modules()):
            what = one.__name__ if isinstance(one, type) else type(one).__name__
            there = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
            raise ValueError(f"units: the model has no {what}; its modules are {there}.")
    return found


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


def _require_names(copies: Collection[str], by_name: Mapping[str, nn.Parameter]) -> Collection[str]:
    unknown = [copies] if isinstance(copies, str) else [name for name in copies if name not in by_name]
    if unknown:
        got = unknown[0]
        raise ValueError(f"copies: got {got!r}; accepted is a list of names of the model's parameters.")
    return copies


def _label(
    by_name: Mapping[str, nn.Parameter],
    transform: Transforms,
    policy: AnyPrecision,
    labels: Labels | None,
    copies: Collection[str],
    *,
    is_part: bool,
) -> tuple[dict[str, str], dict[str, LabelledTransform]]:
    """The label of each trained parameter, by name, and what each label means."""
    trained = {name: p for name, p in by_name.items() if p.requires_grad}
    for name, parameter in trained.items():
        if not parameter.is_floating_point():
            raise TypeError(f"{name}: got a {parameter.dtype} parameter; accepted are real floating-point parameters.")
    transforms = transform if isinstance(transform, Mapping) else {"": transform}
    if isinstance(transform, Mapping) and labels is None:
        raise ValueError(
            "labels: got None with several transforms; accepted is a function of (name, parameter) that names one of them."
        )
    if not isinstance(transform, Mapping) and labels is not None:
        raise ValueError(
            "labels: got a function with a single transform; give a transform for each label: {'decay': ..., 'plain': ...}."
        )
    for name, one in transforms.items():
        who = "transform" + (f"[{name!r}]" if name else "")
        require_transform(one, who=who)
    source = {name: labels(name, p) if labels else "" for name, p in trained.items()}
    for name, label in source.items():
        if label not in transforms:
            raise ValueError(
                f"labels: {name} is labelled {label!r}; there are transforms for {', '.join(map(repr, transforms))}."
            )
    unused = [label for label in transforms if label not in source.values()]
    if labels and unused and not is_part:
        of_frozen = {labels(n, p) for n, p in by_name.items() if n not in trained}
        if absent := [label for label in unused if label not in of_frozen]:
            raise ValueError(
                f"labels: no parameter is labelled {', '.join(map(repr, absent))}; the labels given are"
                f" {', '.join(map(repr, dict.fromkeys(source.values())))}. Drop the transform, or mend the labels."
            )
    decisions: dict[str, tuple[Any, ...]] = {}
    for label, one in transforms.items():
        members = {name: p for name, p in trained.items() if source[name] == label}
        columns = [eb.tree.label(choice, members, name=f"a mask of transform {label!r}") for choice in choices(one)]
        for number, name in enumerate(members):
            decisions[name] = tuple(column[number] for column in columns)
        if not is_part:
            frozen = {
                n: p for n, p in by_name.items() if n not in trained and (labels is None or labels(n, p) == label)
            }
            require_labels_used(one, [decisions[name] for name in members], members | frozen)
    policy_labels = _policy_labels(trained, policy)
    mixed = any(parameter.dtype in LOW for parameter in by_name.values())
    beside_others = mesh_of(list(by_name.values())) is not None
    label_of: dict[str, str] = {}
    labelled: dict[str, LabelledTransform] = {}
    for name, parameter in trained.items():
        policy_label, chosen_policy = policy_labels[name]
        dtype = dtype_name(parameter.dtype, field=name)
        own_policy = for_dtype(chosen_policy, dtype, mixed=mixed)
        assert isinstance(own_policy, Policy)  # as labels are known
        kept = "" if own_policy == chosen_policy else dtype
        # What is counted by other ranks lies apart, so that a buffer is counted whole, or not at all.
        alike = [replicated(parameter, beside_others=beside_others), "copy" if name in copies else ""]
        parts = [source[name], *(str(decision) for decision in decisions[name]), policy_label, kept, *alike]
        label = label_of[name] = ", ".join(part for part in parts if part)
        try:
            resolve(own_policy, dtype)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None
        if label not in labelled:
            labelled[label] = LabelledTransform(
                source[name], chosen(transforms[source[name]], decisions[name]), own_policy
            )
        if parameter.numel():
            matrices_of(labelled[label].transform, name, parameter.shape)  # which refuses shapes that do not fit
    return label_of, labelled


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
        if local(parameter).numel() and needs_whole_tensors(one.transform):
            try:
                parts = _parts(one.transform, tuple(local(parameter).shape))
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


def _policy_labels(trained: Mapping[str, nn.Parameter], policy: AnyPrecision) -> dict[str, tuple[str, Policy]]:
    policy = with_name_resolved(policy)
    if policy is None or isinstance(policy, MixedPrecision):
        by_dtype: dict[str, tuple[str, Policy]] = {}
        for name, parameter in trained.items():
            dtype = dtype_name(parameter.dtype, field=name)
            by_dtype[name] = (dtype, native(dtype) if policy is None else policy.policy(dtype))
        return by_dtype
    if isinstance(policy, Policy):
        return dict.fromkeys(trained, ("", policy))
    if not isinstance(policy, ByLabel):
        raise TypeError(
            f"policy: got {policy!r}; accepted are a Policy, such as everybit.policies.LEAN_BF16, its name,"
            " by_label(...), MixedPrecision(...), or None."
        )
    labelled: dict[str, tuple[str, Policy]] = {}
    for name, label in zip(trained, eb.tree.label(policy.labels, dict(trained)), strict=True):
        try:
            labelled[name] = label, policy.policy_for(label)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return labelled
