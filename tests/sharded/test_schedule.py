"""What a stepper does in a cycle is what the schedule says, which is made without a tensor."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import everybit as eb
from everybit_torch.sharded import arguments
from everybit_torch.sharded.layout import Layout, ParameterSpec, build
from everybit_torch.sharded.scheduling.events import Event
from everybit_torch.sharded.scheduling.schedule import Settings, cycle
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import STRATEGIES, OuterStrategy, Sharding, Strategy
from tests.support.programs import Block, Pair, on_a_mesh
from tests.support.ranks import run


class Nested(nn.Module):
    """Units in a row, one of which has units in it; one is frozen but for a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(3, 5)
        self.parts = nn.ModuleList([Block(5), Pair(5), Block(5)])
        self.exit = nn.Linear(5, 2)
        for parameter in self.parts[0].parameters():
            parameter.requires_grad_(parameter.ndim == 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for part in self.parts:
            x = part(x)
        out: Tensor = self.exit(x)
        return out


ARRIVALS = ("copy", "add")


def arrivals_apart(events: list[Event]) -> tuple[list[Event], list[Event]]:
    """Arrivals of gradients, sorted, and the other events as they came: autograd decides in which order the gradients of a unit arrive."""
    return sorted(e for e in events if e.kind in ARRIVALS), [e for e in events if e.kind not in ARRIVALS]


def executed(
    strategy: Strategy, outer: OuterStrategy = "no_shard", mesh: Any = None, *, offload: bool = False
) -> list[tuple[Any, ...]]:
    """The cases in which the events of a cycle are not the schedule's; the number of cases first."""
    wrong: list[tuple[Any, ...]] = []
    cases = list(itertools.product([1, 2, 4], [True, False], [True, False]))
    for microbatches, reshard, keep in cases:
        torch.manual_seed(0)
        model = Nested()
        stepper = FlatStepper(
            model,
            eb.chain(eb.clip_by_global_norm(1.0), eb.adamw(1e-3)),
            strategy=strategy,
            outer=outer,
            mesh=mesh,
            units=[Block, Pair],
            reshard_after_forward=reshard,
            keep_gradients=keep,
            offload=offload,
        )
        seen: list[Event] = []
        stepper._executor.observer = seen.append
        for _ in range(2):
            seen.clear()
            for number in range(microbatches):
                with stepper.microbatch(last=number == microbatches - 1):
                    model(torch.ones(2, 3)).square().mean().backward()
            stepper.step()
        settings = Settings(stepper.sharding, reshard, keep, overlap_reductions=False)  # of a host
        expected = [event for stage in cycle(stepper.layout, settings, microbatches) for event in stage.events]
        case = (strategy, outer, microbatches, reshard, keep)
        for got, planned in zip(arrivals_apart(seen), arrivals_apart(expected), strict=True):
            if got != planned or not got:
                first = next((n for n, (a, b) in enumerate(zip(got, planned, strict=False)) if a != b), None)
                wrong.append((*case, first, got, planned))
        stepper.close()
    return [(len(cases),), *wrong]


@pytest.mark.parametrize(
    "strategy", [*(pytest.param(one, marks=pytest.mark.exhaustive) for one in STRATEGIES[:2]), *STRATEGIES[2:]]
)
def test_a_cycle_executes_the_events_of_the_schedule(strategy: Strategy) -> None:
    assert run(2, executed, strategy) == [[(12,)]] * 2


@pytest.mark.parametrize("outer", ["optim", pytest.param("no_shard", marks=pytest.mark.exhaustive)])
def test_a_cycle_on_a_mesh_executes_the_events_of_the_schedule(outer: OuterStrategy) -> None:
    assert run(4, on_a_mesh, executed, 2, 2, "optim_grads_params", outer) == [[(12,)]] * 4


def test_offloaded_state_changes_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "is_host", lambda device: False)
    for strategy in STRATEGIES:
        assert executed(strategy, offload=True) == [(12,)]


class NoTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses every operation on tensors."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} was called")


def layout(shapes: list[list[int]], *, frozen: int | None = None) -> Layout:
    """A model with a parameter of each length in each unit."""
    units = ["", *(f"unit{number}" for number in range(1, len(shapes)))]
    specs = [
        ParameterSpec((f"{units[unit]}.{place}",), (size,), torch.float32, requires_grad=unit != frozen, unit=unit)
        for unit, sizes in enumerate(shapes)
        for place, size in enumerate(sizes)
    ]
    return build(specs, shards=2, units=units)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_schedule_is_made_without_tensors_and_leaves_nothing_open(strategy: Strategy) -> None:
    """Whatever is gathered is freed, and whatever is opened is reduced or cleared, in every cycle."""
    for keep, reshard, microbatches, frozen in itertools.product([True, False], [True, False], [1, 3], [None, 1]):
        made = layout([[3, 4], [5], [], [7, 1, 2]], frozen=frozen)
        with NoTensor():  # type: ignore[no-untyped-call]
            stages = cycle(made, Settings(Sharding(strategy), reshard, keep), microbatches)
        assert [stage.name for stage in stages] == ["forward", "backward"] * microbatches + ["step"]
        open_now: set[tuple[str, int]] = set()
        for event in itertools.chain.from_iterable(stage.events for stage in stages):
            opened = {"gather": "weights", "open bucket": "bucket", "open main": "main"}.get(event.kind)
            closed = {"free": ["weights"], "reduce": ["bucket"], "reduce last": ["bucket"], "clear": ["bucket", "main"]}
            if opened is not None:
                assert (opened, event.number) not in open_now
                open_now.add((opened, event.number))
            open_now -= {(name, event.number) for name in closed.get(event.kind, [])}
        assert not open_now
        reduced = [event.number for stage in stages for event in stage.events if event.kind.startswith("reduce")]
        once = [number for number, group in enumerate(made.groups) if group.requires_grad][::-1]
        assert reduced == once * (microbatches if Sharding(strategy).grads else 1)
