"""A cycle that its user directs: gradients that are summed over the ranks once, with the bits of strategies that always do so."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import everybit as eb
from everybit_torch import AdamW
from everybit_torch.sharded.checkpoint import load_sharded, save_sharded
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import STRATEGIES, Strategy
from tests.support.programs import Block, data, network, on_a_mesh, train, weights_of
from tests.support.ranks import run
from tests.support.weights import Weights, equal

WIRES: list[tuple[eb.Policy | None, torch.dtype]] = [
    (None, torch.float32),
    (eb.Policy(params=eb.Kahan(), grads=eb.Grads(main="float32", comm="bfloat16", reduce="fp32")), torch.bfloat16),
    (eb.Policy(params=eb.Kahan(), grads=eb.Grads(main="float16", comm="float16")), torch.bfloat16),
]
CLIPPED = eb.chain(eb.clip_by_global_norm(0.5), eb.adamw(1e-2))


# -- reduction deferred to the last backward pass ------------------------------------------------------------------------------------


DEFERRED = [(0, "microbatch", 3), (1, "no_sync", 2), (2, "neither", 2), (1, "microbatch", 1)]


def deferred(cases: list[tuple[int, str, int]], mesh: Any = None) -> list[tuple[Any, ...]]:
    """The cases in which a sharded gradient whose reduction is deferred is not the one that is kept whole on every rank."""
    wrong: list[tuple[Any, ...]] = []
    for wire, pattern, count in cases:
        policy, dtype = WIRES[wire]
        arguments: dict[str, Any] = {
            "steps": 2,
            "microbatches": count,
            "dtype": dtype,
            "pattern": pattern,
            "mesh": mesh,
        }
        expected, norms = train("optim", policy, CLIPPED, **arguments)
        sharded: list[tuple[Strategy, bool]] = [("optim_grads", False), ("optim_grads_params", True)]
        for strategy, keep in sharded:
            weights, found = train(strategy, policy, CLIPPED, defer_reduction=True, keep_gradients=keep, **arguments)
            if found != pytest.approx(norms, rel=1e-12) or not equal(weights, expected):
                wrong.append((wire, pattern, count, strategy))
    return wrong


def test_gradients_whose_reduction_is_deferred_are_those_of_optim() -> None:
    """Added up in the main gradient's dtype on each rank, sent once, and divided once: the same sums, bit for bit."""
    for size, cases in ((2, DEFERRED), (3, DEFERRED[:2])):
        for wrong in run(size, deferred, cases):
            assert not wrong


def test_deferred_reductions_on_a_mesh() -> None:
    for wrong in run(4, on_a_mesh, deferred, 2, 2, DEFERRED[1:2]):
        assert not wrong


def directed(strategy: Strategy, policy: eb.Policy | None, dtype: torch.dtype, pattern: str) -> Weights:
    """Four microbatches, of which the second and the fourth are summed over the ranks."""
    model = network(dtype)
    stepper = FlatStepper(model, CLIPPED, policy=policy, strategy=strategy, units=[Block])
    for step, number in itertools.product(range(2), range(4)):
        stepper.set_requires_gradient_sync(number % 2 == 1)
        within: Any = stepper.microbatch(last=number == 3) if pattern == "microbatch" else contextlib.nullcontext()
        with within:
            model(data(step, dist.get_rank(), number, dtype)).float().square().mean().backward()
        if number == 3:
            stepper.step()
    return weights_of(stepper)


def in_pairs(strategy: Strategy, policy: eb.Policy | None, dtype: torch.dtype) -> Weights:
    """The same gradients: each two microbatches are one backward pass, which is summed over the ranks."""
    model = network(dtype)
    stepper = FlatStepper(model, CLIPPED, policy=policy, strategy=strategy, units=[Block])
    for step, pair in itertools.product(range(2), range(2)):
        stepper.set_requires_gradient_sync(False)
        model(data(step, dist.get_rank(), 2 * pair, dtype)).float().square().mean().backward()
        stepper.set_requires_gradient_sync(True)
        with stepper.sync() if pair else stepper.no_sync():
            model(data(step, dist.get_rank(), 2 * pair + 1, dtype)).float().square().mean().backward()
        if pair:
            stepper.step()
    return weights_of(stepper)


def sync_of_some() -> list[str]:
    wrong = []
    for policy, dtype in WIRES[:2]:
        for strategy in ("optim_grads", "optim_grads_params"):
            expected = in_pairs(strategy, policy, dtype)
            wrong += [
                f"{strategy} {pattern} {dtype}"
                for pattern in ("microbatch", "neither")
                if not equal(directed(strategy, policy, dtype, pattern), expected)
            ]
    return wrong


def test_backward_passes_are_summed_over_the_ranks_where_it_is_said() -> None:
    """A pass that is summed takes along what came before it; two ranks, whose sums are divided exactly."""
    for wrong in run(2, sync_of_some):
        assert not wrong


def unalike(strategy: Strategy) -> tuple[list[str], bool]:
    """What ranks are told that do not sum the same passes; and whether they go on from there."""
    model, rank, said = network(), dist.get_rank(), []
    stepper = FlatStepper(model, eb.sgd(0.1), strategy=strategy, units=[Block])
    for turn in range(2):
        stepper.set_requires_gradient_sync(rank == turn)
        try:
            with stepper.microbatch(last=False):
                model(data(0, rank, 0, torch.float32)).square().mean().backward()
        except RuntimeError as error:
            said.append(str(error))
        stepper.zero_grad()
    stepper.set_requires_gradient_sync(True)
    with stepper.microbatch(last=True):
        model(data(0, rank, 0, torch.float32)).square().mean().backward()
    stepper.step()
    weights = weights_of(stepper)
    return said, equal(weights, train("no_shard", None, eb.sgd(0.1), steps=1, microbatches=1)[0])


def test_ranks_that_sum_different_passes_are_told_so() -> None:
    for rank, (said, goes_on) in enumerate(run(2, unalike, "optim_grads_params", timeout=20)):
        assert len(said) == 2
        for turn, text in enumerate(said):
            assert (
                f"this rank {'does' if rank == turn else 'does not'} sum the gradients of this backward pass over"
                in text
            )
            assert "set_requires_gradient_sync() on every rank; accepted next is zero_grad()" in text
        assert goes_on


def test_what_is_deferred_is_said_between_passes() -> None:
    model = network()
    stepper = FlatStepper(model, eb.sgd(0.1), strategy="optim_grads", units=[Block])
    with pytest.raises(TypeError, match=r"^requires_gradient_sync: got 1; accepted is True or False\."):
        stepper.set_requires_gradient_sync(1)  # type: ignore[arg-type]
    with (
        stepper.microbatch(last=True),
        pytest.raises(RuntimeError, match=r"^set_requires_gradient_sync: inside a microbatch"),
    ):
        stepper.set_requires_gradient_sync(False)
    # What was refused has changed nothing: it is a microbatch without a loss.
    assert stepper.step().untouched


# -- parameters that are trained in some steps only -------------------------------------------------------------------------------------


class Adversaries(nn.Module):
    """A generator and a discriminator in one model, which take turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(Block(3), Block(3))
        self.judge = nn.Sequential(Block(3), nn.Linear(3, 1))

    def losses(self, noise: Tensor, turn: int) -> Tensor:
        made = self.generator(noise)
        judged: Tensor = self.judge(made.detach() if turn == 0 else made).square().mean()
        return (judged - self.judge(noise).mean()) / 2 if turn == 0 else judged

    def forward(self, noise: Tensor, turn: int) -> Tensor:
        self.generator.requires_grad_(turn == 1)
        self.judge.requires_grad_(turn == 0)
        return self.losses(noise, turn)


def taking_turns(strategy: Strategy, directory: Path, resume: Strategy) -> tuple[Weights, list[tuple[str, ...]]]:
    """One stepper over both; after half of the steps another one goes on from a checkpoint, with other ranks' shards."""
    untouched = []
    model = Adversaries()
    stepper = FlatStepper(model, eb.adamw(1e-2, weight_decay=0.1), strategy=strategy, units=[Block])
    for step in range(6):
        if step == 3:
            save_sharded(stepper, directory)
            stepper.close()
            model = Adversaries()
            stepper = FlatStepper(model, eb.adamw(1e-2, weight_decay=0.1), strategy=resume, units=[Block])
            load_sharded(stepper, directory)
        with stepper.microbatch(last=True):
            model(data(step, 0, 0, torch.float32), int(step in (1, 2, 5))).backward()
        untouched.append(stepper.step().untouched)
    return weights_of(stepper), untouched


def all_taking_turns(directory: Path) -> list[str]:
    model = Adversaries()
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(6):
        optimizer.zero_grad()
        model(data(step, 0, 0, torch.float32), int(step in (1, 2, 5))).backward()
        optimizer.step()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    wrong = []
    for number, strategy in enumerate(STRATEGIES):
        weights, untouched = taking_turns(strategy, directory / strategy, STRATEGIES[number - 1])
        if not equal(weights, expected):
            wrong.append(f"{strategy}: other weights")
        for step, names in enumerate(untouched):
            stands = "judge" if step in (1, 2, 5) else "generator"
            if set(names) != {name for name in expected if name.startswith(stands)}:
                wrong.append(f"{strategy}: {names} in step {step}")
    return wrong


def test_one_stepper_trains_two_models_in_turns_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """As one process with a torch optimizer does: who stands still is neither moved nor decayed nor counted."""
    for wrong in run(2, all_taking_turns, tmp_path):
        assert not wrong


# -- gradients of gradients ---------------------------------------------------------------------------------------------------------------


def slopes(strategy: Strategy, kind: str, checkpointed: bool) -> Weights:
    """Losses that have a gradient in them; of kind "alone" nothing else, so that no pass need come to what units return."""
    model = Slope(checkpointed)
    stepper = FlatStepper(
        model, eb.adamw(1e-2), strategy=strategy, units=[Block], reshard_after_forward=not checkpointed
    )
    for step, number in itertools.product(range(2), range(2)):
        with stepper.microbatch(last=number == 1):
            x = data(step, dist.get_rank(), number, torch.float32).requires_grad_()
            out = model(x).square().sum()
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
            with torch.no_grad():
                model(x)  # evaluation in between
            loss = slope.square().sum()
            (loss if kind != "and loss" else loss + model(x.detach()).sum() + out).backward()
        stepper.step()
    return weights_of(stepper)


class Slope(nn.Module):
    """A network whose blocks may be recomputed."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.inside, self.checkpointed = network(), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside.entry(x)
        for block in self.inside.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        out: Tensor = self.inside.exit(x) * self.inside.scale
        return out


def all_slopes() -> list[str]:
    wrong = []
    for kind, checkpointed in (("alone", True), ("and loss", False)):
        expected = slopes("no_shard", kind, checkpointed)
        wrong += [
            f"{strategy}, {kind}, {checkpointed}"
            for strategy in STRATEGIES[1:]
            if not equal(slopes(strategy, kind, checkpointed), expected)
        ]
    return wrong


def test_gradients_of_gradients_have_the_same_bits_under_every_strategy() -> None:
    """Where weights are sharded, they stay gathered from the pass of which a graph was made to the end of the next."""
    for wrong in run(2, all_slopes):
        assert not wrong


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_in_which_no_output_of_a_unit_is_reaches_its_weights(strategy: Strategy, gathered: bool) -> None:
    """The slope of linear layers depends on weights and on nothing that is computed with them; whole numbers, so it is exact."""

    def made() -> nn.Sequential:
        layers = [nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in range(2)]
        for number, layer in enumerate(layers):
            layer.weight.data = torch.arange(9.0, dtype=torch.float64).view(3, 3) - 4 + number
        return nn.Sequential(*layers)

    def loss(model: nn.Module) -> Tensor:
        x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum()

    mine, theirs = made(), made()
    loss(theirs).backward()  # type: ignore[no-untyped-call]
    stepper = FlatStepper(mine, eb.sgd(1.0), strategy=strategy, units=[nn.Linear])
    with stepper.microbatch(last=True), stepper.full_parameters() if gathered else contextlib.nullcontext():
        loss(mine).backward()  # type: ignore[no-untyped-call]
    stepper.step()
    for name, p in theirs.named_parameters():
        assert p.grad is not None
        assert torch.equal(weights_of(stepper)[name], p.detach() - p.grad)


def freed_again() -> list[bool]:
    """Whether weights are there: after the pass that made a graph; after the next; and after an error between the two."""
    model = Slope(False)
    stepper = FlatStepper(model, eb.sgd(0.1), strategy="optim_grads_params", units=[Block])
    seen = []
    block = model.inside.blocks[0]
    assert isinstance(block, Block)
    for fails in (False, True):
        with contextlib.suppress(ZeroDivisionError), stepper.microbatch(last=False):
            x = data(0, dist.get_rank(), 0, torch.float32).requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            seen.append(not block.inner.weight.isnan().any())
            if fails:
                raise ZeroDivisionError
            slope.square().sum().backward()  # type: ignore[no-untyped-call]
        if fails:
            stepper.zero_grad()
        seen.append(not block.inner.weight.isnan().any())
    with stepper.microbatch(last=True):
        model(data(0, dist.get_rank(), 0, torch.float32)).sum().backward()
    stepper.step()
    return seen


def test_weights_that_were_kept_for_a_graph_are_given_back() -> None:
    assert run(2, freed_again) == [[True, False, True, False]] * 2


def only_one_penalizes() -> tuple[str, bool]:
    """What ranks are told of which one has a graph of its backward pass; and whether they go on from there."""
    model, rank, said = network(), dist.get_rank(), "nothing"
    stepper = FlatStepper(model, eb.sgd(0.1), strategy="optim_grads_params", units=[Block])
    x = data(0, rank, 0, torch.float32).requires_grad_()
    try:
        with stepper.microbatch(last=True):
            loss = model(x).square().mean()
            (slope,) = torch.autograd.grad(loss, x, create_graph=rank == 0, retain_graph=True)
            (loss + slope.square().sum()).backward()
    except RuntimeError as error:
        said = str(error)
    stepper.zero_grad()
    with stepper.microbatch(last=True):
        model(x.detach()).square().mean().backward()
    stepper.step()
    weights = weights_of(stepper)
    return said, equal(weights, train("no_shard", None, eb.sgd(0.1), steps=1, microbatches=1)[0])


def test_a_graph_that_only_some_ranks_make_is_refused_by_name() -> None:
    """They would keep weights that the others gather again."""
    for rank, (said, goes_on) in enumerate(run(2, only_one_penalizes, timeout=20)):
        assert f"this rank {'does not' if rank else 'does'} make a graph of this backward pass" in said
        assert goes_on


# -- weights that stay --------------------------------------------------------------------------------------------------------------------


def staying(strategy: Strategy, kind: int) -> Weights:
    """Three microbatches of two steps, before each of which it is said what stays."""
    model = network()
    stepper = FlatStepper(model, CLIPPED, strategy=strategy, units=[Block])
    one = model.blocks[0]
    for step, number in itertools.product(range(2), range(3)):
        if kind == 1:
            stepper.set_reshard_after_forward(one, (step + number) % 2 == 0, recurse=False)
        elif kind == 2:
            stepper.set_reshard_after_backward(model, number == 2)
        elif kind == 3:
            stepper.set_reshard_after_forward(model, False)
            stepper.set_reshard_after_backward(one, False)
        with stepper.microbatch(last=number == 2):
            model(data(step, dist.get_rank(), number, torch.float32)).square().mean().backward()
        if strategy == "optim_grads_params" and kind == 2:
            assert bool(one.get_parameter("inner.weight").isnan().any()) == (number == 2)
        if number == 1:
            with torch.no_grad():
                model(data(step, 0, number, torch.float32))  # evaluation in between
        if number == 2:
            stepper.step()
    assert strategy != "optim_grads_params" or one.get_parameter("inner.weight").isnan().any()
    return weights_of(stepper)


def all_staying() -> list[tuple[str, int]]:
    wrong: list[tuple[str, int]] = []
    strategies: tuple[Strategy, ...] = ("optim", "optim_grads_params")
    for strategy in strategies:
        expected = staying(strategy, 0)
        wrong += [(strategy, kind) for kind in range(1, 4) if not equal(staying(strategy, kind), expected)]
    return wrong


def test_weights_that_stay_after_a_pass_have_the_same_bits() -> None:
    for wrong in run(2, all_staying):
        assert not wrong


class Direct(Block):
    def direct(self, x: Tensor) -> Tensor:
        """Computes with the unit's own weights, without its forward."""
        out: Tensor = self.outer(torch.relu(self.inner(x)))
        return out


def through_a_method(strategy: Strategy, ahead: str, count: int) -> Weights:
    """Weights that a method computes with are there before it runs."""
    model, last = network(), Direct(5)
    model.blocks[1] = last
    stepper = FlatStepper(model, CLIPPED, strategy=strategy, units=[Block])
    stepper.register_method(last, "direct")
    if ahead == "stays":
        stepper.set_reshard_after_backward(model, False)
    for number in range(count):
        if ahead == "by hand":
            stepper.unshard(last)
        with stepper.microbatch(last=number == count - 1):
            x = data(0, dist.get_rank(), number, torch.float32)
            last.direct(torch.cat([x, x[:, :2]], 1)).square().mean().backward()  # type: ignore[no-untyped-call]
    stepper.step()
    return weights_of(stepper)


def all_through_a_method() -> list[str]:
    expected = through_a_method("no_shard", "", 1)
    wrong = [] if equal(through_a_method("optim_grads_params", "", 1), expected) else ["one microbatch"]
    expected = through_a_method("optim_grads_params", "", 3)
    return wrong + [
        one for one in ("by hand", "stays") if not equal(through_a_method("optim_grads_params", one, 3), expected)
    ]


def test_a_registered_method_is_trained_through_whose_weights_are_there_before() -> None:
    for wrong in run(2, all_through_a_method, timeout=20):
        assert not wrong


def unalike_staying() -> tuple[list[str], bool]:
    """What ranks are told that say different things; and whether they go on from there."""
    model, rank, said = network(), dist.get_rank(), []
    stepper = FlatStepper(model, eb.sgd(0.1), strategy="optim_grads_params", units=[Block])
    first = model.blocks[0]
    try:
        stepper.set_reshard_after_forward(first, rank == 0)
    except RuntimeError as error:
        said.append(str(error))
    for turn in range(2):
        stepper.set_reshard_after_backward(first if turn else model, rank == turn)
        try:
            with stepper.microbatch(last=False):
                model(data(0, rank, 0, torch.float32)).square().mean().backward()
        except RuntimeError as error:
            said.append(str(error))
        stepper.zero_grad()
    stepper.set_reshard_after_backward(model, reshard_after_backward=True)
    loss = model(data(0, rank, 0, torch.float32)).square().mean()
    calls: list[Callable[[], object]] = [
        lambda: stepper.set_reshard_after_forward(first, False),
        lambda: stepper.set_reshard_after_backward(model.entry, False),
        lambda: stepper.set_reshard_after_backward(model, 0),  # type: ignore[arg-type]
        lambda: stepper.set_reshard_after_forward(model, True, recurse="no"),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises((RuntimeError, TypeError, ValueError)) as refused:
            call()
        said.append(str(refused.value))
    loss.backward()
    stepper.step()
    weights = weights_of(stepper)
    return said, equal(weights, train("no_shard", None, eb.sgd(0.1), steps=1, microbatches=1)[0])


def test_ranks_that_keep_different_weights_are_told_so_by_name_and_go_on() -> None:
    for said, goes_on in run(2, unalike_staying, timeout=20):
        assert said[0] == (
            "rank 0 calls set_reshard_after_forward(blocks.0, True, recurse=True), and rank 1 calls set_reshard_after_forward(blocks.0,"
            " False, recurse=True); accepted is the same call on every rank."
        )
        for one in said[1:3]:
            assert (
                "keep the weights of different units after this backward pass. Accepted is the same set_reshard_after_backward()"
                in one
            )
        assert said[3].startswith("set_reshard_after_forward: inside a forward or a backward pass, or between the two")
        assert said[4:] == [
            "set_reshard_after_backward: got a Linear that is no unit; accepted are units, and the model.",
            "set_reshard_after_backward: reshard_after_backward: got 0; accepted is True or False.",
            "set_reshard_after_forward: recurse: got 'no'; accepted is True or False.",
        ]
        assert goes_on


# -- when weights are gathered ------------------------------------------------------------------------------------------------------------


def by_hand() -> list[str]:
    model = network()
    stepper = FlatStepper(model, eb.sgd(0.1), strategy="optim_grads_params", units=[Block])
    one, two = model.blocks
    assert isinstance(one, Block)
    assert isinstance(two, Block)
    said = []
    calls: list[Callable[[], object]] = [
        lambda: stepper.unshard(model.entry),
        lambda: stepper.set_modules_to_forward_prefetch(two, [one]),
        lambda: stepper.set_modules_to_backward_prefetch(one, [model]),
    ]
    for call in calls:
        with pytest.raises(ValueError) as error:
            call()
        said.append(str(error.value))
    loss = model(data(0, 0, 0, torch.float32)).sum()
    for name in ("unshard", "reshard"):
        with pytest.raises(RuntimeError, match=f"^{name}: inside a forward or a backward pass, or between the two"):
            getattr(stepper, name)(one)
    loss.backward()
    stepper.step()
    # Those before it in the layout's order too, and no others; given back from a unit on.
    stepper.unshard(one)
    there = [bool(p.isnan().any()) for p in (one.inner.weight, two.inner.weight)]
    stepper.reshard(one)
    there.append(bool(one.inner.weight.isnan().any()))
    assert there == [False, True, True]
    stepper.reshard(model)
    # Only one rank gathers by hand: it may not give back what the other never had.
    if dist.get_rank() == 0:
        stepper.unshard(two, async_op=True)
    with pytest.raises(RuntimeError, match=r"this rank gives back weights by reshard\(\)"):
        stepper.reshard(two)
    with torch.no_grad():
        said.append(str(float(model(data(0, 0, 0, torch.float32)).sum())))
    return said


def test_weights_are_gathered_and_given_back_by_hand() -> None:
    first, second = run(2, by_hand, timeout=15)
    assert first[:3] == [
        "unshard: got a Linear that is no unit; accepted are units, and the model.",
        "set_modules_to_forward_prefetch: got blocks.0 for blocks.1; accepted are units that come after it in the model.",
        "set_modules_to_backward_prefetch: got the model for blocks.0; accepted are units that come before it in the model.",
    ]
    assert first == second
