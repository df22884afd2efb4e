"""Carry out the loading of a state dict that was judged: from here on nothing is refused."""

from __future__ import annotations

from torch import Tensor

from everybit_torch.front import Front
from everybit_torch.full_precision import RoundingLoss
from everybit_torch.loading import Loaded
from everybit_torch.places import parameters_of


def restore(front: Front, loaded: Loaded) -> None:
    """Take over a state dict, as stored."""
    _take_settings(front, loaded)
    front.engine.load(loaded.own)


def restore_in_full(front: Front, loaded: Loaded) -> dict[str, RoundingLoss]:
    """Take over a state dict in full precision.

    Returns:
        By name, what rounding lost.
    """
    _take_settings(front, loaded)
    return front.engine.encode(loaded.own)


def _take_settings(front: Front, loaded: Loaded) -> None:
    """Hyperparameters, places for parameters that get state, and what others keep: all but the optimizer's own entries."""
    settings = loaded.settings
    for values, new in zip(front.param_groups, settings.groups, strict=True):
        values.update(new)
    front.engine.start_with(settings.arguments, settings.optimizers)
    if loaded.placement is not None:
        front.places.carry_out(loaded.placement)
    front.engine.follow_parameters(lambda: parameters_of(front.param_groups))
    states = front.engine.states
    for key in [key for key in states if not isinstance(key, Tensor)]:
        del states[key]
    states.update(loaded.elsewhere)
    for parameter in parameters_of(front.param_groups):
        kept = loaded.kept.get(id(parameter), {})
        if kept or parameter in states:
            states[parameter].keep(kept)
