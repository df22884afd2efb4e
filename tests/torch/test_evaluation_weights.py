"""Weights for evaluation take the place of the model's for a while, and the model has its own bits again after it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import (
    AdamW,
    TorchOptimizer,
    create,
    enable_gradient_release,
    evaluation_weights,
    load_sharded_into,
)
from tests.support.small_models import give_gradients

POLICIES = {"FP32": torch.float32, "LEAN_BF16": torch.bfloat16, "FLOOR_BF16": torch.bfloat16}


def averaged(learning_rate: Any) -> eb.Transform[Any]:
    return eb.chain(eb.adamw(learning_rate), eb.average_weights(0.9, start=1))


def train(model: nn.Module, optimizer: TorchOptimizer, steps: int) -> None:
    for step in range(steps):
        train_step(model, optimizer, step)


def train_step(model: nn.Module, optimizer: TorchOptimizer, step: int) -> None:
    optimizer.zero_grad()
    x = torch.sin(torch.arange(32.0) * (step + 1)).view(4, 8).to(next(model.parameters()).dtype)
    model(x).float().square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_average_is_in_the_model_inside_and_its_own_bits_after_it(policy: str) -> None:
    """Compared with the mean of the exported weights after each step, and with a run that never evaluates."""
    runs: list[list[Tensor]] = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).to(POLICIES[policy])
        optimizer = TorchOptimizer(
            model.parameters(), averaged, lr=1e-2, policy=eb.policies.PRESETS[policy], compile=False
        )
        mean: list[Tensor] = []
        for step in range(1, 6):
            train(model, optimizer, 1)
            # What a step adds to the average is not rounded to the model's dtype; its export is.
            exact = [p for group in optimizer.export_fp32() for p in group]
            share = 1.0 if step <= 2 else 0.1 / (1 - 0.9 ** (step - 1))
            mean = exact if step == 1 else [m + share * (p - m) for m, p in zip(mean, exact, strict=True)]
            if evaluates:
                before = [p.detach().clone() for p in model.parameters()]
                with evaluation_weights(optimizer):
                    # One rounding of the weights a step under FLOOR_BF16, one of the average to the model's dtype.
                    error = {"FP32": 2.0**-20, "LEAN_BF16": 2.0**-8, "FLOOR_BF16": 2.0**-6}[policy]
                    for p, m in zip(model.parameters(), mean, strict=True):
                        assert p.dtype is POLICIES[policy]
                        torch.testing.assert_close(p.detach().float(), m, rtol=error, atol=error * 0.01)
                assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        runs.append([p.detach().clone() for p in model.parameters()] + optimizer.eval_params()[0])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_the_model_has_its_weights_again_after_an_error_and_steps_are_refused_inside() -> None:
    model = nn.Linear(4, 4)
    optimizer = TorchOptimizer(model.parameters(), averaged, lr=0.1, compile=False)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    before = model.weight.detach().clone()
    with (
        pytest.raises(RuntimeError, match=r"step: the model has its weights for evaluation; accepted is outside of"),
        evaluation_weights(optimizer),
    ):
        optimizer.step()
    assert torch.equal(model.weight, before)
    optimizer.step()


@pytest.mark.parametrize("average", [False, True])
def test_weights_that_were_given_other_memory_are_those_that_are_evaluated(average: bool) -> None:
    """A long parameter is stepped where it lay at the last step."""
    model = nn.Linear(300, 300, bias=False)
    optimizer = TorchOptimizer(model.parameters(), averaged if average else eb.adamw, lr=0.1, compile=False)
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    model.weight.data = 2 * model.weight.data
    trained = model.weight.detach().clone()
    with evaluation_weights(optimizer):
        evaluated = model.weight.detach().clone()
    assert torch.equal(
        evaluated, trained / 2 if average else trained
    )  # the first step begins the average with its weights
    assert torch.equal(model.weight, trained)


def test_an_optimizer_without_averages_evaluates_what_it_trains() -> None:
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    optimizer = AdamW(model.parameters(), policy=eb.policies.LEAN_BF16, compile=False)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    before = model.weight.detach().clone()
    with evaluation_weights(optimizer):
        assert torch.equal(model.weight, before)
    with (
        pytest.raises(TypeError, match="optimizer: got SGD; accepted are optimizers of everybit, and a FlatStepper"),
        evaluation_weights(torch.optim.SGD(model.parameters())),  # type: ignore[arg-type]
    ):
        pass


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("full_state_dict", lambda o: o.full_state_dict()),
        ("export_fp32", lambda o: o.export_fp32()),
        ("eval_params", lambda o: o.eval_params()),
        ("import_fp32", lambda o: o.import_fp32([])),
        ("load_state_dict", lambda o: o.load_state_dict({})),
        ("load_full_state_dict", lambda o: o.load_full_state_dict({})),
        ("load_sharded_into", lambda o: load_sharded_into(nn.Linear(4, 4), o, "nowhere")),
        ("a copy of the optimizer", copy.deepcopy),
        ("evaluation_weights", lambda o: evaluation_weights(o).__enter__()),
        ("step", lambda o: o.step()),
    ],
)
def test_what_would_be_another_run_is_refused_inside(name: str, call: Any) -> None:
    """Saved beside the model's weights for evaluation, the state of an optimizer is that of other weights."""
    model = nn.Linear(4, 4)
    optimizer = TorchOptimizer(model.parameters(), eb.schedule_free_adamw, lr=0.1, compile=False)
    train_one(model, optimizer)
    with evaluation_weights(optimizer):
        inside = model.weight.detach().clone()
        with pytest.raises(
            RuntimeError, match=rf"^{name}: the model has its weights for evaluation; accepted is outside of"
        ):
            call(optimizer)
        assert torch.equal(model.weight, inside)
    optimizer.state_dict()
    train_one(model, optimizer)


def train_one(model: nn.Linear, optimizer: TorchOptimizer) -> None:
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 8).view(2, 4)).square().mean().backward()
    optimizer.step()


def test_a_backward_pass_under_gradient_release_is_refused_inside() -> None:
    model = nn.Linear(4, 4)
    optimizer = TorchOptimizer(model.parameters(), averaged, lr=0.1, compile=False)
    handle = enable_gradient_release(model, optimizer)
    with (
        evaluation_weights(optimizer),
        pytest.raises(RuntimeError, match="under gradient release: the model has its weights for evaluation"),
    ):
        model(torch.ones(1, 4)).sum().backward()
    handle.remove()


def is_evaluated(model: nn.Module, optimizer: TorchOptimizer, trained: list[Tensor]) -> bool:
    """Whether the model has other weights than those that are trained."""
    return optimizer.evaluating and not all(map(torch.equal, model.parameters(), trained))


def checkpoint(model: nn.Module, optimizer: TorchOptimizer, tmp_path: Path) -> tuple[Any, Any]:
    """State dicts of both, as they come back from a file."""
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "checkpoint.pt")
    weights, state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    return weights, state


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("named", [False, True])
def test_a_program_that_saves_between_eval_and_train_goes_on_from_the_trained_weights(
    policy: str, named: bool, tmp_path: Path
) -> None:
    """As transformers' Trainer: ``eval()`` before an evaluation, a checkpoint after it, ``train()`` before each step."""

    def made() -> tuple[nn.Sequential, TorchOptimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).to(POLICIES[policy])
        model[0].bias.requires_grad_(False)
        given = model.named_parameters() if named else model.parameters()
        return model, TorchOptimizer(given, averaged, lr=1e-2, policy=eb.policies.PRESETS[policy], compile=False)

    plain, alone = made()
    train(plain, alone, 6)
    model, optimizer = made()
    optimizer.eval()
    optimizer.train()
    train(model, optimizer, 3)
    trained = [p.detach().clone() for p in model.parameters()]
    optimizer.eval()
    optimizer.eval()  # nothing
    assert is_evaluated(model, optimizer, trained)
    weights, state = checkpoint(model, optimizer, tmp_path)
    again, resumed = made()
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert is_evaluated(again, resumed, trained)
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    with pytest.raises(
        RuntimeError, match=r"^step: the model has its weights for evaluation; .* or after train\(\)\.$"
    ):
        resumed.step()
    for one, its in ((model, optimizer), (again, resumed)):
        its.train()
        its.train()  # nothing
        assert all(map(torch.equal, one.parameters(), trained))
        for step in range(3, 6):
            train_step(one, its, step)
        assert all(map(torch.equal, one.parameters(), plain.parameters()))
        assert not any("trained_weights" in its.state[p] for p in one.parameters() if p.requires_grad)


def test_trained_weights_of_another_shape_are_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = TorchOptimizer(model.parameters(), eb.schedule_free_adamw, lr=0.1, compile=False)
    train_one(model, optimizer)
    optimizer.eval()
    _, state = checkpoint(model, optimizer, tmp_path)
    optimizer.train()
    before = optimizer.state_dict()
    state["state"][0]["trained_weights"] = torch.zeros(3)
    with pytest.raises(
        ValueError, match=r"^state_dict\['state'\]\[0\]\['trained_weights'\]: got .*accepted is torch.float32 of shape"
    ):
        optimizer.load_state_dict(state)
    assert str(optimizer.state_dict()) == str(before)
    assert not optimizer.evaluating


def test_eval_does_nothing_where_the_trained_weights_are_evaluated() -> None:
    model = nn.Linear(4, 4)
    for optimizer in (AdamW(model.parameters(), compile=False), create("muon", model, policy="FP32", compile=False)):
        optimizer.eval()
        train_one(model, optimizer)


@pytest.mark.parametrize("policy", ["FP32", "LEAN_BF16", "EXACT_BF16"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "muon", "rmsprop"])
@pytest.mark.sampled(4)
def test_an_average_in_one_argument_is_that_of_all_weights_so_far(name: Any, policy: Any) -> None:
    """Against float64: the average's own float32 rounds 40 times by 2**-24 of numbers below 4, and so does each exported weight."""
    rate, steps = 0.9, 40
    dtype = torch.float32 if policy == "FP32" else torch.bfloat16
    model, plain = (nn.Linear(6, 5).to(dtype) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    optimizer = create(name, model, policy=policy, average=rate, compile=False)
    other = create(name, plain, policy=policy, compile=False)
    expected = [torch.zeros(p.shape, dtype=torch.float64) for p in model.parameters()]
    for step in range(1, steps + 1):
        for one, of in ((model, optimizer), (plain, other)):
            give_gradients(one, step)
            of.step()
        ((*weights,),) = optimizer.export_fp32()
        expected = [
            a + (1 - rate) / (1 - rate**step) * (w.double() - a) for a, w in zip(expected, weights, strict=True)
        ]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    ((*averages,),) = optimizer.eval_params()
    for found, exact in zip(averages, expected, strict=True):
        assert float((found.double() - exact).abs().max()) <= 2 * steps * 4 * 2**-24
    with evaluation_weights(optimizer):
        assert all(torch.equal(p, a.to(dtype)) for p, a in zip(model.parameters(), averages, strict=True))
    assert optimizer.param_groups[0]["average"] == rate
    assert copy.deepcopy(optimizer).param_groups[0]["average"] == rate
