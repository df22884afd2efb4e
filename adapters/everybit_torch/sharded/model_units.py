"""The modules of a model that are units: their parameters are reduced, and gathered, together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

Units = Sequence[type[nn.Module] | nn.Module]
"""Modules of a model, and classes of modules."""


def find_units(model: nn.Module, units: Units | None) -> dict[str, nn.Module]:
    """The model and the modules that ``units`` selects, by name; the model first.

    Raises:
        TypeError: Something that is neither a module nor a class of modules.
        ValueError: Something that the model does not have.
    """
    if isinstance(units, (type, nn.Module, str)):
        raise TypeError(
            f"units: got {units!r}; accepted is a list of modules of the model, and classes of modules: units=[Block]."
        )
    wanted = list(units or ())
    for one in wanted:
        if not (isinstance(one, nn.Module) or (isinstance(one, type) and issubclass(one, nn.Module))):
            raise TypeError(f"units: got {one!r}; accepted are modules of the model, and classes of modules.")
        if not any(module is one or (isinstance(one, type) and isinstance(module, one)) for module in model.modules()):
            what = one.__name__ if isinstance(one, type) else type(one).__name__
            there = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
            raise ValueError(f"units: the model has no {what}; its modules are {there}.")
    classes = tuple(one for one in wanted if isinstance(one, type))
    single = {id(one) for one in wanted if not isinstance(one, type)}
    chosen = {n: m for n, m in model.named_modules() if n and (isinstance(m, classes) or id(m) in single)}
    return {"": model} | chosen
