"""Refuses models that a stepper cannot train."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.parameter import is_lazy


def require_model(model: object) -> None:
    """Refuse an object that is not a module, and a module with parameters that have no shapes yet.

    Raises:
        TypeError: No module.
        ValueError: A parameter or buffer of a lazy module that was never called.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got a {type(model).__name__}; accepted is a module, before the transform.")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"model: call it once with a batch, model(batch), and then make the stepper. {name} belongs to a lazy module, and"
                " has no shape before that."
            )


def require_some(parameters: Iterable[nn.Parameter]) -> None:
    """Refuse a model without trained parameters.

    Raises:
        ValueError: It has no parameters, or all of them are frozen.
    """
    given = list(parameters)
    if not given:
        raise ValueError("model: has no parameters (that are not ignored); accepted is a module with at least one.")
    if not any(parameter.requires_grad for parameter in given):
        raise ValueError(
            "model: all of its parameters are frozen; accepted is a module with at least one that requires a gradient."
        )
