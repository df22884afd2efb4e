"""What becomes of small updates, decay and state under every optimizer: the peers' and ours, a row each, every cell from a run.

Each optimizer is a process of its own. Columns:

- decay: share of a decay of ``lr * weight_decay = 1e-5`` a step that reached the weights after 2000 steps without gradient;
- updates: share of 1000 updates of 1e-5 that reached weights between 1 and 2;
- variance: the second moment after 200 gradients of 1 and 3800 of 0.01, relative to what it should be;
- compiled: whether 20 compiled steps give the bits of 20 eager ones, and whether anything was compiled at all;
- resumed: whether 10 steps, a checkpoint through a file under ``weights_only=True`` and 10 more give the bits of 20;
- dtypes: whether all state comes back from the checkpoint in the dtypes it had;
- bytes: of weights and state, per parameter.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from contestants import CONTESTANTS, Contestant, corrected, full_precision, named, state_tensors
from machine import describe
from pages import insert, origin, table

SIZE = 1 << 13
"""Elements: torchao quantizes the state of tensors of at least 4096."""

LEFT_OUT = {
    "torch foreach",
    "torch loop",
    "torch compiled",
    "everybit FP32, not compiled",
}
"""The same arithmetic as another row."""


@dataclass(frozen=True)
class Arguments:
    """What to run.

    Attributes:
        contestants: Names in contestants.py; none for all.
        out: Where the raw results go.
        page: Where the table goes, as Markdown; a picture goes into its ``images``.
        run: False: show what ``out`` holds.
    """

    contestants: tuple[str, ...] = ()
    out: Path = Path("benchmarks/results/battery-cpu.json")
    page: Path | None = None
    run: bool = True


@dataclass
class Row:
    """A number, a verdict, or how it failed."""

    optimizer: str
    decay: float | str = "not run"
    updates: float | str = "not run"
    variance: float | str = "not run"
    compiled: str = "not run"
    resumed: str = "not run"
    dtypes: str = "not run"
    bytes: float | str = "not run"


def weights(dtype: torch.dtype) -> list[nn.Parameter]:
    """Numbers between 1 and 2, the same in all dtypes."""
    generator = torch.Generator().manual_seed(0)
    start = (1 + torch.rand(SIZE, generator=generator)).bfloat16()
    return [nn.Parameter(start.to(dtype).view(-1, 128))]


def run(
    contestant: Contestant, gradients: Callable[[int], float], steps: int, **hyperparameters: Any
) -> tuple[Any, list[nn.Parameter]]:
    """Constant gradients, by step."""
    params = weights(contestant.dtype)
    optimizer = contestant.make(params, **hyperparameters)
    for step in range(steps):
        params[0].grad = torch.full_like(params[0], gradients(step))
        optimizer.step()
    return optimizer, params


def decay(contestant: Contestant) -> float:
    """Share of the decay that arrived."""
    steps, rate = 2000, 1e-5
    start = weights(torch.float64)[0].detach()
    optimizer, params = run(contestant, lambda _: 0.0, steps, lr=1e-4, weight_decay=0.1)
    lost = start - full_precision(optimizer, params)[0]
    return float(lost.sum() / (start * (1 - (1 - rate) ** steps)).sum())


def updates(contestant: Contestant) -> float:
    """Share of small updates that arrived: a constant gradient makes Adam step by the learning rate."""
    steps, rate = 1000, 1e-5
    start = weights(torch.float64)[0].detach()
    optimizer, params = run(contestant, lambda _: 1.0, steps, lr=rate, weight_decay=0.0)
    return float((start - full_precision(optimizer, params)[0]).mean() / (steps * rate))


def variance(contestant: Contestant) -> float:
    """The second moment relative to the exact one."""
    high, low, b2 = 200, 3800, 0.999
    optimizer, params = run(contestant, lambda step: 1.0 if step < high else 0.01, high + low, lr=1e-4)
    exact = (1 - b2**high) * b2**low + 0.01**2 * (1 - b2**low)
    return float(second_moment(optimizer, params[0]).double().mean() / exact)


def second_moment(optimizer: Any, parameter: nn.Parameter) -> Tensor:
    """An optimizer's second moment of a parameter."""
    if hasattr(optimizer, "full_state_dict"):
        held: Tensor = optimizer.full_state_dict()["state"][0]["variance"]
        return held

    def find(value: Any) -> Tensor | None:
        if isinstance(value, dict):
            for key, item in value.items():
                if isinstance(item, Tensor) and item.numel() >= parameter.numel() and "exp_avg_sq" in str(key):
                    return corrected(item, value.get(f"{key}::ecc"))
                if (found := find(item)) is not None:
                    return found
        return None

    found = find(dict(optimizer.state).get(parameter, {})) if hasattr(optimizer, "state") else None
    if found is None:
        raise LookupError("its second moment cannot be read")
    return found.dequantize() if hasattr(found, "dequantize") and type(found) is not Tensor else found


def stream(optimizer: Any, params: list[nn.Parameter], steps: range) -> None:
    """Step through normal gradients, each from its own seed."""
    for step in steps:
        noise = torch.randn(params[0].shape, generator=torch.Generator().manual_seed(step))
        params[0].grad = noise.to(params[0].dtype)
        torch.manual_seed(step)  # of stochastic rounding by torch's generator
        optimizer.step()


def compiled(contestant: Contestant) -> str:
    """The same bits compiled and eager, if anything was compiled; what compiles by itself is kept from it in the eager run."""
    results = []
    for compile in (False, True):
        torch._dynamo.reset()
        counters.clear()
        params = weights(contestant.dtype)
        optimizer = contestant.make(params)
        step = optimizer.step
        if compile and not compiles_itself(contestant):
            step = torch.compile(step)
        with warnings.catch_warnings(), torch.compiler.set_stance("default" if compile else "force_eager"):
            # Optimizers that compile by themselves warn that the stance keeps them from it, which is meant here.
            warnings.filterwarnings("ignore", message=".*runs uncompiled for now")
            for number in range(20):
                noise = torch.randn(params[0].shape, generator=torch.Generator().manual_seed(number))
                params[0].grad = noise.to(params[0].dtype)
                torch.manual_seed(number)
                step()
        results.append(full_precision(optimizer, params)[0])
    # torch.compile runs a function as it is where it finds nothing that it can compile.
    if not counters["stats"]["unique_graphs"]:
        return "not compiled"
    moved = (results[0] - weights(torch.float64)[0].detach()).square().mean().sqrt()
    difference = float((results[1] - results[0]).square().mean().sqrt() / moved)
    return "same bits" if torch.equal(*results) else f"off by {difference:.1e}"


def compiles_itself(contestant: Contestant) -> bool:
    """Whether its step is compiled without our doing."""
    return contestant.name.startswith(("everybit", "torchao", "HeavyBall", "torch compiled"))


def resumed(contestant: Contestant) -> str:
    """Resume is continue."""
    params = weights(contestant.dtype)
    optimizer = contestant.make(params)
    stream(optimizer, params, range(10))
    file = io.BytesIO()
    torch.save({"weights": params[0].detach(), "optimizer": optimizer.state_dict()}, file)
    stream(optimizer, params, range(10, 20))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    others = weights(contestant.dtype)
    others[0].data.copy_(saved["weights"])
    other = contestant.make(others)
    other.load_state_dict(saved["optimizer"])
    stream(other, others, range(10, 20))
    same = torch.equal(full_precision(optimizer, params)[0], full_precision(other, others)[0])
    return "same bits" if same else "differs"


def dtypes(contestant: Contestant) -> str:
    """The dtypes of state before a checkpoint and after it."""
    params = weights(contestant.dtype)
    optimizer = contestant.make(params)
    stream(optimizer, params, range(2))
    before = kinds(optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = contestant.make(weights(contestant.dtype))
    other.load_state_dict(torch.load(file, weights_only=True))
    after = kinds(other)
    return "kept" if before == after else f"{before} became {after}"


def kinds(optimizer: Any) -> str:
    """Dtypes of the state's tensors of one element per parameter, or nearly."""
    return (
        ", ".join(sorted(str(x.dtype).removeprefix("torch.") for x in state_tensors(optimizer) if x.ndim))
        or "no tensors"
    )


def bytes_per_parameter(contestant: Contestant) -> float:
    """Weights and state."""
    params = weights(contestant.dtype)
    optimizer = contestant.make(params)
    stream(optimizer, params, range(1))
    state = sum(x.nbytes for x in state_tensors(optimizer) if x.ndim)
    return (params[0].nbytes + state) / params[0].numel()


CHECKS: dict[str, Callable[[Contestant], float | str]] = {
    "decay": decay, "updates": updates, "variance": variance, "compiled": compiled, "resumed": resumed, "dtypes": dtypes,
    "bytes": bytes_per_parameter,
}  # fmt: skip


def cell(check: str, contestant: Contestant) -> float | str:
    """One check's result; of a failure the first line."""
    try:
        return CHECKS[check](contestant)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"{type(error).__name__}: {lines[0][:120]}"


def in_a_process(contestant: Contestant) -> Row:
    """All checks of one optimizer, each in its own process."""
    row = Row(contestant.name)
    for check in CHECKS:
        command = [sys.executable, __file__, "--check", check, contestant.name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        except subprocess.TimeoutExpired:
            setattr(row, check, "took more than 240 s")
            continue
        if done.returncode:
            setattr(row, check, (done.stderr.strip().splitlines() or ["died"])[-1][:120])
        else:
            setattr(row, check, json.loads(done.stdout.strip().splitlines()[-1]))
    return row


def shown(row: Row) -> list[str]:
    """A row's cells as text."""
    cells = [row.optimizer]
    for check in ("decay", "updates", "variance"):
        value = getattr(row, check)
        cells.append(f"{100 * value:.1f} %" if isinstance(value, float) else first_sentence(value))
    cells += [
        first_sentence(row.compiled),
        first_sentence(row.resumed),
        first_sentence(row.dtypes),
        f"{row.bytes:.2f}" if isinstance(row.bytes, float) else str(row.bytes),
    ]
    return cells


def first_sentence(text: str) -> str:
    """Of a long error."""
    return text.split(". ")[0]


HEADINGS = ["optimizer", "decay", "updates", "variance", "compiled", "resumed", "state dtypes", "bytes"]


def picture(rows: list[Row], path: Path) -> None:
    """What is lost, on a logarithmic scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(14, 6.5), layout="constrained", sharey=True)
    names = [row.optimizer for row in rows][::-1]
    titles = {"decay": "decay of 1e-5 a step", "updates": "updates of 1e-5 a step", "variance": "second moment"}
    for ax, (check, title) in zip(axes, titles.items(), strict=True):
        values = [getattr(row, check) for row in rows][::-1]
        errors = [max(abs(value - 1), 1e-5) if isinstance(value, float) else 0 for value in values]
        colours = ["#1f6f8b" if name.startswith("everybit") else "#b8b8b8" for name in names]
        ax.barh(names, errors, left=1e-5, color=colours)
        ax.set_xscale("log")
        ax.set_title(title)
        ax.set_xlabel("relative error")
    figure.savefig(path, dpi=110)


def main(arguments: Arguments) -> None:
    """Run, print, write."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    rows: list[Row] = []
    if arguments.run:
        chosen = [named(name) for name in arguments.contestants] or [c for c in CONTESTANTS if c.name not in LEFT_OUT]
        for contestant in track(chosen, description="running", console=Console(stderr=True)):
            rows.append(in_a_process(contestant))
            raw = {"machine": describe(), "rows": [asdict(row) for row in rows]}
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(raw, indent=1))
    held = json.loads(arguments.out.read_text())
    rows = [Row(**row) for row in held["rows"]]
    printed = Table(*HEADINGS)
    for row in rows:
        printed.add_row(*shown(row))
    Console(width=180).print(printed)
    if arguments.page is not None:
        (arguments.page.parent / "images").mkdir(parents=True, exist_ok=True)
        image = arguments.page.parent / "images" / f"{arguments.page.stem}.png"
        picture(rows, image)
        insert(arguments.page, "battery", table(HEADINGS, [shown(row) for row in rows]) + origin(held["machine"]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        print(json.dumps(cell(sys.argv[2], named(sys.argv[3]))))
    else:
        import tyro

        main(tyro.cli(Arguments))
