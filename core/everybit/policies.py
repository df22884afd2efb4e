"""Presets: policies by name. Bytes are per parameter, for an optimizer with Adam's two slots, and include the gradient.

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

``KAHAN_BF16`` is for those who want to continue or compare with optimizers that compensate bfloat16 weights by a bfloat16 residual
(torchdistX's AnyPrecisionAdamW, optimi), and for code that reads the residual as a number. Choose ``LEAN_BF16`` otherwise: it takes the
same bytes, and its weights are exact float32 numbers. A residual that is rounded to nearest is off by up to 2**-17 of the weight at every
step, always to the same side while a weight moves slowly: over 20,000 steps of decay without gradients ``KAHAN_BF16`` decays weights by
2.1 % too much, with a relative error of 1.7e-2 where ``LEAN_BF16`` has 5.3e-6 (weights around 0.02, a decay of 1e-5 a step).

A bfloat16 moment is rounded stochastically in every preset but the last two: rounded to nearest it stops moving where a decay rate is above
0.96875, which is a refused policy, and at lower rates it is off by up to a seventh where gradients are steady (2 to 3 % on average at 0.9).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any

from everybit.dtypes import FloatDType
from everybit.formats import Blockwise, Kahan, Master, Nearest, Split, Stochastic
from everybit.policy import ByLabel, Policy

_BF16 = Nearest("bfloat16")
_BF16_STOCHASTIC = Stochastic("bfloat16")

FP64 = Policy(
    compute="float64",
    params=Nearest("float64"),
    momentum=Nearest("float64"),
    variance=Nearest("float64"),
    state=Nearest("float64"),
)
FP32 = Policy(params=Nearest("float32"))
MIXED_BF16 = Policy(params=Master("float32"))
EXACT_BF16 = Policy(params=Split(16))
LEAN_BF16 = Policy(params=Split(16), momentum=_BF16_STOCHASTIC, variance=_BF16_STOCHASTIC)
KAHAN_BF16 = Policy(params=Kahan(), momentum=_BF16_STOCHASTIC, variance=_BF16_STOCHASTIC)
TIGHT_BF16 = Policy(params=Split(8, rounding="stochastic"), momentum=_BF16_STOCHASTIC, variance=_BF16_STOCHASTIC)
FLOOR_BF16 = Policy(params=Stochastic(), momentum=_BF16_STOCHASTIC, variance=_BF16_STOCHASTIC)
PURE_BF16 = Policy(momentum=_BF16, variance=_BF16, state=_BF16)
ANYPRECISION = Policy(momentum=Nearest("float32"), variance=_BF16)

LEAN_8BIT = Policy(
    params=Split(8, rounding="stochastic"),
    momentum=Blockwise("power"),
    variance=Blockwise("power"),
    state=_BF16_STOCHASTIC,
)
FLOOR_8BIT = Policy(
    params=Stochastic(), momentum=Blockwise("power"), variance=Blockwise("power"), state=_BF16_STOCHASTIC
)
LEAN_4BIT = Policy(
    params=Split(8, rounding="stochastic"),
    momentum=Blockwise("power"),
    variance=Blockwise("float", 4, 128),
    state=_BF16_STOCHASTIC,
)

PRESETS: Mapping[str, Policy] = MappingProxyType(
    {
        "FP64": FP64,
        "FP32": FP32,
        "MIXED_BF16": MIXED_BF16,
        "EXACT_BF16": EXACT_BF16,
        "LEAN_BF16": LEAN_BF16,
        "KAHAN_BF16": KAHAN_BF16,
        "TIGHT_BF16": TIGHT_BF16,
        "FLOOR_BF16": FLOOR_BF16,
        "PURE_BF16": PURE_BF16,
        "ANYPRECISION": ANYPRECISION,
        "LEAN_8BIT": LEAN_8BIT,
        "FLOOR_8BIT": FLOOR_8BIT,
        "LEAN_4BIT": LEAN_4BIT,
    }
)


def native(model: FloatDType) -> Policy:
    """The policy that stores everything as the model is stored, where that is safe.

    Raises:
        ValueError: For 16-bit models, where it is not: which bits to spend is the user's choice.
    """
    if model == "float64":
        return FP64
    if model == "float32":
        return FP32
    raise ValueError(
        f"policy: parameters are {model}, and without a policy their updates would be rounded away. Choose one from"
        " everybit.policies: LEAN_BF16 (10 bytes per parameter), EXACT_BF16 (14), TIGHT_BF16 (9), FLOOR_BF16 (8), MIXED_BF16"
        ' (16), KAHAN_BF16 (10, less exact than LEAN_BF16), or PURE_BF16 (8, with unsafe="warn") for what plain torch does.'
    )


def describe(policy: object) -> str:
    """A policy in one line: the preset's name, or that of the nearest preset and what differs from it.

    Examples:
        >>> from everybit.policies import describe
        >>> describe(Policy(params=Split(16), momentum=Nearest("float32"), variance=Stochastic("bfloat16")))
        "LEAN_BF16 with momentum=Nearest('float32')"
    """
    if isinstance(policy, ByLabel):
        return f"by_label({', '.join(f'{label}: {describe(one)}' for label, one in policy.policies.items())})"
    if not isinstance(policy, Policy):
        return repr(policy)
    differences = {name: _differences(policy, preset) for name, preset in PRESETS.items()}
    # The way a preset stores weights is what its name stands for; of equals, the last, which stores less.
    nearest = min(
        reversed(list(PRESETS)), key=lambda name: (PRESETS[name].params != policy.params, len(differences[name]))
    )
    different = differences[nearest]
    return nearest + (f" with {', '.join(different)}" if different else "")


def _differences(policy: Policy, preset: Policy) -> list[str]:
    pairs = [(one.name, getattr(policy, one.name), getattr(preset, one.name)) for one in fields(Policy)]
    return [f"{name}={short(mine)}" for name, mine, theirs in pairs if mine != theirs]


def short(value: Any) -> str:
    """A format, or anything else in a policy, as one would write it: ``Split(16)``."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {short(one)}" for key, one in value.items()) + "}"
    if not hasattr(value, "__dataclass_fields__"):
        return repr(value)
    arguments = []
    by_name = False
    for one in fields(value):
        if getattr(value, one.name) == one.default and one.default is not MISSING:
            by_name = True
            continue
        given = repr(getattr(value, one.name))
        arguments.append(f"{one.name}={given}" if by_name or one.kw_only else given)
    return f"{type(value).__name__}({', '.join(arguments)})"
