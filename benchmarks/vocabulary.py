"""Print the table of optimizers and of the implementations that they follow, for docs/optimizers.md.

Usage, after ``make conformance`` has installed the oracles:

    python -m pytest -o addopts='' --import-mode=importlib --junitxml=deviations.xml \\
        tests/conformance/test_more_optimizers.py tests/conformance/test_memory_optimizers.py
    python benchmarks/vocabulary.py deviations.xml
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any
from xml.etree import ElementTree

import torch

import everybit as eb
from everybit import tree

OPTIMIZERS: dict[str, tuple[str, eb.Transform[Any]]] = {
    "ademamix": ("[2409.03137](https://arxiv.org/abs/2409.03137)", eb.ademamix()),
    "adopt": ("[2411.02853](https://arxiv.org/abs/2411.02853)", eb.adopt()),
    "schedule_free_sgd": ("[2405.15682](https://arxiv.org/abs/2405.15682)", eb.schedule_free_sgd()),
    "schedule_free_adamw": ("[2405.15682](https://arxiv.org/abs/2405.15682)", eb.schedule_free_adamw()),
    "schedule_free_radam": ("[2405.15682](https://arxiv.org/abs/2405.15682)", eb.schedule_free_radam()),
    "dadapt_adam": ("[2301.07733](https://arxiv.org/abs/2301.07733)", eb.dadapt_adam()),
    "prodigy": ("[2306.06101](https://arxiv.org/abs/2306.06101)", eb.prodigy()),
    "lamb": ("[1904.00962](https://arxiv.org/abs/1904.00962)", eb.lamb()),
    "lars": ("[1708.03888](https://arxiv.org/abs/1708.03888)", eb.lars()),
    "lion": ("[2302.06675](https://arxiv.org/abs/2302.06675)", eb.lion()),
    "adan": ("[2208.06677](https://arxiv.org/abs/2208.06677)", eb.adan()),
    "adabelief": ("[2010.07468](https://arxiv.org/abs/2010.07468)", eb.adabelief()),
    "yogi": ("[NeurIPS 2018](https://papers.nips.cc/paper/8186)", eb.yogi()),
    "laprop": ("[2002.04839](https://arxiv.org/abs/2002.04839)", eb.laprop()),
    "signum": ("[1802.04434](https://arxiv.org/abs/1802.04434)", eb.signum()),
    "tiger": ("[bojone/tiger](https://github.com/bojone/tiger)", eb.tiger()),
    "stable_adamw": ("[2304.13013](https://arxiv.org/abs/2304.13013)", eb.stable_adamw()),
    "mars": ("[2411.10438](https://arxiv.org/abs/2411.10438)", eb.mars()),
    "adam_atan2": ("[2407.05872](https://arxiv.org/abs/2407.05872)", eb.adam_atan2()),
    "adafactor": ("[1804.04235](https://arxiv.org/abs/1804.04235)", eb.adafactor(b1=0.9)),
    "came": ("[2307.02047](https://arxiv.org/abs/2307.02047)", eb.came()),
    "adam_mini": ("[2406.16793](https://arxiv.org/abs/2406.16793)", eb.adam_mini(labels="tensor")),
    "sm3": ("[1901.11150](https://arxiv.org/abs/1901.11150)", eb.sm3()),
    "novograd": ("[1905.11286](https://arxiv.org/abs/1905.11286)", eb.novograd()),
}


def slots(transform: eb.Transform[Any]) -> str:
    """The names of a transform's slots, in order."""
    found: list[str] = []

    def note(name: str, slot: object) -> object:
        found.append(f"`{name}`")
        return slot

    tree.map_slots(note, transform.init(torch.zeros(3)))
    return ", ".join(dict.fromkeys(found)) or "none"


def deviations(path: str) -> dict[str, dict[str, float]]:
    """Of each optimizer the largest deviation from each oracle; names with a comma are its options."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for one in ElementTree.parse(path).iter("property"):
        name, _, oracle = one.attrib["name"].partition("; ")
        entry = (
            name.split(",")[0].replace("lambc", "lamb").replace("mars lion", "mars").replace("-", "_").replace(" ", "_")
        )
        found[entry][oracle] = max(float(one.attrib["value"]), found[entry].get(oracle, 0.0))
    return found


def main() -> None:
    """Print the table."""
    measured = deviations(sys.argv[1])
    print("| Optimizer | Paper | Slots | Cut | Reductions | Oracle: largest deviation |")
    print("|---|---|---|---|---|---|")
    for name, (paper, transform) in OPTIMIZERS.items():
        per_tensor = getattr(transform, "per_tensor", False)
        reductions = "per tensor" if per_tensor else "over everything" if transform.reduces else "none"
        reductions = "of whole tensors" if transform.cut == "tensor" and not transform.reduces else reductions
        oracles = [f"{oracle}: {value:.0e}" for oracle, value in measured.get(name, {}).items()]
        row = (
            f"`{name}`",
            paper,
            slots(transform),
            transform.cut,
            reductions,
            "; ".join(oracles) or "the formula only",
        )
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
