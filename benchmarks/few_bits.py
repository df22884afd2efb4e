"""Where the error of 8-bit and 4-bit state comes from: each moment alone, by map, rounding and kind of gradient.

    python benchmarks/few_bits.py --out benchmarks/results/few-bits-cpu.json --page docs/formats.md

AdamW without decay steps float32 weights with gradients that do not depend on them. The error is the distance of the weights from those of
float32 state, over the distance travelled; the overshoot is what lies along the way. It takes about ten minutes on one thread.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

import everybit as eb
from machine import describe
from pages import insert, table

EXACT = eb.Nearest("float32")
NEAREST = partial(eb.Blockwise, rounding="nearest")
POWER, FLOAT, DYNAMIC = eb.Blockwise("power"), eb.Blockwise("float"), eb.Blockwise("dynamic")
FOUR = eb.Blockwise("power", 4, 128)

MOMENTS: dict[str, tuple[Any, Any]] = {
    "momentum alone, `power`, stochastic": (POWER, EXACT),
    "momentum alone, `power`, nearest": (NEAREST("power"), EXACT),
    "variance alone, `power`, stochastic": (EXACT, POWER),
    "variance alone, `power`, nearest": (EXACT, NEAREST("power")),
    "both `power`, stochastic (`LEAN_8BIT`)": (POWER, POWER),
    "both `float`, stochastic": (FLOAT, FLOAT),
    "both `expanded`, stochastic": (eb.Blockwise("expanded"), eb.Blockwise("expanded")),
    "both `dynamic`, stochastic": (DYNAMIC, DYNAMIC),
    "both `dynamic`, nearest (as bitsandbytes)": (NEAREST("dynamic"), NEAREST("dynamic")),
    "variance alone, `float`, 4 bits": (EXACT, eb.Blockwise("float", 4, 128)),
    "variance alone, `power`, 4 bits": (EXACT, FOUR),
    "momentum `power`, 8 bits, variance `float`, 4 bits (`LEAN_4BIT`)": (POWER, eb.Blockwise("float", 4, 128)),
}
KINDS = ("normal", "heavy tails", "sparse rows", "signs flip", "six decades")


@dataclass
class Arguments:
    """Measure the error of state in few bits.

    Attributes:
        out: The file for raw results.
        page: The page whose table is written.
        steps: Of each run.
        elements: Of the parameter.
    """

    out: Path | None = None
    page: Path | None = None
    steps: int = 1000
    elements: int = 1024


def gradients(kind: str, steps: int, elements: int) -> Iterator[Tensor]:
    """Gradients of a kind, the same in every run."""
    generator = torch.Generator().manual_seed(7)
    sizes = 10 ** (-6 * torch.rand(elements, generator=torch.Generator().manual_seed(8)))
    for step in range(steps):
        x = torch.randn(elements, generator=generator)
        if kind == "heavy tails":
            x = x * torch.exp(1.5 * torch.randn(elements, generator=generator))
        elif kind == "sparse rows":
            x = x * (torch.rand(elements // 64, generator=generator) < 0.1).repeat_interleave(64)
        elif kind == "signs flip":
            x = x.abs() * (-1) ** step + 0.1
        elif kind == "six decades":  # in each block
            x = x * sizes
        yield x


def trained(momentum: Any, variance: Any, kind: str, arguments: Arguments) -> Tensor:
    """The weights after a run that begins at zero."""
    policy = eb.Policy(params=EXACT, momentum=momentum, variance=variance)
    # A variance that is rounded to nearest is refused, for it stops; here it is compared.
    optimizer = eb.with_policy(eb.adamw(1e-3, weight_decay=0.0), policy, unsafe="warn")
    weights = torch.zeros(arguments.elements)
    state = optimizer.init(weights)
    for grad in gradients(kind, arguments.steps, arguments.elements):
        weights, state = optimizer.step(weights, grad, state)
    return weights


def main(arguments: Arguments) -> None:
    """Measure, print and write."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results: list[dict[str, Any]] = []
    for kind in KINDS:
        print(f"{kind}: {len(MOMENTS)} runs of {arguments.steps} steps", flush=True)
        exact = trained(EXACT, EXACT, kind, arguments)
        for name, moments in MOMENTS.items():
            found = trained(*moments, kind, arguments)
            error = float((found - exact).norm() / exact.norm())
            overshoot = float((found * exact).sum() / exact.square().sum() - 1)
            results.append({"gradients": kind, "state": name, "error": error, "overshoot": overshoot})
            print(f"  {name}: error {error:.3f}, overshoot {overshoot:+.3f}", flush=True)
    by = {(one["state"], one["gradients"]): one for one in results}
    rows = [
        [name, *(f"{by[name, kind]['error']:.3f} ({by[name, kind]['overshoot']:+.3f})" for kind in KINDS)]
        for name in MOMENTS
    ]
    text = table(["state", *KINDS], rows)
    print(text)
    if arguments.out is not None:
        held = {"machine": describe(), "steps": arguments.steps, "elements": arguments.elements, "results": results}
        arguments.out.write_text(json.dumps(held, indent=1) + "\n")
    if arguments.page is not None:
        insert(arguments.page, "few bits by moment", text)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
