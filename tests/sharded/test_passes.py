"""Passes out of the ordinary: each of these once went wrong, most of them silently."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import everybit as eb
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import STRATEGIES, Strategy
from tests.support.programs import FLAT, Block, Network, data, network, weights_of
from tests.support.ranks import run
from tests.support.weights import Weights, equal

# -- reductions that some parameters have and others have not --------------------------------------------------------------------------

SGD = eb.sgd(0.5)
WEIGHTS: Any = lambda path, p: p.ndim > 1  # noqa: E731
BIASES: Any = lambda path, p: p.ndim <= 1  # noqa: E731
PARTIAL: dict[str, eb.Transform[Any]] = {
    "clipped weights": eb.chain(eb.masked(eb.clip_by_global_norm(0.1), where=WEIGHTS), SGD),
    "clipped biases": eb.chain(eb.masked(eb.clip_by_global_norm(0.1), where=BIASES), SGD),
    "clipped biases, then all": eb.chain(
        eb.masked(eb.clip_by_global_norm(0.1), where=BIASES), eb.clip_by_global_norm(0.2), SGD
    ),
    "two clips": eb.partition(
        {"a": eb.chain(eb.clip_by_global_norm(0.05), SGD), "b": eb.chain(eb.clip_by_global_norm(0.1), SGD)},
        lambda path, p: "a" if p.ndim > 1 else "b",
    ),
    "one of two clips": eb.partition(
        {"a": SGD, "b": eb.chain(eb.clip_by_global_norm(0.1), SGD)}, lambda path, p: "a" if p.ndim > 1 else "b"
    ),
    "guarded, accumulated": eb.apply_if_finite(eb.accumulate(eb.chain(eb.clip_by_global_norm(0.1), SGD), 2)),
}


def partially(strategy: Strategy, name: str) -> Weights:
    model = network()
    stepper = FlatStepper(model, PARTIAL[name], strategy=strategy, units=[Block])
    for step in range(3):
        with stepper.microbatch(last=True):
            model(data(step, 0, 0, torch.float32)).square().mean().backward()
        stepper.step()
    return weights_of(stepper)


@pytest.mark.parametrize("name", PARTIAL)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@pytest.mark.sampled(4)
def test_reductions_go_over_the_parameters_that_they_are_for(strategy: Strategy, name: str) -> None:
    """Against the core's own step over the whole tree, where masks are masks."""
    model = network()
    optimizer = eb.with_policy(PARTIAL[name], eb.policies.FP32)
    params = {key: p.detach().clone() for key, p in model.named_parameters()}
    state = optimizer.init(params)
    for step in range(3):
        for key, p in model.named_parameters():
            p.data = params[key]
        model.zero_grad()
        model(data(step, 0, 0, torch.float32)).square().mean().backward()
        grads = {key: p.grad for key, p in model.named_parameters()}
        params, state = optimizer.step(params, grads, state)  # type: ignore[arg-type]
    (weights,) = run(1, partially, strategy, name)
    (two, _) = run(2, partially, strategy, name)
    for key, expected in params.items():
        # The same float32 steps, but for the order in which at most 195 squares are added: a factor off by 2**-20, of updates below 1/2.
        torch.testing.assert_close(weights[key], expected, rtol=0, atol=3 * 2**-20)
        torch.testing.assert_close(two[key], expected, rtol=0, atol=3 * 2**-20)


# -- units that are out of the ordinary ------------------------------------------------------------------------------------------------


class Skipping(Network):
    """Uses its second block first, and its first twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for number in (1, 0, 0):
            x = self.blocks[number](x)
        out: Tensor = self.exit(x) * self.scale
        return out


def passes(case: str, strategy: Strategy, compile: bool = False) -> Weights:
    torch.manual_seed(0)
    model = Skipping() if case == "order" else Network()
    stepper = FlatStepper(model, SGD, strategy=strategy, units=[Block])
    called: Any = torch.compile(model, backend="aot_eager") if case == "compiled" else model
    rank = dist.get_rank()
    for step in range(2):
        x = data(step, rank, 0, torch.float32)
        if case == "no forward" and rank == 1:
            with stepper.microbatch(last=True):
                pass
        elif case == "two forwards":
            with stepper.microbatch(last=True):
                (model(x).square().mean() + model(x + 1).square().mean()).backward()
        elif case == "evaluation between":
            with stepper.microbatch(last=True):
                loss = model(x).square().mean() + (model.entry.weight * 0.1).sum()
                with torch.no_grad():
                    model(x)
                loss.backward()
        elif case == "forward inside":
            with stepper.microbatch(last=True):
                loss = model(x).square().mean()
                loss.backward()
        elif case == "create graph":
            with stepper.microbatch(last=True):
                model(x).square().mean().backward(create_graph=True)
        elif case == "reentrant":
            with stepper.microbatch(last=True):
                x = x.requires_grad_()
                checkpoint(model, x, use_reentrant=True).square().mean().backward()
        elif case == "recomputed":
            with stepper.microbatch(last=True):
                checkpoint(model, x, use_reentrant=False).square().mean().backward()
        elif case == "failed forward":
            try:
                with stepper.microbatch(last=True):
                    model(x[:, :2])
            except RuntimeError:
                stepper.zero_grad()
            with stepper.microbatch(last=True):
                model(x).square().mean().backward()
        else:
            with stepper.microbatch(last=True):
                called(x).square().mean().backward()
        stepper.step()
    return weights_of(stepper)


CASES = [
    "order", "no forward", "two forwards", "evaluation between", "forward inside", "create graph", "reentrant", "recomputed",
    "failed forward", "compiled",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(3)
def test_every_strategy_agrees(case: str) -> None:
    """Without sharing anything out there is nothing to gather and little to go wrong; everything else has to be as that."""
    expected = run(2, passes, case, "no_shard")[0]
    ordinary = run(2, passes, "ordinary", "no_shard")[0]
    if case in ("forward inside", "create graph", "reentrant", "recomputed", "failed forward"):
        assert equal(expected, ordinary)
    elif case != "compiled":
        assert not equal(expected, ordinary)
    for strategy in ("optim", "optim_grads"):
        assert equal(run(2, passes, case, strategy)[0], expected), strategy


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_models_are_compiled_whole_where_nothing_is_gathered(strategy: Strategy) -> None:
    torch._dynamo.reset()
    model = network()
    stepper = FlatStepper(model, SGD, strategy=strategy, units=[Block])
    torch.compile(model, fullgraph=True, backend="aot_eager")(data(0, 0, 0, torch.float32)).square().mean().backward()
    other = network()
    other(data(0, 0, 0, torch.float32)).square().mean().backward()
    stepper.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert q.grad is not None
        assert torch.equal(p.detach(), q.detach() - 0.5 * q.grad)


# -- what must not be done to a model --------------------------------------------------------------------------------------------------


def test_gradients_that_are_there_already_are_refused() -> None:
    model = network()
    model(data(0, 0, 0, torch.float32)).sum().backward()
    with pytest.raises(ValueError, match=r"scale: holds a gradient already, which would be counted"):
        FlatStepper(model, SGD)


@pytest.mark.parametrize("strategy", FLAT)
def test_a_model_is_given_back_and_stepped_by_another(strategy: Strategy) -> None:
    model = network()
    first = FlatStepper(model, SGD, strategy=strategy, units=[Block])
    with pytest.raises(ValueError, match=r"model: belongs to a stepper already.*close\(\) first"):
        FlatStepper(model, SGD)
    first.close()
    assert equal(dict(model.named_parameters()), dict(network().named_parameters()))
    second = FlatStepper(model, SGD, strategy=strategy, units=[Block])
    model(data(0, 0, 0, torch.float32)).sum().backward()
    assert not second.step().untouched


def test_a_stepper_cannot_be_copied_and_a_model_can() -> None:
    model = network()
    stepper = FlatStepper(model, SGD, strategy="optim_grads", units=[Block])
    with pytest.raises(TypeError, match="FlatStepper: cannot be copied or pickled"):
        copy.deepcopy(stepper)
    average, sent = copy.deepcopy(model), pickle.dumps(model)
    x = data(0, 0, 0, torch.float32)
    for other in (average, pickle.loads(sent)):
        assert torch.equal(other(x), network()(x))


def test_a_stepper_that_nobody_has_is_gone() -> None:
    model = network()
    reference = weakref.ref(FlatStepper(model, SGD))
    model(data(0, 0, 0, torch.float32)).sum().backward()
    gc.collect()
    assert reference() is None


def is_freed(strategy: Strategy) -> bool:
    def trained() -> weakref.ref[nn.Module]:
        model = network()
        stepper = FlatStepper(model, SGD, strategy=strategy, units=[Block])
        model(data(0, 0, 0, torch.float32)).sum().backward()
        stepper.step()
        return weakref.ref(model)

    reference = trained()
    gc.collect()
    return reference() is None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_that_nobody_has_is_freed_with_its_stepper(strategy: Strategy) -> None:
    """Hooks on parameters hold their model where Python's collector does not see it: one of FSDP2's was never freed."""
    assert run(1, is_freed, strategy) == [True]


# -- numbers ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e25, 1e-25])
def test_the_norm_of_very_large_and_very_small_gradients(scale: float) -> None:
    model = nn.Linear(3, 1, bias=False)
    stepper = FlatStepper(model, eb.sgd(0.0))
    (model(torch.tensor([[3.0, 4.0, 0.0]])).sum() * scale).backward()
    # 3, 4 and 5 times a float32 number: rounded twice.
    assert float(stepper.step().grad_norm) == pytest.approx(5 * float(torch.tensor(scale)), rel=2**-22)


def test_a_group_without_elements_takes_part() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(0)), nn.Parameter(torch.ones(2))])
    policy = eb.by_label(lambda path, p: str(p.numel()), {"0": eb.policies.FP32, "2": eb.policies.FP32})
    stepper = FlatStepper(model, SGD, policy=policy, strategy="optim_grads")
    for _ in range(2):
        with stepper.microbatch(last=False):
            (model[0].sum() + model[1].sum()).backward()
    with stepper.microbatch(last=True):
        (model[0].sum() + model[1].sum()).backward()
    stepper.step()
    assert model[1].tolist() == [-0.5, -0.5]


def test_schedulers_see_that_the_stepper_steps() -> None:
    """torch warns, and warnings are errors here, where it sees no step before a scheduler's."""
    model = network()
    stepper = FlatStepper(model, SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(stepper.as_optimizer(), 1)
    model(data(0, 0, 0, torch.float32)).sum().backward()
    stepper.step()
    scheduler.step()
    assert stepper.as_optimizer().param_groups[0]["lr"] == 0.05
