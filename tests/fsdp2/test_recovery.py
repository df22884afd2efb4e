"""After an error inside a cycle, and zero_grad(), a stepper over FSDP2 has the bits of one without it; in a step it asks for a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import everybit as eb
from everybit_torch import FlatStepper, load_sharded, save_sharded
from tests.support.exact_models import Cell, Cells, mesh_of, train, weights_of
from tests.support.ranks import run
from tests.support.weights import Weights, equal

FSDP2: Any = {"strategy": "optim_grads_params", "units": [Cell], "policy": "LEAN_BF16"}
ADAMW = eb.adamw(0.03, weight_decay=0.1)


class StoppedError(Exception):
    """What these programs raise."""


class Stop(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise StoppedError


def stopping(_module: Any, _arguments: Any, output: Tensor) -> Tensor:
    raise StoppedError


def stopping_later(_module: Any, _arguments: Any, output: Tensor) -> Tensor:
    out: Tensor = Stop.apply(output)  # type: ignore[no-untyped-call]
    return out


def interrupt(stepper: FlatStepper, model: Cells, where: str, unit: str, last: bool) -> None:
    """A microbatch that ends in an error, on all ranks alike."""
    hooks = {"forward": stopping, "backward": stopping_later}
    handle = model.get_submodule(unit).register_forward_hook(hooks[where]) if where in hooks else None
    try:
        with stepper.microbatch(last=last) if last else stepper.no_sync():
            loss = model(5)
            if where == "loss":
                raise StoppedError
            loss.backward()
    finally:
        if handle is not None:
            handle.remove()


def recovered(where: str, unit: str, shape: tuple[int, ...], outer: Any) -> list[tuple[Weights, Weights]]:
    """Of each way into the error: the weights after it and a step, and without it."""
    found = []
    for last in (True, False):
        both = []
        for fails in (True, False):
            model = Cells(torch.bfloat16)
            stepper = FlatStepper(model, ADAMW, mesh=mesh_of(shape), outer=outer, **FSDP2)
            train(stepper, model, range(1), 2)
            if fails:
                with stepper.microbatch(last=False):
                    model(4).backward()
                with pytest.raises(StoppedError):
                    interrupt(stepper, model, where, unit, last)
                with pytest.raises(RuntimeError, match="ended in an error, and its gradients are in part"):
                    stepper.step()
                stepper.zero_grad()
            train(stepper, model, range(1, 3), 2, "microbatch" if last else "no_sync")
            both.append(weights_of(model))
            stepper.close()
        found.append((both[0], both[1]))
    return found


needs_reset = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"),
    reason="torch before 2.13 cannot bring FSDP2 back from the middle of a pass",
)
PLACES = [
    *((where, unit) for where in ("forward", "backward") for unit in ("first", "second", "second.inner", "")),
    ("loss", ""),
]


@needs_reset
@pytest.mark.parametrize(
    ("where", "unit", "shape", "outer"),
    [
        *((*place, (2,), "no_shard") for place in PLACES),
        *(
            pytest.param(*place, (2, 2), "optim", marks=() if number % 4 == 2 else pytest.mark.exhaustive)
            for number, place in enumerate(PLACES)
        ),
    ],
)
@pytest.mark.sampled(15)
def test_a_cycle_after_an_error_has_the_bits_of_one_without(
    where: str, unit: str, shape: tuple[int, ...], outer: str
) -> None:
    for ways in run(torch.Size(shape).numel(), recovered, where, unit, shape, outer):
        for after, without in ways:
            assert equal(after, without)


def without_a_way_back() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FSDPModule, "reset_iter_state", raising=False)
        model = Cells(torch.bfloat16)
        stepper = FlatStepper(model, ADAMW, **FSDP2)
        stepper.zero_grad()
        train(stepper, model, range(1), 1)
        with pytest.raises(StoppedError):
            interrupt(stepper, model, "backward", "first", last=True)
        with pytest.raises(RuntimeError) as error:
            stepper.zero_grad()
    return str(error.value)


def test_a_torch_that_cannot_begin_a_pass_anew_is_named() -> None:
    for said in run(2, without_a_way_back):
        assert said.startswith("zero_grad: an error ended a pass of FSDP2, which torch before 2.13 cannot begin anew")


def stopped_in_a_step(folder: Path) -> tuple[str, Weights, Weights]:
    stops = False

    def rate(step: Tensor) -> Tensor:
        if stops:
            raise StoppedError
        return 0.03 * torch.ones_like(step, dtype=torch.float32)

    model = Cells(torch.bfloat16)
    stepper = FlatStepper(model, eb.adamw(rate), **FSDP2)
    train(stepper, model, range(2), 1)
    save_sharded(stepper, folder)
    train(stepper, model, range(2, 3), 1)
    expected = weights_of(model)
    stops = True
    with pytest.raises(StoppedError):
        train(stepper, model, range(3, 4), 1)
    with pytest.raises(RuntimeError, match="after weights had been changed") as error:
        stepper.step()
    stops = False
    load_sharded(stepper, folder)
    train(stepper, model, range(2, 3), 1)
    return str(error.value), expected, weights_of(model)


def test_after_an_error_within_a_step_a_load_goes_on(tmp_path: Path) -> None:
    for message, expected, weights in run(2, stopped_in_a_step, tmp_path / "saved"):
        assert "load" in message
        assert equal(weights, expected)
