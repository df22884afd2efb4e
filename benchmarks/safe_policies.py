"""Which policies are safe for which optimizer: what is refused, and how far each slot is from float32 where it is not.

    python benchmarks/safe_policies.py --write

Every optimizer takes STEPS steps of the same gradients under each policy and under FP32: around 1 in the first half, around
0.05 in the second, so that averages have to rise and to fall. A slot's deviation is that of its sum, relative to float32's: rounding
errors that have no direction vanish in it, and a slot that has stopped is off by what it missed. What a policy refuses is run all the
same (``unsafe="allow"``).
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.protocol import decays
from pages import insert

PAGE = Path(__file__).parents[1] / "docs/optimizers.md"
BEGIN, END = "<!-- begin safe policies -->\n", "<!-- end safe policies -->"
PRESETS: tuple[eb.PolicyName, ...] = ("LEAN_BF16", "FLOOR_BF16", "PURE_BF16")
STEPS = 1000
ELEMENTS = 1024
ALLOWED = 1 / 7
"""The greatest deviation of a slot that moves: what the rule of ``everybit/policies/checks.py`` guarantees."""


@dataclass(frozen=True, slots=True)
class Found:
    """What became of an optimizer under a policy.

    Attributes:
        refused: The slot that the policy was refused for; None: it was not.
        slot: The slot that is farthest from float32's; empty if there is none.
        deviation: How far.
    """

    refused: str | None
    slot: str
    deviation: float

    @property
    def moves(self) -> bool:
        """Whether all slots are as near to float32's as the rule guarantees."""
        return self.deviation <= ALLOWED

    def __str__(self) -> str:
        if math.isnan(self.deviation):
            return ("" if self.refused is None else f"refused for `{self.refused}`; ") + "not finite"
        share = f"{100 * self.deviation:{'.0f' if self.deviation > 0.1 else '.1g'}} %"
        moved = (f"`{self.slot}` {share}" if self.moves else f"`{self.slot}` **{share}**") if self.slot else "no state"
        return f"refused for `{self.refused}`; {moved}" if self.refused is not None else moved


def gradient(step: int, steps: int) -> Tensor:
    """The gradient of a step."""
    generator = torch.Generator().manual_seed(step)
    around = 1.0 if 2 * step <= steps else 0.05
    return around * (1 + 0.5 * torch.randn(ELEMENTS, generator=generator).clamp(-1.5, 1.5))


def slots_after(transform: eb.Transform[Any], policy: eb.Policy, steps: int) -> dict[str, Tensor]:
    """Every slot after so many steps, decoded, in float64."""
    optimizer = eb.with_policy(transform, policy, unsafe="allow")
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, policy.model_dtype)
    params = {"weight": torch.randn(8, ELEMENTS // 8, generator=generator).bfloat16().to(dtype)}
    state = optimizer.init(params)
    for step in range(1, steps + 1):
        params, state = optimizer.step(params, {"weight": gradient(step, steps).reshape(8, -1).to(dtype)}, state)
    found: dict[str, Tensor] = {}

    def note(name: str, slot: object) -> object:
        # Parts of a partition have slots of the same name, and some have no parameters.
        leaves = [leaf.double().reshape(-1) for leaf in eb.tree.leaves(slot)]
        found[name] = torch.cat([found.get(name, torch.zeros(0, dtype=torch.float64)), *leaves])
        return slot

    eb.tree.map_slots(note, optimizer.decode(params, state)[1].inner)
    return found


def refused_for(one: eb.NamedOptimizer, policy: eb.Policy) -> str | None:
    """The slot for which a policy is refused; None: it is not."""
    try:
        eb.with_policy(one.function(), policy)
    except ValueError as error:
        return next(decay.slot for decay in decays(one.function()) if f"'{decay.slot}'" in str(error))
    return None


def examined(name: eb.OptimizerName, steps: int = STEPS) -> dict[str, Found]:
    """What becomes of an optimizer under each preset."""
    one = eb.optimizers()[name]
    exact = slots_after(one.function(), eb.policies.FP32, steps)
    found: dict[str, Found] = {}
    for preset in PRESETS:
        policy = eb.policies.PRESETS[preset]
        stored = slots_after(one.function(), policy, steps)
        off = {
            slot: float((stored[slot] - value).sum().abs() / value.abs().sum().clamp(min=1e-300))
            for slot, value in exact.items()
        }
        worst = max(off, key=lambda slot: off[slot], default="")
        found[preset] = Found(refused_for(one, policy), worst, off.get(worst, 0.0))
    return found


def table() -> str:
    """The table, in Markdown."""
    lines = [f"| optimizer | {' | '.join(f'`{name}`' for name in PRESETS)} |", f"|{'---|' * (len(PRESETS) + 1)}"]
    lines += [f"| `{name}` | {' | '.join(map(str, examined(name).values()))} |" for name in eb.optimizers()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description="Which policies are safe for which optimizer.")
    parser.add_argument("--write", action="store_true", help="write it into docs/optimizers.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    made = table()
    if not given.write:
        print(made, end="")
        return
    insert(PAGE, "safe policies", made)


if __name__ == "__main__":
    main()
