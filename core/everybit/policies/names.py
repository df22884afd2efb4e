"""The presets of :mod:`everybit.policies` by name: ``policy="LEAN_BF16"`` wherever a policy is accepted."""

from __future__ import annotations

import difflib
from typing import Literal, TypeVar

from everybit.policies.labels import AnyPolicy
from everybit.policies.policy import Policy
from everybit.policies.presets import PRESETS

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
