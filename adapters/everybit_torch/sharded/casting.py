"""The dtypes in which units compute: what goes into them, and what comes out of the model, is cast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from everybit.base import FLOAT_DTYPES, FloatDType, require_member, torch_dtype
from everybit_torch.sharded.module_hooks import no_hook


@dataclass(frozen=True, slots=True, kw_only=True)
class Casts:
    """The dtypes of a module's floating-point inputs and outputs; everything else is left as it is.

    Tensors are found in positional and named arguments and in what is returned, in tuples, lists, dicts and registered pytrees. A cast is
    recorded by autograd: gradients are cast back.

    Args:
        inputs: dtype of the inputs of ``forward``. None: they are not cast.
        outputs: dtype of the results of ``forward``. None: they are not cast.

    Raises:
        ValueError: Not the name of a dtype; the message names the field.
    """

    inputs: FloatDType | None = None
    outputs: FloatDType | None = None

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs"):
            if getattr(self, name) is not None:
                require_member(getattr(self, name), FLOAT_DTYPES, field=f"Casts.{name}")


CastsOfUnits = Casts | Mapping[type[nn.Module] | nn.Module, Casts]
"""The casts of every unit and of the model; or a dict of them by class or module, where a module takes precedence over its class."""


def casts_of(units: Sequence[tuple[str, nn.Module]], given: CastsOfUnits | None) -> list[tuple[str, nn.Module, Casts]]:
    """Name, module and casts of each unit in which something is cast.

    Args:
        units: The model first.
        given: :class:`Casts` for all: inputs of every unit and of the model, outputs of the model alone. Or a dict.

    Raises:
        TypeError: Something else.
        ValueError: A module, or class of modules, that is no unit.
    """
    if given is None:
        return []
    if isinstance(given, Casts):
        inside = Casts(inputs=given.inputs)
        return [(name, module, inside if number else given) for number, (name, module) in enumerate(units)]
    if not isinstance(given, Mapping):
        raise TypeError(f"casts: got {given!r}; accepted are Casts(...), a dict of them by unit, or None.")
    asked: Mapping[Any, Casts] = given
    used: set[int] = set()
    found = []
    for name, module in units:
        keys: list[Any] = [module, *type(module).__mro__]
        if (key := next((one for one in keys if one in asked), None)) is not None:
            casts = asked[key]
            if not isinstance(casts, Casts):
                raise TypeError(f"casts: got {casts!r} for {name or 'the model'}; accepted are Casts(...).")
            used.add(id(key))
            found.append((name, module, casts))
    for key in asked:
        if id(key) not in used:
            what = key.__name__ if isinstance(key, type) else type(key).__name__
            there = ", ".join(sorted({type(module).__name__ for _, module in units}))
            raise ValueError(f"casts: {what} is no unit, nor the model; these are of the classes {there}.")
    return found


def watch(casts: Sequence[tuple[str, nn.Module, Casts]]) -> list[Any]:
    """Cast from now on; handles of the hooks."""
    handles: list[Any] = []
    for _, module, one in casts:
        if one.inputs is not None:
            hook = _Inputs(torch_dtype(one.inputs))
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        if one.outputs is not None:
            handles.append(module.register_forward_hook(_Outputs(torch_dtype(one.outputs))))
    return handles


class _Cast:
    """Casts the floating-point tensors of a tree; copies of a module do not have it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def _cast(self, tree: Any) -> Any:
        return tree_map(self._one, tree)

    def _one(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype is not self._dtype:
            return leaf.to(self._dtype)
        return leaf

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Leave no hook in copies of the model."""
        return no_hook, ()


class _Inputs(_Cast):
    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return other arguments; torch calls hooks so."""
        return self._cast(args), self._cast(kwargs)


class _Outputs(_Cast):
    def __call__(self, _: nn.Module, __: Any, output: Any) -> Any:
        """Return another output; torch calls hooks so."""
        return self._cast(output)
