"""The arguments of a stepper, which are judged before anything is changed."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import everybit as eb
from everybit.optimizer import Unsafe
from everybit_torch.collectives.meshes import Mesh
from everybit_torch.param_groups import require_float64
from everybit_torch.sharded.fingerprint import Facts, facts_of
from everybit_torch.sharded.model_layout import AnyPrecision, Labels, ModelLayout, Transforms, Units, describe
from everybit_torch.sharded.offload import is_host
from everybit_torch.sharded.reports import NanCheck
from everybit_torch.sharded.strategies import OuterStrategy, Sharding, Strategy, sharding


class Owner(Protocol):
    """What a model's parameters lie in the buffers of."""

    closed: bool


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
    offload: bool
    keep_gradients: bool
    defer_reduction: bool


@dataclass(frozen=True, slots=True)
class Judged:
    """Arguments that can work.

    Attributes:
        described: The model, with what its parameters are stepped with.
        device: Where it is.
        sharding: What is sharded.
        divisor: Of sums over the ranks.
        facts: What has to be the same on every rank.
    """

    described: ModelLayout
    device: torch.device
    sharding: Sharding
    divisor: float
    facts: Facts


def judge(model: nn.Module, given: Arguments, ranks: tuple[int, int]) -> Judged:
    """Look at all arguments. Nothing is changed.

    Args:
        model: The model.
        given: The other arguments.
        ranks: The numbers of inner and outer ranks.

    Raises:
        TypeError: As the stepper.
        ValueError: As the stepper.
    """
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
    described = describe(model, given.transform, given.policy, given.units, given.labels)
    for spec, parameter in zip(described.specs, described.parameters, strict=True):
        if parameter.grad is not None:
            raise ValueError(
                f"{spec.name}: holds a gradient already, which would be counted; clear it (model.zero_grad()) before."
            )
    device = _device_of(described)
    if given.offload and is_host(device):
        raise ValueError(
            "offload: got True for a model in the host's memory, where its state is already; accepted is False."
        )
    for one in described.labelled.values():
        unsafe: Unsafe = "allow" if given.unsafe == "warn" else given.unsafe
        eb.with_policy(one.transform, one.policy, seed=given.seed, unsafe=unsafe)
    facts = [
        *facts_of(model, described, kind, ranks),
        ("divisor", repr(float(divisor))),
        *(
            (name, repr(getattr(given, name)))
            for name in ("nan", "seed", "reshard_after_forward", "metrics", "synchronize", "defer_reduction")
        ),
    ]
    return Judged(described, device, kind, float(divisor), facts)


def _device_of(described: ModelLayout) -> torch.device:
    devices = {parameter.device for parameter in described.parameters}
    if len(devices) > 1:
        raise ValueError(f"model: has parameters on {', '.join(sorted(map(str, devices)))}; accepted is one device.")
    (device,) = devices
    require_float64(device, "model")
    if device.type == "meta":
        raise ValueError(
            "model: is on the meta device, without values; accepted is a model with values. (everybit_torch.plan and `everybit plan` take"
            " one on the meta device.)"
        )
    return device
