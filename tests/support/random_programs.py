"""Random programs of training: drawn as data, carried out by steppers on several ranks, and by plain torch in one process.

Whatever is computed is exact: whole numbers in float64, kept small by remainders. So sums are the same in every
order, and a program is right if losses and weights are those of plain torch, bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import everybit as eb
from everybit_torch.sharded.checkpoint import load_sharded, save_sharded
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import STRATEGIES, Strategy
from tests.support.programs import weights_of
from tests.support.weights import Weights

WIDTH = 3
UNITS = 4
Recompute = Literal["no", "saved tensors", "reentrant", "nested", "nested reentrant"]
Context = Literal["microbatch", "no_sync", "neither"]
Place = Literal["forward", "backward", "after"]


class BoomError(Exception):
    """What is raised in the middle of a program."""


class Wrapped(torch.autograd.Function):
    """A remainder, whose derivatives of every order are remainders too: everything stays small, and exact."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return torch.remainder(x, 8.0)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        return Wrapped.apply(gradients[0])  # type: ignore[no-untyped-call]


class Leaf(nn.Module):
    """A unit, of which one parameter is used in some passes only."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randint(-3, 4, (WIDTH, WIDTH), generator=generator).double())
        self.bias = nn.Parameter(torch.randint(-3, 4, (WIDTH,), generator=generator).double())

    def forward(self, x: Tensor, biased: bool) -> Tensor:
        x = x @ self.weight
        out: Tensor = Wrapped.apply(x + self.bias if biased else x)  # type: ignore[no-untyped-call]
        return out


class Nest(nn.Module):
    """A unit with units in it, and a parameter of its own that is used before and after them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.first, self.second = Leaf(seed + 1), Leaf(seed + 2)
        self.scale = nn.Parameter(torch.full((WIDTH,), 2.0, dtype=torch.float64))

    def forward(self, x: Tensor, biased: bool) -> Tensor:
        x = self.first(x * self.scale, biased)
        if biased:
            x = self.second(x, biased)
        out: Tensor = Wrapped.apply(x * self.scale)  # type: ignore[no-untyped-call]
        return out


@dataclass(frozen=True)
class Way:
    """What one rank does in one microbatch.

    Attributes:
        units: Those that it runs, in order.
        biased: Whether all of their parameters are used.
        recompute: How checkpoints cover them.
        penalty: Whether the slope at the input is a part of the loss.
        seed: Of its data.
        unshards: The module that is gathered by hand before it, by its number; None: none is.
    """

    units: tuple[int, ...]
    biased: bool
    recompute: Recompute
    penalty: bool
    seed: int
    unshards: int | None = None


@dataclass(frozen=True)
class Microbatch:
    """What all ranks do, each its own way.

    Attributes:
        ways: By rank.
        syncs: What ``set_requires_gradient_sync`` is told before it; None: it is not called.
        frozen: The beginnings of the names of parameters that require no gradient in it.
        evaluates: Whether the model runs without a gradient before it.
        reshards: Whether what was gathered by hand is given back first, and gathered again.
        stays: What is said before it of modules' weights: after which pass they are kept or given back, of which module (by its number),
            whether they are given back, and whether those of units in it are, too.
    """

    ways: tuple[Way, ...]
    syncs: bool | None
    frozen: tuple[str, ...]
    evaluates: bool
    reshards: bool
    stays: tuple[tuple[Literal["forward", "backward"], int, bool, bool], ...] = ()


@dataclass(frozen=True)
class Cycle:
    """What comes before a step.

    Attributes:
        microbatches: In order.
        context: How they are told from each other.
        fails: The number of the microbatch that ends in an error, and where; None: it ends in a step.
        resumes: The strategy of a stepper that goes on from a checkpoint after it; None: the same stepper goes on.
    """

    microbatches: tuple[Microbatch, ...]
    context: Context
    fails: tuple[int, Place] | None
    resumes: Strategy | None


@dataclass(frozen=True)
class Program:
    """Cycles, and how the stepper is made.

    Attributes:
        cycles: In order.
        reshard: Whether weights are freed after the forward pass.
        defers: Whether reductions are deferred.
        ahead: By rank, how many units are asked for ahead, forwards and backwards; None: as it is without being told.
    """

    cycles: tuple[Cycle, ...]
    reshard: bool
    defers: bool
    ahead: tuple[tuple[int, int] | None, ...]


class Model(nn.Module):
    """Units between parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = Leaf(1).weight
        self.units = nn.ModuleList([Leaf(10), Nest(20), Leaf(30), Leaf(40)])
        self.exit = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, way: Way) -> Tensor:
        x = Wrapped.apply(x @ self.entry)  # type: ignore[no-untyped-call]
        units = way.units
        if way.recompute in ("saved tensors", "reentrant"):
            for unit in units:
                x = checkpoint(self.units[unit], x, way.biased, use_reentrant=way.recompute == "reentrant")
        elif way.recompute.startswith("nested") and units:
            x = checkpoint(self._outer, x, way, use_reentrant=way.recompute == "nested reentrant")
        else:
            x = self._run(x, units, way.biased)
        out: Tensor = (x * self.exit).sum()
        return out

    def _run(self, x: Tensor, units: Sequence[int], biased: bool) -> Tensor:
        for unit in units:
            x = self.units[unit](x, biased)
        return x

    def _outer(self, x: Tensor, way: Way) -> Tensor:
        """A checkpoint inside of a checkpoint."""
        x = self._run(x, way.units[:1], way.biased)
        out: Tensor = checkpoint(
            self._run, x, way.units[1:], way.biased, use_reentrant=way.recompute == "nested reentrant"
        )
        return out


# -- drawing ------------------------------------------------------------------------------------------------------------------------

FREEZABLE = ("entry", "exit", "units.0", "units.1", "units.1.first", "units.2.weight", "units.3")


@st.composite
def ways(draw: Any) -> Way:
    units = tuple(number for number in range(UNITS) if draw(st.booleans()) or draw(st.booleans()))
    recompute = draw(st.sampled_from(["no", "no", "saved tensors", "nested", "reentrant", "nested reentrant"]))
    unshards = draw(st.sampled_from([None, None, *range(UNITS + 1)]))
    return Way(units, draw(st.booleans()), recompute, False, draw(st.integers(0, 99)), unshards)


@st.composite
def cycles(draw: Any, ranks: int) -> Cycle:
    context: Context = draw(st.sampled_from(["microbatch", "microbatch", "no_sync", "neither"]))
    penalties, alike = draw(st.integers(0, 3)) == 0, draw(st.booleans())
    microbatches = []
    for _ in range(draw(st.integers(1, 3))):
        penalty = penalties and draw(st.booleans())
        one = draw(ways())
        own = [one if alike else draw(ways()) for _ in range(ranks)]
        if penalty:
            # Of all ranks, or of none; torch has no graph of a pass through a reentrant checkpoint.
            own = [replace(w, recompute="no" if "reentrant" in w.recompute else w.recompute, penalty=True) for w in own]
        if any(w.recompute.startswith("nested") for w in own):
            own = [own[0]] * ranks  # ranks have to run the units in a checkpoint of a checkpoint alike
        frozen = tuple(name for name in FREEZABLE if draw(st.integers(0, 4)) == 0)
        if context != "microbatch":
            frozen = tuple(name for name in frozen if name != "exit")  # each rank needs a backward pass
        reshards = draw(st.integers(0, 3)) == 0
        if reshards:
            own = [replace(way, unshards=2) for way in own]  # all ranks do it alike
        evaluates = draw(st.integers(0, 3)) == 0
        syncs = draw(st.sampled_from([None, None, True, False]))
        said = st.tuples(st.sampled_from(["forward", "backward"]), st.integers(0, UNITS), st.booleans(), st.booleans())
        stays = draw(st.lists(said, max_size=2))
        microbatches.append(Microbatch(tuple(own), syncs, frozen, evaluates, reshards, tuple(stays)))
    fails = None
    if draw(st.integers(0, 3)) == 0:
        places = (
            ["forward", "backward", "after"] if context != "neither" else ["after"]
        )  # there, the same place on all ranks
        fails = draw(st.integers(0, len(microbatches) - 1)), draw(st.sampled_from(places))
    resumes = draw(st.sampled_from([None, None, None, *STRATEGIES]))
    return Cycle(tuple(microbatches), context, fails, None if fails else resumes)


@st.composite
def programs(draw: Any, ranks: int) -> Program:
    """A program for so many ranks."""
    drawn = tuple(draw(cycles(ranks)) for _ in range(draw(st.integers(1, 4))))
    ahead = st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(0, 3)))
    return Program(drawn, draw(st.booleans()), draw(st.booleans()), tuple(draw(ahead) for _ in range(ranks)))


# -- carrying out -------------------------------------------------------------------------------------------------------------------

Outcome = tuple[list[Any], Weights]
"""Losses, outputs and names without a gradient, in order; and the weights in the end."""


def _freeze(model: nn.Module, frozen: Sequence[str]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name == one or name.startswith(f"{one}.") for one in frozen))


def _input(way: Way) -> Tensor:
    generator = torch.Generator().manual_seed(way.seed)
    x = torch.randint(-4, 5, (2, WIDTH), generator=generator).double()
    return x.requires_grad_(way.penalty or way.recompute.endswith("reentrant") or way.seed % 2 == 0)


def _loss(model: nn.Module, way: Way) -> Tensor:
    x = _input(way)
    loss: Tensor = model(x, way)
    if way.penalty:
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + (Wrapped.apply(slope * slope)).sum()  # type: ignore[no-untyped-call]
    return loss


def reference(program: Program, ranks: int) -> list[Outcome]:
    """What plain torch has, in one process, for each rank."""
    model = Model()
    seen: list[list[Any]] = [[] for _ in range(ranks)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0)
    for cycle in program.cycles:
        for number, one in enumerate(cycle.microbatches):
            _freeze(model, one.frozen)
            if cycle.fails is not None and cycle.fails[0] == number:
                break
            for rank, way in enumerate(one.ways):
                if one.evaluates:
                    with torch.no_grad():
                        seen[rank].append(float(model(_input(way), way)))
                loss = _loss(model, way)
                seen[rank].append(float(loss))
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
        else:
            untouched = tuple(name for name, p in model.named_parameters() if p.grad is None)
            for own in seen:
                own.append(sorted(untouched))
            optimizer.step()
        optimizer.zero_grad()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return [(own, weights) for own in seen]


def _stepper(model: Model, program: Program, strategy: Strategy) -> FlatStepper:
    stepper = FlatStepper(
        model,
        eb.sgd(1.0, momentum=1.0),
        strategy=strategy,
        units=[Leaf, Nest],
        divisor=1.0,
        reshard_after_forward=program.reshard,
        defer_reduction=program.defers,
    )
    ahead = program.ahead[dist.get_rank()]
    if ahead is not None:
        units = [module for module in model.modules() if isinstance(module, Leaf | Nest)]
        for number, unit in enumerate(units):
            stepper.set_modules_to_forward_prefetch(unit, units[number + 1 :][: ahead[0]])
            stepper.set_modules_to_backward_prefetch(unit, units[:number][::-1][: ahead[1]])
    return stepper


def _by_hand(stepper: FlatStepper, model: Model, way: Way, reshards: bool) -> None:
    if way.unshards is not None:
        module = model if way.unshards == UNITS else model.units[way.unshards]
        handle = stepper.unshard(module, async_op=True)
        if way.seed % 2:
            assert handle is not None
            handle.wait()
            assert not any(p.isnan().any() for p in module.parameters(recurse=False))
        if reshards:
            stepper.reshard(module)
            stepper.unshard(model)


def _say_what_stays(stepper: FlatStepper, model: Model, one: Microbatch) -> None:
    for after, number, reshard, recurse in one.stays:
        module = model if number == UNITS else model.units[number]
        if after == "forward":
            stepper.set_reshard_after_forward(module, reshard, recurse)
        else:
            stepper.set_reshard_after_backward(module, reshard, recurse=recurse)


def _pass_of(stepper: FlatStepper, context: Context, last: bool) -> contextlib.AbstractContextManager[None]:
    if context == "microbatch":
        return stepper.microbatch(last=last)
    if context == "no_sync":
        return stepper.sync() if last else stepper.no_sync()
    return contextlib.nullcontext()


@contextlib.contextmanager
def _raising(model: Model, place: Place | None) -> Iterator[None]:
    def boom(*arguments: object) -> None:
        raise BoomError(place)

    handle = None
    if place == "forward":
        handle = model.units[1].register_forward_hook(boom)
    elif place == "backward":
        handle = model.exit.register_hook(boom) if model.exit.requires_grad else None  # type: ignore[no-untyped-call]
    try:
        yield
        if place is not None:
            boom()
    finally:
        if handle is not None:
            handle.remove()


def carried_out(program: Program, strategy: Strategy, directory: Path) -> Outcome:
    """What a stepper has on this rank."""
    rank, model = dist.get_rank(), Model()
    seen: list[Any] = []
    stepper = _stepper(model, program, strategy)
    for count, cycle in enumerate(program.cycles):
        failed = False
        for number, one in enumerate(cycle.microbatches):
            way, last = one.ways[rank], number == len(cycle.microbatches) - 1
            _freeze(model, one.frozen)
            if one.syncs is not None:
                stepper.set_requires_gradient_sync(one.syncs)
            _say_what_stays(stepper, model, one)
            fails = cycle.fails is not None and cycle.fails[0] == number
            if fails:
                assert cycle.fails is not None
                with (
                    contextlib.suppress(BoomError),
                    _pass_of(stepper, cycle.context, last),
                    _raising(model, cycle.fails[1]),
                ):
                    loss = _loss(model, way)
                    if loss.requires_grad:
                        loss.backward()  # type: ignore[no-untyped-call]
                failed = True
                break
            _by_hand(stepper, model, way, one.reshards)
            if one.evaluates:
                with torch.no_grad():
                    seen.append(float(model(_input(way), way)))
                _by_hand(stepper, model, way, one.reshards)
            with _pass_of(stepper, cycle.context, last):
                loss = _loss(model, way)
                seen.append(float(loss))
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
            del loss
        if failed:
            stepper.zero_grad()
            continue
        seen.append(sorted(stepper.step().untouched))
        if cycle.resumes is not None:
            place = directory / f"{strategy} {count}"
            save_sharded(stepper, place)
            stepper.close()
            model = copy.deepcopy(Model())
            stepper = _stepper(model, program, cycle.resumes)
            load_sharded(stepper, place)
    weights = weights_of(stepper)
    stepper.close()
    return seen, weights


def differences(program: Program, directory: Path, strategies: Sequence[Strategy] = STRATEGIES) -> list[str]:
    """What is not as plain torch has it, on this rank."""
    seen, expected = reference(program, dist.get_world_size())[dist.get_rank()]
    wrong = []
    for strategy in strategies:
        got, weights = carried_out(program, strategy, directory)
        if got != seen:
            wrong.append(f"{strategy}: saw {got}, and plain torch {seen}")
        wrong += [f"{strategy}: {name}" for name in expected if not torch.equal(weights[name], expected[name])]
    return wrong
