"""Time and temporaries of optimizers that look at whole tensors, rows or norms: against our AdamW, and against another implementation.

python benchmarks/reductions.py --out benchmarks/results/reductions-cpu.json --page docs/speed.md

Every case is a process of its own. In it three optimizers take turns, each first every third time: the case, our AdamW
(compiled, if the case is), and another implementation of the same algorithm. Medians, and the ratios of medians.
Temporaries are the most bytes that a step has allocated at a time, by torch's profiler.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import everybit as eb
from case_process import run_case
from everybit_torch import TorchOptimizer
from machine import describe
from memory import allocated_by
from pages import insert, origin, table
from shapes import Shape, gpt
from speed import parameters, seconds_of, weights_and_gradients

RATE = 1e-3


def _many(count: int) -> list[Shape]:
    """Small tensors, every second of them a matrix."""
    return [(8, 4 + i % 9) if i % 2 else (16 + i % 49,) for i in range(count)]


MODELS: Mapping[str, list[Shape]] = {"144 tensors": gpt(768, 12), "10000 tensors": _many(10_000)}
"""The first has the blocks of OPT-125m, with queries, keys and values in one tensor: 85 million parameters."""

QUICK_MODELS: Mapping[str, list[Shape]] = {"12 tensors": gpt(32, 1), "40 tensors": _many(40)}


@dataclass(frozen=True, slots=True)
class Peer:
    """Another implementation: where it is, and its arguments besides parameters and learning rate."""

    module: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    names: bool = False

    def make(self, params: list[nn.Parameter]) -> Any:
        """Make it; imports its package."""
        given: Any = zip(names_of(params), params, strict=True) if self.names else params
        return getattr(_module(self.module), self.name)(given, lr=RATE, **self.arguments)


def _module(name: str) -> Any:
    """A module; one of timm's without the rest of timm, which imports torchvision."""
    package = name.partition(".")[0]
    found = find_spec(package)
    if package != "timm" or found is None or not found.submodule_search_locations:
        return import_module(name)
    (folder,) = found.submodule_search_locations
    for empty, path in (("timm", folder), ("timm.optim", f"{folder}/optim")):
        sys.modules[empty] = ModuleType(empty)
        sys.modules[empty].__path__ = [path]
    return import_module(name)


@dataclass(frozen=True, slots=True)
class Subject:
    """An optimizer of ours, and the other implementations of it, of which the first that imports counts."""

    factory: Callable[..., eb.Transform[Any]]
    peers: tuple[Peer, ...]


def cautious_adamw(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
    """AdamW with cautious updates, as timm's."""
    return eb.chain(
        eb.cautious(eb.scale_by_adam()), eb.add_decayed_weights(1e-2), eb.scale_by_learning_rate(learning_rate)
    )


def _block(_path: str, parameter: Tensor) -> str:
    return "row" if parameter.ndim > 1 else "tensor"


def adam_mini(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
    """Adam-mini with a second moment for each row of matrices."""
    return eb.adam_mini(learning_rate, labels=_block)


DECAY = {"weight_decay": 1e-2}
SUBJECTS: Mapping[str, Subject] = {
    "adamw": Subject(eb.adamw, (Peer("torch.optim", "AdamW", {"fused": True}),)),
    "lamb": Subject(eb.lamb, (Peer("timm.optim.lamb", "Lamb", DECAY), Peer("pytorch_optimizer", "Lamb", DECAY))),
    "lars": Subject(eb.lars, (Peer("timm.optim.lars", "Lars", {"momentum": 0.9}), Peer("pytorch_optimizer", "LARS"))),
    "stable_adamw": Subject(
        eb.stable_adamw, (Peer("optimi", "StableAdamW", DECAY), Peer("pytorch_optimizer", "StableAdamW", DECAY))
    ),
    "cautious adamw": Subject(
        cautious_adamw, (Peer("timm.optim.adamw", "AdamWLegacy", {"caution": True, **DECAY}),)
    ),
    "adafactor": Subject(eb.adafactor, (Peer("torch.optim", "Adafactor"),)),
    "came": Subject(eb.came, (Peer("came_pytorch", "CAME"), Peer("pytorch_optimizer", "CAME"))),
    "adam_mini": Subject(adam_mini, (Peer("adam_mini", "Adam_mini", {"verbose": False}, names=True),)),
}  # fmt: skip


def names_of(params: list[nn.Parameter]) -> list[str]:
    """Names by which Adam-mini takes rows of matrices, and whole vectors."""
    return [f"layers.{index}.{'mlp' if p.ndim > 1 else 'norm'}" for index, p in enumerate(params)]


@dataclass(frozen=True)
class Arguments:
    """What to measure.

    Attributes:
        subjects: Names of optimizers; none for all.
        threads: Of torch.
        seconds: How long a case is timed.
        limit: Seconds after which a case is given up.
        out: Where the raw results go.
        page: Where the table goes, as Markdown, at the name of ``out``.
        run: False: show what ``out`` holds.
        quick: Small models for a fifth of a second each, and few compiled cases: to see that it runs.
    """

    subjects: tuple[str, ...] = ()
    threads: int = 1
    seconds: float = 3.0
    limit: float = 900.0
    out: Path = Path("benchmarks/results/reductions-cpu.json")
    page: Path | None = None
    run: bool = True
    quick: bool = False


@dataclass
class Result:
    """One case. Times in seconds, temporaries in bytes."""

    model: str
    subject: str
    compiled: bool
    tensors: int = 0
    elements: int = 0
    peer: str = ""
    first_step: float = math.nan
    samples: list[float] = field(default_factory=list)
    adamw_samples: list[float] = field(default_factory=list)
    peer_samples: list[float] = field(default_factory=list)
    peak: int = 0
    adamw_peak: int = 0
    peer_peak: int = 0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """An optimizer on a model."""

    model: str
    subject: str
    compiled: bool

    @property
    def result(self) -> Result:
        """Nothing measured yet."""
        return Result(self.model, self.subject, self.compiled)


def ours(factory: Any, params: list[nn.Parameter], *, compiled: bool) -> Any:
    """An optimizer of ours in float32."""
    return TorchOptimizer(
        params, factory, lr=RATE, policy=eb.policies.FP32, compile=compiled
    )  # fmt: skip


def measure(case: Case, seconds: float, shapes: list[Shape]) -> Result:
    """Run one case in this process."""
    result, subject = case.result, SUBJECTS[case.subject]
    weights, gradients = weights_and_gradients(shapes)
    result.tensors, result.elements = len(shapes), sum(w.numel() for w in weights)
    optimizers = [
        ours(subject.factory, _parameters(weights, gradients), compiled=case.compiled),
        ours(eb.adamw, _parameters(weights, gradients), compiled=case.compiled),
    ]
    for peer in subject.peers:
        try:
            optimizers.append(peer.make(_parameters(weights, gradients)))
        except ModuleNotFoundError:
            continue
        result.peer = peer.module.partition(".")[0]
        break
    del weights, gradients
    samples = [result.samples, result.adamw_samples, result.peer_samples]
    result.first_step = seconds_of(optimizers[0].step, "cpu")
    for one in optimizers * 2:
        one.step()
    turns = list(zip(optimizers, samples, strict=False))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(result.samples) < 3:
        turns.append(turns.pop(0))
        for one, found in turns:
            found.append(seconds_of(one.step, "cpu"))
    peaks = [allocated_by(one.step)[0] for one in optimizers]
    result.peak, result.adamw_peak, result.peer_peak = (*peaks, 0)[:3]
    return result


def _parameters(weights: list[Tensor], gradients: list[Tensor]) -> list[nn.Parameter]:
    return parameters(weights, gradients, torch.float32)


def cases(arguments: Arguments) -> list[Case]:
    """The cases, in order."""
    if unknown := [name for name in arguments.subjects if name not in SUBJECTS]:
        raise SystemExit(f"subjects: got {', '.join(unknown)}; accepted are {', '.join(SUBJECTS)}.")
    found = [
        Case(model, name, compiled)
        for model in (QUICK_MODELS if arguments.quick else MODELS)
        for name in (arguments.subjects or SUBJECTS)
        for compiled in (True, False)
    ]
    if not arguments.quick:
        return found
    first, compiling = next(iter(QUICK_MODELS)), {"lamb", "came"}
    return [one for one in found if one.subject in compiling or (one.model == first and not one.compiled)]


def in_a_process(case: Case, arguments: Arguments) -> Result:
    """One case in a process of its own, so that neither memory nor compiled code is another's."""
    result = case.result
    seconds = 0.2 if arguments.quick else arguments.seconds
    settings = json.dumps(asdict(case) | {"threads": arguments.threads, "seconds": seconds})
    found, result.failure = run_case(__file__, [settings], arguments.limit)
    return result if found is None else Result(**found)


COLUMNS = [
    "optimizer", "compiled", "ms", "of AdamW's time", "of the peer's time", "temporaries, MB", "AdamW's", "the peer's",
    "first step, s",
]  # fmt: skip


def cells(r: Result) -> list[str]:
    """A case as text."""
    case = [r.subject, "yes" if r.compiled else "no"]
    if r.failure:
        return [*case, r.failure, *[""] * (len(COLUMNS) - len(case) - 1)]
    took, adamw = statistics.median(r.samples), statistics.median(r.adamw_samples)
    peer = f"{took / statistics.median(r.peer_samples):.2f} ({r.peer})" if r.peer else "not installed"
    peaks = [f"{peak / 1e6:.3g}" for peak in (r.peak, r.adamw_peak)]
    return [
        *case, f"{1e3 * took:.2f}", f"{took / adamw:.2f}", peer, *peaks, f"{r.peer_peak / 1e6:.3g}" if r.peer else "", f"{r.first_step:.1f}"
    ]  # fmt: skip


def main(arguments: Arguments) -> None:
    """Measure, print, write."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    if arguments.run:
        torch.set_num_threads(arguments.threads)
        results: list[Result] = []
        machine = describe()
        for case in track(cases(arguments), description="measuring", console=Console(stderr=True)):
            results.append(in_a_process(case, arguments))
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(
                json.dumps({"machine": machine, "results": [asdict(r) for r in results]}, indent=1)
            )
    held = json.loads(arguments.out.read_text())
    results = [Result(**r) for r in held["results"]]
    by_model = ""
    for model in dict.fromkeys(r.model for r in results):
        own = [r for r in results if r.model == model]
        shown = Table(*COLUMNS, title=model)
        for r in own:
            shown.add_row(*cells(r), style="red" if r.failure else None)
        Console(width=170).print(shown)
        elements = max(r.elements for r in own)
        by_model += f"\n**{model}**, {elements:,} parameters\n\n{table(COLUMNS, [cells(r) for r in own])}"
    if arguments.page is not None:
        insert(arguments.page, arguments.out.stem, by_model + origin(held["machine"]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        warnings.simplefilter("ignore")
        asked = json.loads(sys.argv[2])
        torch.set_num_threads(asked.pop("threads"))
        limit, chosen = asked.pop("seconds"), Case(**asked)
        print(json.dumps(asdict(measure(chosen, limit, {**MODELS, **QUICK_MODELS}[chosen.model]))))
    else:
        import tyro

        main(tyro.cli(Arguments))
