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

# These take a parameter to find its gradient, or for its shape, dtype or device, and compute nothing from its values.
_MAKES_OTHERS = {"__get__", "detach", "requires_grad_"}

_HARMLESS = {
    torch.autograd.grad, torch.autograd.backward, Tensor.backward,
    Tensor.view_as, Tensor.expand_as, Tensor.reshape_as, Tensor.type_as, Tensor.to,
}  # fmt: skip


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
            if not torch.is_grad_enabled() or not _computes(function, args, result):
                return result
        # A frozen one, too: it has no gradient, and its NaN is in those of others.
        _refuse([x for x in tree_leaves((args, given)) if isinstance(x, AbsentParameter)])
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter of NaN: the copy belongs to no stepper."""
        if id(self) not in memo:
            with plain_tensors():
                memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        found: nn.Parameter = memo[id(self)]
        return found


def _computes(function: Callable[..., Any], args: Sequence[Any], result: Any) -> bool:
    """Whether a call made numbers of a parameter's values, which are NaN."""
    name = getattr(function, "__name__", "")
    if function in _HARMLESS or name in _MAKES_OTHERS or name.startswith("new_") or name.endswith("_like"):
        # A conversion of the parameter itself reads its values.
        return name in ("to", "type_as", "reshape_as") and bool(args) and isinstance(args[0], AbsentParameter)
    made = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()]
    return any(x is not (args[0] if args else None) for x in made)


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
