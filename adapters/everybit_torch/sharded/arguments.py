"""The arguments of a stepper."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from everybit.combinators import needs_whole_tensors
from everybit.stepping import Unsafe, with_policy
from everybit_torch.collectives.meshes import Mesh
from everybit_torch.optim.param_groups import require_float64
from everybit_torch.sharded.ignored_parameters import Ignored, ignored_ids
from everybit_torch.sharded.labelling import AnyPrecision, Labelled, Labels, Transforms
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

    def require_safe(self, labelled: Labelled, parameters: Mapping[str, Tensor]) -> None:
        """Refuse policies that cannot work, see :func:`everybit.with_policy`, and transforms with state that no policy stores.

        Args:
            labelled: What parameters are stepped with.
            parameters: By name.

        Raises:
            TypeError: A transform's ``init`` returns something else than slots and 0-d tensors.
            ValueError: A policy cannot work.
        """
        unsafe: Unsafe = "allow" if self.unsafe == "warn" else self.unsafe
        examples = {label: parameters[name] for name, label in reversed([*labelled.of.items()])}
        for label, one in labelled.meaning.items():
            optimizer = with_policy(one.transform, one.policy, seed=self.seed, unsafe=unsafe)
            shape = tuple(examples[label].shape) if needs_whole_tensors(one.transform) else (0,)
            # On the host where nothing is allocated anyway: the first tensor on the meta device loads sympy.
            device = "meta" if math.prod(shape) else "cpu"
            optimizer.init([torch.empty(shape, dtype=examples[label].dtype, device=device)])
