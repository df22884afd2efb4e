"""Compiled steps take every number that uncompiled ones take, never fail where those would not, and are compiled a few times only."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import SGD, Adam, AdamW, AnyPrecisionAdamW, Lion, RMSprop, TorchOptimizer
from everybit_torch.compiled import variants
from tests.support.small_models import same_bits

Make = Callable[[list[nn.Parameter], bool], torch.optim.Optimizer]
pytestmark = pytest.mark.usefixtures("traced")

SHAPES = ((3, 2), (5,))


@dataclass
class Ran:
    """What became of a run: everything stored, warnings of the optimizer, graphs compiled."""

    stored: list[Tensor]
    warned: list[str]
    graphs: int


def run(
    make: Make,
    compile: bool,
    *,
    steps: int,
    change: Callable[[int], dict[str, Any]] = lambda step: {},
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    dtype: torch.dtype = torch.float32,
    missing: Callable[[int, int], bool] = lambda step, index: False,
) -> Ran:
    generator = torch.Generator().manual_seed(3)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    optimizer = make(parameters, compile)
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        for step in range(steps):
            optimizer.param_groups[0].update(change(step))
            for index, parameter in enumerate(parameters):
                gradient = torch.randn(parameter.shape, generator=generator).to(dtype)
                parameter.grad = None if missing(step, index) else gradient
            optimizer.step()
    stored = [parameter.detach() for parameter in parameters]
    stored += [value for parameter in parameters for value in optimizer.state[parameter].values()]
    return Ran(stored, [str(one.message) for one in caught], counters["unique_graphs"] - before)


def compare(make: Make, **arguments: Any) -> Ran:
    """The compiled run, whose bits are those of the uncompiled one, which warns of nothing."""
    eager, compiled = run(make, False, **arguments), run(make, True, **arguments)
    assert not eager.warned
    assert len(eager.stored) == len(compiled.stored)
    assert same_bits(eager.stored, compiled.stored)
    return compiled


# -- numbers --------------------------------------------------------------------------------------------------------------------

CHANGES: dict[str, tuple[Make, list[dict[str, Any]], int]] = {
    "AdamW": (
        lambda p, c: AdamW(p, lr=1e-2, weight_decay=0.0, compile=c),
        [{"lr": 2e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}, {"weight_decay": 0.0}],
        1,
    ),
    "AdamW, fully decoupled": (
        lambda p, c: AdamW(p, lr=1e-2, weight_decay=0.1, fully_decoupled=True, max_learning_rate=0.1, compile=c),
        [{"lr": 2e-2, "max_learning_rate": 0.2, "weight_decay": 0.0}, {"max_learning_rate": 0.3, "weight_decay": 0.2}],
        1,
    ),
    "adamw with eps_root": (
        lambda p, c: TorchOptimizer(p, eb.adamw, lr=1e-2, eps_root=0.0, compile=c),
        [{"eps_root": 1e-3}, {"eps_root": 0.0, "eps": 1e-5}],
        1,
    ),
    "Adam": (
        lambda p, c: Adam(p, lr=1e-2, compile=c),
        [{"lr": 2e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}, {"weight_decay": 0.0}],
        1,
    ),
    "Lion": (
        lambda p, c: Lion(p, lr=1e-2, compile=c),
        [{"lr": 2e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}, {"weight_decay": 0.0}],
        1,
    ),
    "SGD": (
        lambda p, c: SGD(p, lr=1e-2, momentum=0.9, dampening=0.1, compile=c),
        [{"lr": 2e-2, "momentum": 0.8, "dampening": 0.0, "weight_decay": 0.1}, {"dampening": 0.2, "weight_decay": 0.0}],
        1,
    ),
    # A weight decay of zero is not added: other code.
    "SGD without momentum": (
        lambda p, c: SGD(p, lr=1e-2, compile=c),
        [{"weight_decay": 0.1}, {"lr": 2e-2}, {"weight_decay": 0.0}, {"weight_decay": 0.2}],
        1,
    ),
    "RMSprop": (
        lambda p, c: RMSprop(p, lr=1e-2, momentum=0.8, compile=c),
        [{"lr": 2e-2, "alpha": 0.9, "eps": 1e-6, "weight_decay": 0.1, "momentum": 0.9}, {"weight_decay": 0.0}],
        1,
    ),
    "AnyPrecisionAdamW": (
        lambda p, c: AnyPrecisionAdamW(p, variance_rounding="stochastic", compile=c),
        [{"lr": 2e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}, {"weight_decay": 0.0}],
        1,
    ),
}  # fmt: skip


SAMPLED = ("SGD without momentum",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLED else pytest.mark.exhaustive) for name in CHANGES]
)
@pytest.mark.slow
def test_every_number_of_every_optimizer_may_change_between_compiled_steps(name: str) -> None:
    make, changes, graphs = CHANGES[name]
    ran = compare(make, steps=len(changes) + 2, change=lambda step: dict(enumerate(changes, 1)).get(step, {}))
    assert not ran.warned
    assert ran.graphs == graphs


@dataclass(frozen=True, slots=True)
class Branching:
    """A transform whose update looks at one of its numbers."""

    factor: float

    @property
    def cut(self) -> Literal["element"]:
        return "element"

    @property
    def reduces(self) -> bool:
        return False

    def init(self, params: Any) -> tuple[()]:
        return ()

    def update(self, updates: Any, state: tuple[()], params: Any, ctx: Any = None) -> tuple[Any, tuple[()]]:
        return (eb.tree.map(lambda u: u * self.factor, updates) if self.factor > 1 else updates), state


def structural(
    learning_rate: Any, weight_decay: Any, every: Any, terms: Any, whole: Any, factor: Any, offset: Any
) -> Any:
    """Branches on a number, hands one on as a whole number, counts with one, converts one, and needs all digits of one."""
    parts: list[Any] = [eb.scale(0.5) for _ in range(terms)]
    if weight_decay > 0:
        parts.append(eb.add_decayed_weights(weight_decay))
    assert offset in (2**53 + 1, 2**70 + 1)
    inner = eb.chain(*parts, Branching(factor), eb.scale(1.0 / int(whole)), eb.scale_by_learning_rate(learning_rate))
    return eb.accumulate(inner, every)


@pytest.mark.slow
def test_numbers_that_a_factory_or_its_transform_looks_at_are_constants_and_the_others_are_data() -> None:
    ran = compare(
        lambda p, c: TorchOptimizer(
            p, structural, lr=0.1, weight_decay=0.1, every=2, terms=2, whole=3, factor=1.5, offset=2**53 + 1, compile=c
        ),
        steps=6,
        change=lambda step: (
            {"lr": 0.1 / (step + 1)} | ({"weight_decay": 0.0, "factor": 0.5, "offset": 2**70 + 1} if step > 3 else {})
        ),
    )
    assert not ran.warned
    assert ran.graphs == 2


@pytest.mark.exhaustive
def test_zero_is_told_from_minus_zero_and_one_from_true() -> None:
    def factory(learning_rate: Any, sign: Any) -> Any:
        if sign == 0:
            return eb.chain(eb.scale(2.0 if str(sign) == "0.0" else 3.0), eb.scale_by_learning_rate(learning_rate))
        return eb.chain(eb.scale(4.0 if sign is True else 5.0), eb.scale_by_learning_rate(learning_rate))

    values: list[Any] = [0.0, -0.0, 1, True]
    ran = compare(
        lambda p, c: TorchOptimizer(p, factory, lr=0.1, sign=0.0, compile=c),
        steps=4,
        change=lambda step: {"sign": values[step]},
    )
    assert not ran.warned


@pytest.mark.slow
def test_trying_out_what_may_be_data_is_not_noticed() -> None:
    def factory(learning_rate: Any, weight_decay: Any) -> Any:
        if isinstance(weight_decay, Tensor):
            warnings.warn("a tensor", stacklevel=1)
            random.random()
            torch.rand(3)
        return eb.adamw(learning_rate, weight_decay=weight_decay) if weight_decay > 0 else eb.sgd(learning_rate)

    states = []
    for compile in (False, True):
        random.seed(1)
        torch.manual_seed(1)
        ran = run(lambda p, c: TorchOptimizer(p, factory, lr=0.1, weight_decay=0.1, compile=c), compile, steps=1)
        assert not ran.warned
        states.append((random.random(), torch.rand(1).item()))
    assert states[0] == states[1]


# -- what cannot be compiled ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opaque:
    """Gradients through ``function``, which sees one tensor."""

    function: Callable[[Tensor], Tensor]

    @property
    def cut(self) -> Literal["element"]:
        return "element"

    @property
    def reduces(self) -> bool:
        return False

    def init(self, params: Any) -> tuple[()]:
        return ()

    def update(self, updates: Any, state: tuple[()], params: Any, ctx: Any = None) -> tuple[Any, tuple[()]]:
        return eb.tree.map(self.function, updates), state


def looks(x: Tensor) -> Tensor:
    return x * (2.0 if x.sum().item() > 0 else 3.0)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def hidden(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("function", [looks, hidden])
def test_what_cannot_be_traced_warns_once_and_steps_uncompiled(function: Callable[[Tensor], Tensor]) -> None:
    def factory(learning_rate: Any) -> Any:
        return eb.chain(Opaque(function), eb.scale_by_learning_rate(learning_rate))

    ran = compare(
        lambda p, c: TorchOptimizer(p, factory, lr=0.1, compile=c),
        steps=4,
        change=lambda step: {"lr": 0.1 / (step + 1)},
    )
    assert ran.graphs == 0
    (warned,) = ran.warned
    assert warned.startswith("param group 0: compile: got True, but its step runs uncompiled")
    assert "the compiler raised " in warned
    assert "compile=False" in warned


def test_a_tensor_of_the_users_that_is_looked_at_is_not_compiled() -> None:
    def factory(learning_rate: Any) -> Any:
        return eb.sgd(learning_rate if learning_rate > 0.15 else 2 * learning_rate)

    ran = compare(
        lambda p, c: TorchOptimizer(p, factory, lr=torch.tensor(0.1), compile=c),
        steps=3,
        change=lambda step: {"lr": torch.tensor(0.1 * (step + 1))},
    )
    assert ran.graphs == 0
    assert len(ran.warned) == 1


@pytest.mark.slow
def test_an_error_of_a_transform_is_raised_as_it_is_and_nothing_is_changed() -> None:
    def fails(x: Tensor) -> Tensor:
        raise LookupError("no such table")

    def factory(learning_rate: Any) -> Any:
        return eb.chain(Opaque(fails), eb.adamw(learning_rate))

    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = TorchOptimizer([parameter], factory, lr=0.1, compile=True)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            with pytest.raises(LookupError, match=r"^no such table$"):
                optimizer.step()
    assert torch.equal(parameter, torch.ones(3))
    assert all(not value.count_nonzero() for value in optimizer.state[parameter].values())


# -- few graphs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_constant_that_changes_at_every_step_is_not_compiled_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "LIMIT", 2)

    def factory(learning_rate: Any, terms: Any) -> Any:
        return eb.chain(*[eb.scale(0.5) for _ in range(terms)], eb.scale_by_learning_rate(learning_rate))

    ran = compare(
        lambda p, c: TorchOptimizer(p, factory, lr=0.1, terms=0, compile=c),
        steps=6,
        change=lambda step: {"terms": step},
    )
    assert ran.graphs == 2
    (warned,) = ran.warned
    assert "param group 0" in warned
    assert "other values of terms" in warned


@pytest.mark.slow
def test_sets_of_missing_gradients_need_few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more of them than torch makes graphs for, eight, and more than variants are made for."""
    monkeypatch.setattr(variants, "LIMIT", 2)

    def factory(learning_rate: Any, max_norm: Any) -> Any:
        return eb.chain(eb.clip_by_global_norm(max_norm), eb.sgd(learning_rate))

    ran = compare(
        lambda p, c: TorchOptimizer(p, factory, lr=0.1, max_norm=0.1, compile=c),
        shapes=((3,), (2, 2), (1,), (2,)),
        steps=15,  # 12 sets, and the first ones again
        missing=lambda step, index: bool((step % 12) >> index & 1),
    )
    assert not ran.warned
    # One for all together, and for single parameters those of all sizes and of one element.
    assert ran.graphs <= 6


@pytest.mark.exhaustive
def test_many_shapes_under_policies_by_label_need_few_graphs() -> None:
    policy = eb.by_label(
        lambda path, x: "matrix" if x.ndim > 1 else "vector",
        {"matrix": eb.policies.FP32, "vector": eb.Policy(momentum=eb.Nearest("bfloat16"))},
    )
    shapes: list[tuple[int, ...]] = [(), (1, 1)]
    shapes += [(n,) for n in range(6)]
    shapes += [(n, 2) for n in range(6)] + [(n, n) for n in range(4)]
    shapes += [(2, n, 3) for n in range(6)] + [(2, 3, 2, n) for n in range(6)]
    assert len(shapes) == 30
    ran = compare(
        lambda p, c: SGD(p, lr=0.1, momentum=0.9, policy=policy, compile=c),
        shapes=shapes,
        steps=2,
        change=lambda step: {"lr": 0.1 / (step + 1)},
    )
    assert not ran.warned
    # For each label one for a single shape, one for all sizes, and one for a single element.
    assert ran.graphs <= 6


@dataclass(frozen=True)
class Whole:
    """Wants whole tensors, in their shapes."""

    cut: ClassVar[eb.Cut] = "tensor"

    reduces: ClassVar[bool] = False

    def init(self, params: Any) -> tuple[()]:
        return ()

    def update(self, updates: Any, state: tuple[()], params: Any, ctx: Any = None) -> tuple[Any, tuple[()]]:
        return eb.tree.map(lambda u: u / 2, updates), state


@pytest.mark.slow
def test_shapes_beyond_the_compilers_own_limit_step_uncompiled() -> None:
    def factory(learning_rate: Any) -> Any:
        return eb.chain(Whole(), eb.sgd(learning_rate))

    with torch._dynamo.config.patch(recompile_limit=2):
        ran = compare(
            lambda p, c: TorchOptimizer(p, factory, lr=0.1, compile=c),
            shapes=((3,), (3, 2), (2, 3, 4), (2, 2, 3, 4)),
            steps=3,
        )
    assert ran.graphs == 2
    (warned,) = ran.warned
    assert "recompile_limit" in warned


def test_a_graph_from_before_a_compiled_step_of_one_tensor_does_not_run() -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = SGD([parameter], lr=0.1, compile=True)
    loss = (parameter**3).sum()
    parameter.grad = torch.ones(3, 2)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]
