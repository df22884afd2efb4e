"""The interface of a front end with param groups: to what saves and loads its state dicts, and to what steps its parameters by parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from everybit_torch.engine import Engine
from everybit_torch.places import Places


@dataclass(frozen=True, slots=True)
class TorchNames:
    """The mapping from torch.optim's state names to everybit's.

    Attributes:
        slots: Our slot names, and torch's.
        counts: Whether it counts steps.
        options: Options of torch's param groups that ours does not have, with the values that agree with it.
        ours: Options of our param groups that torch's does not have, with the values that agree with it.
    """

    slots: Mapping[str, str]
    counts: bool
    options: Mapping[str, Any]
    ours: Mapping[str, Any] = field(default_factory=dict)


class Front(Protocol):
    """A front end with param groups.

    Attributes:
        engine: That steps its parameters.
        places: Where they lie.
        torch_names: How torch's optimizer of the same name calls what this one keeps; None if torch has none.
        param_groups: By number, as ``torch.optim``'s.
        state: By parameter, as ``torch.optim``'s.
    """

    engine: Engine
    places: Places
    torch_names: ClassVar[TorchNames | None]
    param_groups: list[dict[str, Any]]
    state: Any

    def factory_arguments(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The factory's keyword arguments for a param group."""
        ...


class Release(Protocol):
    """Steps parameters during the backward pass (gradient release)."""

    def finish(self) -> None:
        """End the step: step the parameters that are left."""
        ...

    def abandon(self) -> None:
        """Drop a step that an exception interrupted; called when the gradients are cleared."""
        ...
