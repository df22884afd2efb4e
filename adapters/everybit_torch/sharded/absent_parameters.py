"""Parameters whose values are not there: what autograd would record of their NaN is an error by name, and not a NaN gradient."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from everybit_torch.torch_internals.tensors import plain_tensors

_UNITS: MutableMapping[Tensor, tuple[str, str]] = WeakIdKeyDictionary()
"""The name of each parameter, and of its unit."""

# These take a parameter to find its gradient, and compute nothing from its values.
_HARMLESS = {torch.autograd.grad, torch.autograd.backward, Tensor.backward, Tensor.view_as, Tensor.expand_as}


class AbsentParameter(nn.Parameter):
    """A parameter while its values are sharded: its class then, so that nothing is spent on it while they are there.

    Shape, dtype, gradient and hooks are those of any parameter. Reading it without a graph gives NaN.
    """

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch's, and refuse a result that a backward pass would go through.

        Raises:
            RuntimeError: There is one; the message names the parameter.
        """
        given = kwargs or {}
        with plain_tensors():
            result = function(*args, **given)
            if function in _HARMLESS or not torch.is_grad_enabled():
                return result
            recorded = (x for x in tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad and not x.is_leaf)
            if next(recorded, None) is None or getattr(function, "__self__", None) is Tensor.grad:
                return result
        _refuse([x for x in tree_leaves((args, given)) if isinstance(x, AbsentParameter) and x.requires_grad])
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter of NaN: the copy belongs to no stepper."""
        if id(self) not in memo:
            with plain_tensors():
                memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        found: nn.Parameter = memo[id(self)]
        return found


def _refuse(absent: Sequence[Tensor]) -> None:
    for parameter in absent:
        name, unit = _UNITS.get(parameter, ("a parameter", "its unit"))
        raise RuntimeError(
            f"{name}: was used out of the forward pass of {unit}, while its weights were sharded and NaN. Accepted is to use it in that"
            " forward method, or the whole pass inside `with stepper.full_parameters():`."
        )


def name_units(parameters: Sequence[nn.Parameter], names: Sequence[str], unit: str) -> None:
    """Note the names of parameters and their unit, for messages."""
    for parameter, name in zip(parameters, names, strict=True):
        _UNITS[parameter] = name, unit


def hide(parameters: Sequence[nn.Parameter]) -> None:
    """Their values are not there from now on. Parameters of other classes (DTensors, a user's) keep theirs."""
    for parameter in parameters:
        if type(parameter) is nn.Parameter:
            parameter.__class__ = AbsentParameter


def show(parameters: Sequence[nn.Parameter]) -> None:
    """Their values are there again."""
    for parameter in parameters:
        if type(parameter) is AbsentParameter:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
