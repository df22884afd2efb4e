"""Inductor's options for code on accelerators: it rounds as eager code does, and generates few kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

EXACT_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    # Triton makes a product and a sum one operation unless this is set, and leaves out pairs of casts that round.
    "emulate_precision_casts": True,
    # Otherwise its division of float32 is off in the last bit.
    "eager_numerics.division_rounding": True,
    # Library functions else take subnormal numbers for zero.
    "eager_numerics.disable_ftz": True,
    # The same for a CPU, where both are off unless somebody sets them.
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
}
"""Options of ``torch.compile`` with which compiled code rounds as eager code does: ``torch.compile(step, options=EXACT_OPTIONS)``.

Steps that this library compiles have them. A function of your own that you compile, and that contains a step, has the options that you
give it.
"""

_FEW_KERNELS = {
    # Kernels of one element share no input, and are otherwise not fused: a launch takes as long as a step of a million elements.
    "aggressive_fusion": True,
    "score_fusion_memory_threshold": 0,
    # A step over elements and the maxima of their blocks are else taken for loops over different memory, and not made one.
    "loop_ordering_after_fusion": False,
}


class MissingOptionError(RuntimeError):
    """This torch has no option by which compiled code rounds as eager code does."""


@cache
def device_options() -> dict[str, Any]:
    """The options for steps on an accelerator.

    Raises:
        MissingOptionError: torch has not all that decide on bits, so that steps are not to be compiled.
    """
    known = import_module("torch._inductor.config").get_config_copy()
    exact = {name: value for name, value in EXACT_OPTIONS.items() if not name.startswith("cpp.")}
    missing = [name for name in exact if name not in known]
    if missing:
        raise MissingOptionError(
            f"this torch has no option {', '.join(missing)}, without which code for an accelerator rounds otherwise than eager code"
        )
    return {**exact, **{name: value for name, value in _FEW_KERNELS.items() if name in known}}
