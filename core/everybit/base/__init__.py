"""Trees, dtypes, scalars, rounding and random bits: what every other room is made of."""

from everybit.base import tree
from everybit.base.barriers import (
    atan, bias_correction, cos, exp, log, materialize, mean, sqrt, sum_of_all_squares, sum_of_squares,
)  # fmt: skip
from everybit.base.blocks import Blocks, FirstElement, Scattered, first_of_whole, without_gaps
from everybit.base.dtypes import (
    COMPUTE_DTYPES, DTYPES, FLOAT_DTYPES, LOW_DTYPES, ComputeDType, FloatDType, LowDType, dtype_name, is_dense, is_parameter, itemsize,
    require_member, settle_dtype, spelled,
)  # fmt: skip
from everybit.base.memo import once, remember
from everybit.base.named_tensors import load_state_dict, state_dict
from everybit.base.patterns import by_name, label_table, plain_name, require_each, require_name, require_patterns
from everybit.base.random_bits import Key, Lane, Numbering, normal, require_seed, stream
from everybit.base.rounding import straight_through, uniform
from everybit.base.scalars import (
    AboveZero, AtLeastOne, AtMostZero, Constant, Count, CountFromZero, Finite, FixedAboveZero, FixedFinite, FixedNonNegative, FixedShare,
    Hyperparameter, Instance, NonNegative, NonNegativeConstant, Options, PositiveConstant, Range, Ranged, Rate, RateConstant, Rows, Scalar,
    Schedule, Share, Updates, UpdatesFromZero, as_tensor, at, beside, clamp, is_zero, require, require_count, require_step, require_word,
    square_root,
)  # fmt: skip
from everybit.base.tree import Slot, state

__all__ = [
    "COMPUTE_DTYPES", "DTYPES", "FLOAT_DTYPES", "LOW_DTYPES", "AboveZero", "AtLeastOne", "AtMostZero", "Blocks",
    "ComputeDType", "Constant", "Count", "CountFromZero", "Finite", "FirstElement", "FixedAboveZero", "FixedFinite",
    "FixedNonNegative", "FixedShare", "FloatDType", "Hyperparameter", "Instance", "Key", "Lane", "LowDType",
    "NonNegative", "NonNegativeConstant", "Numbering", "Options", "PositiveConstant", "Range", "Ranged", "Rate",
    "RateConstant", "Rows", "Scalar", "Scattered", "Schedule", "Share", "Slot", "Updates", "UpdatesFromZero",
    "as_tensor", "at", "atan", "beside", "bias_correction", "by_name", "clamp", "cos", "dtype_name", "exp",
    "first_of_whole", "is_dense", "is_parameter", "is_zero", "itemsize", "label_table", "load_state_dict", "log",
    "materialize", "mean", "normal", "once", "plain_name", "remember", "require", "require_count", "require_each",
    "require_member", "require_name", "require_patterns", "require_seed", "require_step", "require_word",
    "settle_dtype", "spelled", "sqrt", "square_root", "state", "state_dict", "straight_through", "stream",
    "sum_of_all_squares", "sum_of_squares", "tree", "uniform", "without_gaps",
]  # fmt: skip
