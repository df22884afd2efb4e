"""The interface of an optimizer with param groups to what saves and loads its state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from everybit_torch.optim.parameters import Parameters


@dataclass(frozen=True, slots=True)
class TorchNames:
    """The mapping from torch.optim's state names to everybit's.

    Attributes:
        slots: Our slot names, and torch's.
        counts: Whether it counts steps.
        options: Options of torch's param groups that ours does not have, with the values that agree with it.
        ours: Options of our param groups that torch's does not have, with the values that agree with it.
        eager: Whether torch's has state before its first step.
    """

    slots: Mapping[str, str]
    counts: bool
    options: Mapping[str, Any]
    ours: Mapping[str, Any] = field(default_factory=dict)
    eager: bool = False

    @property
    def kept(self) -> frozenset[str]:
        """The names of what torch's optimizer keeps for a parameter, without its count of steps."""
        return frozenset(self.slots.values())


class Front(Protocol):
    """An optimizer with param groups.

    Attributes:
        own: Its parameters, and their state.
        torch_names: The names of torch's optimizer of the same name for the entries of this optimizer; None if torch has no such optimizer.
        param_groups: By number, as ``torch.optim``'s.
        state: By parameter, as ``torch.optim``'s.
        had_gradients: Whether the last step had some.
    """

    own: Parameters
    torch_names: ClassVar[TorchNames | None]
    param_groups: list[dict[str, Any]]
    state: Any
    had_gradients: bool

    @property
    def own_groups(self) -> list[dict[str, Any]]:
        """Those of ``param_groups`` that are stepped: each once."""
        ...

    def factory_arguments(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the factory's keyword arguments for a param group."""
        ...


class Release(Protocol):
    """Steps parameters during the backward pass (gradient release)."""

    def finish(self) -> None:
        """End the step: step the parameters that are left."""
        ...

    def abandon(self) -> None:
        """Drop a step that an exception interrupted; called when the gradients are cleared."""
        ...
