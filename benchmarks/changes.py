"""Which weights change: what it costs to note them, how many they are, and a sync beside one by a snapshot. For docs/how-to.

.venv/bin/python benchmarks/changes.py --run      # two threads, about five minutes
.venv/bin/python benchmarks/changes.py --write    # the tables and the picture, from the results
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import machine
import pages
from everybit_cli.compare.corpus import load_corpus
from everybit_cli.compare.model import SIZES, Transformer
from everybit_torch import AdamW
from torch_step import LONG, MODELS, POLICIES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/changes-cpu.json"
PAGE = ROOT / "docs/how-to/send_changed_weights.md"
RATES = (1e-6, 1e-5, 1e-4)
WARM, MEASURED = 60, 20
SYNCED = [(2048, 1024)] * 25  # 52 million elements


def dtype_of(policy: str) -> torch.dtype:
    return torch.float32 if policy == "FP32" else torch.bfloat16


# -- what noting costs ---------------------------------------------------------------------------------------------------------------


def cost(shapes: list[tuple[int, ...]], policy: str, steps: int) -> dict[str, float]:
    """Milliseconds of a compiled step with and without a watch, and bytes for each element of weights, gradients and state."""
    optimizers = []
    for watch in (None, "bfloat16"):
        parameters = [nn.Parameter((torch.randn(s) * 0.02).to(dtype_of(policy))) for s in shapes]
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
        optimizers.append(AdamW(parameters, lr=1e-5, policy=policy, compile=True, watch=watch))  # type: ignore[arg-type]
    times: list[list[float]] = [[], []]
    for number in range(steps + 5):
        for which in random.sample(range(2), 2):
            started = time.perf_counter()
            optimizers[which].step()
            if number >= 5:
                times[which].append(1e3 * (time.perf_counter() - started))
    plain, watched = map(statistics.median, times)
    numel = sum(torch.Size(s).numel() for s in shapes)
    held = [sum(one.bytes_table().values()) / numel for one in optimizers]
    return {"plain": plain, "watched": watched, "ratio": watched / plain, "bytes": held[0], "bytes_watched": held[1]}


# -- how many change -----------------------------------------------------------------------------------------------------------------


def shares(policy: str, rate: float) -> dict[str, float]:
    """The share of bfloat16 weights that a step changes, and four steps, of a small language model in training."""
    torch.manual_seed(0)
    model = Transformer(SIZES["small"]).to(dtype_of(policy))
    text = load_corpus().training
    warm = AdamW(model.parameters(), lr=1e-3, policy=policy)  # type: ignore[arg-type]
    optimizer = AdamW(model.parameters(), lr=rate, policy=policy, watch="bfloat16")  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)

    def step(one: AdamW) -> None:
        starts = torch.randint(0, len(text) - 129, (8,), generator=generator)
        windows = torch.stack([text[s : s + 129].long() for s in starts.tolist()])
        loss = nn.functional.cross_entropy(model(windows[:, :-1]).float().flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        one.step()
        one.zero_grad()

    def measured(steps: int, syncs: int) -> float:
        found = []
        for _ in range(syncs):
            for _ in range(steps):
                step(optimizer)
            found.append(sum(len(indices) for _, indices, _ in optimizer.take_changed()))
        return statistics.mean(found) / sum(p.numel() for p in model.parameters())

    for _ in range(WARM):
        step(warm)
    for _ in range(WARM // 2):  # its own moments
        step(optimizer)
    optimizer.take_changed().discard()
    return {"one": measured(1, MEASURED), "four": measured(4, MEASURED // 4)}


# -- a sync --------------------------------------------------------------------------------------------------------------------------


def sync(rate: float, rounds: int) -> dict[str, float]:
    """Milliseconds to find the changes of one step, by the optimizer's masks and by a snapshot as verl 0.9.1 keeps it; and bytes kept."""
    torch.manual_seed(0)
    parameters = [nn.Parameter((torch.randn(s) * 0.02).bfloat16()) for s in SYNCED]
    named = [(f"layer {number}", one) for number, one in enumerate(parameters)]
    optimizer = AdamW(named, lr=rate, policy="LEAN_BF16", compile=True, watch="bfloat16")
    snapshot = [p.detach().clone().view(-1) for p in parameters]
    optimizer.take_changed().discard()

    def by_snapshot() -> list[tuple[Tensor, Tensor]]:
        found = []
        for parameter, held in zip(parameters, snapshot, strict=True):
            here = parameter.detach().view(-1)
            where = (here.view(torch.int16) != held.view(torch.int16)).nonzero().view(-1)
            found.append((where.int(), here[where]))
            held.copy_(here)
        return found

    def timed(find: Callable[[], Any]) -> tuple[float, Any]:
        started = time.perf_counter()
        found = find()
        return 1e3 * (time.perf_counter() - started), found

    times: list[list[float]] = [[], []]
    changed = 0
    for number in range(rounds + 3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        theirs, one = timed(by_snapshot)
        ours, other = timed(lambda: list(optimizer.take_changed()))
        assert all(torch.equal(a[0], b[1]) and torch.equal(a[1], b[2]) for a, b in zip(one, other, strict=True))
        if number >= 3:
            times[0].append(theirs)
            times[1].append(ours)
            changed += sum(len(where) for where, _ in one)
    numel = sum(p.numel() for p in parameters)
    return {
        "share": changed / numel / rounds,
        "snapshot": statistics.median(times[0]),
        "masks": statistics.median(times[1]),
        "snapshot_bytes": float(sum(x.nbytes for x in snapshot)),
        "mask_bytes": float(optimizer.bytes_table()["changed"]),
    }


def run(steps: int) -> dict[str, Any]:
    """Measure all of it."""
    found: dict[str, Any] = {"machine": machine.describe(), "cost": [], "shares": [], "sync": []}
    for name in LONG:
        for policy in POLICIES:
            found["cost"].append({"model": name, "policy": policy, **cost(MODELS[name], policy, steps)})
            print(found["cost"][-1], flush=True)
    for policy in ("FP32", "LEAN_BF16"):
        for rate in RATES:
            found["shares"].append({"policy": policy, "rate": rate, **shares(policy, rate)})
            print(found["shares"][-1], flush=True)
    for rate in RATES:
        found["sync"].append({"rate": rate, **sync(rate, 15)})
        print(found["sync"][-1], flush=True)
    return found


# -- the page ------------------------------------------------------------------------------------------------------------------------


def percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def short(rate: float) -> str:
    return f"{rate:.0e}".replace("e-0", "e-")


def tables(found: dict[str, Any]) -> dict[str, str]:
    """The tables of the page, by name."""
    of = {(row["model"], row["policy"]): row for row in found["cost"]}
    costs = []
    for policy in POLICIES:
        one = of[LONG[1], policy]
        ratios = [f"{of[name, policy]['ratio']:.2f}" for name in LONG]
        costs.append([f"`{policy}`", *ratios, f"{one['bytes_watched'] / one['bytes']:.2f}"])
    by_rate = {(row["policy"], row["rate"]): row for row in found["shares"]}
    many = []
    for rate in RATES:
        rows = [by_rate[policy, rate][key] for policy in ("FP32", "LEAN_BF16") for key in ("one", "four")]
        many.append([short(rate), *map(percent, rows)])
    syncs = []
    for row in found["sync"]:
        times = [f"{row[key]:.0f}" for key in ("snapshot", "masks")]
        sizes = [f"{row[key] / 1e6:.0f}" for key in ("snapshot_bytes", "mask_bytes")]
        syncs.append([short(row["rate"]), percent(row["share"]), *times, *sizes])
    headings = ["learning rate", "FP32, 1 step", "FP32, 4 steps", "LEAN_BF16, 1 step", "LEAN_BF16, 4 steps"]
    origin = pages.origin(found["machine"])
    return {
        "cost of watching": pages.table(["policy", *LONG, "bytes"], costs) + origin,
        "changed weights": pages.table(headings, many) + origin,
        "a sync": pages.table(
            ["learning rate", "changed", "snapshot, ms", "masks, ms", "snapshot, MB", "masks, MB"], syncs
        )
        + origin,
    }


def draw(found: dict[str, Any], palette: str) -> None:
    """Time of a sync on the left, memory on the right."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from concept_pictures import PALETTES, SETTINGS
    from everybit_cli.colours import POLICY_COLOURS

    ink = PALETTES[palette]
    named = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with mpl.rc_context(SETTINGS | dict.fromkeys(named, ink)):  # type: ignore[arg-type]  # names of settings
        figure = Figure(figsize=(8.4, 2.8), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(2, 1))
        for offset, key, label in ((-0.2, "snapshot", "a snapshot"), (0.2, "masks", "take_changed()")):
            colour = POLICY_COLOURS[1 if key == "snapshot" else 0]
            places = [place + offset for place in range(len(RATES))]
            left.barh(places, [row[key] for row in found["sync"]], height=0.36, color=colour, label=label)
            size = found["sync"][0][f"{key.removesuffix('s')}_bytes"] / 1e6
            right.barh(offset, size, height=0.36, color=colour)
            right.text(size + 1, offset, f"{size:.0f}", verticalalignment="center")
        ticks = [f"{short(row['rate'])}: {percent(row['share'])}" for row in found["sync"]]
        left.set_yticks(range(len(RATES)), ticks)
        left.invert_yaxis()
        left.set_title("a sync of 52M weights, milliseconds", loc="left", fontsize=10)
        left.legend()
        right.set_title("kept for it, MB", loc="left", fontsize=10)
        right.set_yticks([])
        right.invert_yaxis()
        figure.savefig(ROOT / f"docs/images/changes-{palette}.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.run:
        RESULTS.write_text(json.dumps(run(given.steps), indent=1) + "\n", encoding="utf-8")
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    for name, text in tables(found).items():
        print(text)
        if given.write:
            pages.insert(PAGE, name, text)
    for palette in ("light", "dark") if given.write else ():
        draw(found, palette)


if __name__ == "__main__":
    main()
