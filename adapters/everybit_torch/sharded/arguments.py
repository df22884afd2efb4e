"""The arguments of a stepper, which are judged before anything is changed."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import everybit as eb
from everybit.stepping import Unsafe
from everybit_torch.collectives.communicator import Communicator
from everybit_torch.collectives.meshes import Mesh, communicators, ranks_of
from everybit_torch.dtensors import is_dtensor
from everybit_torch.param_groups import require_float64
from everybit_torch.sharded.casting import Casts, CastsOfUnits, casts_of
from everybit_torch.sharded.construction.making import Construction
from everybit_torch.sharded.construction.sources import Values
from everybit_torch.sharded.element_places import number_elements
from everybit_torch.sharded.fingerprint import Facts, facts_of, require_alike
from everybit_torch.sharded.fingerprint import describe as text_of
from everybit_torch.sharded.ignored_parameters import Ignored, ignored_ids
from everybit_torch.sharded.layout import Layout, build
from everybit_torch.sharded.model_layout import (
    AnyPrecision,
    Labels,
    ModelLayout,
    Transforms,
    Units,
    describe,
    require_model,
)
from everybit_torch.sharded.model_parallel import ModelParallel
from everybit_torch.sharded.offload import Offload, is_host
from everybit_torch.sharded.offload_rules import require_offload
from everybit_torch.sharded.reports import NanCheck
from everybit_torch.sharded.strategies import OuterStrategy, Sharding, Strategy, sharding
from everybit_torch.sharded.tensor_parallel import require_in_parts


class Owner(Protocol):
    """The object in whose buffers a model's parameters are."""

    @property
    def closed(self) -> bool:
        """Whether it gave the parameters back."""
        ...


_OWNERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Owner]] = weakref.WeakKeyDictionary()


def claim(model: nn.Module, owner: Owner) -> None:
    """A model belongs to a stepper from now on, until that is closed."""
    _OWNERS[model] = weakref.ref(owner)


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a :class:`~everybit_torch.FlatStepper` beside the model; see there."""

    transform: Transforms
    policy: AnyPrecision
    mesh: Mesh
    strategy: Strategy | int
    outer: OuterStrategy
    units: Units | None
    labels: Labels | None
    divisor: float | None
    nan: NanCheck
    reshard_after_forward: bool
    compile: bool
    metrics: bool
    seed: int
    unsafe: Unsafe
    synchronize: bool
    offload: bool | Offload
    keep_gradients: bool
    defer_reduction: bool
    model_parallel: Mesh
    copies: Collection[str]
    values: Values | None
    device: torch.device | str | None
    ignored: Ignored | None
    casts: CastsOfUnits | None
    overlap_param_gather: bool
    most_elements: float

    def to_keep(self) -> Arguments:
        """Without what may hold a model's values."""
        return replace(self, values=None)


@dataclass(frozen=True, slots=True)
class Judged:
    """Arguments that can work.

    Attributes:
        described: The model, with what its parameters are stepped with.
        layout: Of its parameters.
        construction: How it is given to the stepper.
        ranks: The inner and the outer ranks.
        beside: The ranks that hold other parts of the model.
        device: Where it is, or is to be.
        sharding: What is sharded.
        divisor: Of sums over the ranks.
        facts: What has to be the same on every rank.
        casts: What is cast in which unit.
        facts_of_model: What has to be the same on ranks that hold other parts of the model, too.
    """

    described: ModelLayout
    layout: Layout
    construction: Construction
    ranks: tuple[Communicator, Communicator]
    beside: ModelParallel
    device: torch.device
    sharding: Sharding
    divisor: float
    facts: Facts
    facts_of_model: Facts
    casts: Sequence[tuple[str, nn.Module, Casts]]


def judge(model: nn.Module, given: Arguments) -> Judged:
    """Look at all arguments, on all ranks. Nothing is changed.

    Ranks that are about to differ are told so here, before they meet in any other collective: also what one alone has to refuse.

    Args:
        model: The model.
        given: The other arguments.

    Raises:
        OSError: As the stepper.
        TypeError: As the stepper.
        ValueError: As the stepper.
    """
    require_model(model)
    device = next((p.device for p in model.parameters()), None)
    if device is not None and device.type == "meta":
        device = _wanted_device(given.device)
    inner, outer = communicators(given.mesh, device)
    beside = ModelParallel()
    judged: Judged | None = None
    refused: Exception | None = None
    try:
        left_alone = ignored_ids(model, given.ignored)
        # Once: it may be an iterator.
        given = replace(given, ignored=[p for p in model.parameters() if id(p) in left_alone])
        laid_out = {name: p for name, p in model.named_parameters() if id(p) not in left_alone}
        require_in_parts(laid_out, ranks_of(given.mesh))
        beside = ModelParallel.of(list(laid_out.values()), given.model_parallel, ranks_of(given.mesh), device)
        judged = _judge(model, given, (inner, outer), beside)
    except Exception as error:
        refused = error
    compared = [(judged and judged.facts, (inner, outer))]
    compared += [(judged and judged.facts_of_model, (one, Communicator(None))) for one in beside.communicators]
    for facts, ranks in compared:
        # Also after a refusal: ranks of other data-parallel groups wait to be told of it.
        try:
            require_alike(refused or facts or (), *ranks)
        except Exception as error:
            refused = refused or error
    if refused is not None:
        raise refused
    assert judged is not None
    judged.construction.meet()
    return replace(judged, layout=number_elements(judged.layout, beside, given.copies))


def _judge(
    model: nn.Module, given: Arguments, between: tuple[Communicator, Communicator], beside: ModelParallel
) -> Judged:
    ranks = (between[0].size, between[1].size)
    if given.nan not in ("off", "step", "param"):
        raise ValueError(f"nan: got {given.nan!r}; accepted are 'off', 'step', 'param'.")
    divisor = float(ranks[0] * ranks[1]) if given.divisor is None else given.divisor
    if isinstance(divisor, bool) or not divisor > 0 or divisor == float("inf"):
        raise ValueError(
            f"divisor: got {given.divisor!r}; accepted is a finite number above zero, or None for the number of ranks."
        )
    kind = sharding(given.strategy, given.outer)
    if given.outer == "optim" and ranks[1] == 1 and not isinstance(given.mesh, DeviceMesh):
        raise ValueError(
            "outer: got 'optim' without an outer dimension; accepted with it is a DeviceMesh of two dimensions."
        )
    owner = _OWNERS.get(model)
    if owner is not None and (other := owner()) is not None and not other.closed:
        raise ValueError(
            "model: belongs to a stepper already, whose buffers its parameters lie in; call that stepper's close() first."
        )
    described = describe(
        model,
        given.transform,
        given.policy,
        given.units,
        given.labels,
        given.ignored,
        ranks_of(given.mesh),
        given.copies,
        is_part=given.model_parallel is not None,
    )
    for spec, parameter in zip(described.specs, described.parameters, strict=True):
        if parameter.grad is not None:
            raise ValueError(
                f"{spec.name}: holds a gradient already, which would be counted; clear it (model.zero_grad()) before."
            )
    device = _device_of(model, described, given)
    construction = Construction(model, described, given.values, device, between, beside, synchronize=given.synchronize)
    offload = Offload.of(given.offload)
    if offload.anything and is_host(device):
        raise ValueError(
            f"offload: got {given.offload!r} for a model in the host's memory, where its state is already; accepted is False."
        )
    require_offload(offload, kind, described.labelled, keep_gradients=given.keep_gradients)
    for one in described.labelled.values():
        unsafe: Unsafe = "allow" if given.unsafe == "warn" else given.unsafe
        eb.with_policy(one.transform, one.policy, seed=given.seed, unsafe=unsafe)
    facts = [
        *facts_of(model, described, kind, ranks),
        ("divisor", repr(float(divisor))),
        *(
            (name, repr(getattr(given, name)))
            for name in (
                "nan",
                "seed",
                "reshard_after_forward",
                "metrics",
                "synchronize",
                "defer_reduction",
                "most_elements",
            )
        ),
        ("copies", repr(sorted(given.copies.items() if isinstance(given.copies, Mapping) else given.copies))),
        *construction.facts,
    ]
    casts = casts_of(described.units, given.casts)
    facts += [(f"casts of {name or 'the model'}", repr(one)) for name, _, one in casts]
    # A multiple of all ranks, though not all strategies cut so fine: an exact sum is made in parts on all of them.
    names = [name for name, _ in described.units]
    layout = build(
        described.specs,
        shards=ranks[0] * ranks[1],
        units=names,
        shares=kind.shares(*ranks),
        within=kind.within(ranks[1]),
        most=given.most_elements,
    )
    return Judged(
        described, layout, construction, between, beside, device, kind, float(divisor), facts,
        _facts_of_model(given, described), casts,
    )  # fmt: skip


def _facts_of_model(given: Arguments, described: ModelLayout) -> Facts:
    """List what decides on the reductions over the whole model, in their order."""
    transforms = given.transform if isinstance(given.transform, Mapping) else {"": given.transform}
    sources = dict.fromkeys(one.source for one in described.labelled.values() if one.transform.reduces)
    reducing = [
        (f"a transform that reduces, of {name or 'all parameters'}", text_of(transforms[name])) for name in sources
    ]
    return [*((name, repr(getattr(given, name))) for name in ("nan", "metrics")), *reducing]


def _device_of(model: nn.Module, described: ModelLayout, given: Arguments) -> torch.device:
    """Where the model is, or is to be."""
    devices = {parameter.device for parameter in described.parameters}
    if len(devices) > 1:
        raise ValueError(f"model: has parameters on {', '.join(sorted(map(str, devices)))}; accepted is one device.")
    (device,) = devices
    require_float64(device, "model")
    if given.values is not None and not isinstance(given.values, Values):
        raise TypeError(
            f"values: got {given.values!r}; accepted are FromInitializers(...), FromSafetensors(...), FromCheckpoint(...),"
            " FromStateDict(...), and None for a model that has its values."
        )
    if device.type != "meta":
        if given.values is not None:
            raise ValueError(
                f"values: got {type(given.values).__name__} for a model on {device}, which has values; accepted is a model on the meta"
                " device, made inside `with torch.device('meta'):`."
            )
        if given.device is not None and torch.device(given.device).type != device.type:
            raise ValueError(
                f"device: got {given.device} for a model on {device}; accepted is to move the model first:"
                f" model.to({str(given.device)!r})."
            )
        return device
    if given.values is None:
        raise ValueError(
            "model: is on the meta device, without values; accepted is a model with values, or to say where they come from:"
            " values=FromInitializers(), FromSafetensors(path), FromCheckpoint(path) or FromStateDict(state_dict). (everybit_torch.plan and"
            " `everybit plan` take one on the meta device.)"
        )
    laid_out = {id(parameter) for parameter in described.parameters}
    for name, parameter in model.named_parameters():
        if id(parameter) not in laid_out and parameter.device.type == "meta":
            raise ValueError(
                f"ignored: {name} is on the meta device, and values= are of what the stepper lays out; accepted is a parameter that has its"
                " values."
            )
    wanted = _wanted_device(given.device)
    if wanted.type == "meta":
        raise ValueError("device: got meta; accepted is the device where the model is to be trained.")
    require_float64(wanted, "model")
    for spec, parameter in zip(described.specs, described.parameters, strict=True):
        if is_dtensor(parameter) and parameter.device_mesh.device_type != wanted.type:
            raise ValueError(
                f"device: got {wanted} for {spec.name}, a DTensor over a mesh of {parameter.device_mesh.device_type}; accepted is the"
                " device of the mesh."
            )
    return wanted


def _wanted_device(device: torch.device | str | None) -> torch.device:
    return torch.get_default_device() if device is None else torch.device(device)
