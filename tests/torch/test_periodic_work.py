"""Work that is not due at every step (``ctx.every``): done where it is due and nowhere else, without waiting for the device."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import everybit as eb
from everybit.testing.examples import assert_same_bits
from everybit_torch import TorchOptimizer, enable_gradient_release
from everybit_torch.compiled.direct_calls import DirectCalls
from everybit_torch.segments import steps as segment_steps
from tests.support.readbacks import Readbacks
from tests.support.transforms import WORK, CountedWork, counted, counted_and_clipped, old_norm

FP32, LEAN = eb.policies.FP32, eb.policies.LEAN_BF16
SIZES = (5, 7, 11)
PERIOD, STEPS = 3, 10


@pytest.fixture(autouse=True)
def nothing_done() -> Iterator[None]:
    WORK.clear()
    yield
    WORK.clear()


def start(policy: eb.Policy = FP32) -> list[Tensor]:
    dtype = torch.float32 if policy is FP32 else torch.bfloat16
    return [torch.linspace(-1, 1, size).to(dtype) for size in SIZES]


def gradient(step: int, number: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(like.shape, generator=generator).to(like.dtype)


def decided_on_the_device(factory: Callable[..., Any], policy: eb.Policy = FP32, steps: int = STEPS) -> list[Tensor]:
    """The weights after some steps of the core, which is told of no answer."""
    optimizer = eb.with_policy(factory(0.1), policy, seed=3)
    params = start(policy)
    state = optimizer.init(params)
    for step in range(1, steps + 1):
        params, state = optimizer.step(params, [gradient(step, n, p) for n, p in enumerate(params)], state)
    WORK.clear()
    return params


class Model(nn.Module):
    """Its gradients are what it is told."""

    def __init__(self, policy: eb.Policy = FP32) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(p) for p in start(policy))

    def backward(self, step: int, absent: tuple[int, ...] = ()) -> None:
        total = torch.zeros(())
        for number, p in enumerate(self.parts):
            if number not in absent:
                total = total + (p * gradient(step, number, p)).sum()
        total.backward()  # type: ignore[no-untyped-call]

    def values(self) -> list[Tensor]:
        return [p.detach() for p in self.parts]


def made(
    model: Model, factory: Callable[..., Any] = counted, policy: eb.Policy = FP32, **options: Any
) -> TorchOptimizer:
    options.setdefault("compile", False)
    return TorchOptimizer(model.parameters(), factory, lr=0.1, policy=policy, seed=3, **options)


Absent = dict[int, tuple[int, ...]]


def train(model: Model, optimizer: TorchOptimizer, steps: range, absent: Absent | None = None) -> dict[int, set[int]]:
    """For each step in which work was done, the sizes of the parameters or the units for which it was."""
    done: dict[int, set[int]] = {}
    for step in steps:
        WORK.clear()
        optimizer.zero_grad()
        model.backward(step, (absent or {}).get(step, ()))
        optimizer.step()
        if WORK:
            done[step] = set(WORK)
    return done


KINDS: dict[str, dict[str, Any]] = {
    "uncompiled": {},
    "released": {},
}


@pytest.mark.parametrize("policy", [FP32, LEAN], ids=["FP32", "LEAN"])
@pytest.mark.parametrize("kind", KINDS)
def test_work_is_done_at_every_third_step_only_and_gives_the_bits_of_the_device_s_decision(
    kind: str, policy: eb.Policy
) -> None:
    model = Model(policy)
    optimizer = made(model, policy=policy, **KINDS[kind])
    if kind == "released":
        enable_gradient_release(model, optimizer)
    assert sorted(train(model, optimizer, range(1, STEPS + 1))) == [1, 4, 7, 10]
    assert_same_bits(model.values(), decided_on_the_device(counted, policy), kind)


@pytest.mark.parametrize("alone", [False, True], indirect=True)
@pytest.mark.parametrize("factory", [counted_and_clipped, old_norm])
def test_transforms_that_reduce_do_their_work_when_it_is_due_too(factory: Any, alone: bool) -> None:
    """Whether they ask for reductions in the work itself or around it."""
    model = Model()
    optimizer = made(model, factory)
    assert sorted(train(model, optimizer, range(1, STEPS + 1))) == [1, 4, 7, 10]
    assert_same_bits(model.values(), decided_on_the_device(factory), str(alone))


def test_work_is_done_for_a_tensor_that_must_be_whole_when_it_is_due() -> None:
    model = Model()
    optimizer = made(model, Whole)
    assert sorted(train(model, optimizer, range(1, STEPS + 1))) == [1, 4, 7, 10]
    assert_same_bits(model.values(), decided_on_the_device(Whole), "whole tensors")


def Whole(learning_rate: Any) -> eb.Transform[Any]:  # noqa: N802
    return eb.chain(OnWholeTensors(), eb.clip_by_global_norm(0.5), eb.scale_by_learning_rate(learning_rate))


class OnWholeTensors(CountedWork):
    __slots__ = ()
    cut = "tensor"


# -- counts that begin elsewhere ----------------------------------------------------------------------------------------------------------


def by_state_dict(optimizer: TorchOptimizer, model: Model) -> tuple[Model, TorchOptimizer]:
    new = Model()
    new.load_state_dict(model.state_dict())
    other = made(new)
    other.load_state_dict(optimizer.state_dict())
    return new, other


def by_state_dict_after_steps(optimizer: TorchOptimizer, model: Model) -> tuple[Model, TorchOptimizer]:
    new = Model()
    other = made(new)
    train(new, other, range(1, 4))
    new.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    return new, other


def by_full_state_dict(optimizer: TorchOptimizer, model: Model) -> tuple[Model, TorchOptimizer]:
    new = Model()
    other = made(new)
    train(new, other, range(1, 3))
    other.load_full_state_dict(optimizer.full_state_dict())
    return new, other


def by_deepcopy(optimizer: TorchOptimizer, model: Model) -> tuple[Model, TorchOptimizer]:
    new, other = copy.deepcopy((model, optimizer))
    return new, other


def by_pickle(optimizer: TorchOptimizer, model: Model) -> tuple[Model, TorchOptimizer]:
    new, other = pickle.loads(pickle.dumps((model, optimizer)))
    return new, other


def by_a_file(optimizer: TorchOptimizer, model: Model) -> tuple[Model, TorchOptimizer]:
    stream = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
    stream.seek(0)
    saved = torch.load(stream, weights_only=True)
    new = Model()
    other = made(new)
    train(new, other, range(1, 2))
    new.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    return new, other


def by_hand(optimizer: TorchOptimizer, model: Model) -> tuple[Model, TorchOptimizer]:
    """The tensors that the state shows are the optimizer's own, and may be written to, as torch's checkpoints do."""
    new, other = by_deepcopy(optimizer, model)
    train(new, other, range(6, 9))
    for old, parameter in zip(model.parts, new.parts, strict=True):
        parameter.data.copy_(old.data)
        for name, value in other.state[parameter].items():
            value.copy_(optimizer.state[old][name])
    return new, other


@pytest.mark.parametrize(
    "way",
    [by_state_dict, by_state_dict_after_steps, by_full_state_dict, by_deepcopy, by_pickle, by_a_file, by_hand],
)
def test_after_a_resume_in_the_middle_of_a_period_work_is_done_when_it_would_have_been(way: Any) -> None:
    model = Model()
    optimizer = made(model)
    train(model, optimizer, range(1, 6))
    new, other = way(optimizer, model)
    assert sorted(train(new, other, range(6, STEPS + 1))) == [7, 10]
    assert_same_bits(new.values(), decided_on_the_device(counted), way.__name__)
    # What it was copied from goes on, too.
    assert sorted(train(model, optimizer, range(6, STEPS + 1))) == [7, 10]


def test_other_hyperparameters_go_on_counting() -> None:
    """At update 6 a period of 5 is due, at update 9 one of 4 and at 11 one of 5."""
    model = Model()
    optimizer = made(model, period=3, momentum=0.9)
    assert sorted(train(model, optimizer, range(1, 6))) == [1, 4]
    optimizer.param_groups[0]["period"] = 5
    assert sorted(train(model, optimizer, range(6, 9))) == [6]
    optimizer.param_groups[0] |= {"period": 4, "momentum": 0.5}
    assert sorted(train(model, optimizer, range(9, 11))) == [9]
    optimizer.param_groups[0] |= {"period": 5, "lr": 0.01}
    assert sorted(train(model, optimizer, range(11, 16))) == [11]


# -- counts that differ -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_without_a_gradient_counts_for_itself(kind: str) -> None:
    """The second has none at step 2: its third update after the first is at step 5."""
    model = Model()
    optimizer = made(model, **KINDS[kind])
    if kind == "released":
        enable_gradient_release(model, optimizer)
    readbacks = Readbacks()
    done: dict[int, set[int]] = {}
    for step in range(1, STEPS + 1):
        WORK.clear()
        optimizer.zero_grad()
        if kind == "released":
            with readbacks.watching() if step > 1 else Readbacks(refuse=False).watching():
                model.backward(step, (1,) if step == 2 else ())
                optimizer.step()
        else:
            model.backward(step, (1,) if step == 2 else ())
            with readbacks.watching() if step > 1 else Readbacks(refuse=False).watching():
                optimizer.step()
        done[step] = set(WORK)
    others, second = {5, 11}, {7}
    assert {step: sizes for step, sizes in done.items() if sizes and step > 1} == {
        4: others, 5: second, 7: others, 8: second, 10: others
    }  # fmt: skip
    assert readbacks.read == 0


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 2), max_size=2), min_size=1, max_size=8),
    st.integers(1, 4),
)
def test_whatever_parameters_have_gradients_each_is_worked_on_at_its_own_updates(
    missing: list[set[int]], period: int
) -> None:
    model = Model()
    optimizer = made(model, counted, period=period)
    counts = [0, 0, 0]
    for step, absent in enumerate(missing):
        here = [number for number in range(3) if number not in absent]
        WORK.clear()
        optimizer.zero_grad()
        model.backward(step, tuple(absent))
        optimizer.step()
        for number in here:
            counts[number] += 1
        expected = sum(SIZES[number] for number in here if (counts[number] - 1) % period == 0)
        assert sum(WORK) == expected


def with_old_norms(periods: Sequence[int], absent: Absent, steps: int) -> list[Tensor]:
    """The weights in float64: each parameter is divided by the norm of all gradients at the last of its own updates that was due."""
    weights = [p.double() for p in start()]
    norms, counts = [0.0] * len(SIZES), [0] * len(SIZES)
    for step in range(1, steps + 1):
        grads = {
            number: gradient(step, number, p.float()).double()
            for number, p in enumerate(weights)
            if number not in absent.get(step, ())
        }
        norm = sum(float(g.square().sum()) for g in grads.values()) ** 0.5
        for number in grads:
            if counts[number] % periods[number] == 0:
                norms[number] = norm
            counts[number] += 1
        scaled = {number: g / (norms[number] + 1) for number, g in grads.items()}
        length = sum(float(u.square().sum()) for u in scaled.values()) ** 0.5
        for number, u in scaled.items():
            weights[number] -= 0.1 * min(1.0, 0.5 / length) * u
    return weights


def assert_rounded(model: Model, expected: list[Tensor], steps: int) -> None:
    """Updates are of at most 0.05, and each of their few operations rounds by 2**-24 of it; weights of about 1 by as much."""
    for p, right in zip(model.values(), expected, strict=True):
        torch.testing.assert_close(p.double(), right, rtol=0, atol=steps * 4 * 2.0**-24)


@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_a_norm_that_is_asked_for_in_the_work_is_that_of_all_gradients_whoever_is_due(alone: bool) -> None:
    """Where parameters have different counts: then all do the work, and the device chooses."""
    model = Model()
    absent: Absent = {2: (1,), 3: (1,), 4: (0,), 8: (0, 2)}
    train(model, made(model, old_norm), range(1, 13), absent)
    assert_rounded(model, with_old_norms([PERIOD] * 3, absent, 12), 12)


@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_groups_with_other_periods_take_part_in_one_sequence_of_reductions(alone: bool) -> None:
    """Which reductions are asked for must not depend on whose work is due."""
    model = Model()
    param_groups = [{"params": [model.parts[0]], "period": 2}, {"params": list(model.parts)[1:], "period": 3}]
    optimizer = TorchOptimizer(param_groups, old_norm, lr=0.1, period=3, policy=FP32, compile=False)
    train(model, optimizer, range(1, STEPS + 1))
    assert_rounded(model, with_old_norms([2, 3, 3], {}, STEPS), STEPS)


# -- compiled -----------------------------------------------------------------------------------------------------------------------------


def graphs() -> int:
    """How many the compiler has made so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("policy", [FP32, pytest.param(LEAN, marks=pytest.mark.exhaustive)], ids=["FP32", "LEAN"])
def test_a_compiled_step_has_one_variant_for_each_answer_and_the_same_bits(policy: eb.Policy) -> None:
    model = Model(policy)
    optimizer = made(model, policy=policy, compile=True)
    seen = []
    for step in range(1, STEPS + 1):
        before = graphs()
        train(model, optimizer, range(step, step + 1))
        seen.append(graphs() - before)
    assert seen == [1, 1] + [0] * (STEPS - 2)
    assert_same_bits(model.values(), decided_on_the_device(counted, policy), "compiled")


@pytest.mark.usefixtures("traced")
@pytest.mark.exhaustive
def test_a_compiled_step_with_reductions_in_its_work_has_the_same_bits() -> None:
    """Also where answers are dropped, because a parameter without a gradient counts for itself."""
    found = []
    for compile in (True, False):
        model = Model()
        optimizer = made(model, old_norm, compile=compile)
        train(model, optimizer, range(1, STEPS + 1), {5: (1,)})
        # The norm is a number that parameters share; it was not written by compiled code.
        found.append([*model.values(), *(x for p in model.parts for x in optimizer.state[p].values())])
    assert_same_bits(found[0], found[1], "compiled")


def library_factory(learning_rate: Any) -> eb.Transform[Any]:
    return LibraryWork()


class LibraryWork(CountedWork):
    __slots__ = ()
    __module__ = "everybit.of_the_test"


library_factory.__module__ = "everybit.of_the_test"


@pytest.mark.usefixtures("traced")
@pytest.mark.slow
def test_direct_calls_of_both_variants_do_what_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a transform as the library's own, of which nothing can change: after each answer was seen Dynamo is not asked."""
    through: list[Any] = []
    note = DirectCalls.note

    def noted(self: DirectCalls, *args: Any) -> None:
        if self._ran is None:
            through.append(self)
        note(self, *args)

    results = []
    monkeypatch.setattr(DirectCalls, "note", noted)
    for compile in (True, False):
        parameter = nn.Parameter(torch.linspace(-1, 1, 50))
        optimizer = TorchOptimizer([parameter], library_factory, lr=0.1, policy=FP32, compile=compile)
        for step in range(1, STEPS + 1):
            parameter.grad = gradient(step, 0, parameter)
            optimizer.step()
        results.append([parameter.detach(), *optimizer.state[parameter].values()])
    assert_same_bits(results[0], results[1], "direct calls")
    assert len({id(one) for one in through}) == 2


def two_periods(learning_rate: Any) -> eb.Transform[Any]:
    return eb.chain(CountedWork(2), CountedWork(3), eb.scale_by_learning_rate(learning_rate))


@pytest.mark.exhaustive
def test_many_periods_do_not_compile_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the longest the host answers, and of the others the device decides; here of one, so that there are two answers and not four."""
    monkeypatch.setattr(segment_steps, "MOST_PERIODS", 1)
    model = Model()
    optimizer = made(model, two_periods, compile=True)
    before = graphs()
    train(model, optimizer, range(1, STEPS + 1))
    assert graphs() - before == 2
    assert_same_bits(model.values(), decided_on_the_device(two_periods), "two periods")


# -- the host ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", [counted, counted_and_clipped, old_norm])
@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_after_the_first_step_nothing_is_read_from_the_device(alone: bool, factory: Any) -> None:
    model = Model()
    optimizer = made(model, factory)
    first, others = Readbacks(refuse=False), Readbacks()
    for step in range(1, 6):
        optimizer.zero_grad()
        model.backward(step)
        with (first if step == 1 else others).watching():
            optimizer.step()
    assert first.read == len(optimizer.own.stepped)  # one count each
    assert others.read == 0


def test_transforms_without_periods_read_nothing_at_all() -> None:
    model = Model()
    optimizer = made(model, lambda learning_rate: eb.adamw(learning_rate))
    readbacks = Readbacks()
    for step in range(1, 4):
        optimizer.zero_grad()
        model.backward(step)
        with readbacks.watching():
            optimizer.step()
    assert readbacks.read == 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_in_a_cuda_graph_decides_on_the_device() -> None:
    """A graph is replayed without the host, which neither counts its steps nor may answer for them."""
    results = []
    for captured in (True, False):
        parameter = nn.Parameter(torch.linspace(-1, 1, 50, device="cuda"))
        optimizer = TorchOptimizer([parameter], counted, lr=0.1, policy=FP32, compile=False)
        parameter.grad = torch.zeros_like(parameter)
        graph: Any = None
        for step in range(1, STEPS + 1):
            parameter.grad.copy_(gradient(step, 0, torch.zeros(50)))
            if captured and 3 <= step <= 8:
                if graph is None:
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        optimizer.step()
                graph.replay()
            else:
                optimizer.step()
        results.append([parameter.detach().cpu()])
    assert_same_bits(results[0], results[1], "captured")
