"""Checks for transforms and formats of your own: the promises that the built-in ones keep.

One line runs all of them, and gives for each that fails the promise, the finding and the place to look at::

    print(everybit.testing.assert_transform_conforms(my_optimizer))

A single check takes a *build*: a function from a learning rate (a float, a 0-d tensor or a schedule) to a transform, such as ``eb.adamw``
or ``lambda lr: eb.chain(MyTransform(), eb.scale_by_learning_rate(lr))``. It returns None, or raises ``AssertionError`` with
the promise and the finding. With pytest::

    @pytest.mark.parametrize("name", everybit.testing.CHECKS)
    def test_my_optimizer(name):
        everybit.testing.CHECKS[name](my_optimizer)

A number format of your own is held to its promises by ``check_format(format)``.

``REGISTRY`` holds everybit's own builds by name. The checks that compile empty the compiler's caches first.
"""

from everybit.testing.battery import CHECKS
from everybit.testing.checks.compiled import check_compiled_equals_eager, check_no_recompilation
from everybit.testing.checks.cuts import check_cut, check_flat_equals_tree
from everybit.testing.checks.formats import check_format
from everybit.testing.checks.functional import check_differentiable, check_vmap
from everybit.testing.checks.purity import check_pure, check_state_is_a_fixed_point
from everybit.testing.checks.runs import (
    check_hyperparameters_are_data, check_meta_init, check_no_wait, check_periodic_work, check_resume_equals_continue,
)  # fmt: skip
from everybit.testing.checks.shards import check_shards_equal_whole
from everybit.testing.conformance import Conformance, assert_transform_conforms
from everybit.testing.examples import Build, assert_same_bits, example_grads, example_params
from everybit.testing.own_transforms import REGISTRY

__all__ = [
    "CHECKS", "REGISTRY", "Build", "Conformance", "assert_same_bits", "assert_transform_conforms",
    "check_compiled_equals_eager", "check_cut", "check_differentiable", "check_flat_equals_tree", "check_format",
    "check_hyperparameters_are_data", "check_meta_init", "check_no_recompilation", "check_no_wait",
    "check_periodic_work", "check_pure", "check_resume_equals_continue", "check_shards_equal_whole",
    "check_state_is_a_fixed_point", "check_vmap", "example_grads", "example_params",
]  # fmt: skip


def __dir__() -> list[str]:
    """The public names; modules are imported by their own."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
