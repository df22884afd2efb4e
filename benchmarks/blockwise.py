"""Blockwise state beside bitsandbytes' and torchao's: errors, drift of Adam, bytes and times of steps, all in one run.

    python benchmarks/blockwise.py --page docs/formats.md             # everything
    python benchmarks/blockwise.py --no-time --page docs/formats.md   # all but times, which need a quiet machine
    python benchmarks/blockwise.py --no-errors --page docs/formats.md # times alone; the file keeps what it has of the rest

It needs the packages ``bitsandbytes`` and ``torchao``; ``everybit[peers]`` has both.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import everybit as eb
from everybit.formats import block_maps
from everybit_torch import AdamW
from machine import describe
from pages import insert, origin, table

T = TypeVar("T")
SPREADS = (1.0, 2.0)
"""Of the natural logarithms of magnitudes in a block; of their squares twice that."""
BETAS, EPS = (0.9, 0.999), 1e-8
KINDS: tuple[eb.SlotKind, ...] = ("signed", "non-negative")


@dataclass(frozen=True)
class Arguments:
    """What to measure.

    Attributes:
        errors: Measure round trips, drift and bytes.
        time: Measure times of steps.
        steps: Of the drift.
        seconds: How long steps are timed.
        threads: Of torch.
        out: Where the raw results go.
        page: Where the tables go, as Markdown, at the name of ``out``.
    """

    errors: bool = True
    time: bool = True
    steps: int = 10_000
    seconds: float = 20.0
    threads: int = 1
    out: Path = Path("benchmarks/results/blockwise-cpu.json")
    page: Path | None = None


# -- round trips ----------------------------------------------------------------------------------------------------------------

Trip = Callable[[Tensor], Tensor]


def _ours(format: eb.Blockwise, x: Tensor) -> Tensor:
    return format.decode(format.encode(x, eb.Key(0, torch.tensor(1), 0)), x.shape, "float32")


def _of_bitsandbytes(kind: eb.SlotKind, x: Tensor) -> Tensor:
    functional = import_module("bitsandbytes.functional")
    code = functional.create_dynamic_map(signed=kind == "signed")
    codes, state = functional.quantize_blockwise(x, code=code, blocksize=256)
    found: Tensor = functional.dequantize_blockwise(codes, state)
    return found


def _of_torchao(bits: int, kind: eb.SlotKind, x: Tensor) -> Tensor:
    module = import_module(f"torchao.optim.subclass_{bits}bit")
    kept = getattr(module, f"OptimState{bits}bit").zeros(x.shape, kind == "signed")
    kept.copy_(x)
    found: Tensor = kept.dequantize()
    return found


def trips(kind: eb.SlotKind) -> dict[tuple[str, str, int], Trip]:
    """By implementation, map and bits. All round to nearest."""
    found: dict[tuple[str, str, int], Trip] = {}
    for bits, block in ((8, 256), (4, 128)):
        for name in block_maps.MAP_NAMES:
            width: Any = bits
            format = eb.Blockwise(name, width, block, "nearest", kind=kind)
            found["everybit", name, bits] = partial(_ours, format)
        of_torchao = "dynamic" if bits == 8 or kind == "signed" else "linear"
        found["torchao", of_torchao, bits] = partial(_of_torchao, bits, kind)
        if bits == 8:
            found["bitsandbytes", "dynamic", 8] = partial(_of_bitsandbytes, kind)
    return found


def watched(items: Sequence[T], what: str) -> Iterable[T]:
    """The items, with a bar on standard error that says how far one is."""
    from rich.console import Console
    from rich.progress import track

    return track(items, description=what, console=Console(stderr=True))


def round_trips() -> list[dict[str, Any]]:
    """Errors of numbers whose magnitudes are log-normal; of non-negative ones their squares."""
    found = []
    for kind in KINDS:
        for (implementation, name, bits), trip in watched(list(trips(kind).items()), f"round trips, {kind}"):
            row: dict[str, Any] = {"implementation": implementation, "map": name, "bits": bits, "kind": kind}
            for spread in SPREADS:
                generator = torch.Generator().manual_seed(1)
                x = torch.exp(spread * torch.randn(1 << 18, generator=generator))
                signs = torch.where(torch.rand(1 << 18, generator=generator) < 0.5, -1.0, 1.0)
                x = x * signs if kind == "signed" else x.square()
                exact, got = x.double(), trip(x).double()
                relative = (got - exact).abs() / exact.abs()
                row[f"spread {spread:g}"] = {
                    "rms": math.sqrt(float((got - exact).square().sum() / exact.square().sum())),
                    "rms of elements": math.sqrt(float(relative.square().mean())),
                    "largest": float(relative.max()),
                    "zeros": float((got == 0).double().mean()),
                }
            found.append(row)
    return found


# -- optimizers -----------------------------------------------------------------------------------------------------------------


def _policy(momentum: eb.StateFormat, variance: eb.StateFormat) -> eb.Policy:
    return eb.Policy(momentum=momentum, variance=variance)


BF16 = eb.Stochastic("bfloat16")
DRIFTS: Mapping[str, eb.Policy] = {
    "float32": eb.policies.FP32,
    "bfloat16, stochastic": _policy(BF16, BF16),
    "8 bits, power (LEAN_8BIT)": _policy(eb.Blockwise("power"), eb.Blockwise("power")),
    "8 bits, float": _policy(eb.Blockwise("float"), eb.Blockwise("float")),
    "8 bits, expanded": _policy(eb.Blockwise("expanded"), eb.Blockwise("expanded")),
    "8 bits, dynamic": _policy(eb.Blockwise(), eb.Blockwise()),
    "8 bits, root": _policy(eb.Blockwise("root"), eb.Blockwise("root")),
    "8 bits, power, and 4 bits, float (LEAN_4BIT)": _policy(eb.Blockwise("power"), eb.Blockwise("float", 4, 128)),
    "8 and 4 bits, power": _policy(eb.Blockwise("power"), eb.Blockwise("power", 4, 128)),
    "8 and 4 bits, expanded": _policy(eb.Blockwise("expanded"), eb.Blockwise("expanded", 4, 128)),
    "4 bits, dynamic and linear": _policy(eb.Blockwise("dynamic", 4, 128), eb.Blockwise("linear", 4, 128)),
}
PEERS: Mapping[str, tuple[str, str]] = {
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit"),
    "torchao AdamW8bit": ("torchao.optim", "AdamW8bit"),
    "torchao AdamW4bit": ("torchao.optim", "AdamW4bit"),
}


def peer(name: str, params: list[nn.Parameter], rate: float) -> Any:
    """An optimizer of another package."""
    module, kind = PEERS[name]
    return getattr(import_module(module), kind)(params, lr=rate, betas=BETAS, eps=EPS, weight_decay=0.0)


def ours(policy: eb.Policy, params: list[nn.Parameter], rate: float, *, compiled: bool) -> AdamW:
    """AdamW in a policy."""
    return AdamW(params, lr=rate, betas=BETAS, eps=EPS, weight_decay=0.0, policy=policy, compile=compiled)


def moments(optimizer: Any) -> tuple[Tensor, Tensor]:
    """Both moments of the one parameter, as they are stored, in float64."""
    if isinstance(optimizer, AdamW):
        entries = optimizer.full_state_dict()["state"][0]
        return entries["momentum"].double(), entries["variance"].double()
    (state,) = optimizer.state.values()
    if "exp_avg" in state:
        first, second = (state[name] for name in ("exp_avg", "exp_avg_sq"))
        return first.dequantize().double(), second.dequantize().double()
    decode = import_module("bitsandbytes.functional").dequantize_blockwise
    first, second = (
        decode(state[f"state{n}"], absmax=state[f"absmax{n}"], code=state[f"qmap{n}"], blocksize=256).double()
        for n in "12"
    )
    return first, second


def drift(steps: int) -> list[dict[str, Any]]:
    """Adam's update from the stored moments, against float64; looked at 20 times in the second half."""
    elements = 1 << 14
    generator = torch.Generator().manual_seed(2)
    sizes = torch.exp(torch.randn(elements, generator=generator)) * 1e-3

    def weights() -> list[nn.Parameter]:
        return [nn.Parameter(torch.zeros(elements))]

    running: dict[str, Any] = {name: ours(policy, weights(), 0.0, compiled=False) for name, policy in DRIFTS.items()}
    running |= {name: peer(name, weights(), 0.0) for name in PEERS}
    looked: dict[str, list[dict[str, float]]] = {name: [] for name in running}
    momentum, variance = torch.zeros(elements, dtype=torch.float64), torch.zeros(elements, dtype=torch.float64)
    for step in watched(range(1, steps + 1), "drift"):
        gradient = torch.randn(elements, generator=generator) * sizes
        momentum.lerp_(gradient.double(), 1 - BETAS[0])
        variance.lerp_(gradient.double().square(), 1 - BETAS[1])
        for optimizer in running.values():
            optimizer.param_groups[0]["params"][0].grad = gradient.clone()
            optimizer.step()
        if step <= steps // 2 or step % max(steps // 40, 1):
            continue
        exact = update(momentum, variance, step)
        for name, optimizer in running.items():
            m, v = moments(optimizer)
            u = update(m, v, step)
            looked[name].append({
                "rms": math.sqrt(float((u - exact).square().sum() / exact.square().sum())),
                "largest": float(u.abs().max() / exact.abs().max()),
                "variance": float((v / variance).mean()),
                "zeros": float((v == 0).double().mean()),
            })  # fmt: skip
    return [
        {"subject": name} | {key: statistics.fmean(one[key] for one in rows) for key in rows[0]}
        for name, rows in looked.items()
    ]


def update(momentum: Tensor, variance: Tensor, step: int) -> Tensor:
    """Adam's, before the learning rate."""
    return (momentum / (1 - BETAS[0] ** step)) / ((variance / (1 - BETAS[1] ** step)).sqrt() + EPS)


# -- bytes and times ------------------------------------------------------------------------------------------------------------

PRESETS = ("LEAN_BF16", "LEAN_8BIT", "FLOOR_8BIT", "LEAN_4BIT")
ELEMENTS = 1 << 20


def parameter() -> list[nn.Parameter]:
    """One of 2**20 elements in bfloat16, with its gradient."""
    generator = torch.Generator().manual_seed(3)
    made = nn.Parameter(torch.randn(1024, 1024, generator=generator).bfloat16())
    made.grad = torch.randn(1024, 1024, generator=generator).bfloat16() * 1e-3
    return [made]


def _bytes(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_bytes, value.values()))
    if hasattr(value, "codes"):
        return _bytes({"codes": value.codes, "scale": value.scale})
    return value.nbytes if isinstance(value, Tensor) else 0


def bytes_of() -> list[dict[str, Any]]:
    """Bytes for each parameter: weights in bfloat16, what is kept beside them, gradients."""
    made: dict[str, Any] = {
        name: ours(eb.policies.PRESETS[name], parameter(), 1e-3, compiled=False) for name in PRESETS
    }
    made |= {name: peer(name, parameter(), 1e-3) for name in PEERS}
    found = []
    for name, optimizer in made.items():
        optimizer.step()
        (weights,) = optimizer.param_groups[0]["params"]
        entries = optimizer.state_dict()["state"]
        kept = _bytes(entries)
        found.append({
            "subject": name,
            "weights": weights.nbytes / ELEMENTS,
            "kept": kept / ELEMENTS,
            "gradient": weights.grad.nbytes / ELEMENTS,
        })  # fmt: skip
    return found


def times(seconds: float) -> list[dict[str, Any]]:
    """Samples of steps, taken in turns."""
    made: dict[str, Any] = {
        f"{name}, {'compiled' if compiled else 'not compiled'}": ours(
            eb.policies.PRESETS[name], parameter(), 1e-3, compiled=compiled
        )
        for name in PRESETS
        for compiled in (True, False)
    }
    made |= {name: peer(name, parameter(), 1e-3) for name in PEERS}
    for optimizer in watched(list(made.values()), "first steps"):
        for _ in range(3):
            optimizer.step()
    samples: dict[str, list[float]] = {name: [] for name in made}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples[next(iter(samples))]) < 5:
        for name, optimizer in made.items():
            start = time.perf_counter()
            optimizer.step()
            samples[name].append(time.perf_counter() - start)
    return [{"subject": name, "samples": taken} for name, taken in samples.items()]


# -- the page -------------------------------------------------------------------------------------------------------------------


def _short(value: float) -> str:
    return "0" if value == 0 else f"{value:.2g}" if 1e-3 <= abs(value) < 1000 else f"{value:.1e}"


def shown(held: Mapping[str, Any]) -> str:
    """The tables of what was measured."""
    text = ""
    if "round trips" in held:
        text += (
            "\n**Round trip**, to nearest, of log-normal magnitudes with a spread of 1 of their natural logarithms; non-negative numbers"
            " are their squares. Other spreads, and errors of single numbers, are in the raw results\n\n"
        )
        (spread, *_) = (f"spread {spread:g}" for spread in SPREADS)
        columns = ["kind", "bits", "map", "of", "rms", "zeros"]
        rows = [
            [row["kind"], str(row["bits"]), row["map"], row["implementation"]]
            + [_short(row[spread][key]) for key in ("rms", "zeros")]
            for row in held["round trips"]["rows"]
        ]
        text += table(columns, rows)
        text += "\nrms: of the error, over that of the numbers; zeros: the share that became zero.\n"
    if "drift" in held:
        steps = held["drift"]["steps"]
        text += f"\n**Drift** of Adam's update over {steps:,} steps against float64 (2**14 elements, betas 0.9 and 0.999)\n\n"
        columns = [
            "state",
            "rms error of the update",
            "largest update over exact",
            "mean of second moment over exact",
            "zeros in it",
        ]
        text += table(
            columns,
            [
                [row["subject"], _short(row["rms"]), _short(row["largest"]), f"{row['variance']:.4g}", _short(row["zeros"])]
                for row in held["drift"]["rows"]
            ],
        )  # fmt: skip
    if "bytes" in held:
        text += "\n**Bytes** per parameter of a bfloat16 model\n\n"
        rows = [
            [row["subject"], *(f"{row[key]:.2f}" for key in ("weights", "kept", "gradient")),
             f"{row['weights'] + row['kept'] + row['gradient']:.2f}"]
            for row in held["bytes"]["rows"]
        ]  # fmt: skip
        text += table(["", "weights", "kept beside them", "gradient", "sum"], rows)
    if "machine" in held:
        text += origin(held["machine"])
    if "times" in held:
        text += f"\n**Time** of a step on {ELEMENTS:,} bfloat16 parameters\n\n"
        taken = {row["subject"]: statistics.median(row["samples"]) for row in held["times"]["rows"]}
        base = taken["bitsandbytes AdamW8bit"]
        rows = [[name, f"{1e3 * one:.2f}", f"{one / base:.2f}"] for name, one in taken.items()]
        text += table(["", "ms", "of bitsandbytes' time"], rows) + origin(held["times"]["machine"])
    return text


def main(arguments: Arguments) -> None:
    """Measure, print, write."""
    torch.set_num_threads(arguments.threads)
    held: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    if arguments.errors:
        held["machine"] = describe()
        # torchao compiles its step; the numbers are those of the formula either way.
        with torch.compiler.set_stance("force_eager"):
            held["round trips"] = {"rows": round_trips()}
            held["bytes"] = {"rows": bytes_of()}
            held["drift"] = {"steps": arguments.steps, "rows": drift(arguments.steps)}
    if arguments.time:
        held["times"] = {"machine": describe(), "rows": times(arguments.seconds)}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(held, indent=1))
    print(shown(held))
    if arguments.page is not None:
        insert(arguments.page, arguments.out.stem, shown(held))


if __name__ == "__main__":
    import tyro

    with contextlib.suppress(KeyboardInterrupt):
        main(tyro.cli(Arguments))
