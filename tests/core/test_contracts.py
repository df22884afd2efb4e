"""What a transform gets wrong is named where it is put to use, with what to write instead."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor

import everybit as eb
from everybit import testing
from everybit.stepping import OptimizerState
from everybit.testing import assert_same_bits

P = TypeVar("P")


@eb.state
class TwoSlots(Generic[P]):
    momentum: eb.Slot[P]
    variance: eb.Slot[P]


@dataclass(frozen=True, slots=True)
class Right:
    """Adam without its corrections; each mistake below is a change of it."""

    cut: ClassVar[eb.Cut] = "element"

    reduces: ClassVar[bool] = False

    def decays(self) -> tuple[eb.SlotDecay, ...]:
        return eb.SlotDecay("momentum", 0.9), eb.SlotDecay("variance", 0.9, squares=True)

    def init(self, params: Any) -> Any:
        return TwoSlots(eb.tree.zeros_like(params), eb.tree.zeros_like(params))

    def update(self, updates: Any, state: Any, params: Any, ctx: Any = None) -> Any:
        momentum = eb.tree.elementwise(lambda g, m: 0.9 * m + 0.1 * g, updates, state.momentum)
        variance = eb.tree.elementwise(lambda g, v: 0.9 * v + 0.1 * g * g, updates, state.variance)
        direction = eb.tree.elementwise(lambda m, v: -0.1 * m / (v + 1e-6).sqrt(), momentum, variance)
        return direction, TwoSlots(momentum, variance)


# -- memory -------------------------------------------------------------------------------------------------------------------


class OneZeroForBoth(Right):
    def init(self, params: Any) -> Any:
        zeros = eb.tree.zeros_like(params)
        return TwoSlots(zeros, zeros)


class ViewsOfOneZero(Right):
    def init(self, params: Any) -> Any:
        zeros = eb.tree.zeros_like(params)
        return TwoSlots(zeros, eb.tree.map(lambda z: z.view(-1).view(z.shape), zeros))


class ExpandedZero(Right):
    def init(self, params: Any) -> Any:
        def expanded(p: Tensor) -> Tensor:
            return torch.zeros(()).to(p).expand(p.shape)

        return TwoSlots(eb.tree.map(expanded, params), eb.tree.map(expanded, params))


class TheParametersThemselves(Right):
    def init(self, params: Any) -> Any:
        return TwoSlots(params, eb.tree.zeros_like(params))


@pytest.mark.parametrize("kind", [OneZeroForBoth, ViewsOfOneZero, ExpandedZero, TheParametersThemselves])
@pytest.mark.parametrize("policy", [eb.policies.FP32, eb.policies.LEAN_BF16])
def test_slots_that_shared_memory_have_their_own_after_init(kind: type[Right], policy: eb.Policy) -> None:
    dtype = torch.float32 if policy is eb.policies.FP32 else torch.bfloat16
    params = {"w": torch.linspace(-1, 1, 24).view(4, 6).to(dtype), "b": torch.ones(5, dtype=dtype)}
    optimizer = eb.with_policy(kind(), policy)
    state = optimizer.init(params)
    owners = [x.untyped_storage().data_ptr() for x in eb.tree.leaves((params, state)) if x.numel()]
    assert len(set(owners)) == len(owners)
    for x in eb.tree.leaves(state):
        x.add_(1)  # nothing overlaps itself


@pytest.mark.parametrize("kind", [OneZeroForBoth, ViewsOfOneZero, ExpandedZero, TheParametersThemselves])
def test_the_battery_finds_slots_that_share_memory(kind: type[Right]) -> None:
    with pytest.raises(AssertionError, match=r"the state from init.*(shares memory with|overlaps itself)"):
        testing.check_pure(lambda learning_rate: kind())


# -- states -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unregistered:
    momentum: Any
    variance: Any


class Named(NamedTuple):
    momentum: Any
    variance: Any


@eb.state
class WithoutSlots(Generic[P]):
    momentum: P
    variance: P


@eb.state
class WithANumber(Generic[P]):
    momentum: eb.Slot[P]
    count: Any


def with_state(make: Any) -> eb.Transform[Any]:
    class Changed(Right):
        def init(self, params: Any) -> Any:
            return make(params)

    changed: Any = Changed()
    return changed  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda p: Unregistered(p, p),
            r"state: got an instance of Unregistered.*put @eb\.state above the @dataclass of Unregistered",
        ),
        (lambda p: Named(p, p), r"state: got the named tuple Named; accepted is a dataclass with @eb\.state above"),
        (
            lambda p: WithoutSlots(eb.tree.zeros_like(p), eb.tree.zeros_like(p)),
            r"state\.momentum: got one tensor for each parameter outside of a slot.*momentum: eb\.Slot\[P\]",
        ),
        (
            lambda p: {"momentum": eb.tree.zeros_like(p)},
            r"state\['momentum'\]\['w'\]: got a tensor of shape \(4, 6\) outside of a slot",
        ),
        (
            lambda p: WithANumber(eb.tree.zeros_like(p), 0),
            r"state\.count: got 0; accepted are tensors.*torch\.zeros\(\(\)",
        ),
        (
            lambda p: (WithANumber(eb.tree.zeros_like(p), torch.zeros(3)),),
            r"state\[0\]\.count: got a tensor of shape \(3,\)",
        ),
    ],
)
def test_a_state_that_a_policy_would_not_store_is_refused_with_what_to_write(make: Any, message: str) -> None:
    params = {"w": torch.ones(4, 6), "b": torch.ones(())}
    transform = with_state(make)
    for one in (transform, eb.chain(transform, eb.scale(0.1)), eb.masked(transform, True), eb.accumulate(transform, 2)):
        with pytest.raises(
            TypeError, match=message.replace("state", r"state[\w.\[\]0-9']*", 1) if one is not transform else message
        ):
            eb.with_policy(one, eb.policies.FP32).init(params)


def test_a_tree_of_numbers_outside_of_a_slot_is_refused_though_each_is_0_d() -> None:
    params = {"a": torch.ones(()), "b": torch.ones(())}
    transform = with_state(lambda p: WithoutSlots(eb.tree.zeros_like(p), eb.tree.zeros_like(p)))
    with pytest.raises(TypeError, match=r"state\.momentum: got one tensor for each parameter outside of a slot"):
        eb.with_policy(transform, eb.policies.FP32).init(params)


# -- promises, updates --------------------------------------------------------------------------------------------------------


class Elementwise(Right):
    cut: ClassVar[Any] = "elementwise"


class Perhaps(Right):
    reduces: ClassVar[Any] = "tree"


class Old:
    """As transforms were written before there were two promises."""

    scope = "tree"
    init, update = Right.init, Right.update


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("adamw", r"call the function of that name, everybit\.adamw\(\.\.\.\)\. Got 'adamw'; accepted are transforms"),
        ([eb.scale_by_adam()], r"write each transform as an argument, chain\(a, b\) or chain\(\*transforms\)\. Got a list of 1"),
        ((eb.scale(1.0), eb.scale(2.0)), r"Got a tuple of 2; accepted are transforms\."),
        (eb.adamw, r"call it, adamw\(\.\.\.\)\. Got the function adamw; accepted are transforms\."),
        (torch.nn.Sequential(torch.nn.Linear(2, 2)), r"got a Sequential, which has no cut, reduces, init, update; accepted are"),
    ],
)  # fmt: skip
def test_what_stands_in_the_place_of_a_transform_is_told_what_to_write_in_one_line(given: Any, message: str) -> None:
    uses: list[Any] = [
        lambda t: eb.with_policy(t, "FP32"),
        eb.chain,
        eb.apply_if_finite,
        lambda t: eb.named_chain({"x": t}),
    ]
    for use in uses:
        with pytest.raises(TypeError, match=message) as raised:
            use(given)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Elementwise, r"Elementwise\.cut: got 'elementwise'; accepted are 'element', 'tensor'\."),
        (Perhaps, r"Perhaps\.reduces: got 'tree'; accepted are True and False\."),
        (Old, r"which has no cut, reduces; accepted are transforms\. For scope write cut and reduces"),
    ],
)
def test_a_promise_that_there_is_not_is_refused_where_the_transform_is_used(made: Any, message: str) -> None:
    uses: list[Any] = [
        lambda t: eb.with_policy(t, eb.policies.FP32), eb.chain, lambda t: eb.masked(t, True), lambda t: eb.partition({"x": t}, "x"),
        lambda t: eb.accumulate(t, 2), eb.apply_if_finite, lambda t: eb.named_chain({"x": t}),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(TypeError, match=message):
            use(made())


def with_update(update: Any) -> eb.Transform[Any]:
    class Changed(Right):
        def update(self, updates: Any, state: Any, params: Any, ctx: Any = None) -> Any:
            return update(self, updates, state, params, ctx)

    changed: Any = Changed()
    return changed  # type: ignore[no-any-return]


def in_place(self: Any, updates: Any, state: Any, params: Any, ctx: Any) -> Any:
    eb.tree.map(lambda m, g: m.mul_(0.9).add_(g), state.momentum, updates)
    return state.momentum, state


def scaled_gradients(self: Any, updates: Any, state: Any, params: Any, ctx: Any) -> Any:
    return eb.tree.map(lambda g: g.mul_(-0.1), updates), state


def stepped_parameters(self: Any, updates: Any, state: Any, params: Any, ctx: Any) -> Any:
    eb.tree.map(lambda p, g: p.sub_(g), params, updates)
    return updates, state


@pytest.mark.parametrize(
    ("update", "where"),
    [
        (in_place, r"state\S*momentum\['[wb]'\]"),
        (scaled_gradients, r"grads\['w'\]"),
        (stepped_parameters, r"params\['w'\]"),
    ],
)
@pytest.mark.parametrize("policy", [eb.policies.FP32, eb.policies.LEAN_BF16])
def test_an_update_that_writes_to_what_it_was_given_is_refused(update: Any, where: str, policy: eb.Policy) -> None:
    dtype = torch.float32 if policy is eb.policies.FP32 else torch.bfloat16
    params = {"w": torch.ones(4, 6, dtype=dtype), "b": torch.ones(5, dtype=dtype)}
    for transform in (with_update(update), eb.chain(with_update(update), eb.scale(0.1))):
        optimizer = eb.with_policy(transform, policy)
        state = optimizer.init(params)
        with pytest.raises(
            TypeError, match=rf"update wrote to {where}, which was passed in; accepted is an update that makes new"
        ):
            optimizer.step(params, {name: torch.ones_like(p) for name, p in params.items()}, state)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (lambda self, u, s, p, c: u, r"update returned a dict; accepted is a pair: return updates, state"),
        (lambda self, u, s, p, c: (u, s, p), r"update returned a tuple; accepted is a pair"),
        (lambda self, u, s, p, c: [u, s], r"update returned a list; accepted is a pair"),
        (lambda self, u, s, p, c: None, r"update returned a NoneType; accepted is a pair"),
        (
            lambda self, u, s, p, c: (u, u),
            r"update returned a dict as its state; accepted is what init returned, a TwoSlots",
        ),
        (
            lambda self, u, s, p, c: (u, None),
            r"update returned a NoneType as its state; accepted is what init returned",
        ),
    ],
)
def test_an_update_that_does_not_return_updates_and_state_is_refused_by_name(update: Any, message: str) -> None:
    # Two parameters: a dict of two would unpack into a pair.
    params = {"w": torch.ones(4, 6), "b": torch.ones(5)}
    one = with_update(update)
    for transform in (
        one, eb.chain(one), eb.named_chain({"x": one}), eb.masked(one, True), eb.partition({"x": one}, "x"), eb.accumulate(one, 2),
        eb.apply_if_finite(one),
    ):  # fmt: skip
        optimizer = eb.with_policy(transform, eb.policies.FP32)
        with pytest.raises(TypeError, match=message):
            optimizer.step(params, params, optimizer.init(params))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda u: {"w": u["w"]}, r"updates: structure differs from params: no tensor at updates\['b'\]"),
        (lambda u: u | {"b": u["b"].sum()}, r"updates\['b'\]: shape \(\), but params\['b'\] has \(5,\)"),
        (lambda u: u | {"w": u["w"].T}, r"updates\['w'\]: shape \(6, 4\), but params\['w'\] has \(4, 6\)"),
    ],
)
def test_updates_of_another_shape_are_refused_and_not_broadcast(change: Any, message: str) -> None:
    params = {"w": torch.ones(4, 6), "b": torch.ones(5)}
    optimizer = eb.with_policy(with_update(lambda self, u, s, p, c: (change(u), s)), eb.policies.FP32)
    with pytest.raises(ValueError, match=message):
        optimizer.step(params, params, optimizer.init(params))


@pytest.mark.parametrize("policy", [eb.policies.FP32, eb.policies.LEAN_BF16])
def test_stored_state_of_another_shape_is_refused_though_it_would_broadcast(policy: eb.Policy) -> None:
    dtype = torch.float32 if policy is eb.policies.FP32 else torch.bfloat16
    params = {"w": torch.ones(4, dtype=dtype)}
    optimizer = eb.with_policy(Right(), policy)
    state = optimizer.init(params)
    wrong = replace(state, inner=replace(state.inner, momentum={"w": state.inner.momentum["w"][:1]}))
    with pytest.raises(ValueError, match=r"state\.momentum\['w'\]: stored as \[torch\.\w+ \(1,\)\]"):
        optimizer.step(params, params, wrong)


@pytest.mark.parametrize("policy", [eb.policies.FP32, eb.policies.LEAN_BF16])
def test_a_slot_whose_shape_an_update_changes_is_refused(policy: eb.Policy) -> None:
    dtype = torch.float32 if policy is eb.policies.FP32 else torch.bfloat16
    params = {"w": torch.ones(4, dtype=dtype)}

    def update(self: Any, updates: Any, state: Any, params: Any, ctx: Any) -> Any:
        return updates, TwoSlots(eb.tree.map(torch.sum, state.momentum), state.variance)

    optimizer = eb.with_policy(with_update(update), policy)
    with pytest.raises(
        ValueError, match=r"state\.momentum\['w'\]: got the shape \(\); accepted is that of its parameter, \(4,\)"
    ):
        optimizer.step(params, params, optimizer.init(params))


def test_what_is_right_is_accepted_everywhere() -> None:
    testing.check_pure(lambda learning_rate: Right())
    testing.check_state_is_a_fixed_point(lambda learning_rate: Right())


class Reversed(eb.Elementwise):
    """Returns its updates with the keys in another order."""

    def init(self, params: Any) -> tuple[()]:
        return ()

    def update(self, updates: Any, state: Any, params: Any, ctx: Any = None) -> Any:
        return dict(reversed([(key, -u) for key, u in updates.items()])), state


def test_updates_are_added_to_the_parameters_of_their_keys() -> None:
    params = {"a": torch.zeros(2), "b": torch.zeros(2)}
    optimizer = eb.with_policy(Reversed(), "FP32")
    new, _ = optimizer.step(params, {"a": torch.ones(2), "b": torch.full((2,), 3.0)}, optimizer.init(params))
    assert list(new) == ["a", "b"]
    assert (new["a"].tolist(), new["b"].tolist()) == ([-1.0, -1.0], [-3.0, -3.0])


@pytest.mark.parametrize("policy", ["LEAN_BF16", "LEAN_8BIT"])
def test_a_state_belongs_to_its_parameters_by_key(policy: eb.PolicyName) -> None:
    """As of a state or a model that came back with its keys in another order."""

    def other(values: Any) -> Any:
        return dict(reversed(values.items())) if isinstance(values, dict) else values

    optimizer = eb.with_policy(eb.adamw(1e-2, b2=0.95), policy, seed=3)
    params = {
        key: torch.randn(64, generator=torch.Generator().manual_seed(n)).bfloat16() for n, key in enumerate("abc")
    }
    state = optimizer.init(params)
    for _ in range(2):
        params, state = optimizer.step(params, params, state)
    turned = OptimizerState(state.step, other(state.extra), eb.tree.map_slots(lambda _, slot: other(slot), state.inner))
    assert list(turned.extra) == ["c", "b", "a"]
    for _ in range(2):
        for name in ("export_fp32", "eval_params", "decode"):
            found, expected = getattr(optimizer, name)(params, turned), getattr(optimizer, name)(params, state)
            assert_same_bits(found, expected, name)
        assert_same_bits(optimizer.step(params, params, turned), optimizer.step(params, params, state), "step")
    weights, wide = optimizer.decode(params, state)
    again = OptimizerState(wide.step, wide.extra, eb.tree.map_slots(lambda _, slot: other(slot), wide.inner))
    assert_same_bits(optimizer.encode(weights, again, params), optimizer.encode(weights, wide, params), "encode")
