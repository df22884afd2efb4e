"""The arguments of a stepper, and those of one on flat buffers judged before anything is changed."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from everybit.stepping import Unsafe, with_policy
from everybit_torch.collectives.communicator import Communicator
from everybit_torch.collectives.meshes import Mesh, communicators
from everybit_torch.optim.param_groups import require_float64
from everybit_torch.sharded.fingerprint import Facts, facts_of, require_alike
from everybit_torch.sharded.ignored_parameters import Ignored, ignored_ids
from everybit_torch.sharded.labelling import AnyPrecision, LabelledTransform, Labels, Transforms
from everybit_torch.sharded.layout import Layout, build
from everybit_torch.sharded.model_layout import ModelLayout, describe, require_model
from everybit_torch.sharded.model_units import Units
from everybit_torch.sharded.reports import NanCheck
from everybit_torch.sharded.strategies import Sharding


class Owner(Protocol):
    """The object that steps a model's parameters."""

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
    sharding: Sharding
    units: Units | None
    labels: Labels | None
    divisor: float | None
    nan: NanCheck
    ignored: Ignored | None
    compile: bool
    seed: int
    unsafe: Unsafe

    def of_once(self, model: nn.Module) -> Arguments:
        """The same, with ``ignored`` as a list: it may be an iterator."""
        left_alone = ignored_ids(model, self.ignored)
        return replace(self, ignored=[p for p in model.parameters() if id(p) in left_alone])

    def divisor_of(self, ranks: int) -> float:
        """The divisor of sums over so many ranks.

        Raises:
            ValueError: No finite number above zero.
        """
        divisor = float(ranks) if self.divisor is None else self.divisor
        if isinstance(divisor, bool) or not 0 < divisor < float("inf"):
            raise ValueError(
                f"divisor: got {self.divisor!r}; accepted is a finite number above zero, or None for the number of ranks."
            )
        return float(divisor)

    def require_usable(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        """Refuse what no stepper takes.

        Args:
            model: The model.
            parameters: Those that are managed, by name.

        Raises:
            ValueError: An unknown ``nan``, a model that another stepper steps, or a parameter that holds a gradient.
        """
        if self.nan not in ("off", "step", "param"):
            raise ValueError(f"nan: got {self.nan!r}; accepted are 'off', 'step', 'param'.")
        owner = _OWNERS.get(model)
        if owner is not None and (other := owner()) is not None and not other.closed:
            raise ValueError("model: belongs to a stepper already; call that stepper's close() first.")
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                raise ValueError(
                    f"{name}: holds a gradient already, which would be counted; clear it (model.zero_grad()) before."
                )
            require_float64(parameter.device, "model")

    def require_safe(self, labelled: Mapping[str, LabelledTransform]) -> None:
        """Refuse policies that cannot work; see :func:`everybit.with_policy`.

        Raises:
            ValueError: One cannot.
        """
        unsafe: Unsafe = "allow" if self.unsafe == "warn" else self.unsafe
        for one in labelled.values():
            with_policy(one.transform, one.policy, seed=self.seed, unsafe=unsafe)


@dataclass(frozen=True, slots=True)
class Judged:
    """Arguments that can work.

    Attributes:
        described: The model, with what its parameters are stepped with.
        layout: Of its parameters.
        ranks: The inner and the outer ranks.
        device: Where it is.
        divisor: Of sums over the ranks.
        facts: What has to be the same on every rank.
    """

    described: ModelLayout
    layout: Layout
    ranks: tuple[Communicator, Communicator]
    device: torch.device
    divisor: float
    facts: Facts


def judge(model: nn.Module, given: Arguments) -> Judged:
    """Look at all arguments, on all ranks. Nothing is changed.

    Ranks that are about to differ are told so here, before they meet in any other collective: also what one alone has to refuse.

    Args:
        model: The model.
        given: The other arguments.

    Raises:
        TypeError: As the stepper.
        ValueError: As the stepper.
    """
    require_model(model)
    ranks = communicators(given.mesh, next((p.device for p in model.parameters()), None))
    judged: Judged | None = None
    refused: Exception | None = None
    try:
        judged = _judge(model, given.of_once(model), ranks)
    except Exception as error:
        refused = error
    require_alike(refused or (judged.facts if judged else ()), *ranks)
    if refused is not None:
        raise refused
    assert judged is not None
    return judged


def _judge(model: nn.Module, given: Arguments, between: tuple[Communicator, Communicator]) -> Judged:
    ranks = (between[0].size, between[1].size)
    divisor = given.divisor_of(ranks[0] * ranks[1])
    described = describe(model, given.transform, given.policy, given.units, given.labels, given.ignored)
    given.require_usable(model, {spec.name: p for spec, p in zip(described.specs, described.parameters, strict=True)})
    devices = {parameter.device for parameter in described.parameters}
    if len(devices) > 1:
        raise ValueError(f"model: has parameters on {', '.join(sorted(map(str, devices)))}; accepted is one device.")
    (device,) = devices
    if device.type == "meta":
        raise ValueError(
            "model: is on the meta device, without values; accepted is a model with values. (everybit_torch.plan and `everybit plan` take"
            " one on the meta device.)"
        )
    given.require_safe(described.labelled)
    facts = [
        *facts_of(model, described, given.sharding, ranks),
        ("divisor", repr(divisor)),
        *((name, repr(getattr(given, name))) for name in ("nan", "seed")),
    ]
    # A multiple of all ranks, though not all strategies cut so fine: an exact sum is made in parts on all of them.
    layout = build(
        described.specs,
        shards=ranks[0] * ranks[1],
        units=[name for name, _ in described.units],
        shares=given.sharding.shares(ranks[0]),
    )
    return Judged(described, layout, between, device, divisor, facts)
