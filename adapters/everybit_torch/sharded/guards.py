"""Refusals, by name, of what would silently compute with, save or copy weights that are not there, where parameters are sharded.

A parameter whose unit is not gathered has its shape, and NaN for every element. Whoever looks at it sees that. But whoever calls a module
below its unit (``model.encoder(x)``, ``generate()``), saves a ``state_dict()`` or copies the model would carry NaN on without a word, so
hooks on every module that holds parameters refuse it. Gathering there instead would need all ranks to be there, which nothing tells.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from everybit_torch.sharded.gathering import Gathering
from everybit_torch.sharded.module_hooks import no_hook

INSIDE = "`with stepper.full_parameters():`, on every rank"


class Guards:
    """Hooks on the modules of a model whose parameters are sharded.

    Args:
        model: The model.
        gathering: Its units.
    """

    def __init__(self, model: nn.Module, gathering: Gathering) -> None:
        self._gathering = weakref.ref(gathering)
        units: dict[int, int] = {}
        for number, unit in enumerate(gathering.units):
            units |= {id(p): number for buffer in unit.buffers for p in buffer.parameters}
        self._lifted = False
        _refuse_wrappers()
        self._guarded: list[weakref.ref[nn.Module]] = []
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            own = {units[id(p)] for p in module.parameters(recurse=False) if id(p) in units}
            if own:
                _GUARDED.add(module)
                self._guarded.append(weakref.ref(module))
                guard = _Guard(self, module, name or "the model", sorted(own))
                self._handles += [
                    module.register_forward_pre_hook(guard.before_forward),
                    module.register_state_dict_pre_hook(guard.before_saving),
                    module.register_load_state_dict_pre_hook(guard.before_loading),
                ]

    def close(self) -> None:
        """Remove all hooks from the model."""
        for handle in self._handles:
            handle.remove()
        for module in filter(None, (reference() for reference in self._guarded)):
            _GUARDED.discard(module)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Refuse nothing inside, for code that handles absent weights itself."""
        before, self._lifted = self._lifted, True
        try:
            yield
        finally:
            self._lifted = before

    def absent(self, units: Sequence[int]) -> str | None:
        """The first of these units whose weights are not there."""
        gathering = self._gathering()
        if gathering is None or self._lifted:
            return None
        for number in units:
            if not gathering.units[number].shown:
                return str(gathering.units[number])
        return None


_GUARDED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules whose parameters are sharded."""


@cache
def _refuse_wrappers() -> None:
    """Register a hook that refuses ``DistributedDataParallel`` around such a module, before it sends anything.

    It stays registered: torch iterates over its hooks while modules are made, when the garbage collector may come to a stepper.
    """
    register_module_module_registration_hook(_refuse_wrapper)


def _refuse_wrapper(wrapper: nn.Module, _name: str, module: nn.Module | None) -> None:
    if not isinstance(wrapper, DistributedDataParallel) or module is None:
        return
    if any(one in _GUARDED for one in module.modules()):
        raise RuntimeError(
            "DistributedDataParallel: call the model without it. A FlatStepper shards the model's parameters and sums their"
            " gradients over the ranks itself; close() gives the model back."
        )


class _Guard:
    """The hooks of one module; they do nothing on a copy of it."""

    def __init__(self, guards: Guards, module: nn.Module, name: str, units: Sequence[int]) -> None:
        reference, here = weakref.ref(guards), weakref.ref(module)

        def absent(given: nn.Module) -> str | None:
            if given is not here():
                return None
            guards = reference()
            if guards is not None:
                return guards.absent(units)
            raise RuntimeError(
                f"{name}: its weights were sharded by a FlatStepper that is gone, and are gone with it. Keep the stepper as long as the"
                " model is used, or call its close(), which gives the model back."
            )

        def before_forward(given: nn.Module, _arguments: Any) -> None:
            if torch.compiler.is_compiling():
                return
            if (unit := absent(given)) is not None:
                raise RuntimeError(
                    f"{name}: was called while its weights are sharded: they belong to {unit}, and are gathered when {unit} is called as a"
                    f" module. Accepted is to call that, on every rank; or any method inside {INSIDE}."
                )

        def before_saving(given: nn.Module, _prefix: str, _keep_vars: bool) -> None:
            if absent(given) is not None:
                raise RuntimeError(
                    f"state_dict: the weights of {name} are sharded, and this rank has a part of them; accepted is model.state_dict()"
                    f" inside {INSIDE}, or save_sharded(stepper, path)."
                )

        def before_loading(given: nn.Module, *_arguments: Any) -> None:
            if absent(given) is not None:
                raise RuntimeError(
                    f"load_state_dict: the weights of {name} are sharded, and there is nothing to write to; accepted is"
                    f" model.load_state_dict(...) inside {INSIDE}, or load_sharded(stepper, path)."
                )

        def before_copying() -> None:
            module = here()
            if module is not None and absent(module) is not None:
                raise RuntimeError(
                    f"copy: the weights of {name} are sharded, and a copy of the model would be of NaN; accepted is to copy, pickle or"
                    f" save it inside {INSIDE}."
                )

        self.before_forward = _Hook(before_forward, before_copying)
        self.before_saving = _Hook(before_saving, before_copying)
        self.before_loading = _Hook(before_loading, before_copying)


class _Hook:
    """A hook that says when its module is copied."""

    def __init__(self, function: Callable[..., None], before_copying: Callable[[], None]) -> None:
        self._function, self._before_copying = function, before_copying

    def __call__(self, *arguments: Any) -> None:
        """Call the function; torch calls hooks so."""
        self._function(*arguments)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        """Leave no hook in copies of the model, whose weights are present.

        Raises:
            RuntimeError: In this one it is not.
        """
        self._before_copying()
        return no_hook, ()
