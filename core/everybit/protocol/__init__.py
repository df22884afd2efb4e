"""The definition of a transform: its two functions, the context of a step, the requests it may make, and its promises."""

from everybit.protocol.context import ALONE, Context, Due, enter, in_turn
from everybit.protocol.contracts import Unwritten, require_cut, require_state, separated
from everybit.protocol.hyperparameters import accepting, hyperparameters, map_hyperparameters
from everybit.protocol.requests import (
    Axis, Local, Max, Pending, Request, Sum, SumOfSquares, advance, fulfil, require_done, then,
)  # fmt: skip
from everybit.protocol.transform import (
    PARTS, Cut, Elementwise, HasEvalParams, SlotDecay, Transform, WholeTensors, any_draws, any_per_tensor, any_reduces, coarsest, common,
    decays, eval_params, periods, require_transform,
)  # fmt: skip
from everybit.protocol.traversal import fields_of, is_transform, map_parts, transforms_in

__all__ = [
    "ALONE", "PARTS", "Axis", "Context", "Cut", "Due", "Elementwise", "HasEvalParams", "Local", "Max", "Pending", "Request", "SlotDecay",
    "Sum", "SumOfSquares", "Transform", "Unwritten", "WholeTensors", "accepting", "advance", "any_draws", "any_per_tensor",
    "any_reduces", "coarsest", "common", "decays", "enter", "eval_params", "fields_of", "fulfil", "hyperparameters", "in_turn",
    "is_transform", "map_hyperparameters", "map_parts", "periods", "require_cut", "require_done", "require_state",
    "require_transform", "separated", "then", "transforms_in",
]  # fmt: skip


def __dir__() -> list[str]:
    """The public names; modules are imported by their own."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
