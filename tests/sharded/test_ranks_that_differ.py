"""Ranks that would not make the same stepper are told so before anything else is sent, all of them, and what differs first is named."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import everybit as eb
from everybit_torch.checkpoint.sharded import save_sharded
from everybit_torch.collectives import communicator
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import Strategy
from tests.support.programs import Block, Network, data, network, on_a_mesh
from tests.support.ranks import run


def rate(step: Any) -> Any:
    return 1e-2 / (1 + step)


def frozen(model: Network) -> Network:
    model.entry.requires_grad_(False)
    return model


# What one rank makes otherwise than all others; and what is said to all of them.
DIFFERENCES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "another number of layers": (
        lambda: {"model": Network(blocks=3)},
        r"^number of units: rank 0 has 3, and rank {rank} has 4",
    ),
    "another width": (
        lambda: {"model": Network(width=6)},
        r"^entry\.weight: rank 0 has torch\.float32 \(5, 3\).*, and rank {rank} has torch\.float32 \(6, 3\)",
    ),
    "another dtype": (
        lambda: {"model": network(torch.float64)},
        r"^scale: rank 0 has torch\.float32 .*, and rank {rank} has torch\.float64",
    ),
    "a frozen layer": (
        lambda: {"model": frozen(network())},
        r"^entry\.weight: rank 0 has .* trained.*, and rank {rank} has .* frozen",
    ),
    "another strategy": (
        lambda: {"strategy": "no_shard" if dist.get_world_size() == 4 else "optim_grads"},
        r"^strategy: rank 0 has '{strategy}', and rank {rank} has '",
    ),
    "another class of units": (lambda: {"units": [nn.Linear]}, r"^number of units: rank 0 has 3, and rank {rank} has 7"),
    "other units": (
        lambda: {"model": (model := network()), "units": [model.entry, model.exit]},
        r"entry\.weight: rank 0 has .* unit '', .*, and rank {rank} has .* unit 'entry'",
    ),
    "another transform": (
        lambda: {"transform": eb.sgd(1e-2)},
        r"^transform of float32: rank 0 has Chain\(.*ScaleByAdam.*, and rank {rank} has",
    ),
    "another learning rate": (
        lambda: {"transform": eb.adamw(1e-3)},
        r"^transform of float32: rank 0 has .*0\.01.*, and rank {rank} has .*0\.001",
    ),
    "a schedule": (
        lambda: {"transform": eb.adamw(rate)},
        r"^transform of float32: .*, and rank {rank} has .*test_ranks_that_differ\.rate",
    ),
    "another policy": (
        lambda: {"policy": eb.Policy(grads=eb.Grads(comm="bfloat16"))},
        r"^scale: rank 0 has .*label 'float32', and rank {rank} has .*label ''",
    ),
    "another divisor": (lambda: {"divisor": 1.0}, r"^divisor: rank 0 has \d\.0, and rank {rank} has 1\.0"),
    "another seed": (lambda: {"seed": 1}, r"^seed: rank 0 has 0, and rank {rank} has 1"),
    "another check": (lambda: {"nan": "step"}, r"^nan: rank 0 has 'off', and rank {rank} has 'step'"),
    "what is refused": (lambda: {"nan": "always"}, r"^rank {rank} could not make its stepper: ValueError: nan: got 'always'"),
}  # fmt: skip


def arguments_of(strategy: Strategy) -> dict[str, Any]:
    return {"model": network(), "transform": eb.adamw(1e-2), "strategy": strategy, "units": [Block]}


def different(strategy: Strategy, odd_rank: int, mesh: Any = None) -> dict[str, str]:
    """For each difference, what this rank is told."""
    messages = {}
    for name, (change, _) in DIFFERENCES.items():
        arguments = arguments_of(strategy) | {"mesh": mesh}
        if dist.get_rank() == odd_rank:
            arguments |= change()
        try:
            FlatStepper(arguments.pop("model"), arguments.pop("transform"), **arguments)
            messages[name] = "nothing"
        except (ValueError, RuntimeError) as error:
            messages[name] = str(error)
    # And after all of that the ranks go on.
    model = network()
    stepper = FlatStepper(model, eb.adamw(1e-2), strategy=strategy, units=[Block], mesh=mesh)
    with stepper.microbatch(last=True):
        model(data(0, 0, 0, torch.float32)).sum().backward()
    stepper.step()
    return messages


def require_named(outcomes: list[dict[str, str]], strategy: str, odd_rank: int) -> None:
    for name, (_, pattern) in DIFFERENCES.items():
        expected = pattern.replace("{rank}", str(odd_rank)).replace("{strategy}", strategy)
        told = [messages[name] for messages in outcomes]
        if name == "what is refused":
            assert told[odd_rank].startswith("nan: got 'always'; accepted are")
            told[odd_rank] = told[0 if odd_rank else 1]
        assert len(set(told)) == 1, name  # the same on every rank
        assert re.search(expected, told[0]), (name, told[0])


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_the_first_difference_is_named_on_every_rank(strategy: Strategy) -> None:
    require_named(run(3, different, strategy, 2, timeout=20), strategy, 2)


def test_the_first_difference_is_named_on_a_mesh() -> None:
    require_named(run(4, on_a_mesh, different, 2, 2, "optim_grads", 3, timeout=20), "optim_grads", 3)


def alike_but_for_addresses() -> str:
    """Functions and objects of each process's own are the same if they do the same."""
    offset = 0.5
    transform = eb.chain(
        eb.masked(eb.add_decayed_weights(0.1), where=lambda path, p: p.ndim > 1),
        eb.sgd(lambda step: offset / (1 + step)),
    )
    FlatStepper(network(), transform)
    return "made"


def test_functions_are_compared_by_what_they_are() -> None:
    assert run(2, alike_but_for_addresses) == ["made", "made"]


# -- timeouts and kinds of errors ---------------------------------------------------------------------------------------------------------


def absent_peer(told: Path) -> str:
    """What a rank is told that waits for one that does not come before it was told."""
    model = network()
    _stepper = FlatStepper(model, eb.sgd(0.1), strategy="optim_grads", units=[Block])
    if dist.get_rank() == 1:
        while not told.exists():
            time.sleep(0.1)
        return ""
    with pytest.raises(RuntimeError, match=r"rank 0 of 2: all_(gather|reduce) of .* did not complete") as error:
        model(data(0, 0, 0, torch.float32)).sum().backward()
    told.touch()
    return str(error.value)


def test_weights_are_waited_for_as_long_as_the_group_says(tmp_path: Path) -> None:
    messages = run(2, absent_peer, tmp_path / "told", timeout=2, limit=60)
    assert "within the process group's timeout" in messages[0]


def groups_that_are_made(path: Path) -> list[tuple[str, timedelta | None]]:

    model = network()
    stepper = FlatStepper(model, eb.sgd(0.1), strategy="optim_grads", units=[Block])
    save_sharded(stepper, path)
    made = stepper.others.values()
    return [(dist.get_backend(one.group), one.timeout) for one in made]


def test_groups_that_are_made_have_the_timeout_and_backend_of_the_given_one(tmp_path: Path) -> None:
    for made in run(2, groups_that_are_made, tmp_path, timeout=17):
        assert made == [("gloo", timedelta(seconds=17))]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, NotImplementedError, RuntimeError])
def test_only_errors_of_the_communication_are_explained_by_it(error: type[RuntimeError]) -> None:
    alone = communicator.Communicator(None)
    kind, text = (RuntimeError, "another rank died") if error is RuntimeError else (error, "^no memory$")
    with pytest.raises(kind, match=text), alone.explained("all_gather of something"):
        raise error("no memory")


def test_dtensors_are_refused_by_name() -> None:
    for message in run(2, with_dtensors):
        assert message.startswith(
            "scale: is a DTensor, of which this rank has a part; accepted under this strategy are whole parameters"
        )


def with_dtensors() -> str:
    from torch.distributed.tensor import distribute_module

    model = distribute_module(network(), init_device_mesh("cpu", (2,)))
    try:
        FlatStepper(model, eb.sgd(0.1))
    except ValueError as error:
        return str(error)
    return "nothing"
