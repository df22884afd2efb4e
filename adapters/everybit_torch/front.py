"""The interface of a front end whose state dicts are saved, judged and loaded: an engine, and param groups as torch has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from everybit_torch.engine import Engine
from everybit_torch.places import Places


class Front(Protocol):
    """A front end with param groups.

    Attributes:
        engine: That steps its parameters.
        places: Where they lie.
        param_groups: By number, as ``torch.optim``'s.
        state: By parameter, as ``torch.optim``'s.
    """

    engine: Engine
    places: Places
    param_groups: list[dict[str, Any]]
    state: Any

    def factory_arguments(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The factory's keyword arguments for a param group."""
        ...
