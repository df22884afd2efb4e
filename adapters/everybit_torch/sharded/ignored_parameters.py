"""Parameters that a stepper leaves alone."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

Ignored = Iterable[nn.Parameter | nn.Module | str]
"""Parameters, modules with all of their parameters, and names of either."""


def ignored_ids(model: nn.Module, ignored: Ignored | None) -> set[int]:
    """The ids of the parameters of a model that are to be left alone.

    Raises:
        TypeError: Something that is neither a parameter, a module nor a name.
        ValueError: Something that is not the model's.
    """
    if isinstance(ignored, (str, nn.Module, nn.Parameter)):
        raise TypeError(f"ignored: got {type(ignored).__name__}; accepted is a list of parameters, modules and names.")
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found: set[int] = set()
    for one in ignored or ():
        given = (parameters.get(one) if one in parameters else modules.get(one)) if isinstance(one, str) else one
        if given is None:
            raise ValueError(
                f"ignored: got {one!r}, which is not in the model; accepted are names of its parameters and modules."
            )
        if isinstance(given, nn.Parameter):
            known, here = parameters.values(), [given]
        elif isinstance(given, nn.Module):
            known, here = modules.values(), list(given.parameters())
        else:
            raise TypeError(f"ignored: got {type(one).__name__}; accepted are parameters, modules and names.")
        if all(given is not other for other in known):
            raise ValueError(
                f"ignored: got a {type(given).__name__} that is not in the model; accepted are its parameters and modules."
            )
        found |= {id(parameter) for parameter in here}
    return found
