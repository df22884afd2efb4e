"""Weights that a step hands out while the next forward pass begins: whoever reads them waits, and whoever cannot is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit.testing.examples import assert_same_bits
from everybit_torch import load_sharded, save_sharded
from everybit_torch.collectives.communicator import Communicator, Pending
from everybit_torch.sharded.scheduling.events import Event
from everybit_torch.sharded.scheduling.schedule import Settings, cycle
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import STRATEGIES
from tests.support.ranks import run


class Unit(nn.Module):
    """A unit one of whose layers is used by its parent, without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x)) @ self.outer.weight.T


class Tied(nn.Module):
    """Units between an embedding and a head that have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.units = nn.ModuleList(Unit() for _ in range(3))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.embedding(x)
        for unit in self.units:
            y = unit(y)
        out: Tensor = self.head(y)
        return out

    def middle(self, x: Tensor) -> Tensor:
        """Compute with one unit, not as a forward pass of the model."""
        return torch.tanh(x @ self.units[1].inner.weight.T)  # type: ignore[operator, union-attr]


class Late:
    """A gathering that sends nothing before it is waited for: until then the weights are those from before the step."""

    def __init__(self, gather: Callable[[], Pending]) -> None:
        self._gather = gather

    def wait(self) -> None:
        self._gather().wait()

    def is_done(self) -> bool:
        return False


@contextmanager
def as_late_as_can_be() -> Iterator[None]:
    gather = Communicator.all_gather

    def late(self: Communicator, into: Tensor, shard: Tensor, what: str, lengths: Sequence[int] = ()) -> Any:
        return Late(lambda: gather(self, into, shard, what, lengths))

    with mock.patch.object(Communicator, "all_gather", late):
        yield


TOKENS = torch.tensor([[1, 2, 6], [0, 3, 5]])


def waited(stepper: FlatStepper) -> list[Tensor]:
    stepper.wait_for_weights()
    return [p.detach().clone() for p in stepper.model.parameters()]


def read(stepper: FlatStepper, how: str) -> Any:
    """Read weights in one of the ways that wait by themselves."""
    model = stepper.model
    assert isinstance(model, Tied)
    with torch.no_grad():
        ways: dict[str, Callable[[], Any]] = {
            "forward pass": lambda: model(TOKENS),
            "a unit": lambda: model.units[1](torch.ones(2, 4)),
            "a module that is no unit": lambda: model.units[2].inner(torch.ones(2, 4)),  # type: ignore[operator]
            "a tied module": lambda: model.head(torch.ones(2, 4)),
            "state_dict": lambda: {name: x.clone() for name, x in model.state_dict().items()},
            "state_dict of a part": lambda: {name: x.clone() for name, x in model.units[2].state_dict().items()},
            "model_state_dict": lambda: stepper.model_state_dict("full"),
            "a registered method": lambda: model.middle(torch.ones(2, 4)),
            "wait_for_weights": lambda: waited(stepper),
            "nothing": lambda: None,
        }
        if how == "full_parameters":
            with stepper.full_parameters() as whole:
                return [p.detach().clone() for p in whole.parameters()]
        return ways[how]()


WAYS = (
    "forward pass", "a unit", "a module that is no unit", "a tied module", "state_dict", "state_dict of a part", "model_state_dict",
    "a registered method", "full_parameters", "wait_for_weights", "nothing",
)  # fmt: skip


def trained(strategy: Any, path: str, *, overlap: bool) -> list[Any]:
    """What was read between the steps of a run, each in another way, and the weights at the end."""
    torch.manual_seed(0)
    model = Tied()
    stepper = FlatStepper(
        model, eb.adamw(0.05), strategy=strategy, units=[Unit], overlap_param_gather=overlap, synchronize=not overlap
    )
    stepper.register_method(model, "middle")
    found: list[Any] = []

    def step() -> None:
        with stepper.microbatch(last=True):
            model(TOKENS).square().mean().backward()
        stepper.step()

    for how in WAYS:
        step()
        found.append(read(stepper, how))
    # Two steps without a forward pass in between, of gradients that were made before.
    step()
    save_sharded(stepper, path)
    step()
    load_sharded(stepper, path)
    found.append(read(stepper, "forward pass"))
    step()
    model.load_state_dict({name: x + 1 for name, x in model.state_dict().items()})
    found.append(read(stepper, "model_state_dict"))
    step()
    stepper.close()
    found.append([p.detach().clone() for p in model.parameters()])
    return found


def both(strategy: Any, path: str) -> tuple[list[Any], list[Any]]:
    waiting = trained(strategy, f"{path}/waiting", overlap=False)
    with as_late_as_can_be():
        return waiting, trained(strategy, f"{path}/late", overlap=True)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_weights_that_come_as_late_as_can_be_are_waited_for_by_whoever_reads_them(
    strategy: Any, tmp_path: Path
) -> None:
    for waiting, late in run(2, both, strategy, str(tmp_path)):
        for how, expected, got in zip([*WAYS, "loading", "load_state_dict", "close"], waiting, late, strict=True):
            if expected is not None:
                assert_same_bits(got, expected, how)


def executed(strategy: Any) -> tuple[list[Event], list[Event]]:
    """The events of weights in a cycle, and those of the schedule."""
    torch.manual_seed(0)
    model = Tied()
    stepper = FlatStepper(model, eb.sgd(0.1), strategy=strategy, units=[Unit], overlap_param_gather=True)
    seen: list[Event] = []
    stepper._executor.observer = seen.append
    for _ in range(2):
        seen.clear()
        with stepper.microbatch(last=True):
            model(TOKENS).square().mean().backward()
        stepper.step()
    stages = cycle(stepper.layout, Settings(stepper.sharding, overlap_param_gather=True))
    kinds = ("gather", "wait", "free", "reduce", "reduce last", "step", "spread", "settle", "stepped")
    planned = [event for stage in stages for event in stage.events]
    return tuple([event for event in events if event.kind in kinds] for events in (seen, planned))  # type: ignore[return-value]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_units_wait_for_their_own_weights_in_the_order_of_the_forward_pass(strategy: Any) -> None:
    ((seen, planned),) = run(1, executed, strategy)
    assert seen == planned
    settled = [event.number for event in seen if event.kind == "settle"]
    assert settled == ([0, 1, 2, 3] if strategy in ("optim", "optim_grads") else [])
    if settled:
        kinds = [event.kind for event in seen]
        assert max(n for n, kind in enumerate(kinds) if kind == "settle") < kinds.index("step")
        assert kinds[kinds.index("step") :] == ["step", *["spread"] * 4, *["stepped"] * 4]


def alone() -> FlatStepper:
    """A stepper in one process, one step of which was taken."""
    model = Tied()
    stepper = FlatStepper(model, eb.sgd(0.1), strategy="optim", units=[Unit], overlap_param_gather=True)
    with stepper.microbatch(last=True):
        model(TOKENS).square().mean().backward()
    return stepper


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused_while_weights_are_under_way(copied: Callable[[nn.Module], Any]) -> None:
    with as_late_as_can_be():
        stepper = alone()
        stepper.step()
        with pytest.raises(RuntimeError, match=r"copy: weights of the last step are under way.*wait_for_weights\(\)"):
            copied(stepper.model)
        stepper.wait_for_weights()
    copied(stepper.model)
    # A copy has none of the hooks.
    copy.deepcopy(stepper.model)(TOKENS)


def test_a_graph_from_before_the_step_is_refused_though_nobody_has_waited() -> None:
    stepper = alone()
    loss = stepper.model(TOKENS).square().mean()
    stepper.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_weights_that_do_not_arrive_end_training_until_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    stepper = alone()
    save_sharded(stepper, tmp_path)

    def gone(*_arguments: Any) -> Pending:
        raise RuntimeError("a rank is gone")

    with mock.patch.object(Communicator, "all_gather", return_value=Late(gone)):
        stepper.step()
        with pytest.raises(RuntimeError, match="a rank is gone"):
            stepper.model(TOKENS)
    stepper.zero_grad()
    with (
        pytest.raises(RuntimeError, match=r"weights of the last step did not arrive; accepted is load_sharded"),
        stepper.microbatch(last=True),
    ):
        pass
    load_sharded(stepper, tmp_path)
    with stepper.microbatch(last=True):
        stepper.model(TOKENS).square().mean().backward()
    stepper.step()


def failing(model: nn.Module) -> None:
    model.embedding(TOKENS)  # type: ignore[operator]
    raise ZeroDivisionError


def test_an_error_in_a_forward_pass_leaves_no_weights_under_way() -> None:
    """zero_grad() waits for those that the pass did not come to, and says so if they did not arrive."""
    with as_late_as_can_be():
        stepper, plain = alone(), alone()
        plain.model.load_state_dict(stepper.model.state_dict())
        for one in (stepper, plain):
            one.zero_grad()
            with one.microbatch(last=True):
                one.model(TOKENS).square().mean().backward()
            one.step()
        plain.wait_for_weights()
        with pytest.raises(ZeroDivisionError), stepper.microbatch(last=True):
            failing(stepper.model)
        stepper.zero_grad()
    for got, expected in zip(stepper.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(got, expected)
