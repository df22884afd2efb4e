"""What a context offers a transform: numbers of each parameter, keys for random draws, work that is due every few steps, evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import everybit as eb
from everybit.protocol import ALONE
from everybit.testing import CHECKS
from everybit.testing.examples import assert_same_bits, example_grads, example_params
from tests.support.transforms import (
    EXAMPLES,
    AddNoise,
    AverageWeights,
    ClipByRms,
    ScaleByOldMagnitudes,
    ScaleByTrustRatio,
    averaged,
    lamb,
    noisy,
    periodic,
)

FP32, LEAN = eb.policies.FP32, eb.policies.LEAN_BF16
COMPILED = ("compiled equals eager", "no recompilation")
IN_THE_LIBRARY = ("lamb", "rms clipped", "averaged")
"""Examples that the library has an optimizer of by now, which the battery runs on."""


@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(name, check, marks=pytest.mark.exhaustive if check in COMPILED or name in IN_THE_LIBRARY else ())
        for name in EXAMPLES
        for check in CHECKS
    ],
)
@pytest.mark.sampled(4)
def test_an_example_keeps_the_promise(name: str, check: str) -> None:
    CHECKS[check](EXAMPLES[name])


# -- numbers of each parameter ----------------------------------------------------------------------------------------------------------


def over_slices(x: Tensor, edges: list[int], ask: Callable[[eb.Context, list[Tensor]], list[Tensor]]) -> list[Tensor]:
    """What is asked for each slice of a parameter, with the totals over all slices."""
    results: list[Any] = [ask(eb.Context(pending=True), [x[start:stop]]) for start, stop in pairwise(edges)]
    while isinstance(results[0], eb.Pending):
        total = torch.stack([one.partial() for one in results]).sum(0)
        results = [one.resume(total) for one in results]
    return [one for found in results for one in found]


ASKED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "sum_of_squares": lambda p: p.square().sum(),
    "mean": lambda p: p.sum() / max(p.numel(), 1),
    "mean_of_squares": lambda p: p.square().sum() / max(p.numel(), 1),
    "norm": lambda p: p.square().sum().sqrt(),
}


@settings(max_examples=60, deadline=None)
@given(size=st.integers(0, 30), cuts=st.lists(st.integers(0, 30), max_size=4), seed=st.integers(0, 99))
def test_numbers_of_slices_are_those_of_the_parameter(size: int, cuts: list[int], seed: int) -> None:
    """Against float64, element by element; whole numbers, whose sums are exact in any order."""
    x = torch.randint(-50, 50, (size,), generator=torch.Generator().manual_seed(seed)).float()
    edges = [0, *sorted(min(cut, size) for cut in cuts), size]
    for name, of in ASKED.items():

        def expanded(ctx: eb.Context, here: list[Tensor], name: str = name) -> list[Tensor]:
            per = ctx.per_tensor
            return ctx.request(getattr(per, name)(here), lambda numbers: per.expand(numbers, here))

        expected = of(x.double()).float()
        for found in (over_slices(x, edges, expanded), expanded(eb.Context(), [x])):
            assert all(torch.equal(one, expected.expand(1)) for one in found), name


def test_a_sum_comes_with_the_number_of_elements_wherever_they_are() -> None:
    def asked(ctx: eb.Context, here: list[Tensor]) -> list[Tensor]:
        return ctx.request(ctx.per_tensor.sum_and_size(here), lambda found: [torch.cat([*found[0], *found[1]])])

    for numbers in over_slices(torch.ones(10), [0, 2, 2, 10], asked):
        assert numbers.tolist() == [10.0, 10.0]


def test_trust_ratios_are_those_of_the_paper() -> None:
    params, updates = example_params(torch.float64), example_grads(example_params(torch.float64), 1)
    state = ScaleByTrustRatio().init(params)
    got, _ = ScaleByTrustRatio().update(updates, state, params)
    for u, p, out in zip(*map(eb.tree.leaves, (updates, params, got)), strict=True):
        torch.testing.assert_close(out, u * (p.norm() / u.norm() if u.numel() else 1.0), rtol=1e-13, atol=0.0)


@dataclass(frozen=True, slots=True)
class Silent:
    """Asks for what it does not declare."""

    cut: ClassVar[eb.Cut] = "element"
    reduces: ClassVar[bool] = True
    ask: Callable[[eb.Context, Any], Any] = lambda ctx, updates: None

    def init(self, params: Any) -> Any:
        return eb.identity().init(params)

    def update(self, updates: Any, state: Any, params: Any, ctx: eb.Context = ALONE) -> tuple[Any, Any]:
        self.ask(ctx, updates)
        return updates, state


UNDECLARED = r"asked by a transform that does not say so.*{}: ClassVar\[bool\] = True"


def test_bits_that_a_transform_does_not_declare_it_does_not_get() -> None:
    """An engine numbers elements by declarations."""
    optimizer = eb.with_policy(eb.chain(Silent(lambda ctx, updates: ctx.keys("noise", updates)), eb.scale(0.1)), FP32)
    params = torch.ones(3)
    with pytest.raises(TypeError, match=UNDECLARED.format("draws")):
        optimizer.step(params, params, optimizer.init(params))


@dataclass(frozen=True, slots=True)
class SilentRatio:
    """Requests a number of each parameter, and does not say so."""

    cut: ClassVar[eb.Cut] = "element"
    reduces: ClassVar[bool] = True

    def init(self, params: Any) -> Any:
        return eb.identity().init(params)

    def update(self, updates: Any, state: Any, params: Any, ctx: eb.Context = ALONE) -> tuple[Any, Any]:
        return ctx.request(ctx.per_tensor.norm(updates), lambda norms: (ctx.per_tensor.expand(norms, updates), state))


def test_a_driver_refuses_numbers_of_each_parameter_that_a_transform_does_not_declare() -> None:
    """A sum over a vector of several would be taken for that of a parameter."""
    optimizer = eb.with_policy(eb.chain(SilentRatio(), eb.scale(0.1)), FP32)
    params = torch.ones(3)
    with pytest.raises(TypeError, match=UNDECLARED.format("per_tensor")):
        optimizer.ask(params, params, optimizer.init(params), eb.Context(pending=True))


def test_a_transform_with_numbers_of_each_parameter_has_to_say_that_it_reduces() -> None:
    @dataclass(frozen=True, slots=True)
    class Half(Silent):
        reduces: ClassVar[bool] = False
        per_tensor: ClassVar[bool] = True

    with pytest.raises(TypeError, match=r"Half\.reduces: got False with per_tensor=True; accepted is True"):
        eb.chain(Half())


def test_numbers_that_are_not_one_for_each_parameter_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got numbers of shape \(3,\); accepted is one for each parameter"):
        eb.Context().per_tensor.expand([torch.ones(3)], [torch.ones(5)])


# -- random draws ---------------------------------------------------------------------------------------------------------------------


def drawn(optimizer: eb.Optimizer[Any], params: Any, ctx: eb.Context | None = None) -> Any:
    """What is added to gradients of zero, at the first step."""
    zero = eb.tree.zeros_like(params)
    found: list[Any] = []

    def keep(ctx: eb.Context, updates: Any) -> None:
        found.append(updates)

    watched = replace(optimizer, transform=eb.chain(optimizer.transform, Silent(keep)))
    watched.step(params, zero, watched.init(params), ctx)
    return found[0]


def test_draws_are_fair_and_their_own() -> None:
    """Two of one chain, two names, two seeds, and those by which a format rounds: no two agree, and none is correlated.

    Each of 2**16 products of uniform numbers of variance 1/12 has a standard deviation of 1/12: means beyond 5/12/256 happen by chance
    once in two million.
    """
    params = torch.zeros(1 << 16)
    noise = AddNoise(1.0)
    found = {
        "first": drawn(eb.with_policy(eb.chain(noise), FP32), params),
        "second": drawn(eb.with_policy(eb.chain(eb.identity(), noise), FP32), params),
        "nested": drawn(eb.with_policy(eb.chain(eb.chain(noise)), FP32), params),
        "other seed": drawn(eb.with_policy(eb.chain(noise), FP32, seed=1), params),
    }
    for name, one in found.items():
        unit = one / 4
        assert abs(unit.mean().item()) < 5 / 12**0.5 / 256, name
        for other_name, other in found.items():
            if other_name != name:
                assert abs((unit * other / 4).mean().item()) < 5 / 12 / 256, (name, other_name)


def test_draws_do_not_depend_on_how_elements_are_stepped() -> None:
    params = example_params()
    optimizer = eb.with_policy(noisy(0.1), FP32)
    flat = torch.cat([leaf.reshape(-1) for leaf in eb.tree.leaves(params)])
    whole = torch.cat([leaf.reshape(-1) for leaf in eb.tree.leaves(drawn(optimizer, params))])
    pieces = [drawn(optimizer, flat[a:b], eb.Context(first_element=a)) for a, b in ((0, 7), (7, 40), (40, len(flat)))]
    assert torch.equal(torch.cat(pieces), whole)


def test_a_mask_and_a_partition_draw_as_the_whole_tree_does() -> None:
    """A leaf's bits do not depend on which other leaves take part."""
    params = {"a": torch.zeros(3), "b": torch.zeros(2, 2), "c": torch.zeros(5)}
    chained = drawn(eb.with_policy(eb.chain(AddNoise(1.0)), FP32), params)
    masked = drawn(eb.with_policy(eb.chain(eb.masked(AddNoise(1.0), where=lambda path, p: p.ndim > 1)), FP32), params)
    assert torch.equal(masked["b"], chained["b"])
    assert not masked["a"].any()
    assert not masked["c"].any()
    labels = {"a": "still", "b": "noisy", "c": "noisy"}
    parts = eb.partition({"noisy": AddNoise(1.0), "still": eb.identity()}, labels)
    labelled = drawn(eb.with_policy(parts, FP32), params)
    # A partition is a chain of its parts: the noise is its first.
    expected = drawn(eb.with_policy(eb.chain(AddNoise(1.0), eb.identity()), FP32), params)
    assert torch.equal(labelled["b"], expected["b"])
    assert torch.equal(labelled["c"], expected["c"])
    assert not labelled["a"].any()


def test_draws_without_a_count_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ctx\.keys depends on the step and nobody counts it"):
        eb.Context().keys("noise", torch.ones(2))


# -- periodic work ----------------------------------------------------------------------------------------------------------------------


def run(build: Any, steps: int, decide: bool, policy: eb.Policy = FP32) -> tuple[Any, Any]:
    optimizer = eb.with_policy(build(0.1), policy)
    params = example_params(torch.float32)
    state = optimizer.init(params)
    for step in range(1, steps + 1):
        ctx = eb.Context(due=optimizer.due(step)) if decide else None
        params, state = optimizer.step(params, example_grads(params, step), state, ctx)
    return params, state


def test_the_host_and_the_device_decide_alike() -> None:
    assert_same_bits(run(periodic, 8, True), run(periodic, 8, False), "decided on the host, against the device")


def test_work_is_done_at_the_first_update_and_every_period_after_it() -> None:
    done: list[int] = []

    def work() -> Tensor:
        done.append(1)
        return torch.ones(())

    optimizer = eb.with_policy(periodic(0.1), FP32)
    for step in range(1, 9):
        eb.Context(due=optimizer.due(step)).every(3, work, lambda: torch.zeros(()))
        assert len(done) == {1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 2, 7: 3, 8: 3}[step]


@pytest.mark.slow
def test_a_decided_step_compiles_twice_and_computes_only_what_is_due() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    optimizer = eb.with_policy(periodic(0.1), FP32)
    torch._dynamo.reset()
    compiled = torch.compile(optimizer.step, fullgraph=True, backend=backend)
    params = {"w": torch.ones(4)}
    state = optimizer.init(params)
    for step in range(1, 11):
        params, state = compiled(params, params, state, eb.Context(due=optimizer.due(step)))
    assert len(graphs) == 2
    magnitudes = ["abs" in graph.code for graph in graphs]
    assert sorted(magnitudes) == [False, True]


@pytest.mark.parametrize("around", [lambda tx: eb.accumulate(tx, every=2), eb.apply_if_finite])
def test_counts_on_the_device_decide_on_the_device(around: Any) -> None:
    """A skipped or accumulated step is no update, which the host does not know."""

    def build(learning_rate: Any) -> Any:
        return around(periodic(learning_rate))

    assert_same_bits(run(build, 8, True), run(build, 8, False), "decided on the host, against the device")


@pytest.mark.parametrize("period", [0, -1, True, 1.5])
def test_a_period_that_is_none_is_refused(period: Any) -> None:
    with pytest.raises(ValueError, match="period: got"):
        eb.Context(step=torch.tensor(1)).every(period, lambda: torch.ones(()), lambda: torch.ones(()))


def test_periods_are_found_in_everything() -> None:
    parts = eb.partition({"a": ScaleByOldMagnitudes(5), "b": eb.masked(ScaleByOldMagnitudes(3), True)}, "a")
    inside = eb.chain(eb.accumulate(eb.apply_if_finite(eb.named_chain({"x": ScaleByOldMagnitudes(2)})), every=2), parts)
    assert eb.with_policy(inside, FP32).due(7) == ((2, True), (3, True), (5, False))
    with pytest.raises(ValueError, match="step: got 0; accepted is the number of an update"):
        eb.with_policy(inside, FP32).due(0)


# -- evaluation -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [FP32, LEAN], ids=["FP32", "LEAN"])
def test_weights_for_evaluation_are_the_running_mean_of_the_weights(policy: eb.Policy) -> None:
    dtype = torch.float32 if policy is FP32 else torch.bfloat16
    optimizer = eb.with_policy(averaged(0.1), policy)
    params = {"w": torch.linspace(-1, 1, 9).to(dtype)}
    state = optimizer.init(params)
    mean = params["w"].double()
    for step in range(1, 6):
        before = optimizer.export_fp32(params, state)["w"].double()
        grads = example_grads(params, step)
        params, state = optimizer.step(params, grads, state)
        mean = 0.9 * mean + 0.1 * optimizer.export_fp32(params, state)["w"].double()
        assert not torch.equal(before, mean)
    got = optimizer.eval_params(params, state)["w"]
    # float32 slots: five roundings of the mean; under LEAN the weights are rounded to 2**-16 of themselves after they are averaged.
    torch.testing.assert_close(got.double(), mean, rtol=0.0, atol=5 * 2.0**-24 if policy is FP32 else 2.0**-9)


def test_weights_for_evaluation_are_found_through_combinators() -> None:
    params = {"a": torch.ones(3), "b": torch.ones(2)}
    grads = {"a": torch.ones(3), "b": torch.ones(2)}

    def stepped(tx: Any) -> tuple[Any, Any]:
        optimizer = eb.with_policy(tx, FP32)
        new, state = optimizer.step(params, grads, optimizer.init(params))
        return new, optimizer.eval_params(new, state)

    mask = {"a": True, "b": False}
    inner = eb.chain(eb.scale_by_learning_rate(0.5), AverageWeights(0.9))
    expected = torch.full((3,), 0.9 * 1 + 0.1 * 0.5)
    for tx in (
        inner,
        eb.named_chain({"inner": inner}),
        eb.apply_if_finite(inner),
        eb.accumulate(inner, every=1),
        eb.chain(eb.scale_by_learning_rate(0.5), eb.masked(AverageWeights(0.9), mask)),
        eb.partition({"x": inner, "y": eb.scale_by_learning_rate(0.5)}, {"a": "x", "b": "y"}),
    ):
        new, evaluated = stepped(tx)
        torch.testing.assert_close(evaluated["a"], expected)
        assert not torch.equal(new["a"], evaluated["a"])
        assert not torch.equal(evaluated["b"], params["b"]) or torch.equal(new["b"], params["b"])
    plain_new, plain = stepped(eb.sgd(0.5))
    assert_same_bits(plain, plain_new, "of a transform without other weights")


def test_resumed_runs_go_on_with_the_same_draws_and_work() -> None:
    for build in (noisy, periodic, averaged, lamb):
        optimizer = eb.with_policy(cast(Any, build)(0.1), LEAN)
        params = example_params(torch.bfloat16)
        state = optimizer.init(params)
        for step in range(1, 4):
            params, state = optimizer.step(params, example_grads(params, step), state)
        again = eb.load_state_dict(optimizer.init(params), eb.state_dict(state))
        grads = example_grads(params, 4)
        assert_same_bits(optimizer.step(params, grads, again), optimizer.step(params, grads, state), build.__name__)


def test_a_limit_on_the_root_mean_square_holds() -> None:
    params = {"w": torch.zeros(4, 5), "b": torch.zeros(3)}
    updates = {"w": torch.full((4, 5), 3.0), "b": torch.full((3,), 0.25)}
    got, _ = ClipByRms(0.5).update(updates, ClipByRms().init(params), params)
    assert torch.equal(got["w"], torch.full((4, 5), 0.5))
    assert torch.equal(got["b"], updates["b"])
