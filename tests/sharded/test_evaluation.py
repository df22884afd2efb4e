"""Evaluation and other methods than forward, between, before and inside the passes of training: they change nothing, and compute what one
process computes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import everybit as eb
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import STRATEGIES, Strategy
from tests.sharded.test_model_access import State, Tied, layouts, same, stepper_of, tied
from tests.support.allocations import counting
from tests.support.programs import Block, data
from tests.support.ranks import run

# What is done between the parts of training. Each is done by all ranks.
ACTIONS = ["no_grad", "inference", "graph", "encode", "generate", "unit", "shown", "state", "copy", "chosen"]
PLACES = ["begin", "before backward", "after backward", "before step", "after step"]


def outputs(model: Any, action: str, stepper: FlatStepper | None) -> list[Tensor]:
    """What an action computes; the same of a plain model."""
    x = data(5, 0, 0, torch.float32)
    if action == "no_grad":
        with torch.no_grad():
            return [model(x), model(x + 1)]
    if action == "inference":
        with torch.inference_mode():
            return [model(x).clone(), model.encode(x).clone()]
    if action == "graph":  # eval() alone records, and the graph is dropped
        return [model(x).detach()]
    if action == "encode":
        with torch.no_grad():
            return [model.encode(x)]
    if action == "generate":
        return [model.generate(x, 3)]
    if action == "unit":
        with torch.no_grad():
            return [model.blocks[0](torch.ones(2, 5))]
    if action == "shown":
        with contextlib.nullcontext() if stepper is None else stepper.full_parameters(writeback=False), torch.no_grad():
            return [model(x), model.encode(x), model.exit.weight.clone()]
    if action == "chosen":
        with (
            contextlib.nullcontext() if stepper is None else stepper.full_parameters([model.blocks[0]]),
            torch.no_grad(),
        ):
            return [model(x), model.blocks[0].inner.weight.clone()]
    if action == "copy":
        made = model if stepper is None else stepper.copy_model("full")
        assert made is not None
        with torch.no_grad():
            return [made.eval()(x)]
    state = model.state_dict() if stepper is None else stepper.model_state_dict("full")
    return [state["exit.weight"]]


def alternating(strategy: dict[str, Any], program: list[list[tuple[str, str]]]) -> tuple[State, list[str]]:
    """Train a step for each list of actions; the weights, and the actions whose outputs are not those of a plain model."""
    model, wrong = tied(), []
    stepper = stepper_of(model, **strategy)
    stepper.register_method(model, "encode")
    stepper.register_method(model, "generate")
    plain = tied()

    def act(step: int, here: str) -> None:
        for place, action in program[step]:
            if place != here or (action in ("graph", "state", "copy", "chosen", "shown") and here == "before backward"):
                continue
            model.eval()
            with torch.no_grad():  # running statistics go on with every pass, and are each rank's own
                for mine, other in zip(plain.buffers(), model.buffers(), strict=True):
                    mine.copy_(other)
            found = outputs(model, action, stepper)
            model.train()
            expected = outputs(plain.eval(), action, None)
            if not all(map(torch.equal, found, expected)) or any(x.is_inference() for x in model.parameters()):
                wrong.append(f"step {step}, {here}: {action}")

    for step in range(len(program)):
        act(step, "begin")
        for number in range(2):
            with stepper.microbatch(last=number == 1):
                loss = model(data(step, dist.get_rank(), number, torch.float32)).square().mean()
                act(step, "before backward")
                loss.backward()
                act(step, "after backward")
        act(step, "before step")
        stepper.step()
        copied = stepper.copy_model("full")
        assert isinstance(copied, Tied)
        plain = copied
        act(step, "after step")
    return stepper.model_state_dict("full"), wrong


def programs(programs: list[list[list[tuple[str, str]]]], strategies: list[Strategy], reshard: bool) -> list[str]:
    wrong = []
    for strategy in strategies:
        arguments = {"strategy": strategy, "reshard_after_forward": reshard}
        expected, _ = alternating(arguments, [[] for _ in range(3)])
        for program in programs:
            state, found = alternating(arguments, program)
            wrong += [f"{strategy}, {program}: {one}" for one in found]
            if not same(without_statistics(state), without_statistics(expected)):
                wrong.append(f"{strategy}, {program}: other weights")
    return wrong


def without_statistics(state: State) -> State:
    return {name: value for name, value in state.items() if "running" not in name and "num_batches" not in name}


@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    drawn=st.lists(
        st.lists(
            st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(ACTIONS)), max_size=4), min_size=3, max_size=3
        ),
        min_size=5,
        max_size=5,
    ),
    reshard=st.booleans(),
)
def test_whatever_is_evaluated_wherever_training_is_as_without(drawn: Any, reshard: bool) -> None:
    for wrong in run(2, programs, drawn, ["optim_grads_params"], reshard):
        assert wrong == []


def test_every_action_at_every_place_leaves_training_as_it_is() -> None:
    every = [[[(place, action) for place in PLACES], [], []] for action in ACTIONS]
    for strategies in (["optim_grads_params"], ["optim"]):
        for wrong in run(2, programs, every, strategies, True):
            assert wrong == []


# -- methods that are trained through -----------------------------------------------------------------------------------------------------


class Losses(Tied):
    """Its loss is a method, which does not call forward, or calls it and goes on with its own layers."""

    def direct(self, x: Tensor) -> Tensor:
        return self.encode(x).square().mean()

    def around(self, x: Tensor) -> dict[str, Tensor]:
        again = torch.cat([self(x), x[:, :1]], 1)
        return {"loss": (self.entry(again) @ self.again.weight).square().mean()}


class Inner(Block):
    def twice(self, x: Tensor) -> Tensor:
        """Computes with the unit's own weights without its forward, and with it."""
        out: Tensor = self.outer(torch.relu(self.inner(x))) + self(x)
        return out


def through(arguments: dict[str, Any], method: str, inside: bool) -> State:
    """Train through a method; ``inside`` full_parameters(), where weights are there for anything."""
    torch.manual_seed(0)
    model = Losses()
    model.blocks[1] = Inner(5)
    stepper = FlatStepper(model, eb.sgd(0.05), units=[Block], **arguments)
    for name in ("direct", "around", "encode"):
        stepper.register_method(model, name)
    stepper.register_method(model.blocks[1], "twice")
    for step in range(2):
        for number in range(
            1
        ):  # strategies that sum over the ranks in each of several microbatches round in another order
            shown = stepper.full_parameters() if inside else contextlib.nullcontext()
            with stepper.microbatch(last=True), shown:
                x = data(step, dist.get_rank(), number, torch.float32)
                if method == "direct":
                    loss = model.direct(x)
                elif method == "around":
                    loss = model.around(x)["loss"]
                else:
                    loss = model.blocks[1].twice(torch.cat([x, x[:, :2]], 1)).square().mean()  # type: ignore[operator]
                loss.backward()  # type: ignore[no-untyped-call]
        stepper.step()
    return stepper.model_state_dict("full")


def losses() -> list[str]:
    wrong = []
    for method in ("direct", "around", "unit"):
        whole = through({"strategy": "no_shard"}, method, False)
        for name, arguments in layouts():
            state = through(arguments, method, False)
            # In two dimensions sums over the ranks are rounded in another order.
            expected = through(arguments, method, True) if "mesh" in arguments else whole
            if not same(without_statistics(state), without_statistics(expected)):
                wrong.append(f"{name}: {method}")
    return wrong


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_registered_method_is_trained_through_as_where_weights_are_whole(size: int) -> None:
    for wrong in run(size, losses):
        assert wrong == []


def registering(strategy: Strategy) -> list[str]:
    model = tied()
    stepper = stepper_of(model, strategy=strategy)
    said = []

    class Streaming(nn.Module):
        def tokens(self) -> Any:
            yield 1

    for module, name in (
        (model, "missing"),
        (model, "forward"),
        (nn.Linear(1, 1), "generate"),
        (model, "blocks"),
        (model, 3),
    ):
        try:
            stepper.register_method(module, name)  # type: ignore[arg-type]
            said.append("accepted")
        except ValueError as error:
            said.append(str(error))
    stepper.register_method(model, "generate")
    stepper.register_method(model, "generate")
    first = model.generate(data(0, 0, 0, torch.float32), 1)
    if strategy == "optim_grads_params":
        assert not any(unit.shown for unit in stepper._gathering.units)  # type: ignore[union-attr]
    stepper.close()
    if "generate" in vars(model) or not torch.equal(first, first):
        said.append("left on the model")
    return said


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_cannot_be_registered_is_refused_under_every_strategy(strategy: Strategy) -> None:
    (said,) = run(1, registering, strategy)
    assert len(said) == 5
    for message in said:
        assert message.startswith(("name: got", "module: got a Linear that is not in the model"))


# -- what evaluation costs, and counts as -------------------------------------------------------------------------------------------------


def evaluating() -> tuple[str, list[tuple[int, int, int]]]:
    """What is said of NaN after an evaluation; and of evaluations: bytes that stay, bytes gathered, and bytes of all weights."""
    found = []
    with counting() as counter:
        model = tied()
        stepper = stepper_of(model, strategy="optim_grads_params")
        gathering = stepper._gathering
        assert gathering is not None
        x = data(0, 0, 0, torch.float32)
        for mode in (torch.no_grad, torch.inference_mode):
            for _ in range(2):
                before, sent = counter.live, gathering.communicator.sent["all_gather"]
                with mode():
                    model(x)
                gathered = gathering.communicator.sent["all_gather"] - sent
                whole = sum(group.padded * 4 for group in stepper.layout.groups)
                found.append((counter.live - before, gathered, whole // 2))
        with stepper.microbatch(last=True):
            # Weights of a unit that was evaluated, and is sharded now: NaN, out of any forward pass.
            absent = model.blocks[0].inner.weight.detach().sum()  # type: ignore[operator, union-attr]
            model.blocks[0](torch.ones(2, 5)).mul(absent).sum().backward()
        try:
            stepper.step()
            said = "stepped"
        except RuntimeError as error:
            said = str(error)
    return said, found


def test_an_evaluation_is_no_pass_of_training_and_gathers_each_unit_once() -> None:
    for said, found in run(2, evaluating):
        assert "the gradient is NaN, and 'the model'" in said
        assert "'blocks.2'" in said or "'blocks.1'" in said
        for stays, gathered, once in found:
            assert stays == 0
            assert gathered == once
