"""Transforms that reduce over everything that is stepped: clipping, skipping, estimates of one number; flat, in groups, in pieces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import everybit as eb
from everybit.base import barriers
from everybit.protocol import ALONE
from everybit.testing.own_transforms import REGISTRY
from everybit_torch import TorchOptimizer
from everybit_torch.planning.allocations import AllocationCounter
from everybit_torch.segments import segment, sources, totals
from everybit_torch.segments.totals import Work, find_totals
from tests.support.small_models import Awkward, Whole, give_gradients, same_bits, train, values

LEAN, KAHAN, FP32 = eb.policies.LEAN_BF16, eb.policies.KAHAN_BF16, eb.policies.FP32


def clipped(learning_rate: Any, limit: Any = 0.5) -> eb.Transform[Any]:
    return eb.chain(eb.clip_by_global_norm(limit), eb.adamw(learning_rate, b2=0.95, weight_decay=0.1))


def skipping(learning_rate: Any) -> eb.Transform[Any]:
    return eb.apply_if_finite(eb.chain(eb.clip_by_global_norm(0.5), eb.adamw(learning_rate, b2=0.95)))


def late(learning_rate: Any) -> eb.Transform[Any]:
    """The norm is that of Adam's update, computed from slots."""
    return eb.chain(eb.scale_by_adam(b2=0.95), eb.clip_by_global_norm(0.1), eb.scale_by_learning_rate(learning_rate))


def decayed(learning_rate: Any) -> eb.Transform[Any]:
    """The norm is computed from gradients and weights."""
    return eb.chain(
        eb.add_decayed_weights(0.5),
        eb.clip_by_global_norm(0.1),
        eb.trace(0.9),
        eb.scale_by_learning_rate(learning_rate),
    )


@eb.state
class DistanceState:
    """How far the weights have come, in all: 0-d, float64."""

    distance: Tensor


@dataclass(frozen=True, slots=True)
class ByDistance:
    """Scales by a number that is estimated from all weights at every step, in two reductions, and kept; as Prodigy's is."""

    cut: ClassVar[eb.Cut] = "element"

    reduces: ClassVar[bool] = True

    def init(self, params: Any) -> DistanceState:
        return DistanceState(torch.ones((), dtype=torch.float64))

    def update(
        self,
        updates: Any,
        state: DistanceState,
        params: Any,
        ctx: eb.Context = eb.Context(),  # noqa: B008
    ) -> tuple[Any, DistanceState]:
        def by_size(square: Tensor) -> tuple[Any, DistanceState]:
            def moved(most: Tensor) -> tuple[Any, DistanceState]:
                distance = torch.maximum(state.distance, most)
                return eb.tree.elementwise(lambda u: u * distance, updates), replace(state, distance=distance)

            elements = [g.double().abs().reshape(-1) for g in eb.tree.leaves(updates)]
            greatest = torch.cat([torch.zeros(1, dtype=torch.float64), *elements]).amax()
            return ctx.request(eb.Max(greatest / square.sqrt()), moved)

        return ctx.request(eb.SumOfSquares(params), by_size)


def by_distance(learning_rate: Any) -> eb.Transform[Any]:
    return eb.chain(ByDistance(), eb.trace(0.9), eb.scale_by_learning_rate(learning_rate))


def cautious(learning_rate: Any) -> eb.Transform[Any]:
    """A request comes after the update of an inner chain that makes none."""
    inner = eb.chain(eb.trace(0.9), eb.scale_by_sign())
    return eb.chain(eb.clip_by_global_norm(0.5), eb.cautious(inner), eb.scale_by_learning_rate(learning_rate))


FACTORIES: dict[str, Callable[..., Any]] = {
    "cautious": cautious, "clipped": clipped, "skipping": skipping, "late": late, "decayed": decayed, "by distance": by_distance,
}  # fmt: skip


@pytest.mark.parametrize("policy", [LEAN, KAHAN, FP32], ids=["LEAN", "KAHAN", "FP32"])
@pytest.mark.parametrize("name", FACTORIES)
def test_pieces_of_flat_buffers_give_the_bits_of_the_whole_tree(
    monkeypatch: pytest.MonkeyPatch, name: str, policy: eb.Policy
) -> None:
    """Against the core's own step of the whole tree; pieces are of a few elements here."""
    monkeypatch.setattr(totals, "PIECE", 7)
    monkeypatch.setattr(segment, "PIECE", 11)
    dtype = torch.float32 if policy is FP32 else torch.bfloat16
    model = Awkward(dtype)
    whole = Whole(FACTORIES[name], model, policy)
    mine = Awkward(dtype)
    optimizer = TorchOptimizer(mine.parameters(), FACTORIES[name], lr=1e-2, policy=policy, seed=3)
    for step in range(4):
        give_gradients(model, 1000 + step)
        assert same_bits(train(mine, optimizer, 1, start=step), whole.step(model))


@pytest.mark.parametrize("name", ["clipped", "late", "decayed"])
def test_a_norm_of_the_gradients_as_they_came_is_found_without_a_run_of_the_transform_on_them(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Only a norm of what was computed from them takes one; that its result is right is tested above."""
    asked: list[int] = []
    ask = eb.Optimizer.ask

    def noted(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(sum(x.numel() for x in eb.tree.leaves(params)))
        return ask(self, params, *args, **kwargs)

    monkeypatch.setattr(eb.Optimizer, "ask", noted)
    model = Awkward(torch.bfloat16)
    optimizer = TorchOptimizer(model.parameters(), FACTORIES[name], lr=1e-2, policy=LEAN)
    train(model, optimizer, 2)
    assert any(asked) == (name != "clipped")


class Calls:
    """Counts the runs of transforms for what they ask for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        ask = eb.Optimizer.ask

        def noted(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.asked += 1
            ask(optimizer, *args, **kwargs)

        monkeypatch.setattr(eb.Optimizer, "ask", noted)


def named(learning_rate: Any) -> eb.Transform[Any]:
    return eb.named_chain({"clip": eb.clip_by_global_norm(0.5), "adam": eb.adamw(learning_rate, b2=0.95)})


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts its runs, of which those are the most expensive that look what a reduction is computed from."""

    cut: ClassVar[eb.Cut] = "element"
    reduces: ClassVar[bool] = False
    runs: ClassVar[list[int]] = []

    def init(self, params: Any) -> Any:
        return eb.identity().init(params)

    def update(self, updates: Any, state: Any, params: Any, ctx: eb.Context = eb.Context()) -> tuple[Any, Any]:  # noqa: B008
        self.runs.append(1)
        return updates, state


def counted(learning_rate: Any) -> eb.Transform[Any]:
    return eb.chain(eb.clip_by_global_norm(0.5), Counted(), eb.scale_by_learning_rate(learning_rate))


@pytest.mark.parametrize("factory", [clipped, named, counted])
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_step_does_not_run_the_transform_to_hear_that_it_clips(
    monkeypatch: pytest.MonkeyPatch, factory: Callable[..., Any], scheduled: bool
) -> None:
    """What it asks for is found at the first step, and is known of other learning rates too."""
    calls = Calls(monkeypatch)
    model = nn.Linear(4, 3, dtype=torch.bfloat16)
    optimizer = TorchOptimizer(model.parameters(), factory, lr=1e-2, policy=LEAN, compile=False)
    train(model, optimizer, 1)
    calls.asked = 0
    Counted.runs.clear()
    for step in range(1, 4):
        if scheduled:
            optimizer.param_groups[0]["lr"] = 1e-2 / step
        train(model, optimizer, 1, start=step)
    assert calls.asked == 0
    assert len(Counted.runs) == (3 if factory is counted else 0)  # the steps themselves


@dataclass(frozen=True, slots=True)
class Alternating:
    """Divides by the norm at every other step, and asks for no norm at the others, as its state says."""

    cut: ClassVar[eb.Cut] = "element"
    reduces: ClassVar[bool] = True

    def init(self, params: Any) -> DistanceState:
        return DistanceState(torch.zeros((), dtype=torch.float64))

    def update(
        self,
        updates: Any,
        state: DistanceState,
        params: Any,
        ctx: eb.Context = eb.Context(),  # noqa: B008
    ) -> tuple[Any, DistanceState]:
        after = replace(state, distance=1 - state.distance)
        if state.distance.item() == 0:
            return updates, after
        return ctx.request(
            eb.SumOfSquares(updates), lambda square: (eb.tree.elementwise(lambda u: u / square.sqrt(), updates), after)
        )


class NoDataclass:
    """The same, as a plain class."""

    cut: ClassVar[eb.Cut] = "element"
    reduces: ClassVar[bool] = True

    def init(self, params: Any) -> Any:
        return Alternating().init(params)

    def update(self, updates: Any, state: Any, params: Any, ctx: eb.Context = ALONE) -> tuple[Any, Any]:
        return Alternating().update(updates, state, params, ctx)


@pytest.mark.parametrize("kind", [Alternating, NoDataclass])
def test_a_transform_of_a_users_own_may_ask_for_something_else_at_every_step(kind: Any) -> None:
    """Against the core's own step of the whole tree."""

    def factory(learning_rate: Any) -> eb.Transform[Any]:
        return eb.chain(kind(), eb.clip_by_global_norm(0.5), eb.scale_by_learning_rate(learning_rate))

    model, mine = Awkward(torch.bfloat16), Awkward(torch.bfloat16)
    whole = Whole(factory, model, LEAN)
    optimizer = TorchOptimizer(mine.parameters(), factory, lr=1e-2, policy=LEAN, seed=3, compile=False)
    for step in range(4):
        give_gradients(model, 1000 + step)
        whole.step(model)
        assert same_bits(train(mine, optimizer, 1, start=step), list(whole.weights.values()))


def of_the_library() -> dict[str, Callable[..., Any]]:
    ours = {name: build for name, build in REGISTRY.items() if build(0.1).reduces}
    return ours | {"named": named, **{name: FACTORIES[name] for name in ("clipped", "skipping", "late", "decayed")}}


@pytest.mark.parametrize("name", of_the_library())
def test_transforms_of_the_library_ask_for_the_same_reductions_at_every_step(name: str) -> None:
    """Whatever the gradients, the state and the learning rate: that they are asked once stands on it."""
    state, found = None, set()
    params = {"w": torch.ones(3, 2)}
    for step, gradient in enumerate([1.0, 0.0, float("nan"), 1e30, 1.0]):
        transform = of_the_library()[name](0.1 * step)
        assert sources.is_fixed(transform)
        state = transform.init(params) if state is None else state
        kinds: list[str] = []
        ctx = eb.Context(step=torch.tensor(step + 1), pending=True)
        result: Any = transform.update({"w": torch.full((3, 2), gradient)}, state, params, ctx)
        while isinstance(result, eb.Pending):
            kinds.append(result.kind)
            result = result.resume(result.partial())
        _, state = result
        found.add(tuple(kinds))
    assert len(found) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_squares_of_several_tensors_are_those_of_one_vector_of_them(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    long = torch.randn(3 * barriers.CHUNK + 17, generator=generator).to(dtype)
    edges = [0, 5, 5, 9, barriers.CHUNK, barriers.CHUNK + 40_000, 2 * barriers.CHUNK + 8, long.numel()]
    for first, last in ((0, 1), (0, 3), (2, 5), (4, 5), (0, len(edges) - 1), (1, 2)):
        tensors = [long[a:b] for a, b in itertools.pairwise(edges[first : last + 1])]
        whole = long[edges[first] : edges[last]]
        found = barriers.sum_of_all_squares(tensors)
        assert torch.equal(found, barriers.sum_of_squares(whole))
        exact = math.fsum(whole.double().square().tolist())
        # n additions of float64, all positive, each wrong by 2**-53 at most.
        assert found.item() == pytest.approx(exact, rel=len(whole) * 2.0**-53, abs=0.0)
    if dtype is torch.float32:
        compiled = torch.compile(barriers.sum_of_all_squares, fullgraph=True)  # as in a step that a user compiles
        assert torch.equal(compiled([long, long[:9]]), barriers.sum_of_all_squares([long, long[:9]]))


@pytest.mark.parametrize("policy", [pytest.param(LEAN, marks=pytest.mark.exhaustive), FP32], ids=["LEAN", "FP32"])
@pytest.mark.parametrize(
    "name", ["clipped", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in FACTORIES if n != "clipped")]
)
@pytest.mark.slow
def test_compiled_steps_give_the_bits_of_uncompiled_ones(name: str, policy: eb.Policy) -> None:
    dtype = torch.float32 if policy is FP32 else torch.bfloat16
    found = []
    for compile in (False, True):
        model = Awkward(dtype)
        optimizer = TorchOptimizer(model.parameters(), FACTORIES[name], lr=1e-2, policy=policy, compile=compile)
        for step in range(3):
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
            train(model, optimizer, 1, start=step)
        found.append(values(model))
    assert same_bits(*found)


@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_one_norm_over_groups_as_torchs_clip_grad_norm(alone: bool) -> None:
    """Each group with a limit of its own, float64 and float32 in one optimizer."""

    def sgd(learning_rate: Any, limit: Any) -> eb.Transform[Any]:
        return eb.chain(eb.clip_by_global_norm(limit), eb.trace(0.9), eb.scale_by_learning_rate(learning_rate))

    def build() -> list[nn.Parameter]:
        draw = torch.Generator().manual_seed(0)
        dtypes = itertools.cycle([torch.float64, torch.float32])
        shapes = [(3, 2), (4,), (), (5, 1, 2), (7,)]
        return [nn.Parameter(torch.randn(shape, generator=draw).to(next(dtypes))) for shape in shapes]

    mine, theirs = build(), build()
    groups: list[Any] = [{"params": mine[:3]}, {"params": mine[3:], "limit": 0.1, "lr": 0.05}]
    optimizer = TorchOptimizer(groups, sgd, lr=0.1, limit=0.5)
    others: list[Any] = [{"params": theirs[:3]}, {"params": theirs[3:], "lr": 0.05}]
    reference = torch.optim.SGD(others, lr=0.1, momentum=0.9)
    draw = torch.Generator().manual_seed(1)
    for step in range(6):
        grads = [torch.randn(p.shape, generator=draw, dtype=torch.float64) for p in mine]
        missing = {step % 5, 4} if step > 2 else set()
        seen = [g.to(p.dtype) for index, (g, p) in enumerate(zip(grads, mine, strict=True)) if index not in missing]
        norm = torch.stack([g.double().square().sum() for g in seen]).sum().sqrt()
        for index, (p, q, grad) in enumerate(zip(mine, theirs, grads, strict=True)):
            limit = 0.5 if index < 3 else 0.1
            p.grad = None if index in missing else grad.to(p.dtype)
            q.grad = None if index in missing else (grad.to(p.dtype) * (limit / norm).clamp(max=1.0)).to(p.dtype)
        optimizer.step()
        reference.step()
    for p, q in zip(mine, theirs, strict=True):
        tolerance = 1e-13 if p.dtype is torch.float64 else 1e-6  # float32: a few roundings of sums below 10
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


@dataclass(frozen=True, slots=True)
class ByGram:
    """Looks at matrices as such, and reduces over all of them; a vector is a matrix of one row."""

    cut: ClassVar[eb.Cut] = "tensor"
    reduces: ClassVar[bool] = True

    def init(self, params: Any) -> Any:
        return eb.identity().init(params)

    def update(self, updates: Any, state: Any, params: Any, ctx: eb.Context = eb.Context()) -> tuple[Any, Any]:  # noqa: B008
        def scaled(square: Tensor) -> tuple[Any, Any]:
            total = square.sqrt()
            return eb.tree.map(lambda u: u / (total.to(u.dtype) + u.abs().max()), updates), state

        grams = [u @ u.mT for u in map(torch.atleast_2d, eb.tree.leaves(updates))]
        return ctx.request(eb.Sum(torch.stack([gram.trace().double() for gram in grams]).sum()), scaled)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_whole_tensors_and_a_reduction_together_give_the_cores_bits(compile: bool) -> None:
    def by_gram(learning_rate: Any) -> eb.Transform[Any]:
        return eb.chain(ByGram(), eb.trace(0.9), eb.scale_by_learning_rate(learning_rate))

    def build() -> nn.ParameterDict:
        draw = torch.Generator().manual_seed(0)
        shapes = {"a": (3, 4), "b": (5,), "c": (2, 2)}
        return nn.ParameterDict({name: torch.randn(shape, generator=draw) for name, shape in shapes.items()})

    model = build()
    whole = Whole(by_gram, model, FP32)
    optimizer = TorchOptimizer(model.parameters(), by_gram, lr=1e-2, seed=3, compile=compile)
    for step in range(3):
        give_gradients(model, step)
        whole.step(model)
        optimizer.step()
        assert same_bits(values(model), list(whole.weights.values()))


def test_a_clip_that_begins_with_a_hyperparameter_begins() -> None:
    def factory(learning_rate: float, limit: float) -> eb.Transform[Any]:
        clips = [eb.clip_by_global_norm(limit)] if limit else []
        return eb.chain(*clips, eb.adamw(learning_rate, b2=0.95, weight_decay=0.1))

    model, reference = Awkward(), Awkward()
    optimizer = TorchOptimizer(model.parameters(), factory, lr=1e-2, limit=0.0)
    other = TorchOptimizer(reference.parameters(), clipped, lr=1e-2, limit=1e30)
    train(model, optimizer, 2)
    train(reference, other, 2)
    for one in (optimizer, other):
        one.param_groups[0]["limit"] = 0.1
    assert same_bits(train(model, optimizer, 2, start=2), train(reference, other, 2, start=2))


def test_groups_of_which_some_reduce_have_the_norm_of_those() -> None:
    def factory(learning_rate: float, clip: bool) -> eb.Transform[Any]:
        return clipped(learning_rate) if clip else eb.adamw(learning_rate, b2=0.95, weight_decay=0.1)

    first, second, alone, plain = (Awkward() for _ in range(4))
    groups: list[Any] = [{"params": second.parameters(), "clip": False}, {"params": first.parameters()}]
    optimizer = TorchOptimizer(groups, factory, lr=1e-2, clip=True)
    for step in range(3):
        give_gradients(first, 1000 + step)
        train(second, optimizer, 1, start=step)
    expected = train(alone, TorchOptimizer(alone.parameters(), clipped, lr=1e-2), 3)
    assert same_bits(values(first), expected)
    unclipped = TorchOptimizer(plain.parameters(), eb.adamw, lr=1e-2, b2=0.95, weight_decay=0.1)
    assert same_bits(values(second), train(plain, unclipped, 3))


def test_parameters_in_one_memory_are_clipped_as_by_torch() -> None:
    """Each is stepped by itself, as torch does, with the norm of all."""

    def build() -> nn.ParameterList:
        base = torch.arange(1.0, 7.0, dtype=torch.float64)
        return nn.ParameterList([nn.Parameter(base), nn.Parameter(base.view(2, 3))])

    def sgd(learning_rate: Any) -> eb.Transform[Any]:
        return eb.chain(eb.clip_by_global_norm(0.5), eb.scale_by_learning_rate(learning_rate))

    mine, theirs = build(), build()
    optimizer = TorchOptimizer(mine.parameters(), sgd, lr=0.1)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, foreach=False)
    for step in range(3):
        give_gradients(mine, step)
        give_gradients(theirs, step)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        reference.step()
    # torch adds 1e-6 to the norm that it divides by, which is above 1 here.
    torch.testing.assert_close(mine[0], theirs[0], rtol=0.0, atol=3 * 0.1 * 0.5 * 1e-6 * 2)
    assert torch.equal(mine[0].view(2, 3), mine[1])


class Elements(TorchDispatchMode):
    """Counts the elements of what is computed, views apart."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in eb.tree.leaves([args, kwargs or {}]) if isinstance(x, Tensor)}
        for x in eb.tree.leaves(made):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                self.count += x.untyped_storage().nbytes() // x.itemsize
        return made


@pytest.mark.parametrize("policy", [LEAN, KAHAN], ids=["LEAN", "KAHAN"])
def test_a_norm_is_found_from_the_gradients_alone(policy: eb.Policy) -> None:
    """One result for each element: the gradient in float64. Nothing is decoded."""
    size = 1 << 16
    model = nn.ParameterList([nn.Parameter(torch.ones(size, dtype=torch.bfloat16))])
    optimizer = TorchOptimizer(model.parameters(), clipped, lr=1e-2, policy=policy)
    for _ in range(2):
        model[0].grad = torch.ones_like(model[0])
        optimizer.step()
    (one,) = optimizer.own.stepped
    work = [Work(one.of.segment, torch.ones(size, dtype=torch.bfloat16))]
    with Elements() as elements:
        ((total,), *_) = find_totals(work)
    assert total.item() == size
    assert elements.count // size == 1


def peak(factory: Callable[..., Any], policy: eb.Policy, size: int) -> int:
    model = nn.ParameterList([nn.Parameter(torch.ones(size // 4, dtype=torch.bfloat16)) for _ in range(4)])
    optimizer = TorchOptimizer(model.parameters(), factory, lr=1e-2, policy=policy, compile=False)
    for _ in range(2):
        for p in model:
            p.grad = torch.ones_like(p)
        optimizer.step()
    with AllocationCounter() as counter:
        optimizer.step()
    found: int = counter.peak
    return found


def plain(learning_rate: Any) -> eb.Transform[Any]:
    return eb.adamw(learning_rate, b2=0.95, weight_decay=0.1)


def masked(learning_rate: Any) -> eb.Transform[Any]:
    return eb.adamw(learning_rate, b2=0.95, weight_decay=0.1, mask=lambda path, p: "[0]" in path)


@pytest.mark.parametrize("policy", [LEAN, pytest.param(KAHAN, marks=pytest.mark.exhaustive)], ids=["LEAN", "KAHAN"])
@pytest.mark.parametrize("other", [clipped, masked])
@pytest.mark.sampled(2)
def test_a_clip_and_a_mask_take_no_more_memory_than_their_optimizer_alone(other: Any, policy: eb.Policy) -> None:
    """A tenth more is what is accepted; a tree of the whole model would take ten times as much."""
    size = 1 << 22
    assert peak(other, policy, size) <= 1.1 * peak(plain, policy, size)


def test_what_is_measured_of_a_clipped_step_is_of_all_parameters() -> None:
    model = Awkward(torch.bfloat16)
    optimizer = TorchOptimizer(model.parameters(), clipped, lr=1e-2, policy=LEAN, metrics=True)
    train(model, optimizer, 2)
    squares = sum(p.grad.double().square().sum().item() for p in model.parameters() if p.grad is not None)
    assert optimizer.metrics().gradient.item() == pytest.approx(squares, rel=1e-12)  # float64 sums of 90 numbers


def test_a_number_of_their_own_from_a_state_dict_is_kept_for_each_parameter() -> None:
    """Of estimates that differ between parameters of one run the last one was used for all of them."""
    model = Awkward()
    optimizer = TorchOptimizer(model.parameters(), by_distance, lr=1e-2, compile=False)
    train(model, optimizer, 2)
    saved = optimizer.state_dict()
    (name,) = [key for key, x in saved["state"][0].items() if x.dtype is torch.float64 and not x.ndim]
    for number, entries in saved["state"].items():
        entries[name] = torch.tensor(2.0 + number, dtype=torch.float64)
    optimizer.load_state_dict(saved)
    loaded = optimizer.state_dict()["state"]
    assert {number: float(entries[name]) for number, entries in loaded.items()} == {
        number: 2.0 + number for number in saved["state"]
    }
