"""Print the table of all optimizers for docs/optimizers.md: what each keeps, how it may be cut, and how far it is from others.

    python benchmarks/vocabulary.py --write

Names, slots, bytes, cut and reductions are those of ``everybit.optimizers()``; deviations from ``torch.optim`` are measured here. Those
from other packages are what the oracles in tests/conformance measured, if their file is given; else they stay as the page has them:

    python -m pytest -o addopts='' --import-mode=importlib --junitxml=deviations.xml tests/conformance/test_more_optimizers.py
    python benchmarks/vocabulary.py --write --deviations deviations.xml
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor, optim

import everybit as eb
from pages import insert

PAGE = Path(__file__).parents[1] / "docs/optimizers.md"
BEGIN, END = "<!-- begin optimizers -->\n", "<!-- end optimizers -->"
PRESETS: tuple[eb.PolicyName, ...] = ("FP32", "LEAN_BF16", "KAHAN_BF16", "FLOOR_BF16")
HEAD = (
    "optimizer",
    "paper",
    "slots",
    *(f"`{name}`" for name in PRESETS),
    "cut",
    "reductions",
    "oracle: largest deviation",
)
STEPS = 200
SHAPES = ((7, 5), (), (3, 2, 2), (11,))

Make = Callable[[list[Tensor]], optim.Optimizer]
TORCH: dict[str, tuple[dict[str, Any], Make]] = {
    "sgd": ({"learning_rate": 1e-2, "momentum": 0.9}, lambda p: optim.SGD(p, lr=1e-2, momentum=0.9)),
    "adam": (
        {"learning_rate": 1e-2, "amsgrad": True, "weight_decay": 0.1},
        lambda p: optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    ),
    "adamw": ({"learning_rate": 1e-2, "weight_decay": 0.1}, lambda p: optim.AdamW(p, lr=1e-2, weight_decay=0.1)),
    "rmsprop": (
        {"learning_rate": 1e-2, "momentum": 0.9, "centered": True},
        lambda p: optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    ),
    "nadam": (
        {"learning_rate": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True},
        lambda p: optim.NAdam(p, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    ),
    "radam": (
        {"learning_rate": 1e-2, "b2": 0.95, "weight_decay": 0.1},
        lambda p: optim.RAdam(p, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
    ),
    "adagrad": (
        {"learning_rate": 1e-2, "lr_decay": 0.1, "initial_accumulator_value": 0.1},
        lambda p: optim.Adagrad(p, lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.1),
    ),
    "adamax": ({"learning_rate": 1e-2, "weight_decay": 0.1}, lambda p: optim.Adamax(p, lr=1e-2, weight_decay=0.1)),
    "adadelta": ({"learning_rate": 0.5, "weight_decay": 0.1}, lambda p: optim.Adadelta(p, lr=0.5, weight_decay=0.1)),
    "torch_adafactor": (
        {"learning_rate": 1e-1, "weight_decay": 0.1},
        lambda p: optim.Adafactor(p, lr=1e-1, weight_decay=0.1),
    ),
    "rprop": ({"learning_rate": 1e-2, "max_step": 0.1}, lambda p: optim.Rprop(p, lr=1e-2, step_sizes=(1e-6, 0.1))),
    "asgd": (
        {"learning_rate": 1e-2, "lambd": 0.1, "t0": 20.0, "weight_decay": 0.1},
        lambda p: optim.ASGD(p, lr=1e-2, lambd=0.1, t0=20.0, weight_decay=0.1),
    ),
}
"""Of the optimizers that torch has: hyperparameters, and torch's with the same."""


def drawn(seed: int) -> list[Tensor]:
    """Normal numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def from_torch(name: str) -> str:
    """The largest difference of any parameter from torch's after 200 steps in float64, relative to the largest parameter."""
    arguments, make = TORCH[name]
    ours = eb.with_policy(eb.optimizers()[_known(name)].function(**arguments), eb.policies.FP64)
    params, theirs = drawn(0), drawn(0)
    state, oracle = ours.init(params), make(theirs)
    for step in range(1, STEPS + 1):
        grads = drawn(step)
        params, state = ours.step(params, grads, state)
        for parameter, gradient in zip(theirs, grads, strict=True):
            parameter.grad = gradient
        oracle.step()
    largest = max(float(x.abs().max()) for x in theirs)
    apart = max(float((a - b).abs().max()) for a, b in zip(params, theirs, strict=True))
    return f"torch: {apart / largest:.0e}"


def _known(name: str) -> eb.OptimizerName:
    return next(known for known in eb.optimizers() if known == name)


def measured(path: str) -> dict[str, str]:
    """Of each optimizer the largest deviation from each package that the oracles noted; a name goes on with its options."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    names = sorted(eb.optimizers(), key=len, reverse=True)
    for one in ElementTree.parse(path).iter("property"):
        title, _, oracle = one.attrib["name"].partition("; ")
        title = title.replace("-", "_").replace(" ", "_")
        name = next((name for name in names if title.startswith(name)), None)
        if name is not None:
            found[name][oracle] = max(float(one.attrib["value"]), found[name].get(oracle, 0.0))
    return {name: "; ".join(f"{oracle}: {value:.0e}" for oracle, value in by.items()) for name, by in found.items()}


def derived(name: eb.OptimizerName) -> tuple[str, ...]:
    """The cells of an optimizer's row that follow from its function and its entry: all but the last."""
    one = eb.optimizers()[name]
    sizes = []
    for preset in PRESETS:
        weights = eb.policies.PRESETS[preset].bytes_per_param(slots=())
        sizes.append(f"{weights + sum(one.state_bytes(preset).values()):.4g}")
    slots = ", ".join(f"`{slot}`" for slot in one.slots()) or "none"
    return f"`{name}`", f"[{one.paper}]({one.link})", slots, *sizes, one.cut, one.reductions


def rows_of(page: str) -> dict[str, tuple[str, ...]]:
    """The rows of the table in a page, by the optimizer's name."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    rows = [tuple(cell.strip() for cell in line.strip().strip("|").split("|")) for line in table.splitlines()]
    return {match[1]: row for row in rows if (match := re.fullmatch(r"`(\w+)`", row[0])) is not None}


def table(deviations: str | None) -> str:
    """The table, in Markdown."""
    on_page = {name: row[-1] for name, row in rows_of(PAGE.read_text(encoding="utf-8")).items()}
    # torch keeps NAdam's product and ASGD's learning rate in the default dtype.
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    own = {name: from_torch(name) for name in TORCH}
    others = on_page if deviations is None else measured(deviations)
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    for name in eb.optimizers():
        oracle = own.get(name) or others.get(name) or on_page.get(name) or "the formula only"
        lines.append(f"| {' | '.join((*derived(name), oracle))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description="The table of all optimizers.")
    parser.add_argument("--write", action="store_true", help="write it into docs/optimizers.md")
    parser.add_argument("--deviations", help="the file that --junitxml wrote")
    given = parser.parse_args()
    made = table(given.deviations)
    if not given.write:
        print(made, end="")
        return
    insert(PAGE, "optimizers", made)


if __name__ == "__main__":
    main()
