"""Policies: which number format each tensor of an optimizer is stored in.

Presets by name. Bytes are per parameter, for an optimizer with Adam's two slots, and include the gradient.

| name             | bytes | what is stored |
|---|---|---|
| ``FP64``         |    32 | everything in float64, computed in float64 |
| ``FP32``         |    16 | everything in float32 |
| ``MIXED_BF16``   |    16 | bfloat16 model, float32 main copy and moments (18 with float32 gradients) |
| ``EXACT_BF16``   |    14 | bfloat16 model, int16 remainder, float32 moments: bit for bit what float32 training does to its weights |
| ``LEAN_BF16``    |    10 | bfloat16 model, int16 remainder: exact float32 weights; bfloat16 moments, rounded stochastically |
| ``KAHAN_BF16``   |    10 | bfloat16 model, bfloat16 residual to nearest; moments as above. ``LEAN_BF16`` is better, see below |
| ``TIGHT_BF16``   |     9 | as ``LEAN_BF16`` with an int8 remainder, rounded stochastically |
| ``FLOOR_BF16``   |     8 | bfloat16 throughout, all rounded stochastically |
| ``PURE_BF16``    |     8 | bfloat16 throughout, all rounded to nearest, as in plain torch; refused where a moment would freeze |
| ``ANYPRECISION`` |    10 | torchdistX's defaults: weights and second moment to nearest in bfloat16, float32 momentum; refused likewise |
| ``LEAN_8BIT``    |  7.03 | as ``TIGHT_BF16``, moments in 8 bits with a scale for 256 elements, rounded stochastically |
| ``FLOOR_8BIT``   |  6.03 | as ``FLOOR_BF16``, moments in 8 bits likewise |
| ``LEAN_4BIT``    |  6.55 | as ``LEAN_8BIT``, second moment in 4 bits with a scale for 128 elements |

``KAHAN_BF16`` continues runs of optimizers that compensate bfloat16 weights by a bfloat16 residual, or is compared with them
(torchdistX's AnyPrecisionAdamW, optimi), and for code that reads the residual as a number. Choose ``LEAN_BF16`` otherwise: it takes the
same bytes, and its weights are exact float32 numbers. A residual that is rounded to nearest is off by up to 2**-17 of the weight at every
step, always to the same side while a weight moves slowly: over 20,000 steps of decay without gradients ``KAHAN_BF16`` decays weights by
2.1 % too much, with a relative error of 1.7e-2 where ``LEAN_BF16`` has 5.3e-6 (weights around 0.02, a decay of 1e-5 a step).

A bfloat16 moment is rounded stochastically in every preset but the last two: rounded to nearest it stops moving where a decay rate is above
0.96875, which is a refused policy, and at lower rates it is off by up to a seventh where gradients are steady (2 to 3 % on average at 0.9).
"""

from everybit.policies.labels import (
    LOW, AnyPolicy, ByLabel, block_of, by_dtype, by_label, draws_bits, for_dtype, policies_of, resolve_tree,
)  # fmt: skip
from everybit.policies.policy import Grads, Policy, Resolved, resolve
from everybit.policies.presets import (
    ANYPRECISION, EXACT_BF16, FLOOR_8BIT, FLOOR_BF16, FP32, FP64, KAHAN_BF16, LEAN_4BIT, LEAN_8BIT, LEAN_BF16, MIXED_BF16, PRESETS,
    PURE_BF16, TIGHT_BF16, PolicyName, PolicyOrName, describe, native, short, with_name_resolved,
)  # fmt: skip
from everybit.policies.wide_parameters import keep_wide

__all__ = [
    "ANYPRECISION", "EXACT_BF16", "FLOOR_8BIT", "FLOOR_BF16", "FP32", "FP64", "KAHAN_BF16", "LEAN_4BIT", "LEAN_8BIT", "LEAN_BF16",
    "LOW", "MIXED_BF16", "PRESETS", "PURE_BF16", "TIGHT_BF16", "AnyPolicy", "ByLabel", "Grads", "Policy", "PolicyName",
    "PolicyOrName", "Resolved", "block_of", "by_dtype", "by_label", "describe", "draws_bits", "for_dtype", "keep_wide",
    "native", "policies_of", "resolve", "resolve_tree", "short", "with_name_resolved",
]  # fmt: skip


def __dir__() -> list[str]:
    """The public names; modules are imported by their own."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
