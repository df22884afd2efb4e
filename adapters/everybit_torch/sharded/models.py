"""The models of steppers: those that can be trained, units, ignored parameters, the owner, and values that are the same on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from everybit.base import require_word
from everybit_torch.collectives import Communicator


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
    """Refuse a model without parameters. Those of one that is frozen as a whole, such as a stage of a pipeline, are never stepped.

    Raises:
        ValueError: It has no parameters.
    """
    if not any(True for _ in parameters):
        raise ValueError("model: has no parameters (that are not ignored); accepted is a module with at least one.")


UnitModules = Sequence[type[nn.Module] | nn.Module]
"""Modules of a model, and classes of modules."""


def find_units(model: nn.Module, units: UnitModules | None) -> dict[str, nn.Module]:
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


class Owner(Protocol):
    """The object that steps a model's parameters."""

    @property
    def closed(self) -> bool:
        """Whether it gave the parameters back."""
        ...


_OWNERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Owner]] = weakref.WeakKeyDictionary()


def claim(model: nn.Module, owner: Owner) -> None:
    """Note that a model belongs to a stepper, until that is closed."""
    _OWNERS[model] = weakref.ref(owner)


def require_free(model: nn.Module) -> None:
    """Refuse a model that another stepper steps.

    Raises:
        ValueError: There is one, which is not closed.
    """
    owner = _OWNERS.get(model)
    if owner is not None and (other := owner()) is not None and not other.closed:
        raise ValueError("model: belongs to a stepper already; call that stepper's close() first.")


BufferValues = Literal["first", "mean"]
"""The values that buffers are set to: those of the first rank, or the mean over all ranks."""


def synchronize_values(
    model: nn.Module, communicators: Sequence[Communicator], parameters: Sequence[nn.Parameter]
) -> None:
    """Copy the first rank's values of these parameters, and of all buffers, to all ranks."""
    ids = {id(parameter) for parameter in parameters}
    named = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) in ids]
    for name, tensor in [*named, *model.named_buffers()]:
        for communicator in communicators:
            values = tensor.detach()
            whole = values if values.is_contiguous() else values.contiguous()
            communicator.broadcast(whole, name)
            if whole is not values:
                values.copy_(whole)


def synchronize_buffers(model: nn.Module, communicators: Sequence[Communicator], values: BufferValues) -> None:
    """Make the buffers of a model the same on all ranks. Every rank has to call it.

    Args:
        model: The model.
        communicators: The outer and the inner ranks.
        values: The result. A mean is computed in float64, in the order of the ranks, and rounded once; values of other types are
            the first rank's.

    Raises:
        ValueError: ``values`` is neither of the two.
    """
    require_word("values", values, BufferValues)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if values == "mean" and buffer.is_floating_point():
                _average(buffer, communicators, name)
            else:
                whole = buffer.detach().contiguous()
                for communicator in communicators:
                    communicator.broadcast(whole, name)
                buffer.copy_(whole)


def _average(buffer: Tensor, communicators: Sequence[Communicator], name: str) -> None:
    total, ranks = buffer.detach().double().reshape(-1), 1
    for communicator in reversed(communicators):
        everyone = total.new_empty((communicator.size, total.numel()))
        communicator.all_gather(everyone.view(-1), total, name).wait()
        total, ranks = everyone[0].clone(), ranks * communicator.size
        for other in everyone[1:]:
            total += other
    buffer.copy_((total / ranks).view(buffer.shape))
