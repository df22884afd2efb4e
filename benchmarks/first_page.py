"""The figures of README, and of pages that it points to, from the results in ``benchmarks/results``. A test compares them.

python benchmarks/first_page.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import live_objects
from pages import insert, origin, table
from torch_step import LONG, POLICIES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
README, SPEED, FSDP2, COMPARE = (
    ROOT / "README.md", ROOT / "docs/speed.md", ROOT / "docs/coming-from/fsdp2.md", ROOT / "docs/compare.md"
)  # fmt: skip

PEERS = {
    "torch fused, bfloat16": "`torch.optim.AdamW` on a bfloat16 model",
    "AnyPrecisionAdamW as published": "torchdistX `AnyPrecisionAdamW`, Kahan",
    "optimi, Kahan": "optimi, Kahan",
    "torchao, stochastic": "torchao, stochastic rounding",
    "HeavyBall, bfloat16": "HeavyBall, bfloat16",
    "everybit LEAN_BF16": "**everybit `LEAN_BF16`**",
}
"""The rows of ``docs/peers.md`` that README has, and what it calls them."""

SHORT = ("a Llama layer / 4", "20M in one tensor", "10,000 tensors of 40")
"""The models of README's table."""


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def _ratios(name: str) -> dict[tuple[str, str], Mapping[str, float]]:
    return {(row["model"], row["policy"]): row for row in _read(name)["rows"]}


def _on_gpu() -> dict[str, float]:
    """Time over torch fused, by name of the contestant, of OPT-125m on the GPU."""
    found = _read("gpu/gpu.json")["results"]["peers"]["results"]
    return {one["contestant"]: one["median"] / one["baseline"] for one in found if one["median"] and not one["failure"]}


def speed_table() -> str:
    """Return README's table: time of a step over torch's fused step of float32, on two CPUs and a GPU."""
    wide, narrow, gpu = _ratios("torch-step-cpu.json"), _ratios("torch-step-cpu-avx2.json"), _on_gpu()
    policies, widths = ("FP32", "LEAN_BF16"), (("AVX512", wide), ("AVX2", narrow))
    rows = [[model, *(f"{of[model, one]['ratio']:.2f}" for one in policies for _, of in widths)] for model in SHORT]
    heads = [f"`{one}`, {width}" for one in policies for width, _ in widths]
    of_gpu = " and ".join(f"`{one}` {gpu[f'everybit {one}']:.2f}" for one in policies)
    return table(["", *heads], rows) + f"\nOn an H200 with OPT-125m (196 tensors): {of_gpu}.\n"


def peers_table() -> str:
    """Return README's table of other packages, some rows and columns of the battery's."""
    rows = []
    by_name = {row["optimizer"]: row for row in _read("battery-cpu.json")["rows"]}
    for name, shown in PEERS.items():
        row = by_name[name]
        shares = [f"{100 * row[key]:.0f} %" for key in ("decay", "updates", "variance")]
        rows.append([shown, *shares, row["compiled"], f"{row['bytes']:.0f}"])
    heads = [
        "AdamW",
        "decay kept",
        "updates kept",
        "second moment",
        "compiled against eager",
        "bytes, weights and state",
    ]
    return table(heads, rows)


def step_table() -> str:
    """Return the table of a step in ``docs/speed.md``."""
    wide, narrow = _ratios("torch-step-cpu.json"), _ratios("torch-step-cpu-avx2.json")
    rows = []
    for model in dict.fromkeys(model for model, _ in wide):
        cells = [model]
        for of in (wide, narrow):
            plain, lean = of[model, "FP32"], of[model, "LEAN_BF16"]
            cells += [
                f"{plain['torch']:.2f}",
                f"{plain['ratio']:.2f}",
                f"{lean['ratio']:.2f}",
                f"{plain['first']:.1f}, {lean['first']:.1f}",
            ]
        rows.append(cells)
    heads = [
        f"{what} ({width})"
        for width in ("AVX512", "AVX2")
        for what in ("torch, ms", "`FP32`", "`LEAN_BF16`", "first step, s")
    ]
    machines = [_read(name)["machine"] for name in ("torch-step-cpu.json", "torch-step-cpu-avx2.json")]
    return table(["", *heads], rows) + "".join(map(origin, machines))


def policies_table() -> str:
    """Return the table of all policies in ``docs/speed.md``."""
    results = (("AVX512", "torch-step-cpu.json"), ("AVX2", "torch-step-cpu-avx2.json"))
    of = {width: _ratios(name) for width, name in results}
    rows = [
        [f"`{policy}`", *(f"{of[width][model, policy]['ratio']:.2f}" for model in LONG for width, _ in results)]
        for policy in POLICIES
    ]
    return table(["", *(f"{model}, {width}" for model in LONG for width, _ in results)], rows)


def clipped_table() -> str:
    """Return the table of a step with a clip in ``docs/speed.md``."""
    name = "torch-step-clipped-cpu.json"
    of = _ratios(name)
    rows = [
        [
            model,
            f"{of[model, 'FP32']['torch']:.2f}",
            *(f"{of[model, one]['ratio']:.2f}" for one in ("FP32", "LEAN_BF16")),
        ]
        for model in dict.fromkeys(model for model, _ in of)
    ]
    return table(["", "torch, ms", "`FP32`", "`LEAN_BF16`"], rows) + origin(_read(name)["machine"])


def objects_table() -> str:
    """Return the table of live objects on the page of FSDP2."""
    return live_objects.table(_read("live-objects.json"))


def demo_table() -> str:
    """Return what `make demo` printed, for ``docs/compare.md``."""
    found = _read("demo-cpu.json")
    rows = []
    for row in found["summary"]:
        difference = "" if row["policy"] == "FP32" else f"{row['difference']:+.4f}"
        sizes = f"{row['bytes_measured']:.2f} / {row['bytes_predicted']:.2f}"
        cells = [f"{100 * row['lost_share']:.1f} %", f"{row['edq']:.3f}", sizes, f"{row['optimizer_milliseconds']:.1f}"]
        rows.append([f"`{row['policy']}`", f"{row['validation_loss']:.4f}", difference, *cells])
    heads = ["policy", "loss", "vs FP32", "lost", "EDQ", "bytes, measured and predicted", "step, ms"]
    made = found["machine"]
    return (
        table(heads, rows)
        + f"\n`{found['command']}`; {found['seconds']:.0f} s; {', '.join(map(str, made.values()))}.\n"
    )


BLOCKS: dict[tuple[Path, str], Callable[[], str]] = {
    (README, "speed"): speed_table,
    (README, "peers"): peers_table,
    (SPEED, "step"): step_table,
    (SPEED, "policies"): policies_table,
    (SPEED, "clipped"): clipped_table,
    (FSDP2, "live objects"): objects_table,
    (COMPARE, "demo"): demo_table,
}
"""What is written where."""


def main() -> None:
    """Write all of them."""
    for (page, name), made in BLOCKS.items():
        insert(page, name, made())


if __name__ == "__main__":
    main()
