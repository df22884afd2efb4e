"""Share of the copy bandwidth that a step of AdamW reaches, and the kernels that it launches, by policy and number of elements.

The optimizer's step and a copy of as many bytes as the policy needs take turns in one process; medians of each. A share of 1 is a step as
fast as memory can be copied. Fewer elements than the device's cache holds may be moved faster than that.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import everybit as eb
from contestants import HYPERPARAMETERS
from everybit.policies.presets import PRESETS
from everybit_torch import AdamW
from everybit_torch.segments import short
from machine import describe, synchronize
from pages import origin, table
from shapes import MODELS as SHAPES
from shapes import Shape
from speed import bytes_moved

# The longest first: Triton chooses the size of a block by its time at the first length, and keeps it for all.
SIZES = {"cuda": (1 << 27, 1 << 24, 1 << 20), "cpu": (1 << 14, 1 << 12)}
"""Elements, by device."""

MODELS = {"cuda": "opt-125m", "cpu": "gpt-0.6M"}
"""Of several tensors, by device."""

GATHERED = (1 << 16, 1 << 18, 1 << 20)
"""Elements below which tensors of a model are stepped together, to be compared."""

NOT_COMPILED = {"cuda": 1 << 24, "cpu": 1 << 12}
"""Elements of the steps that are run uncompiled as well, by device."""

UPPER = 2.0**-20
"""A learning rate at which weights stay about where they are."""


@dataclass
class Result:
    """One case. Times are seconds of one step; bytes are those that a pass has to move, for each element.

    Attributes:
        policy: Its name.
        elements: How many.
        compiled: Whether the step was.
        model: Whose shapes they have; empty for one tensor.
        gathered: Elements below which a tensor of a model is stepped together with others.
        bytes: Loaded and stored.
        step: Until the device is done.
        host: Until the call returns.
        copy: Of a copy that moves as many bytes.
        kernels: That a step launches; None where nothing is launched.
        copies: Transfers and fills that a step asks the device for, beside kernels; likewise.
        first_step: The first step, with compilation.
        failure: Why there is no more.
    """

    policy: str
    elements: int
    compiled: bool
    model: str = ""
    gathered: int = 0
    bytes: float = 0.0
    step: float = 0.0
    host: float = 0.0
    copy: float = 0.0
    kernels: int | None = None
    copies: int | None = None
    first_step: float = 0.0
    samples: list[float] = field(default_factory=list)
    copy_samples: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def share(self) -> float:
        """Of the copy bandwidth."""
        return self.copy / self.step


def model_dtype(policy: eb.Policy) -> torch.dtype:
    """Of the parameters that a policy is made for."""
    dtype: torch.dtype = getattr(torch, policy.model_dtype)
    return dtype


def prepared(policy: str, shapes: Sequence[Shape], device: str, *, compile: bool) -> tuple[AdamW, list[nn.Parameter]]:
    """An optimizer of parameters, with their gradients in buffers."""
    dtype, generator = model_dtype(PRESETS[policy]), torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]
    settings = HYPERPARAMETERS | {"lr": UPPER, "betas": (0.9, 0.95)}
    optimizer = AdamW(parameters, **settings, policy=PRESETS[policy], compile=compile)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.01)
    return optimizer, parameters


def seconds_of(call: Callable[[], object], device: str, repeats: int) -> tuple[float, float]:
    """Seconds of one call of several: until the device is done, and until the host has asked for it."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    asked = time.perf_counter()
    synchronize(device)
    return (time.perf_counter() - begin) / repeats, (asked - begin) / repeats


def launched(events: Iterable[Any]) -> tuple[int, int]:
    """Of the events of a profile, those that are kernels, and those that are transfers and fills."""
    there = [event.name for event in events if event.device_type.name == "CUDA"]
    names = [name for name in there if not name.startswith("Optimizer.step#")]  # torch's mark of the whole step
    moved = sum(name.startswith(("Memcpy", "Memset")) for name in names)
    return len(names) - moved, moved


def profiled(call: Callable[[], object], device: str) -> tuple[int, int] | None:
    """What one call launches; None on a device that launches nothing."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as found:
        call()
        synchronize(device)
    return launched(found.events()) if device == "cuda" else None


def measure(result: Result, device: str, seconds: float) -> None:
    """Run one case, and note what it takes."""
    gathered = mock.patch.multiple(short, SHORT=result.gathered, DEVICE_SHORT=result.gathered)
    with gathered if result.model else nullcontext():
        _measure(result, device, seconds)


def _measure(result: Result, device: str, seconds: float) -> None:
    shapes = SHAPES[result.model] if result.model else [(result.elements,)]
    result.elements = sum(map(math.prod, shapes))
    optimizer, parameters = prepared(result.policy, shapes, device, compile=result.compiled)
    result.first_step, _ = seconds_of(optimizer.step, device, 1)
    seconds_of(optimizer.step, device, 2)
    result.bytes = bytes_moved(optimizer, parameters)
    # A copy loads each byte and stores it.
    source = torch.zeros(int(result.elements * result.bytes / 2), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> Tensor:
        return target.copy_(source)

    once, _ = seconds_of(optimizer.step, device, 3)
    seconds_of(copy, device, 3)
    repeats = max(1, int(0.02 / max(once, 1e-6)))
    hosts: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(result.samples) < 5:
        whole, host = seconds_of(optimizer.step, device, repeats)
        result.samples.append(whole)
        hosts.append(host)
        result.copy_samples.append(seconds_of(copy, device, repeats)[0])
    result.step, result.host = statistics.median(result.samples), statistics.median(hosts)
    result.copy = statistics.median(result.copy_samples)
    if (counts := profiled(optimizer.step, device)) is not None:
        result.kernels, result.copies = counts


def cases(device: str, policies: Sequence[str]) -> list[Result]:
    """What is to be measured, before it is."""
    compiled = [Result(policy, elements, True) for policy in policies for elements in SIZES[device]]
    compiled += [
        Result(policy, 0, True, MODELS[device], gathered)
        for policy in policies
        if policy in ("FP32", "LEAN_BF16")
        for gathered in GATHERED
    ]
    return compiled + [Result(policy, NOT_COMPILED[device], False) for policy in policies]


def run(device: str, policies: Sequence[str], seconds: float, out: Path) -> list[Result]:
    """All cases; what there is so far is written after each."""
    results: list[Result] = []
    machine = describe()
    for result in cases(device, policies):
        try:
            measure(result, device, seconds)
        except Exception as error:  # the others are run all the same
            result.failure = f"{type(error).__name__}: {error}"[:300]
        results.append(result)
        print(" ".join(row(result)), flush=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"machine": machine, "results": [asdict(one) for one in results]}, indent=1) + "\n")
        if device == "cuda":
            torch.cuda.empty_cache()
    return results


COLUMNS = [
    "policy", "elements", "step", "bytes", "time, us", "host, us", "share of copy", "GB/s", "kernels", "transfers", "first step, s"
]  # fmt: skip


def row(result: Result) -> list[str]:
    """A case as text."""
    of_model = f" ({result.model}, short below {result.gathered:,})" if result.model else ""
    step = "compiled" if result.compiled else "uncompiled"
    named = [f"`{result.policy}`", f"{result.elements:,}{of_model}", step]
    if result.failure:
        return [*named, result.failure, *[""] * (len(COLUMNS) - 4)]
    return [
        *named, f"{result.bytes:g}", f"{1e6 * result.step:.1f}", f"{1e6 * result.host:.1f}", f"{100 * result.share:.0f} %",
        f"{result.bytes * result.elements / result.step / 1e9:.0f}", _or_dash(result.kernels), _or_dash(result.copies),
        f"{result.first_step:.1f}",
    ]  # fmt: skip


def _or_dash(count: int | None) -> str:
    return "-" if count is None else str(count)


def markdown(held: dict[str, Any]) -> str:
    """The results as a table."""
    results = [Result(**one) for one in held["results"]]
    largest = max((one.elements for one in results if not one.model), default=0)
    models = " and a model" if any(one.model for one in results) else ""
    text = f"The largest size{models}, compiled; other sizes and uncompiled steps are in the raw results.\n\n"
    shown = [row(one) for one in results if (one.elements == largest and one.compiled) or one.failure or one.model]
    return text + table(COLUMNS, shown or [row(one) for one in results]) + origin(held["machine"])


def main() -> int:
    """Return 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--policies", nargs="*", choices=tuple(PRESETS), default=tuple(PRESETS))
    parser.add_argument("--seconds", type=float, default=0.3, help="that each case is timed")
    parser.add_argument("--out", type=Path, required=True, help="where the raw results go")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    results = run(given.device, given.policies, given.seconds, given.out)
    return 1 if any(one.failure for one in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
