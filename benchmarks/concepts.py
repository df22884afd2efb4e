"""The experiments of docs/concepts: what becomes of small numbers in 16 bits, computed with the library's own formats and optimizers.

    python benchmarks/concepts.py

writes the tables between the markers of docs/concepts/*.md, and the pictures in docs/images/concepts, for the light and the dark
palette. It takes about a minute, and needs a C++ compiler for the experiment with compiled code.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

import everybit as eb
from everybit_torch.collectives.reduction import install
from pages import insert, table

DOCS = Path(__file__).parents[1] / "docs"

PARAMS: dict[str, eb.ParamFormat] = {
    "Nearest()": eb.Nearest(),
    "Stochastic()": eb.Stochastic(),
    "Kahan()": eb.Kahan(),
    "Split(8), stochastic": eb.Split(8, rounding="stochastic"),
    "Split(16)": eb.Split(16),
}
BYTES = {name: eb.Policy(params=format).bytes_table() for name, format in PARAMS.items()}


@dataclass(frozen=True)
class Arguments:
    """What to write.

    Attributes:
        docs: The folder with `concepts` and `images`.
    """

    docs: Path = DOCS


def trained(
    start: Mapping[str, Tensor],
    policies: Mapping[str, eb.Policy],
    transform: Any,
    gradients: Callable[[int], Mapping[str, Tensor]],
    steps: int,
) -> Iterator[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]:
    """Train tensors side by side, each under the policy of its name.

    Yields:
        The weights in float32, and the state by name; before the first step and after each.
    """
    labels = {name: name for name in start}
    optimizer = eb.with_policy(transform, eb.by_label(labels, policies), unsafe="allow")
    whole = eb.Nearest("float32")
    params = {
        name: weights if policies[name].params == whole else weights.bfloat16() for name, weights in start.items()
    }
    with torch.no_grad():
        params, state = optimizer.import_fp32(dict(start), params)
        yield optimizer.export_fp32(params, state), eb.state_dict(state)
        for step in range(steps):
            params, state = optimizer.step(params, dict(gradients(step)), state)
            yield optimizer.export_fp32(params, state), eb.state_dict(state)


# Updates that vanish.


def lost_updates() -> list[tuple[str, float, float]]:
    """For learning rates: the share of updates of that size which change no bfloat16 weight, and the share of the movement that arrives.

    Weights are normal numbers with a standard deviation of 0.02, as a language model's initialization draws them; an update is plus or
    minus the learning rate.
    """
    generator = torch.Generator().manual_seed(0)
    weights = (0.02 * torch.randn(1 << 16, generator=generator)).bfloat16()
    gradient = torch.randn(1 << 16, generator=generator).bfloat16()
    rows = []
    for rate in ("1e-2", "1e-3", "1e-4", "1e-5", "1e-6"):
        transform = eb.chain(eb.scale_by_sign(), eb.scale_by_learning_rate(float(rate)))
        optimizer = eb.with_metrics(eb.with_policy(transform, eb.Policy(params=eb.Nearest())))
        state = optimizer.init({"w": weights})
        with torch.no_grad():
            _, state = optimizer.step({"w": weights}, {"w": gradient}, state)
        rows.append((rate, float(state.metrics.lost_share), float(state.metrics.edq)))
    return rows


UPDATE, STEPS = 1e-3, 400


def walks() -> dict[str, Tensor]:
    """A weight of 1.0 that is to fall by 0.001 at each of 400 steps: its values under each format and in float32, (401, copies)."""
    policies = {"float32": eb.policies.FP32} | {name: eb.Policy(params=format) for name, format in PARAMS.items()}
    start = {name: torch.ones(256) for name in policies}
    gradients = {
        name: torch.ones(256, dtype=torch.float32 if name == "float32" else torch.bfloat16) for name in policies
    }
    path = [weights for weights, _ in trained(start, policies, eb.sgd(UPDATE), lambda _step: gradients, STEPS)]
    return {name: torch.stack([weights[name] for weights in path]) for name in policies}


# What compensation keeps.

EXPONENTS = tuple(range(-9, -25, -1))


def arrivals() -> dict[str, list[tuple[float, float]]]:
    """For updates of 2**-9 to 2**-24 at each of 100 steps, to weights in [1, 2): the mean share that arrives, and a single weight's error.

    The error is the root mean square of (movement - intended movement), relative to the intended movement.
    """
    steps, copies = 100, 4096
    generator = torch.Generator().manual_seed(0)
    start = 1.0 + 0.75 * torch.rand(len(EXPONENTS), copies, generator=generator)
    sizes = torch.tensor([2.0**exponent for exponent in EXPONENTS])[:, None].expand(-1, copies)
    gradients = dict.fromkeys(PARAMS, -sizes.bfloat16())  # powers of two are exact in bfloat16
    policies = {name: eb.Policy(params=format) for name, format in PARAMS.items()}
    path = trained(dict.fromkeys(PARAMS, start), policies, eb.sgd(1.0), lambda _step: gradients, steps)
    first, _ = next(path)
    (last, _) = deque(path, maxlen=1).pop()
    moved = {name: (last[name].double() - first[name].double()) / (steps * sizes) for name in PARAMS}
    return {
        name: [(float(row.mean()), float((row - 1).square().mean().sqrt())) for row in share]
        for name, share in moved.items()
    }


# Moments that freeze.

MOMENTS: dict[str, eb.StateFormat] = {
    "float32": eb.Nearest("float32"),
    'Nearest("bfloat16")': eb.Nearest("bfloat16"),
    'Stochastic("bfloat16")': eb.Stochastic("bfloat16"),
}
LOUD, QUIET = 100, 1100


def second_moments() -> dict[str, list[float]]:
    """Adam's second moment at ``b2 = 0.999`` after each step, the mean of 256: gradients of 1.0 for 100 steps, then of 0.01 for 1100."""
    policies = {name: eb.Policy(params=eb.Nearest("float32"), variance=format) for name, format in MOMENTS.items()}
    start = {name: torch.ones(256) for name in MOMENTS}
    loud, quiet = ({name: torch.full((256,), size) for name in MOMENTS} for size in (1.0, 0.01))
    path = trained(start, policies, eb.adam(1e-3, b2=0.999), lambda step: loud if step < LOUD else quiet, LOUD + QUIET)
    seen: dict[str, list[float]] = {name: [] for name in MOMENTS}
    for _, state in path:
        for name, values in seen.items():
            (slot,) = (tensor for key, tensor in state.items() if ".variance" in key and repr(name) in key)
            values.append(float(slot.double().mean()))
    return seen


# What a compiler makes of compensation.


def textbook_kahan(p: Tensor, residual: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
    """A compensated addition as it is written down everywhere; all tensors bfloat16."""
    corrected = residual + update
    new = p + corrected
    return new, corrected - (new - p)


COMPILED_STEPS, COMPILED_UPDATE = 400, -1e-4


def compiled_sums() -> dict[str, list[tuple[float, float]]]:
    """A weight of 1.0 that gets an update of -1e-4 at each of 400 steps: the weight, and its sum with the residual, eager and compiled."""
    update = torch.full((1024,), COMPILED_UPDATE, dtype=torch.bfloat16)
    paths: dict[str, list[tuple[float, float]]] = {}
    for name, add in (("textbook, eager", textbook_kahan), ("textbook, torch.compile", torch.compile(textbook_kahan))):
        p, residual = torch.ones(1024, dtype=torch.bfloat16), torch.zeros(1024, dtype=torch.bfloat16)
        paths[name] = [(1.0, 1.0)]
        for _ in range(COMPILED_STEPS):
            p, residual = add(p, residual, update)
            paths[name].append((float(p[0]), float(p[0].double() + residual[0].double())))
    optimizer = eb.with_policy(eb.sgd(1.0), eb.Policy(params=eb.Kahan()))
    for name, take in (("everybit, eager", optimizer.step), ("everybit, torch.compile", torch.compile(optimizer.step))):
        params = {"w": torch.ones(1024, dtype=torch.bfloat16)}
        state = optimizer.init(params)
        paths[name] = [(1.0, 1.0)]
        with torch.no_grad():
            for _ in range(COMPILED_STEPS):
                params, state = take(params, {"w": -update}, state)
                paths[name].append((float(params["w"][0]), float(optimizer.export_fp32(params, state)["w"][0])))
    return paths


# Sums over ranks.

RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)


def sums() -> dict[str, list[float]]:
    """The error of a sum of bfloat16 gradients over ranks, relative to the sum (root mean squares over 16,384 elements)."""
    errors: dict[str, list[float]] = {"ring, bfloat16": [], "ring, float32": [], "everybit, bfloat16 wire": []}
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(1 << 14, generator=generator).bfloat16() for _ in range(max(RANKS))]
    for ranks in RANKS:
        exact = torch.stack(parts[:ranks]).double().sum(0)
        low, full = parts[0].clone(), parts[0].float()
        for part in parts[1:ranks]:
            low, full = low + part, full + part.float()  # as the ranks of a ring add, one after the other
        ours = torch.empty_like(full)
        install(ours, parts[:ranks], mode="copy", divisor=None)
        for name, got in zip(errors, (low, full, ours), strict=True):
            errors[name].append(float((got.double() - exact).norm() / exact.norm()))
    return errors


# Pages.


def percent(share: float) -> str:
    """A share for a table."""
    return f"{100 * share:.1f} %"


def number(value: float) -> str:
    """A number for a table, with three digits."""
    return f"{value:.3g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


def updates_table(rows: list[tuple[str, float, float]]) -> str:
    """Of :func:`lost_updates`."""
    return table(
        ["update", "weights that do not change", "of the movement arrives"],
        [[rate, percent(lost), percent(edq)] for rate, lost, edq in rows],
    )


def walks_table(walked: Mapping[str, Tensor]) -> str:
    """Of :func:`walks`: the mean of the copies at the end, and how far single ones are from it."""
    rows = []
    for name, values in walked.items():
        end = values[-1].double()
        stored = BYTES[name]["parameter"] + BYTES[name].get("compensation", 0) if name in BYTES else 4
        rows.append([f"`{name}`", f"{stored:g}", f"{float(end.mean()):.4f}", number(float(end.std()))])
    return table(["stored as", "bytes", "weight after 400 steps, mean", "standard deviation"], rows)


def arrivals_table(arrived: Mapping[str, list[tuple[float, float]]]) -> str:
    """Of :func:`arrivals`, for every third size: the error of a single weight."""
    chosen = [index for index, exponent in enumerate(EXPONENTS) if exponent % 3 == 0]
    headings = ["stored as", *(f"2<sup>{EXPONENTS[index]}</sup>" for index in chosen)]
    rows = [[f"`{name}`", *(percent(values[index][1]) for index in chosen)] for name, values in arrived.items()]
    return table(headings, rows)


def moments_table(seen: Mapping[str, list[float]]) -> str:
    """Of :func:`second_moments`; an update of Adam is proportional to the inverse root of the second moment."""
    right = seen["float32"][-1]
    rows = [
        [f"`{name}`", number(values[LOUD]), number(values[-1]), f"{math.sqrt(right / values[-1]):.2f}"]
        for name, values in seen.items()
    ]
    return table(
        ["second moment stored as", "after 100 loud steps", "after 1100 quiet steps", "size of an update, relative"],
        rows,
    )


def compiled_table(paths: Mapping[str, list[tuple[float, float]]]) -> str:
    """Of :func:`compiled_sums`, after the last step."""
    rows = [[name, *(f"{value:.5f}" for value in path[-1])] for name, path in paths.items()]
    return table(["addition", "weight", "weight and residual"], rows)


def sums_table(errors: Mapping[str, list[float]]) -> str:
    """Of :func:`sums`."""
    chosen = [index for index, ranks in enumerate(RANKS) if ranks in (2, 8, 64, 512)]
    return table(
        ["summed by", *(f"{RANKS[index]} ranks" for index in chosen)],
        [[name, *(f"{values[index]:.1e}" for index in chosen)] for name, values in errors.items()],
    )


def main(arguments: Arguments) -> None:
    """Compute everything, and write tables and pictures."""
    from concept_pictures import draw

    folder = arguments.docs / "concepts"
    updates, walked, arrived, moments, summed = lost_updates(), walks(), arrivals(), second_moments(), sums()
    compiled = compiled_sums()
    insert(folder / "lost_updates.md", "updates", updates_table(updates))
    insert(folder / "lost_updates.md", "walks", walks_table({name: walked[name] for name in ("float32", "Nearest()")}))
    insert(folder / "compensation.md", "walks", walks_table(walked))
    insert(folder / "compensation.md", "arrivals", arrivals_table(arrived))
    insert(
        folder / "stochastic_rounding.md",
        "walks",
        walks_table({name: walked[name] for name in ("float32", "Nearest()", "Stochastic()")}),
    )
    insert(folder / "moments.md", "moments", moments_table(moments))
    insert(folder / "compilers.md", "compiled", compiled_table(compiled))
    insert(folder / "sums.md", "sums", sums_table(summed))
    whole = {name: [sum for _, sum in path] for name, path in compiled.items()}
    draw(arguments.docs / "images/concepts", walked, arrived, EXPONENTS, moments, whole, summed, RANKS)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
