"""What a transform is: its two functions, the context of a step, the requests it may make, and its promises."""

from everybit.protocol.context import ALONE, Context
from everybit.protocol.contracts import Unwritten, enter, require_cut, require_state, separated
from everybit.protocol.hyperparameters import accepting, hyperparameters, map_hyperparameters
from everybit.protocol.joint_work import JointWork
from everybit.protocol.parts import fields_of, is_transform, map_parts, transforms_in
from everybit.protocol.per_tensor import Members
from everybit.protocol.requests import (
    Axis,
    Local,
    Max,
    Pending,
    Request,
    Sum,
    SumOfSquares,
    advance,
    fulfil,
    require_done,
    then,
    with_results,
)
from everybit.protocol.stored_rows import StoredRows, holds_rows, slots_in, with_slots
from everybit.protocol.transform import (
    PARTS,
    Cut,
    Elementwise,
    HasEvalParams,
    SlotDecay,
    Transform,
    WholeTensors,
    any_draws,
    any_per_tensor,
    any_reduces,
    coarsest,
    decays,
    eval_params,
    periods,
    require_transform,
)
from everybit.protocol.whole_work import AtOwner, Whole, WholeWork, requested, why_not_elsewhere

__all__ = [
    "ALONE", "PARTS", "AtOwner", "Axis", "Context", "Cut", "Elementwise", "HasEvalParams", "JointWork", "Local", "Max", "Members",
    "Pending", "Request", "SlotDecay", "StoredRows", "Sum", "SumOfSquares", "Transform", "Unwritten", "Whole", "WholeTensors",
    "WholeWork", "accepting", "advance", "any_draws", "any_per_tensor", "any_reduces", "coarsest", "decays", "enter", "eval_params",
    "fields_of", "fulfil", "holds_rows", "hyperparameters", "is_transform", "map_hyperparameters", "map_parts", "periods", "requested",
    "require_cut", "require_done", "require_state", "require_transform", "separated", "slots_in", "then", "transforms_in",
    "why_not_elsewhere", "with_results", "with_slots",
]  # fmt: skip
