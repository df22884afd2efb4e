"""Which events give a model to a stepper, from what is known of the model alone: the same are carried out and planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from everybit_torch.dtensors import is_dtensor
from everybit_torch.sharded.construction.initializers import calls_of, initializers_of
from everybit_torch.sharded.construction.reading import CHUNK
from everybit_torch.sharded.construction.sources import FromInitializers, FromStateDict, Values
from everybit_torch.sharded.construction.tensors import tensors_of
from everybit_torch.sharded.layout import Layout
from everybit_torch.sharded.model_layout import ModelLayout
from everybit_torch.sharded.scheduling.construction import (
    Call,
    ConstructionEvent,
    Tensors,
    of_calls,
    of_reading,
    of_values,
)
from everybit_torch.sharded.strategies import Sharding


@dataclass(frozen=True, slots=True)
class ConstructionSchedule:
    """How a model is given to a stepper.

    Attributes:
        tensors: Of the model.
        given: Whether it has its values.
        reads: Whether values are read.
        calls: Of initializers.
        later: Groups that are read when the optimizer has its state.
        chunk: Bytes that are sent at a time, where the first rank sends values.
    """

    tensors: Tensors
    given: bool = True
    reads: bool = False
    calls: Sequence[Call] = ()
    later: Sequence[int] = ()
    chunk: int = 0

    def events(self) -> Iterator[ConstructionEvent]:
        """The events, in order."""
        if self.given:
            return of_values(self.tensors)
        return of_reading(self.tensors, self.later, self.calls) if self.reads else of_calls(self.tensors, self.calls)


def construction_of(
    model: nn.Module,
    described: ModelLayout,
    layout: Layout,
    kind: Sharding,
    values: Values | type[Values] | None,
) -> ConstructionSchedule:
    """The schedule for a model that is not looked at on any rank; it may be on the meta device, whether it is to have values or not.

    Raises:
        ValueError: A module has no initializer, and values are to come from initializers.
    """
    names = [spec.name for spec in described.specs]
    if values is None:
        return ConstructionSchedule(Tensors(layout, kind, names, 0))
    found = tensors_of(model, described, planned=True)
    tensors = Tensors(layout, kind, names, len(found) - len(names), names_in_parts(described))
    source = values() if values is FromInitializers else values
    if not isinstance(source, FromInitializers):
        return ConstructionSchedule(tensors, given=False, reads=True, chunk=chunk_of(source))

    calls = calls_of(initializers_of(model, described.units, found, source))
    return ConstructionSchedule(tensors, given=False, calls=calls)


def chunk_of(values: Values | type[Values] | None) -> int:
    """Bytes of a source that are in a tensor at a time, on every rank, on their way from the first."""
    return CHUNK if isinstance(values, FromStateDict) or values is FromStateDict else 0


def names_in_parts(described: ModelLayout) -> list[str]:
    """The names of the parameters that are DTensors."""
    together = zip(described.specs, described.parameters, strict=True)
    return [spec.name for spec, parameter in together if is_dtensor(parameter)]
