"""Whether a policy can work for a transform: a format has to be fine enough for how slowly a slot moves.

Rounded to nearest, a number ``m`` that a step moves by ``(1 - rate) * (g - m)`` stops where that is less than half a unit in its last
place: off by up to ``resolution / (1 - rate)``, relative to itself. A bfloat16 mean with a rate of 0.999 never falls again after gradients
did. With ``1 - rate`` at least ``MARGIN`` times the resolution it comes within a seventh of its value. The rule holds for every slot and
every format, and however a rate is given: a rate that the host does not know is judged as the slowest that it may become.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from everybit.formats import Format, Kahan, Nearest, Split, StateFormat, Stochastic
from everybit.policies.policy import Policy
from everybit.protocol import SlotDecay

MARGIN = 8.0
"""How many times the resolution of its format a step of a slot has to be able to change."""

# The suggested formats, from few bytes to many.
_CANDIDATES: tuple[tuple[str, StateFormat], ...] = (
    ("Stochastic('bfloat16')", Stochastic("bfloat16")),
    ("Split(8, rounding='stochastic')", Split(8, rounding="stochastic")),
    ("Split(8)", Split(8)),
    ("Kahan(rounding='stochastic')", Kahan(rounding="stochastic")),
    ("Kahan()", Kahan()),
    ("Split(16)", Split(16)),
    ("Nearest('float32')", Nearest("float32")),
    ("Nearest('float64')", Nearest("float64")),
)


def problems(policy: Policy, declared: Iterable[SlotDecay]) -> list[str]:
    """List the entries of ``policy`` that cannot work for slots that decay as declared, and formats that would; empty if all can work.

    Rates that are tensors or schedules are judged as if they were 1: the value of a tensor is on the device, and that of a schedule lies
    in the future.
    """
    return [text for one in declared if (text := _problem(policy, one)) is not None]


def undeclared(policy: Policy, slots: Iterable[str], declared: Iterable[SlotDecay]) -> list[str]:
    """The slots of which a transform does not say how slowly they move, though their format cannot follow every rate."""
    known = {one.slot for one in declared}
    return [
        name
        for name in dict.fromkeys(slots)
        if name not in known and policy.resolved_slot(name).resolution(policy.compute) > 0
    ]


def _problem(policy: Policy, one: SlotDecay) -> str | None:
    format = policy.resolved_slot(one.slot, "non-negative" if one.squares else "signed")
    loses = one.squares and format.loses_small_numbers
    if not loses and _follows(format, policy, one):
        # Format a dataclass only for an error: a compiler that traces this may not know how.
        return None
    who = f"{policy.field_of(one.slot)}: got {format}"
    if loses:
        return (
            f"{who} for {one.slot!r}, which holds squares of gradients; of a gradient below 2.4e-4 a float16 keeps no square, and a step"
            f" divides by its root. Accepted here are {_accepted(policy, one)}."
        )
    rate = _number(one)
    smallest = MARGIN * format.resolution(policy.compute)
    if rate is None:
        given = "a tensor" if isinstance(one.rate, torch.Tensor) else "a schedule"
        why = f"the decay rate of {one.slot!r} is {given}, whose value may come close to 1"
    else:
        why = f"{one.slot!r} has a decay rate of {rate:.12g}, so that a step changes it by as little as {1 - rate:.3g} of itself"
    return (
        f"{who}; {why}, and rounding to nearest undoes changes of {format.resolution(policy.compute):.3g} and less: it would stop moving."
        f" Accepted here are {_accepted(policy, one)}, or a decay rate that is a number of at most {1 - smallest:.12g}."
    )


def _follows(format: Format, policy: Policy, one: SlotDecay) -> bool:
    resolution = format.resolution(policy.compute)
    rate = _number(one)
    return resolution == 0 or (rate is not None and 1 - rate >= MARGIN * resolution)


def _number(one: SlotDecay) -> float | None:
    return float(one.rate) if isinstance(one.rate, (int, float)) else None


def _accepted(policy: Policy, one: SlotDecay) -> str:
    too_wide = Nearest("float64" if policy.compute == "float32" else "float32")
    fitting = [
        written
        for written, candidate in _CANDIDATES
        if candidate.objection(policy.compute) is None
        and candidate != too_wide
        and _follows(candidate.for_slot("signed", policy.compute), policy, one)
    ]
    return ", ".join(fitting[:4])
