"""``optimizer.state`` is everybody's: the optimizer's entries follow its hyperparameters, and other people's entries are kept."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import everybit as eb
from everybit.protocol import ALONE
from everybit.testing.own_transforms import REGISTRY
from everybit_torch import SGD, Adam, AdamW, Lion, RMSprop, TorchOptimizer, enable_gradient_release
from everybit_torch.optim.skeletons import skeleton
from tests.support.files import through_a_file
from tests.support.mutations import same
from tests.support.small_models import Awkward, same_bits, train, values

P = TypeVar("P")
NAMES = ["EXACT_BF16", "LEAN_BF16", "KAHAN_BF16", "FLOOR_BF16"]


def close(got: list[Tensor], expected: list[Tensor]) -> None:
    """float64: a few steps that differ by rounding."""
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def skip(step: int, name: str) -> bool:
    return name == "vector" and step in (1, 4)


# -- hyperparameters that change what is kept ------------------------------------------------------------------------------------

CHANGES: list[tuple[type[TorchOptimizer], dict[str, Any], list[dict[str, Any]]]] = [
    (AdamW, {"lr": 1e-2}, [{"maximize": True}, {}, {"maximize": False}]),
    (Adam, {"lr": 1e-2, "weight_decay": 0.1}, [{"maximize": True}, {"betas": (0.8, 0.9)}, {"maximize": False}]),
    (
        SGD,
        {"lr": 0.1, "momentum": 0.9},
        [{"maximize": True}, {"nesterov": True}, {"maximize": False}, {"nesterov": False}],
    ),
]


CASES: list[Any] = [(*case, {}) for case in CHANGES]
COMPILED = [pytest.param(*case, {"compile": True}, marks=pytest.mark.exhaustive) for case in CHANGES[2:3]]


@pytest.mark.parametrize(("kind", "arguments", "changes", "how"), [*CASES, *COMPILED])
def test_flags_that_keep_the_same_state_may_change_at_any_step_as_in_torch(
    kind: Any, arguments: dict[str, Any], changes: list[dict[str, Any]], how: dict[str, Any]
) -> None:
    theirs = getattr(torch.optim, kind.__name__)
    model, reference = Awkward(torch.float64), Awkward(torch.float64)
    mine, other = (
        kind(model.parameters(), **how, **arguments),
        theirs(reference.parameters(), **arguments),
    )
    for number, change in enumerate([{}, *changes]):
        for network, optimizer in ((model, mine), (reference, other)):
            optimizer.param_groups[0].update(change)
            train(network, optimizer, 2, start=2 * number, without=skip)
        close(values(model), values(reference))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_a_flag_that_goes_and_comes_back_leaves_every_bit(name: str, alone: bool) -> None:
    """``maximize`` with negated gradients is the same step: multiplying by -1 is exact."""
    results = []
    for flips in (False, True):
        model = Awkward(torch.bfloat16)
        optimizer = Adam(model.parameters(), lr=1e-2, policy=eb.policies.PRESETS[name])
        for step in range(6):
            flip = flips and step in (1, 2, 4)
            optimizer.param_groups[0]["maximize"] = flip
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.grad = -gradient if flip else gradient
            optimizer.step()
        results.append([*values(model), *optimizer.export_fp32()[0]])
    assert same_bits(*results)


MOMENTUM_SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=12),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=3),
}


@pytest.mark.parametrize("schedule", list(MOMENTUM_SCHEDULES))
@pytest.mark.parametrize("kind", [SGD, RMSprop])
def test_a_scheduler_gives_momentum_to_an_optimizer_that_was_made_without(schedule: str, kind: Any) -> None:
    model, reference = Awkward(torch.float64), Awkward(torch.float64)
    mine = kind(model.parameters(), 1e-2)
    theirs = getattr(torch.optim, kind.__name__)(reference.parameters(), 1e-2)
    pairs = [(model, mine), (reference, theirs)]
    schedules = [MOMENTUM_SCHEDULES[schedule](optimizer) for _, optimizer in pairs]
    for step in range(2, 10):
        for (network, optimizer), one in zip(pairs, schedules, strict=True):
            train(network, optimizer, 1, start=step, without=skip)
            one.step()
    assert mine.param_groups[0]["momentum"] == theirs.param_groups[0]["momentum"] > 0
    close(values(model), values(reference))


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("full", [True, False])
def test_a_checkpoint_with_another_flag_is_taken_with_its_flag(saved: bool, full: bool) -> None:
    model, reference, other = Awkward(torch.float64), Awkward(torch.float64), Awkward(torch.float64)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, maximize=saved)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, maximize=saved)
    train(model, optimizer, 3)
    train(reference, theirs, 5)
    other.load_state_dict(model.state_dict())
    resumed = SGD(other.parameters(), lr=0.1, maximize=not saved)
    train(Awkward(), resumed, 0)
    if full:
        resumed.load_full_state_dict(optimizer.full_state_dict())
    else:
        resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0]["maximize"] is saved
    close(train(other, resumed, 2, start=3), values(reference))


def test_and_one_whose_state_is_there_already_in_another_form() -> None:
    model, other = Awkward(), Awkward()
    optimizer = RMSprop(model.parameters(), lr=1e-2, centered=True, momentum=0.9, maximize=True)
    train(model, optimizer, 3)
    resumed = RMSprop(other.parameters(), lr=1e-2)
    train(other, resumed, 2)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    assert same_bits(train(model, optimizer, 3, start=3), train(other, resumed, 3, start=3))


def test_a_chain_in_a_chain_keeps_its_state_when_another_part_comes_before_it() -> None:
    def factory(learning_rate: float, signed: bool = False, nested: bool = True) -> eb.Transform[Any]:
        adam = eb.chain(eb.identity(), eb.scale_by_adam())
        return eb.chain(*([eb.scale(1.0)] if signed else []), adam, eb.scale_by_learning_rate(learning_rate))

    results = []
    for changes in (False, True):
        model = Awkward()
        optimizer = TorchOptimizer(model.parameters(), factory, lr=1e-2, signed=False)
        for step in range(6):
            optimizer.param_groups[0]["signed"] = changes and step in (2, 3, 5)
            train(model, optimizer, 1, start=step, without=skip)
        results.append(values(model))
    assert same_bits(*results)


def doubled(learning_rate: float, again: bool = False) -> eb.Transform[Any]:
    return eb.chain(eb.trace(0.9), *([eb.trace(0.5)] if again else []), eb.scale_by_learning_rate(learning_rate))


def counted(learning_rate: float, slow: bool = False) -> eb.Transform[Any]:
    inner = eb.chain(eb.scale_by_adam(), eb.scale_by_learning_rate(learning_rate))
    return eb.accumulate(inner, 2) if slow else inner


@pytest.mark.parametrize(
    ("factory", "arguments", "change"),
    [
        (doubled, {"again": False}, {"again": True}),
        (counted, {"slow": False}, {"slow": True}),
        (SGD, {}, {"momentum": 0.9}),
        (SGD, {"momentum": 0.9}, {"momentum": 0.0}),
        (RMSprop, {}, {"centered": True}),
        (Adam, {"amsgrad": True}, {"amsgrad": False}),
    ],
)
def test_hyperparameters_that_would_begin_or_end_state_are_refused_and_change_nothing(
    factory: Any, arguments: dict[str, Any], change: dict[str, Any]
) -> None:
    model = Awkward()
    kind: Any = factory if isinstance(factory, type) else partial(TorchOptimizer, factory=factory)
    optimizer = kind(model.parameters(), lr=1e-2, **arguments)
    train(model, optimizer, 2)
    before = [*values(model), *(x.clone() for p in model.parameters() for x in optimizer.state[p].values())]
    kept = {name: optimizer.param_groups[0][name] for name in change}
    optimizer.param_groups[0].update(change)
    (name,) = change
    with pytest.raises(
        ValueError, match=rf"param group 0: {name}: the state is .* accepted are values that keep the same"
    ):
        train(model, optimizer, 1, start=2)
    after = [*values(model), *(x for p in model.parameters() for x in optimizer.state[p].values())]
    assert same_bits(before, after)
    optimizer.param_groups[0].update(kept)
    train(model, optimizer, 1, start=2)


def test_a_state_dict_of_another_version_is_refused() -> None:
    optimizer = AdamW(Awkward().parameters())
    for version in (1, 3, 0, "2", True):
        with pytest.raises(ValueError, match=r"state_dict\['format_version'\]: got .*; accepted .* is 2"):
            optimizer.load_state_dict(optimizer.state_dict() | {"format_version": version})


def of_a_mask(rate: float) -> eb.Transform[Any]:
    names = ["w"]
    return eb.adamw(rate, weight_decay=0.1, mask=lambda path, p: p.ndim > 1 or path in names)


def labelled(names: set[str], path: str, parameter: Tensor, of: list[str]) -> str:
    return of[0]


class Labels:
    def of(self, path: str, parameter: Tensor) -> str:
        return "a"


LABELS = Labels()
FACTORIES: dict[str, Callable[[float], Any]] = {
    **{name: one.function for name, one in eb.optimizers().items() if one.learning_rate is not None},
    **REGISTRY,
    "a mask": of_a_mask,
    "labels": lambda rate: eb.partition({"a": eb.sgd(rate), "b": eb.adamw(rate)}, lambda path, p: "ab"[p.ndim > 1]),
    "labels of parts": lambda rate: eb.partition({"a": eb.sgd(rate)}, partial(labelled, {"w"}, of=["a"])),
    "labels of a method": lambda rate: eb.partition({"a": eb.sgd(rate)}, LABELS.of),
}


def test_other_numbers_carry_nothing_over() -> None:
    """A rate that changed was taken for a change of Muon's state, and refused where ranks hold rows of it."""
    for name, factory in FACTORIES.items():
        before, after = factory(0.1), factory(0.2)  # both alive, so that nothing has one address
        assert skeleton(before) == skeleton(after) != skeleton(eb.chain(eb.identity(), after)), name


def test_masks_of_other_keyword_defaults_are_other_transforms() -> None:
    def masked(name: str) -> Any:
        def mask(path: str, p: Tensor, *, only: str = name) -> bool:
            return path == only

        return eb.adamw(0.1, weight_decay=0.1, mask=mask)

    assert skeleton(masked("w")) == skeleton(masked("w")) != skeleton(masked("b"))


# -- names ----------------------------------------------------------------------------------------------------------------------


@eb.state
class Named(Generic[P]):
    """Slots called as what is no slot."""

    param: eb.Slot[P]
    step: eb.Slot[P]
    inner: eb.Slot[P]


@dataclass(frozen=True, slots=True)
class ThreeTraces:
    """Momentum, three times over."""

    cut: ClassVar[eb.Cut] = "element"

    reduces: ClassVar[bool] = False

    def init(self, params: Any) -> Named[Any]:
        return Named(*(eb.tree.zeros_like(params) for _ in range(3)))

    def update(self, updates: Any, state: Named[Any], params: Any, ctx: eb.Context = ALONE) -> Any:
        traces = [
            eb.tree.map(lambda g, m, decay=decay: decay * m + g, updates, slot)
            for decay, slot in ((0.5, state.param), (0.6, state.step), (0.7, state.inner))
        ]
        return eb.tree.map(lambda a, b, c: -0.01 * (a + b + c), *traces), Named(*traces)


@pytest.mark.parametrize("name", ["EXACT_BF16", "FLOOR_BF16"])
def test_a_slot_may_be_called_as_the_residual_or_the_counter_are(name: str) -> None:
    def factory() -> eb.Transform[Any]:
        return eb.chain(ThreeTraces())

    model, other = Awkward(torch.bfloat16), Awkward(torch.bfloat16)
    policy = eb.policies.PRESETS[name]
    optimizer = TorchOptimizer(model.parameters(), factory, policy=policy)
    train(model, optimizer, 3, without=skip)
    residual = {"param.remainder"} if name == "EXACT_BF16" else set()
    assert set(optimizer.state[model.matrix]) == {"step", "param#2", "step#2", "inner#2", "inner.step"} | residual
    assert int(optimizer.state[model.matrix]["step"]) == 3
    saved = through_a_file(optimizer.state_dict())
    full = optimizer.full_state_dict()
    other.load_state_dict(model.state_dict())
    resumed = TorchOptimizer(other.parameters(), factory, policy=policy)
    resumed.load_state_dict(saved)
    for entry in ("param#2", "step#2", "inner#2"):
        assert torch.equal(full["state"][0][entry], optimizer.state[model.matrix][entry].float())
    assert same_bits(train(model, optimizer, 3, start=3), train(other, resumed, 3, start=3))
    assert same_bits(optimizer.export_fp32()[0], resumed.export_fp32()[0])


# -- other people's entries -------------------------------------------------------------------------------------------------------


def decorate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter]["slow_buffer"] = parameter.detach().double() + number
        optimizer.state[parameter]["notes"] = {"count": number, "names": ["a", "b"]}
        optimizer.state[parameter]["mean"] = torch.ones(
            2
        )  # as another optimizer of this library might call what it keeps
    optimizer.state["everybody"] = {"rate": torch.tensor(0.5), "steps": 3}  # type: ignore[index]


def decorations(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    found = []
    for parameter in model.parameters():
        entries = optimizer.state[parameter]
        found += [entries["slow_buffer"].clone(), entries["notes"], entries["mean"].clone()]
    return [*found, dict(optimizer.state["everybody"])]  # type: ignore[index]


@pytest.mark.parametrize("alone", [False, True], indirect=True)
@pytest.mark.parametrize("when", ["before the first step", "after it"])
@pytest.mark.parametrize(
    "then", ["a gradient is missing", "released", "deepcopy", "pickle", "load", "load full", "another flag"]
)
def test_what_others_keep_in_the_state_stays(alone: bool, when: str, then: str) -> None:
    model = Awkward()
    optimizer: Any = Adam(model.parameters(), lr=1e-2)
    if when == "after it":
        train(model, optimizer, 2)
    decorate(model, optimizer)
    before = decorations(model, optimizer)
    if when == "before the first step":
        train(model, optimizer, 2)
    if then == "a gradient is missing":
        train(model, optimizer, 3, start=2, without=lambda step, name: name == ("matrix" if step == 3 else "vector"))
    elif then == "released":
        optimizer.zero_grad()
        enable_gradient_release(model, optimizer)
        loss: Tensor = sum((p.square().sum() for p in model.parameters()), start=torch.zeros(()))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    elif then == "deepcopy":
        model, optimizer = copy.deepcopy((model, optimizer))
    elif then == "pickle":
        model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    elif then == "another flag":
        optimizer.param_groups[0]["maximize"] = True
        train(model, optimizer, 1, start=2)
    else:
        other = Awkward()
        resumed = Adam(other.parameters(), lr=1e-2)
        if then == "load":
            resumed.load_state_dict(through_a_file(optimizer.state_dict()))
        else:
            resumed.load_full_state_dict(through_a_file(optimizer.full_state_dict()))
        other.load_state_dict(model.state_dict())
        model, optimizer = other, resumed
    assert same(before, decorations(model, optimizer))
    train(model, optimizer, 1, start=9) if then != "released" else None
    assert same(before, decorations(model, optimizer))


def test_a_copy_shares_nothing_that_others_keep() -> None:
    model = Awkward()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 1)
    decorate(model, optimizer)
    other = Awkward()
    resumed = AdamW(other.parameters())
    resumed.load_state_dict(optimizer.state_dict())
    expected = copy.deepcopy(decorations(other, resumed))
    for parameter in model.parameters():
        optimizer.state[parameter]["slow_buffer"].fill_(99.0)
        optimizer.state[parameter]["notes"]["names"].append("c")
    optimizer.state["everybody"]["rate"].fill_(99.0)  # type: ignore[index]
    assert same(expected, decorations(other, resumed))


def test_what_is_kept_for_a_parameter_that_was_never_stepped_comes_back() -> None:
    """As Lookahead's buffer of a frozen parameter."""
    model, other = Awkward(), Awkward()
    for network in (model, other):
        network.matrix.requires_grad_(False)
    optimizer, resumed = AdamW(model.parameters()), AdamW(other.parameters())
    frozen = lambda step, name: name == "matrix"  # noqa: E731
    train(model, optimizer, 1, without=frozen)
    optimizer.state[model.matrix]["slow"] = torch.ones(2)
    resumed.load_state_dict(optimizer.state_dict())
    assert set(resumed.state[other.matrix]) == {"slow"}
    model.matrix.requires_grad_(True)
    train(model, optimizer, 1, start=1)
    assert {"slow", "momentum"} <= set(optimizer.state[model.matrix])


# -- wrappers that write torch's names ----------------------------------------------------------------------------------------------


class Lookahead:
    """Zhang et al. 2019, with what implementations do to the momentum at each pull: nothing, reset it, or pull it too.

    It keeps the slow weights in the state of the optimizer it wraps, as timm's does, and finds the momentum under torch's name there.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, entry: str, momentum: str, *, assign: bool = True) -> None:
        self.optimizer, self.entry, self.momentum, self.assign = optimizer, entry, momentum, assign
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None):
            state = self.optimizer.state[parameter]
            if "slow" not in state:
                state["slow"] = parameter.detach().clone()
                state["slow_momentum"] = torch.zeros_like(parameter)
            if self.steps % 3:
                continue
            state["slow"].lerp_(parameter, 0.5)
            parameter.copy_(state["slow"])
            if self.momentum == "reset" and self.assign:
                state[self.entry] = torch.zeros_like(parameter)
            elif self.momentum == "reset":
                state[self.entry].zero_()
            elif self.momentum == "pull":
                if self.entry not in state:
                    state[self.entry] = torch.zeros_like(parameter)
                state["slow_momentum"].lerp_(state[self.entry], 0.5)
                state[self.entry] = state["slow_momentum"].clone()


WRAPPED: list[tuple[type[TorchOptimizer], dict[str, Any], str]] = [
    (SGD, {"lr": 0.1, "momentum": 0.9}, "momentum_buffer"),
    (AdamW, {"lr": 1e-2}, "exp_avg"),
    (Adam, {"lr": 1e-2}, "exp_avg_sq"),
    (RMSprop, {"lr": 1e-2}, "square_avg"),
    (RMSprop, {"lr": 1e-2, "momentum": 0.9}, "momentum_buffer"),
]


@pytest.mark.parametrize(("kind", "arguments", "entry"), WRAPPED)
@pytest.mark.parametrize("momentum", ["nothing", "reset", "pull", "reset in place"])
@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_a_wrapper_that_uses_torchs_names_does_here_what_it_does_there(
    kind: Any, arguments: dict[str, Any], entry: str, momentum: str, alone: bool
) -> None:
    model, reference = Awkward(torch.float64), Awkward(torch.float64)
    mine, theirs = (
        kind(model.parameters(), **arguments),
        getattr(torch.optim, kind.__name__)(reference.parameters(), **arguments),
    )
    for network, optimizer in ((model, mine), (reference, theirs)):
        wrapper = Lookahead(optimizer, entry, momentum.split()[0], assign=momentum != "reset in place")
        for step in range(8):
            for parameter in network.parameters():
                parameter.grad = None
            train(network, Stepper(wrapper), 1, start=step, without=skip)
    close(values(model), values(reference))


class Stepper(torch.optim.Optimizer):
    """Something with a ``step``."""

    def __init__(self, wrapper: Lookahead) -> None:
        self.wrapper = wrapper

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.wrapper.step()


def test_torchs_names_stand_for_entries_and_are_not_shown_twice() -> None:
    model = Awkward()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 2)
    state = optimizer.state[model.matrix]
    assert "exp_avg" in state
    assert state["exp_avg"] is state["momentum"] is state.get("exp_avg")
    assert "exp_avg" not in list(state)
    assert "max_exp_avg_sq" not in state
    with pytest.raises(KeyError):
        state["max_exp_avg_sq"]
    assert optimizer.state_dict()["state"][0].keys() == {"step", "momentum", "variance", "inner.step"}
    assert type(optimizer.state_dict()["state"][0]) is dict


def test_an_entry_in_several_tensors_is_not_written_by_one_of_them() -> None:
    policy = eb.Policy(params=eb.Split(16), momentum=eb.Kahan(), variance=eb.Nearest("float32"))
    model = Awkward(torch.bfloat16)
    optimizer = AdamW(model.parameters(), policy=policy)
    train(model, optimizer, 2)
    state = optimizer.state[model.matrix]
    assert "exp_avg" not in state
    before = optimizer.full_state_dict()["state"][0]["momentum"]
    for name in ("exp_avg", "momentum", "momentum.residual"):
        with pytest.raises(RuntimeError, match=r"stores 'momentum' in several tensors, .*load_full_state_dict"):
            state[name] = torch.zeros(7, 5)
    with pytest.raises(KeyError, match=r"stores 'momentum' in several tensors"):
        state["exp_avg"]
    assert torch.equal(before, optimizer.full_state_dict()["state"][0]["momentum"])
    state["exp_avg_sq"] = torch.full((7, 5), 4.0)
    assert torch.equal(optimizer.full_state_dict()["state"][0]["variance"], torch.full((7, 5), 4.0))


def test_what_is_assigned_is_written_or_refused() -> None:
    model = Awkward()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 2)
    state = optimizer.state[model.matrix]
    held = state["momentum"]
    state.update({"momentum": torch.full((7, 5), 2.0), "mine": 1})
    assert state["momentum"] is held
    assert bool((held == 2.0).all())
    with pytest.raises(
        ValueError, match=r"state\['momentum'\]: got a tensor of shape \(2,\); accepted is a tensor of shape \(7, 5\)"
    ):
        state["momentum"] = torch.ones(2)
    with pytest.raises(ValueError, match=r"state\['variance'\]: got None; accepted is a tensor of shape"):
        state["exp_avg_sq"] = None
    with pytest.raises(RuntimeError, match=r"state\['step'\]: parameters that are stepped together share one count"):
        state["step"] = torch.tensor(7)
    state["step"] = torch.tensor(2.0)  # the same count
    assert int(state["step"]) == 2


def test_what_the_optimizer_keeps_is_not_taken_away_silently() -> None:
    model = Awkward()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 2)
    decorate(model, optimizer)
    state, table = optimizer.state[model.matrix], optimizer.state
    refused: list[Callable[[], Any]] = [
        lambda: state.pop("momentum"),
        lambda: state.__delitem__("variance"),
        lambda: state.clear(),
        lambda: table.pop(model.matrix),
        lambda: table.__delitem__(model.matrix),
        lambda: table.clear(),
        lambda: table.__setitem__(model.matrix, {}),
        lambda: table.__setitem__(model.matrix, {"momentum": torch.zeros(7, 5)}),
    ]
    for take in refused:
        with pytest.raises(RuntimeError, match=r"state: .*the optimizer steps with what it keeps.* To begin anew"):
            take()
    assert set(state) == {"step", "momentum", "variance", "inner.step", "slow_buffer", "notes", "mean"}
    assert state.pop("notes") == {"count": 0, "names": ["a", "b"]}
    assert state.pop("nothing", 3) == 3
    assert set(table.pop("everybody")) == {"rate", "steps"}  # type: ignore[call-overload]
    # As Lightning moves state to another device: a mapping of the same type, with the same entries.
    table[model.matrix] = type(state)(OrderedDict(state.items()))
    assert optimizer.state[model.matrix] is state
    optimizer.state = {}  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"optimizer.state was replaced, .* To begin anew"):
        train(model, optimizer, 1, start=2)


def test_what_it_says_begins_anew_does() -> None:
    model, fresh = Awkward(), Awkward()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 2)
    fresh.load_state_dict(model.state_dict())
    other = AdamW(fresh.parameters())
    optimizer.load_state_dict(optimizer.state_dict() | {"state": {}})
    assert same_bits(train(model, optimizer, 2), train(fresh, other, 2))


def test_state_that_was_assigned_before_the_first_step_is_taken_over() -> None:
    model = Awkward()
    optimizer = AdamW(model.parameters())
    optimizer.state = {model.matrix: {"slow": torch.ones(2)}, "x": 1}  # type: ignore[assignment]
    train(model, optimizer, 1)
    assert {"slow", "momentum"} <= set(optimizer.state[model.matrix])
    assert optimizer.state["x"] == 1  # type: ignore[index]


# -- names and numbers in checkpoints ---------------------------------------------------------------------------------------------


def test_names_of_parameters_go_into_checkpoints_and_out_as_torch_has_it() -> None:
    def run(kind: Any) -> list[Any]:
        named, unnamed = Awkward(), Awkward()
        with_names, without = kind(named.named_parameters()), kind(unnamed.parameters())
        train(named, with_names, 1)
        train(unnamed, without, 1)
        plain = copy.deepcopy(without.state_dict())
        without.load_state_dict(with_names.state_dict())
        seen = [without.param_groups[0].get("param_names"), without.state_dict()["param_groups"][0].get("param_names")]
        with_names.load_state_dict(plain)
        seen.append(with_names.param_groups[0].get("param_names"))
        train(named, with_names, 1, start=1)
        train(unnamed, without, 1, start=1)
        return seen

    assert run(AdamW) == run(torch.optim.AdamW)


@pytest.mark.parametrize("number", [3, 3.0, torch.tensor(3.0), torch.tensor([3]), torch.tensor(3, dtype=torch.int32)])
def test_a_count_may_be_saved_as_any_number(number: Any) -> None:
    model, other = Awkward(), Awkward()
    optimizer, resumed = Lion(model.parameters()), Lion(other.parameters())
    train(model, optimizer, 3)
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        entry["step"] = number
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved)
    assert resumed.state[other.matrix]["step"].dtype is torch.int64
    assert same_bits(train(model, optimizer, 2, start=3), train(other, resumed, 2, start=3))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("change", [{"momentum": 0.5}, {"maximize": True}])
def test_a_checkpoint_between_a_change_and_its_step_fits_itself(full: bool, change: dict[str, Any]) -> None:
    model, other = Awkward(), Awkward()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 2)
    optimizer.param_groups[0].update(change)
    saved = optimizer.full_state_dict() if full else optimizer.state_dict()
    other.load_state_dict(model.state_dict())
    resumed = SGD(other.parameters(), lr=0.1)
    (resumed.load_full_state_dict if full else resumed.load_state_dict)(saved)
    assert same_bits(train(model, optimizer, 2, start=2), train(other, resumed, 2, start=2))
    optimizer.param_groups[0]["lr"] = float("nan")
    optimizer.state_dict()  # saved as it is; a load says what is wrong with it


def test_entries_of_a_tensor_that_is_no_parameter_have_no_number_in_a_checkpoint() -> None:
    """In torch a KeyError."""
    optimizer = AdamW(Awkward().parameters())
    optimizer.state[torch.ones(2)]["slow"] = 1
    for save in (optimizer.state_dict, optimizer.full_state_dict):
        with pytest.raises(
            ValueError, match=r"state: has entries for a tensor of shape \(2,\) that is in no param group"
        ):
            save()
