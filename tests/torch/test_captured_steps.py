"""Steps that a CUDA graph may hold: the same memory at every step, nothing that the host decides, and clear words where that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit.testing.examples import assert_same_bits
from everybit_torch import AdamW, FlatStepper, TorchOptimizer
from everybit_torch.compiled import variants
from tests.support.fake_graphs import FakeGraph
from tests.support.readbacks import Crossings, ReadBackError, Readbacks
from tests.support.transforms import counted

POLICIES = eb.policies.PRESETS
STEPS, WARM = 20, 3


def clipped(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
    return eb.chain(eb.clip_by_global_norm(0.5), eb.adamw(learning_rate, b2=0.95))


def scheduled(learning_rate: float) -> eb.Transform[Any]:
    return eb.adamw(eb.linear_schedule(learning_rate, learning_rate / 10, 15), b2=0.95)


def slow(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
    return eb.adamw(learning_rate, b2=0.95)


def parameters(policy: str) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, POLICIES[policy].model_dtype)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((40, 3), (7,), ())]


def fill_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad.copy_(torch.randn(p.shape, generator=generator))


def made(policy: str, factory: Callable[..., Any], **options: Any) -> tuple[TorchOptimizer, list[nn.Parameter]]:
    params = parameters(policy)
    options = {"lr": 0.01, "compile": False, "seed": 4} | options
    return TorchOptimizer(params, factory, policy=POLICIES[policy], **options), params


def all_tensors(optimizer: TorchOptimizer, params: list[nn.Parameter]) -> list[Tensor]:
    return [
        *(p.detach() for p in params),
        *(x for p in params for x in optimizer.state[p].values() if isinstance(x, Tensor)),
    ]


def addresses(optimizer: TorchOptimizer, params: list[nn.Parameter]) -> list[int]:
    return [x.data_ptr() for x in all_tensors(optimizer, params)]


def trained(policy: str, factory: Callable[..., Any], rates: list[float] | None, *, graph: bool, **options: Any) -> Any:
    """Tensors after some steps, the later ones of which a graph carries out; with a learning rate that is written to, if there are any."""
    rate = torch.tensor(0.01, dtype=torch.float64) if rates else 0.01
    optimizer, params = made(policy, factory, lr=rate, **options)
    captured: FakeGraph | None = None
    for step in range(STEPS):
        fill_gradients(params, step)
        if isinstance(rate, Tensor) and rates:
            rate.fill_(rates[step])
        if not graph or step < WARM:
            optimizer.step()
        elif captured is None:
            captured = FakeGraph()
            with captured.capture():
                optimizer.step()
        else:
            captured.replay()
    return [x.clone() for x in all_tensors(optimizer, params)]


@pytest.mark.parametrize("rates", [None, [0.01 / (1 + step) for step in range(STEPS)]], ids=["a float", "a tensor"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("alone", [False, True], indirect=True)
@pytest.mark.sampled(4)
def test_a_replayed_step_has_the_bits_of_a_step(alone: bool, policy: str, rates: list[float] | None) -> None:
    expected = trained(policy, slow, rates, graph=False)
    assert_same_bits(trained(policy, slow, rates, graph=True), expected, "replayed, against stepped")


@pytest.mark.parametrize("factory", [clipped, scheduled, counted])
def test_so_has_one_of_a_transform_that_reduces_counts_or_has_periods(factory: Any) -> None:
    expected = trained("FP32", factory, None, graph=False)
    got = trained("FP32", factory, None, graph=True)
    assert_same_bits(got, expected, "replayed, against stepped")


def test_a_step_after_replays_goes_on_from_them() -> None:
    results = []
    for graph in (False, True):
        optimizer, params = made("LEAN_BF16", slow)
        captured = FakeGraph()
        for step in range(10):
            fill_gradients(params, step)
            if not graph or step in (0, 1, 8, 9):
                optimizer.step()
            elif step == 2:
                with captured.capture():
                    optimizer.step()
            else:
                captured.replay()
        results.append(all_tensors(optimizer, params))
    assert_same_bits(results[1], results[0], "replayed in between")


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.slow
def test_nothing_moves_and_nothing_is_read_from_the_first_step_on(compile: bool) -> None:
    """Code of a transform of the library is called without Dynamo from the second step on, so that a mode sees what it asks for."""
    torch._dynamo.reset()  # what it remembers of other tests' lengths may make code for one length
    optimizer, params = made("EXACT_BF16", eb.adamw if compile else clipped, compile=compile)
    readbacks = Readbacks()
    found = []
    for step in range(6):
        fill_gradients(params, step)
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        if step < 2:
            optimizer.step()
        else:
            with readbacks.watching():
                optimizer.step()
        found.append((addresses(optimizer, params), [p.grad.data_ptr() for p in params if p.grad is not None]))
    assert all(one == found[1] for one in found[1:])
    assert readbacks.read == 0


@pytest.mark.parametrize(
    ("policy", "factory"),
    [
        ("FP32", counted),
        *((policy, one) for policy in ("FP32", "LEAN_BF16", "FLOOR_BF16") for one in (slow, clipped, scheduled)),
    ],
)
def test_a_step_on_a_device_waits_for_nothing(policy: str, factory: Any) -> None:
    """Also after a change of a hyperparameter; tensors without memory stand in for those on a device."""
    params = [nn.Parameter(p.detach().to("meta")) for p in parameters(policy)]
    optimizer = TorchOptimizer(params, factory, policy=POLICIES[policy], lr=0.01, compile=False, metrics=True)
    for step in range(4):
        for p in params:
            p.grad = torch.empty_like(p)
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        with Crossings():  # type: ignore[no-untyped-call]
            optimizer.step()


def test_new_numbers_are_copied_to_a_device_without_a_wait() -> None:
    """Those of a compiled step, after a scheduler has changed one."""
    optimizer, params = made("FP32", slow)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.own.groups[0].steps[torch.float32]._numbers_on(torch.device("meta"))
    optimizer.param_groups[0]["lr"] = 0.5
    with Crossings():  # type: ignore[no-untyped-call]
        optimizer.prepare()


def test_the_mode_sees_what_waits() -> None:
    x = torch.empty(3, device="meta")
    waiting: list[Callable[[], object]] = [
        lambda: x.sum().item(),
        lambda: x.cpu(),
        lambda: x.copy_(torch.ones(3)),
        lambda: torch.ones(3).to("meta"),
        lambda: torch.zeros(3).copy_(x),
        lambda: x.nonzero(),
    ]
    for call in waiting:
        with pytest.raises((ReadBackError, NotImplementedError)), Crossings():  # type: ignore[no-untyped-call]
            call()
    with Crossings():  # type: ignore[no-untyped-call]
        x.copy_(torch.ones(3), non_blocking=True)
        x.mul_(torch.tensor(2.0)).add_(x)


# -- what cannot be captured -----------------------------------------------------------------------------------------------------------


def refuses(optimizer: TorchOptimizer, params: list[nn.Parameter], kind: type[Exception], message: str) -> None:
    """It does, and changes nothing."""
    before = [x.clone() for x in all_tensors(optimizer, params)] if optimizer.own.stepped else []
    weights = [p.detach().clone() for p in params]
    with pytest.raises(kind, match=message), FakeGraph().capture():
        optimizer.step()
    if before:
        assert_same_bits(all_tensors(optimizer, params), before, "after a refusal")
    assert_same_bits([p.detach() for p in params], weights, "after a refusal")


def test_a_first_step_is_not_captured() -> None:
    optimizer, params = made("FP32", slow)
    fill_gradients(params, 0)
    refuses(
        optimizer,
        params,
        RuntimeError,
        r"step: a CUDA graph is being captured, and there are parameters that were not stepped yet",
    )
    optimizer.step()
    graph = FakeGraph()
    with graph.capture():
        optimizer.step()


def test_a_group_that_came_after_the_last_step_is_not_captured() -> None:
    optimizer, params = made("FP32", slow)
    fill_gradients(params, 0)
    optimizer.step()
    other = nn.Parameter(torch.ones(4))
    optimizer.add_param_group({"params": [other]})
    refuses(optimizer, params, RuntimeError, "not stepped yet")


def test_a_hyperparameter_that_has_changed_is_taken_over_before_the_capture() -> None:
    optimizer, params = made("FP32", slow)
    fill_gradients(params, 0)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    refuses(
        optimizer,
        params,
        RuntimeError,
        r"param group 0: lr: has changed since the last step, .* step\(\) or prepare\(\)",
    )
    optimizer.prepare()
    with FakeGraph().capture():
        optimizer.step()


def test_a_learning_rate_on_another_device_is_not_captured() -> None:
    rate = torch.tensor(0.01)
    optimizer, params = made("FP32", slow, lr=rate)
    fill_gradients(params, 0)
    optimizer.step()
    # In the place of parameters on a device and a learning rate on the host.
    optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")
    optimizer.own.groups[0].arguments["learning_rate"] = optimizer.param_groups[0]["lr"]
    refuses(optimizer, params, ValueError, r"param group 0: lr: got a tensor on meta while .*; accepted is one on cpu")


def test_a_step_that_would_cut_a_unit_is_not_captured() -> None:
    optimizer, params = made("FP32", slow)
    fill_gradients(params, 0)
    optimizer.step()
    params[1].grad = None
    refuses(
        optimizer,
        params,
        RuntimeError,
        r"of the parameters that are stepped together with it some have no gradient now",
    )
    optimizer.step()  # cut
    with FakeGraph().capture():
        optimizer.step()


def test_units_that_were_cut_stay_so_once_a_step_was_captured() -> None:
    """Replays step them, and nobody counts those: counts that seem equal may not be."""
    optimizer, params = made("FP32", slow)
    fill_gradients(params, 0)
    optimizer.step()
    params[1].grad = None
    optimizer.step()
    graph = FakeGraph()
    with graph.capture():
        optimizer.step()
    graph.replay()
    fill_gradients(params, 1)
    held, params[0].grad, params[2].grad = (params[0].grad, params[2].grad), None, None
    for _ in range(2):
        optimizer.step()  # the other one, as often as the host has stepped the first two since they were cut
    params[0].grad, params[2].grad = held
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == [5, 4, 5]


def test_a_steppers_cycle_is_not_captured() -> None:
    model = nn.Linear(3, 2)
    stepper = FlatStepper(model, eb.adamw(0.1))
    with stepper.microbatch(last=True):
        model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="step: a CUDA graph is being captured"), FakeGraph().capture():
        stepper.step()
    stepper.zero_grad()
    stepper.close()


# -- compiled steps --------------------------------------------------------------------------------------------------------------------


def test_a_step_that_was_not_compiled_yet_is_captured_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here one that is measured, after one that was not. Code that runs uncompiled stands in for code that was compiled."""
    optimizer, params = made("FP32", slow, compile=True)
    reference, others = made("FP32", slow)
    called: list[object] = []

    def compile_step(function: object, _: object) -> Any:
        def run(*_: Any) -> None:
            called.append(function)

        return run

    for step in range(2):
        fill_gradients(params, step)
        fill_gradients(others, step)
        reference.step()
        if step == 0:
            # Not torch.compiler.set_stance("force_eager"): torch 2.12 warns that it found nothing to compile.
            monkeypatch.setattr(variants, "compile_step", lambda function, _: function)
            optimizer.step()
        else:
            monkeypatch.setattr(variants, "compile_step", compile_step)
            optimizer.metrics_enabled = True
            with FakeGraph().capture():
                optimizer.step()
    assert not called
    assert_same_bits([p.detach() for p in params], [p.detach() for p in others], "captured uncompiled")
    optimizer.step()
    assert called


# -- learning rates that are tensors -----------------------------------------------------------------------------------------------------


def test_a_tensor_that_takes_anothers_place_is_followed_though_it_is_equal() -> None:
    optimizer, params = made("FP32", slow, lr=torch.tensor(0.01))
    reference, others = made("FP32", slow, lr=0.01)
    for step in range(3):
        fill_gradients(params, step)
        fill_gradients(others, step)
        if step == 1:
            optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
        if step == 2:
            optimizer.param_groups[0]["lr"].fill_(0.5)
            reference.param_groups[0]["lr"] = 0.5
        optimizer.step()
        reference.step()
    for p, other in zip(params, others, strict=True):
        torch.testing.assert_close(p, other, rtol=1e-6, atol=0.0)


def test_tensors_that_take_each_others_place_are_not_compared() -> None:
    optimizer, params = made("FP32", slow, lr=torch.tensor(0.01))
    readbacks = Readbacks()
    for step in range(3):
        fill_gradients(params, step)
        optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
        with readbacks.watching():
            optimizer.step()
    assert readbacks.read == 0


@pytest.mark.parametrize("kind", [AdamW, TorchOptimizer])
def test_torchs_argument_for_it_is_accepted_either_way(kind: Any) -> None:
    for given in (False, True):
        arguments = (eb.adamw,) if kind is TorchOptimizer else ()
        optimizer = kind([nn.Parameter(torch.ones(3))], *arguments, lr=0.1, capturable=given)
        assert "capturable" not in optimizer.defaults
    with pytest.raises(ValueError, match=r"capturable: got 1; accepted are False and True"):
        AdamW([nn.Parameter(torch.ones(3))], capturable=1)  # type: ignore[arg-type]
