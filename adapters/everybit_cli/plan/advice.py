"""Which of several plans fits into the memory that there is, and why: the most precise policy, and the strategy that sends least."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import everybit as eb
from everybit_cli.errors import OptionError
from everybit_cli.optimizers import Chosen
from everybit_cli.output import counted
from everybit_torch.planning.plan import Plan
from everybit_torch.sharded.strategies import Strategy

MOST_RANKS = 1 << 14
"""How far ranks are doubled when nothing fits."""

_FEWEST_BYTES = 1 << 20
"""The least number without a unit that is taken as a number of bytes: smaller ones lack their unit."""

UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("bytes", 1))

KEEPS = {
    "FP32": "everything in float32",
    "EXACT_BF16": "the weights and moments of float32 training, bit for bit",
    "MIXED_BF16": "float32 main weights and moments",
    "LEAN_BF16": "exact float32 weights; bfloat16 moments, rounded stochastically",
    "KAHAN_BF16": "bfloat16 weights with a bfloat16 residual; bfloat16 moments, rounded stochastically",
    "TIGHT_BF16": "weights of 24 bits and bfloat16 moments, rounded stochastically",
    "FLOOR_BF16": "bfloat16 throughout, rounded stochastically: right on average, with more noise",
}
"""A description of each policy, in words."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One policy under one strategy."""

    policy: str
    strategy: Strategy
    plan: Plan


def parsed_size(option: str, text: str) -> int:
    """Bytes of a size such as ``80GiB``.

    Raises:
        OptionError: The text is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", text.strip().lower())
    if match is None or (match[3] and not match[2]):
        raise OptionError(option, text, "a number with a unit, such as 80GB, 79.6GiB or 512MiB")
    if text.strip().replace(".", "").isdigit() and 0 < float(match[1]) < _FEWEST_BYTES:
        raise OptionError(
            option, f"{text} (did you mean {match[1]}GB?)", "a number with a unit; without one it is a number of bytes"
        )
    power = "kmgt".index(match[2]) + 1 if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def unit_of(most: int) -> tuple[str, int]:
    """Return the name and the bytes of the largest unit of memory that is not larger than ``most`` bytes."""
    return next((name, size) for name, size in UNITS if most >= size or size == 1)


def sized(nbytes: int) -> str:
    """Bytes in the largest unit of which there is one at least: ``46.6 GiB``."""
    unit, size = unit_of(nbytes)
    return f"{nbytes} {unit}" if size == 1 else f"{nbytes / size:.1f} {unit}"


def best_of(choices: Sequence[Planned], budget: int) -> Planned | None:
    """Choose the first policy that fits under some strategy, and of the strategies that fit the first with the fewest bytes sent."""
    for policy in dict.fromkeys(choice.policy for choice in choices):
        fitting = [one for one in choices if one.policy == policy and one.plan.peak_bytes <= budget]
        if fitting:
            return min(fitting, key=lambda one: one.plan.wire_bytes)
    return None


def enough_ranks(
    policies: Sequence[str], ranks: int, budget: int, of: Callable[[str, int], Plan]
) -> dict[str, int | None]:
    """Return for each policy the number of ranks (doubled) with enough memory if everything is sharded; None: no number is enough."""
    found: dict[str, int | None] = {}
    for name in policies:
        found[name], more = None, ranks
        while found[name] is None and more < MOST_RANKS:
            more *= 2
            if of(name, more).peak_bytes <= budget:
                found[name] = more
    return found


def reasons(choices: Sequence[Planned], best: Planned, budget: int, ranks: int, optimizer: Chosen) -> list[str]:
    """Sentences that say why a plan is advised, and how it is written in Python."""
    plan = best.plan
    said = [
        f"{best.policy} under {best.strategy}: {sized(plan.peak_bytes)} at the peak, {sized(budget - plan.peak_bytes)} of"
        f" the budget are left; {sized(plan.wire_bytes)} are sent in a step."
    ]
    if best.policy in KEEPS:
        said.append(f"{best.policy} keeps {KEEPS[best.policy]}.")
    policies = list(dict.fromkeys(choice.policy for choice in choices))
    for policy in policies[: policies.index(best.policy)]:
        least = min((one for one in choices if one.policy == policy), key=lambda one: one.plan.peak_bytes)
        said.append(f"{policy} does not fit: {sized(least.plan.peak_bytes)} at least, under {least.strategy}.")
    said += [
        f"{one.strategy} would send less, and takes {sized(one.plan.peak_bytes)}."
        for one in choices
        if one.policy == best.policy and one.plan.wire_bytes < plan.wire_bytes
    ]
    kept = ", offload='state'" * (best.plan.host_bytes > 0)
    written = f"eb.policies.{best.policy}" if best.policy in eb.policies.PRESETS else f'load_policy("{best.policy}...")'
    if ranks > 1:
        code = f"FlatStepper(model, {optimizer.code}, policy={written}, strategy={best.strategy!r}, units=[...]{kept})"
    elif optimizer.shown == "adamw":
        code = f"AdamW(model.parameters(), policy={written}{kept})"
    else:
        given = "".join(f", {name}={value!r}" for name, value in optimizer.given.items())
        code = f"create({optimizer.entry.name!r}, model, policy={written}{given}{kept})"
    return [*said, f"As code: {code}"]


def too_small(choices: Sequence[Planned], enough: dict[str, int | None], budget: int) -> list[str]:
    """Sentences with the least memory that is needed, and the number of ranks that would be enough."""
    least = min(choices, key=lambda one: one.plan.peak_bytes)
    said = [
        f"Nothing fits into {sized(budget)}: the least is {sized(least.plan.peak_bytes)}, {least.policy} under {least.strategy}."
    ]
    for policy, ranks in enough.items():
        said.append(
            f"{policy} fits on no number of ranks: one unit alone is too large, or there are no units (--units)."
            if ranks is None
            else f"{policy} fits from {counted(ranks, 'rank')} on, under optim_grads_params."
        )
    return said
