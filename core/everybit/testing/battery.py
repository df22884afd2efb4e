"""All checks by name. See :mod:`everybit.testing` for how to use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from everybit.testing.checks.compiled import check_compiled_equals_eager, check_no_recompilation
from everybit.testing.checks.cuts import check_cut, check_flat_equals_tree
from everybit.testing.checks.functional import check_differentiable, check_vmap
from everybit.testing.checks.purity import check_pure, check_state_is_a_fixed_point
from everybit.testing.checks.runs import (
    check_hyperparameters_are_data,
    check_meta_init,
    check_no_wait,
    check_periodic_work,
    check_resume_equals_continue,
)
from everybit.testing.checks.shards import check_shards_equal_whole
from everybit.testing.examples import Build

CHECKS: Mapping[str, Callable[[Build], None]] = MappingProxyType(
    {
        "pure": check_pure,
        "state is a fixed point": check_state_is_a_fixed_point,
        "vmap": check_vmap,
        "differentiable": check_differentiable,
        "no recompilation": check_no_recompilation,
        "compiled equals eager": check_compiled_equals_eager,
        "flat equals tree": check_flat_equals_tree,
        "cut": check_cut,
        "shards equal whole": check_shards_equal_whole,
        "periodic work": check_periodic_work,
        "resume equals continue": check_resume_equals_continue,
        "hyperparameters are data": check_hyperparameters_are_data,
        "meta init": check_meta_init,
        "no wait": check_no_wait,
    }
)
"""The checks by name."""
