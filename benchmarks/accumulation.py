"""Peak memory of accumulating float32 gradients over microbatches: in slices of one buffer, and in a list that is concatenated at the end.

The case of fairscale's pull request 1186, which took 17.4 GB with the list, 15.1 GB without, and 15.1 GB where nothing was kept flat.
Bytes are counted as torch's operations allocate them, in one process, on the demo's transformer in bfloat16.
"""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import everybit as eb
from everybit_cli.compare.model import SIZES, Block, Transformer
from everybit_torch import FlatStepper
from everybit_torch.planning.allocations import AllocationCounter
from machine import describe
from pages import insert, origin, table


@dataclass(frozen=True)
class Arguments:
    """What to measure.

    Attributes:
        model: One of the demo's sizes.
        microbatches: In a step.
        out: Where the raw results go.
        page: Where the table goes, as Markdown.
        run: False: show what ``out`` holds.
    """

    model: str = "medium"
    microbatches: int = 4
    out: Path = Path("benchmarks/results/accumulation-cpu.json")
    page: Path | None = None
    run: bool = True


def backward(model: nn.Module) -> None:
    tokens = torch.arange(2 * 33).view(2, 33) % 256
    logits = model(tokens[:, :-1])
    torch.autograd.backward(nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()))


def in_place(model: nn.Module) -> Callable[[bool], Tensor]:
    """everybit: hooks copy and add to slices."""
    policy = dataclasses.replace(eb.policies.LEAN_BF16, grads=eb.Grads(main="float32"))
    stepper = FlatStepper(model, eb.sgd(0.0), policy=policy, strategy="optim", units=[Block])

    def microbatch(last: bool) -> Tensor:
        with stepper.microbatch(last=last):
            backward(model)
        return torch.empty(0)

    return microbatch


def concatenated(model: nn.Module) -> Callable[[bool], Tensor]:
    """As before that pull request: a float32 gradient for each parameter, and one concatenation at the last microbatch."""
    parameters = list(model.parameters())
    held: dict[int, Tensor] = {}

    def hook(number: int) -> Callable[[Tensor], None]:
        def arrive(parameter: Tensor) -> None:
            assert parameter.grad is not None
            wide = parameter.grad.float()
            held[number] = held[number].add_(wide) if number in held else wide
            parameter.grad = None

        return arrive

    for number, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(hook(number))  # type: ignore[no-untyped-call]

    def microbatch(last: bool) -> Tensor:
        backward(model)
        return torch.cat([held[number].flatten() for number in range(len(parameters))]) if last else torch.empty(0)

    return microbatch


WAYS: dict[str, Callable[[nn.Module], Callable[[bool], Tensor]]] = {
    "in place (everybit)": in_place,
    "list, then concatenated": concatenated,
}


def measure(arguments: Arguments) -> dict[str, Any]:
    size = next(size for name, size in SIZES.items() if name == arguments.model)
    records = []
    for name, make in WAYS.items():
        gc.collect()
        torch.manual_seed(0)
        with AllocationCounter() as counter:
            model = Transformer(size).bfloat16()
            microbatch = make(model)
            before = counter.live
            for number in range(arguments.microbatches):
                result = microbatch(number == arguments.microbatches - 1)
                del result
        parameters = sum(p.numel() for p in model.parameters())
        records.append({"way": name, "parameters": parameters, "model": before, "peak": counter.peak})
    return {"machine": describe(), "records": records, "microbatches": arguments.microbatches}


def markdown(results: dict[str, Any]) -> str:
    records = results["records"]
    least = min(record["peak"] for record in records)
    rows = [
        [
            record["way"],
            f"{record['peak'] / 2**20:.1f}",
            f"{record['peak'] / least:.3f}",
            f"{record['peak'] / record['parameters']:.2f}",
        ]
        for record in records
    ]
    text = table(["gradients", "peak, MiB", "ratio", "bytes per parameter"], rows)
    text += (
        f"\n{records[0]['parameters']:,} parameters in bfloat16, {results['microbatches']} microbatches; weights, activations and"
        " gradients, no optimizer.\n"
    )
    return text + origin(results["machine"])


def main(arguments: Arguments) -> None:
    if arguments.run:
        arguments.out.write_text(json.dumps(measure(arguments), indent=1) + "\n")
    text = markdown(json.loads(arguments.out.read_text()))
    print(text)
    if arguments.page is not None:
        insert(arguments.page, "accumulation", text)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Arguments))
