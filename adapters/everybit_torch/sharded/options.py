"""The options of a stepper, and what can be said of them before anything is made."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict, cast

import torch
from torch import Tensor, nn

from everybit.combinators import needs_whole_tensors
from everybit.stepping import Unsafe, with_policy
from everybit_torch.collectives import Mesh
from everybit_torch.optim import require_float64, require_watched
from everybit_torch.segments import Offload, WatchedDType, require_offload, require_streams
from everybit_torch.sharded.labelling import AnyPrecision, Labelled, Labels
from everybit_torch.sharded.models import Ignored, UnitModules, require_free
from everybit_torch.sharded.reports import NanCheck
from everybit_torch.sharded.strategies import OuterStrategy, PlainOptions, Sharding, Strategy, sharding


class StepperKeywords(TypedDict, total=False):
    """The fields of :class:`StepperOptions` as keyword arguments."""

    policy: AnyPrecision
    mesh: Mesh
    strategy: Strategy | int
    outer: OuterStrategy
    units: UnitModules | None
    labels: Labels | None
    divisor: float | None
    nan: NanCheck
    ignored: Ignored | None
    compile: bool
    seed: int
    unsafe: Unsafe
    watch: WatchedDType | None
    offload: Offload | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepperOptions(PlainOptions):
    """The options of a :class:`~everybit_torch.FlatStepper`, which :func:`everybit_torch.plan` takes too.

    Args:
        policy: How weights, state and gradients are stored and sent: a policy or its name, several by :func:`everybit.by_label`, a
            :class:`~everybit_torch.MixedPrecision`, or None for a float32 or float64 model stored as it is.
        mesh: The ranks: a process group, or a ``DeviceMesh`` of one dimension or of two, (outer, inner). None: all ranks, or this
            process alone if ``torch.distributed`` is not initialised.
        units: Modules, or classes of modules, with parameters that are reduced (and gathered) together, such as ``[Block]``. All other
            parameters form a unit of their own. Without units the whole model is a unit.
        labels: A function from (name, parameter) to the key of its transform.
        ignored: Parameters, modules with all their parameters, and names of either, that are not managed: not sharded, stepped or
            synchronized; their gradients stay in ``.grad``. State dicts and checkpoints include them.

    ``strategy``, ``outer``, ``divisor``, ``nan``, ``compile``, ``seed``, ``unsafe``, ``watch`` and ``offload`` are described with
    :class:`PlainOptions`, which :class:`everybit_torch.config.StepperConfig` shares. A ``strategy`` may be the number of a ZeRO stage:
    0 to 3.

    Raises:
        ValueError: A strategy that does not exist, or an outer strategy that does not go with it.

    Examples:
        >>> from everybit_torch import StepperOptions
        >>> options = StepperOptions(policy="LEAN_BF16", strategy="optim_grads")
        >>> options.strategy
        'optim_grads'
    """

    policy: AnyPrecision = None
    mesh: Mesh = None
    units: UnitModules | None = None
    labels: Labels | None = None
    ignored: Ignored | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", sharding(self.strategy, self.outer).strategy)
        object.__setattr__(self, "watch", require_watched(self.watch))
        require_offload(self.offload)
        if isinstance(self.ignored, Iterator):  # model.adapter.parameters(), say, and options are used several times
            object.__setattr__(self, "ignored", tuple(self.ignored))

    @classmethod
    def of(cls, options: StepperOptions | None, changes: StepperKeywords) -> StepperOptions:
        """Return options with some changed.

        Args:
            options: The options; None for the defaults.
            changes: Other values, by name.

        Raises:
            TypeError: A name of no option, or ``options`` are of another class.
            ValueError: An option is refused by the stepper.
        """
        given = cls() if options is None else options
        if not isinstance(given, cls):
            raise TypeError(f"options: got {given!r}; accepted are StepperOptions(...), or None.")
        names = [field.name for field in fields(cls)]
        if unknown := [name for name in changes if name not in names]:
            raise TypeError(f"{unknown[0]}: is no option of a stepper; accepted are {', '.join(names)}.")
        return replace(given, **cast(dict[str, Any], changes)) if changes else given

    @property
    def sharding(self) -> Sharding:
        """Return what the inner and the outer ranks shard."""
        return Sharding(self.strategy, self.outer)

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
            ValueError: An unknown ``nan``, a model that another stepper steps, or a parameter that holds a gradient. With ``offload`` a
                parameter on a device without streams.
        """
        if self.nan not in ("off", "step", "param"):
            raise ValueError(f"nan: got {self.nan!r}; accepted are 'off', 'step', 'param'.")
        require_free(model)
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                raise ValueError(
                    f"{name}: holds a gradient already, which would be counted; clear it (model.zero_grad()) before."
                )
            require_float64(parameter.device, "model")
            if self.offload is not None:
                require_streams(parameter.device)

    def require_safe(self, labelled: Labelled, parameters: Mapping[str, Tensor]) -> None:
        """Refuse policies that cannot work, see :func:`everybit.with_policy`, and transforms with state that no policy stores.

        Args:
            labelled: What parameters are stepped with.
            parameters: The parameters by name.

        Raises:
            TypeError: A transform's ``init`` returns something else than slots and 0-d tensors.
            ValueError: A policy cannot work.
        """
        unsafe: Unsafe = "allow" if self.unsafe == "warn" else self.unsafe
        examples = {label: parameters[name] for name, label in reversed([*labelled.of.items()])}
        for label, one in labelled.meaning.items():
            optimizer = with_policy(one.transform, one.policy, seed=self.seed, unsafe=unsafe)
            if label not in examples:
                continue  # of a model that is frozen as a whole
            shape = tuple(examples[label].shape) if needs_whole_tensors(one.transform) else (0,)
            # On the host if no memory is allocated anyway: the first tensor on the meta device loads sympy.
            device = "meta" if math.prod(shape) else "cpu"
            optimizer.init([torch.empty(shape, dtype=examples[label].dtype, device=device)])
