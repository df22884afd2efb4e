"""A pure step as one pass over memory: compiled where that is possible, and told apart by what its code depends on."""

from everybit_torch.compiled.compilation import (
    DeclinedError, can_compile, cause, compile_step, has_compiler, let_length_vary, may_compile, tell_of_small_models,
)  # fmt: skip
from everybit_torch.compiled.dependencies import is_of_library
from everybit_torch.compiled.direct_calls import DirectFunction, GradientKind, same_objects
from everybit_torch.compiled.fused_sums import FusedSums
from everybit_torch.compiled.traceable_numbers import Factory, fits, is_number
from everybit_torch.compiled.variants import LIMIT, Inputs, Variants

__all__ = [
    "LIMIT", "DeclinedError", "DirectFunction", "Factory", "FusedSums", "GradientKind", "Inputs", "Variants",
    "can_compile", "cause", "compile_step", "fits", "has_compiler", "is_number", "is_of_library", "let_length_vary", "may_compile",
    "same_objects", "tell_of_small_models",
]  # fmt: skip
