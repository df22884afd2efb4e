"""What a stepper on flat buffers reports and refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import everybit as eb
from everybit_torch import FlatStepper, TorchOptimizer
from everybit_torch.sharded.strategies import Strategy
from tests.flat.steppers import flat_stepper
from tests.support.exact_models import Cells, train, train_alone, weights_of
from tests.support.ranks import run

FLAT = pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
ADAMW = eb.adamw(0.03)


def small(strategy: Strategy, **others: Any) -> tuple[Cells, FlatStepper]:
    model = Cells(torch.bfloat16)
    return model, flat_stepper(model, ADAMW, policy="LEAN_BF16", strategy=strategy, **others)


def measured(strategy: Strategy) -> list[float]:
    model, stepper = small(strategy)
    stepper.as_optimizer().metrics_enabled = True
    train(stepper, model, range(2), 1)
    found = stepper.as_optimizer().metrics()
    assert found is not None
    return [float(x) for x in eb.tree.leaves(found)]


@FLAT
def test_metrics_are_those_of_all_ranks(strategy: Strategy) -> None:
    """Of a torch optimizer in one process, to the last bits of sums in another order."""
    model = Cells(torch.bfloat16)
    optimizer = TorchOptimizer(
        model.named_parameters(), eb.adamw, lr=0.03, policy="LEAN_BF16", compile=False, metrics=True
    )

    class Alone:
        def step(self) -> Any:
            optimizer.step()
            optimizer.zero_grad()
            return type("Report", (), {"grad_norm": 0.0})

    train_alone(Alone(), model, range(2), 1, 3)
    expected = [float(x) for x in eb.tree.leaves(optimizer.metrics())]
    for found in run(3, measured, strategy):
        # Sums of some 100 float64 numbers, rounded to float32 once.
        assert found == pytest.approx(expected, rel=2**-20)


@FLAT
def test_a_gradient_that_is_assigned_is_stepped_with(strategy: Strategy) -> None:
    """As by code that makes its own clip or noise."""
    found = []
    for assigned in (False, True):
        model, stepper = small(strategy)
        for step in range(3):
            with stepper.microbatch(last=True):
                model(1 + step).backward()
            for parameter in (p for group in stepper.as_optimizer().param_groups for p in group["params"]):
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.mul(-1) if assigned else parameter.grad.neg_()
            stepper.step()
        found.append(weights_of(model))
    assert all(torch.equal(found[0][name], one) for name, one in found[1].items())


def uneven() -> str:
    model, stepper = small("optim_grads")
    for number in range(2):
        with stepper.microbatch(last=number == 1):
            (model(1) if number or dist.get_rank() == 0 else torch.zeros((), requires_grad=True)).backward()
    report = stepper.step()
    return ", ".join(report.untouched)


def test_a_rank_whose_loss_reaches_no_parameter_takes_part_with_zeros() -> None:
    assert run(2, uneven) == ["unused"] * 2


def _cast(model: nn.Module, _: FlatStepper) -> None:
    model.to(torch.float32)


def _moved(model: nn.Module, _: FlatStepper) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


@FLAT
@pytest.mark.parametrize(
    ("change", "match"),
    [(_cast, "own: is not where the stepper has put it"), (_moved, "own: is another parameter than when")],
)
def test_a_model_that_was_changed_is_refused_by_name(
    strategy: Strategy, change: Callable[..., None], match: str
) -> None:
    model, stepper = small(strategy)
    change(model, stepper)
    with pytest.raises(RuntimeError, match=f"^{match}"):
        stepper.step()


@FLAT
def test_after_an_error_in_a_pass_a_fresh_cycle_begins(strategy: Strategy) -> None:
    model, stepper = small(strategy)
    other, plain = small(strategy)

    def fail(_: Tensor) -> None:
        raise ArithmeticError

    line: Any = model.second.get_parameter("line")
    handle = line.register_hook(fail)
    with pytest.raises(ArithmeticError), stepper.microbatch(last=True):
        model(1).backward()
    with pytest.raises(RuntimeError, match=r"^step: the microbatch or step before ended in an error"):
        stepper.step()
    handle.remove()
    stepper.zero_grad()
    for one, its in ((model, stepper), (other, plain)):
        train(its, one, range(2), 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("state_dict", lambda o: o.state_dict()),
        ("export_fp32", lambda o: o.export_fp32()),
        ("load_state_dict", lambda o: o.load_state_dict({})),
        ("import_fp32", lambda o: o.import_fp32([])),
        ("add_param_group", lambda o: o.add_param_group({"params": []})),
    ],
)
def test_what_is_about_one_rank_alone_is_refused(name: str, call: Callable[[Any], object]) -> None:
    _, stepper = small("optim")
    with pytest.raises(RuntimeError, match=rf"^{name}: "):
        call(stepper.as_optimizer())
