"""Methods that compute with a module's weights and are not its forward: weights are gathered while they run.

A registered method of a module keeps the units gathered in which the module's parameters lie, but for units that lie in the module, which
gather themselves when they are called. What it returns may go into a loss.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from everybit_torch.sharded.gathering import Gathering
from everybit_torch.sharded.late_weights import LateWeights
from everybit_torch.sharded.layout import Layout


class RegisteredMethods:
    """Methods of a model that gather weights.

    Args:
        model: The model.
        layout: Of it.
        gathering: Of its units; None where parameters are not sharded, and nothing has to be gathered.
        late: Weights that may be under way; None where none are.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, gathering: Gathering | None, late: LateWeights | None = None
    ) -> None:
        self._model, self._gathering, self._late = model, gathering, late
        self._units = {
            name: group.unit for group in layout.groups for place in group.placements for name in place.spec.names
        }
        self._replaced: list[tuple[weakref.ref[nn.Module], str, Any]] = []

    def register(self, module: nn.Module, name: str) -> None:
        """Gather weights while a method runs; see :meth:`everybit_torch.FlatStepper.register_method`."""
        inside = next((path for path, one in self._model.named_modules() if one is module), None)
        if inside is None:
            raise ValueError(
                f"module: got a {type(module).__name__} that is not in the model; accepted are the model and its modules."
            )
        who = f"{type(module).__name__}.{name}"
        original = getattr(module, name, None) if isinstance(name, str) else None
        if not callable(original) or isinstance(original, nn.Module):
            raise ValueError(
                f"name: got {name!r}, and {type(module).__name__} has no such method; accepted is the name of a method."
            )
        if name in ("forward", "__call__"):
            raise ValueError(
                f"name: got {name!r}; accepted are other methods: modules that are called gather their weights already."
            )
        function = inspect.unwrap(getattr(original, "__func__", original))
        if any(
            judge(function)
            for judge in (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        ):
            raise ValueError(
                f"name: {who} is a generator, or asynchronous, and runs on after it has returned; accepted are methods that are done then."
            )
        if (self._gathering is None and self._late is None) or getattr(original, _MARK, False):
            return
        numbers = self._own_units(module, inside) if self._gathering is not None else []
        self._replaced.append((weakref.ref(module), name, module.__dict__.get(name, _NOTHING)))
        module.__dict__[name] = self._wrapped(module, original, numbers)

    def close(self) -> None:
        """Give all methods back."""
        for reference, name, before in reversed(self._replaced):
            module = reference()
            if module is not None and before is _NOTHING:
                module.__dict__.pop(name, None)
            elif module is not None:
                module.__dict__[name] = before
        self._replaced = []

    def _own_units(self, module: nn.Module, path: str) -> list[int]:
        """The units of a module's parameters that do not lie in it."""
        assert self._gathering is not None
        below = {id(one) for one in module.modules()} - {id(module)}
        prefix = f"{path}." if path else ""
        names = (prefix + name for name, _ in module.named_parameters(remove_duplicate=False))
        found = {self._units[name] for name in names if name in self._units}
        return sorted(number for number in found if id(self._gathering.units[number].module) not in below)

    def _wrapped(self, module: nn.Module, original: Callable[..., Any], numbers: Sequence[int]) -> _Method:
        reference, here = weakref.ref(self), weakref.ref(module)

        def call(*arguments: Any, **named: Any) -> Any:
            methods, owner = reference(), here()
            if methods is not None and methods._late is not None:
                methods._late.wait()
            gathering = None if methods is None or owner is None else methods._gathering
            if gathering is None:
                return original(*arguments, **named)
            with gathering.running(numbers) as follow:
                outputs = original(*arguments, **named)
                follow(outputs)
                return outputs

        return _Method(original, call)


_NOTHING = object()
_MARK = "_gathers_weights"


class _Method:
    """A bound method that gathers weights; in a copy of the module it is the plain method of the copy."""

    _gathers_weights = True

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._original, self._call = original, call

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the method, with the weights that it computes with."""
        return self._call(*arguments, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the plain method of the copied module."""
        return copy.deepcopy(self._original, memo)

    def __reduce__(self) -> Any:
        """Leave the plain method in what is pickled."""
        owner = getattr(self._original, "__self__", None)
        return getattr, (type(owner) if owner is None else owner, self._original.__name__)
