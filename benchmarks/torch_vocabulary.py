"""The table of ``docs/optimizers.md``: what each optimizer keeps, how it may be cut, and how far it is from torch's after 200 steps.

python benchmarks/torch_vocabulary.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim

import everybit as eb
from everybit.transform import decays

STEPS = 200
SHAPES = ((7, 5), (), (3, 2, 2), (11,))


@dataclass(frozen=True, slots=True)
class Row:
    """An optimizer, its paper, and its oracle with the same hyperparameters."""

    name: str
    paper: str
    build: Callable[[], eb.Transform[Any]]
    oracle: str
    make: Callable[[list[Tensor]], optim.Optimizer]


ROWS = (
    Row(
        "`adam(amsgrad=True)`", "Reddi et al. 2018", lambda: eb.adam(1e-2, amsgrad=True, weight_decay=0.1),
        "`Adam(amsgrad=True)`", lambda p: optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    ),
    Row(
        "`nadam`", "Dozat 2016", lambda: eb.nadam(1e-2, weight_decay=0.1, decoupled_weight_decay=True),
        "`NAdam`", lambda p: optim.NAdam(p, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    ),
    Row(
        "`radam`", "Liu et al. 2020", lambda: eb.radam(1e-2, b2=0.95, weight_decay=0.1),
        "`RAdam`", lambda p: optim.RAdam(p, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
    ),
    Row(
        "`adagrad`", "Duchi et al. 2011", lambda: eb.adagrad(1e-2, lr_decay=0.1, initial_accumulator_value=0.1),
        "`Adagrad`", lambda p: optim.Adagrad(p, lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.1),
    ),
    Row(
        "`adamax`", "Kingma & Ba 2015", lambda: eb.adamax(1e-2, weight_decay=0.1),
        "`Adamax`", lambda p: optim.Adamax(p, lr=1e-2, weight_decay=0.1),
    ),
    Row(
        "`adadelta`", "Zeiler 2012", lambda: eb.adadelta(0.5, weight_decay=0.1),
        "`Adadelta`", lambda p: optim.Adadelta(p, lr=0.5, weight_decay=0.1),
    ),
    Row(
        "`torch_adafactor`", "Shazeer & Stern 2018", lambda: eb.torch_adafactor(1e-1, weight_decay=0.1),
        "`Adafactor`", lambda p: optim.Adafactor(p, lr=1e-1, weight_decay=0.1),
    ),
    Row(
        "`rprop`", "Riedmiller & Braun 1993", lambda: eb.rprop(1e-2, max_step=0.1),
        "`Rprop`", lambda p: optim.Rprop(p, lr=1e-2, step_sizes=(1e-6, 0.1)),
    ),
    Row(
        "`asgd`", "Polyak & Juditsky 1992", lambda: eb.asgd(1e-2, lambd=0.1, t0=20.0, weight_decay=0.1),
        "`ASGD`", lambda p: optim.ASGD(p, lr=1e-2, lambd=0.1, t0=20.0, weight_decay=0.1),
    ),
)  # fmt: skip


def drawn(seed: int, dtype: torch.dtype) -> list[Tensor]:
    """Normal numbers, the same for every dtype but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def deviation(row: Row, dtype: torch.dtype) -> float:
    """The largest difference of any parameter after 200 steps of the same gradients, relative to the largest parameter."""
    ours = eb.with_policy(row.build(), eb.policies.FP64 if dtype is torch.float64 else eb.policies.FP32)
    params, theirs = drawn(0, dtype), drawn(0, dtype)
    state, oracle = ours.init(params), row.make(theirs)
    for step in range(1, STEPS + 1):
        grads = drawn(step, dtype)
        params, state = ours.step(params, grads, state)
        for parameter, gradient in zip(theirs, grads, strict=True):
            parameter.grad = gradient
        oracle.step()
    largest = max(float(x.abs().max()) for x in theirs)
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(params, theirs, strict=True)) / largest


def table() -> list[str]:
    """The lines of the table, in Markdown."""
    lines = [
        "| optimizer | paper | slots | cut | reductions | oracle: `torch.optim` | float64 | float32 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        transform = row.build()
        slots = ", ".join(f"`{name}`" for name in dict.fromkeys(one.slot for one in decays(transform)))
        reductions = (
            "per tensor, of whole tensors" if transform.cut == "tensor" else "yes" if transform.reduces else "none"
        )
        measured = " | ".join(f"{deviation(row, dtype):.1e}" for dtype in (torch.float64, torch.float32))
        lines.append(
            f"| {row.name} | {row.paper} | {slots} | {transform.cut} | {reductions} | {row.oracle} | {measured} |"
        )
    return lines


def main() -> None:
    """Print the table."""
    # torch keeps NAdam's product and ASGD's learning rate in the default dtype.
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    print("\n".join(table()))


if __name__ == "__main__":
    main()
