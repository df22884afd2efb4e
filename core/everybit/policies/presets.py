"""The presets: policies by name; :mod:`everybit.policies` lists their bytes and uses."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from everybit.base import FloatDType
from everybit.formats import Blockwise, Kahan, Master, Nearest, Split, Stochastic
from everybit.policies.labels import AnyPolicy, ByLabel
from everybit.policies.policy import Policy

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
        ValueError: The model is 16-bit, where the user has to choose which bits to spend.
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


PolicyName = Literal[
    "FP64", "FP32", "MIXED_BF16", "EXACT_BF16", "LEAN_BF16", "KAHAN_BF16", "TIGHT_BF16", "FLOOR_BF16", "PURE_BF16", "ANYPRECISION",
    "LEAN_8BIT", "FLOOR_8BIT", "LEAN_4BIT"
]  # fmt: skip
PolicyOrName = AnyPolicy | PolicyName

T = TypeVar("T")


def with_name_resolved(policy: T | PolicyName, *, field: str = "policy") -> T | Policy:
    """The preset that ``policy`` names; anything but a string is returned as it is.

    Args:
        policy: A name from :data:`everybit.policies.PRESETS`, or something else that the caller checks.
        field: The argument that messages are about.

    Raises:
        ValueError: No preset has this name; the message suggests the nearest one.

    Examples:
        >>> from everybit.policies import with_name_resolved
        >>> with_name_resolved("LEAN_BF16").bytes_per_param()
        10.0
    """
    if not isinstance(policy, str):
        return policy
    if policy in PRESETS:
        return PRESETS[policy]
    # Near means a slip of the pen: "bf16" is no nearer to LEAN_BF16 than to PURE_BF16.
    close = difflib.get_close_matches(policy.upper(), PRESETS, n=1, cutoff=0.75)
    meant = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(
        f"{field}: got {policy!r}{meant}; accepted are {', '.join(map(repr, PRESETS))}, and policies of your own: everybit.Policy(...)."
    )
