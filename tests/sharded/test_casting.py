"""Inputs and outputs of units in other dtypes: what a user would cast by hand, under every strategy."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import everybit as eb
from everybit_torch import Casts, FlatStepper
from everybit_torch.sharded.casting import CastsOfUnits
from everybit_torch.sharded.strategies import STRATEGIES
from tests.support.ranks import run

LOW = torch.bfloat16


class Seen(NamedTuple):
    """Registered as every named tuple is."""

    x: Tensor
    places: Tensor


class Layer(nn.Module):
    """Asserts what it is given, and returns a tree."""

    def __init__(self, given: torch.dtype, stored: torch.dtype) -> None:
        super().__init__()
        self.given = given
        self.linear = nn.Linear(6, 6, dtype=stored)

    def forward(self, seen: Seen, *, scale: dict[str, Any]) -> Seen:
        assert [seen.x.dtype, seen.places.dtype, scale["by"][0].dtype, scale["name"]] == [
            self.given,
            torch.int64,
            self.given,
            "a word",
        ]
        return Seen(torch.tanh(self.linear(seen.x.to(self.linear.weight.dtype))) * scale["by"][0], seen.places)


class Head(Layer):
    pass


class Network(nn.Module):
    """Layers in bfloat16 before a head in float32; ``by_hand`` casts where a stepper is asked to."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.layers = nn.ModuleList([Layer(LOW, LOW), Layer(LOW, LOW), Head(torch.float32, torch.float32)])

    def forward(self, x: Tensor, places: Tensor) -> list[Tensor]:
        seen = Seen(x.to(LOW) if self.by_hand else x, places)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            by = torch.full((), 0.5)  # of a dtype that no layer has asked for in both cases
            given = layer.given if self.by_hand else seen.x.dtype
            seen = layer(
                Seen(seen.x.to(given), seen.places),
                scale={"by": [by.to(layer.given) if self.by_hand else by], "name": "a word"},
            )
        return [seen.x.to(torch.float64) if self.by_hand else seen.x, seen.places]


def trained(strategy: Any, *, by_hand: bool) -> tuple[list[Tensor], list[float]]:
    torch.manual_seed(0)
    model = Network(by_hand=by_hand)
    low, full = Casts(inputs="bfloat16"), Casts(inputs="float32")
    casts: CastsOfUnits | None = (
        None if by_hand else {Layer: low, model.layers[2]: full, Network: Casts(inputs="bfloat16", outputs="float64")}
    )
    stepper = FlatStepper(
        model, eb.adamw(1e-2), policy=eb.by_label(kind, {"low": eb.policies.EXACT_BF16, "full": eb.policies.FP32}),
        strategy=strategy, units=[Layer], casts=casts,
    )  # fmt: skip
    losses = []
    for step in range(2):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        with stepper.microbatch(last=True):
            out, places = model(x, torch.arange(3))
            assert out.dtype is torch.float64
            assert places.dtype is torch.int64
            loss = out.square().mean()
            loss.backward()
        losses.append(float(loss.detach()))
        stepper.step()
    copied = stepper.copy_model("full")
    assert copied is not None
    hooks = [h for m in copied.modules() for h in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())]
    assert all("casting" not in type(hook).__module__ for hook in hooks)
    with stepper.full_parameters():
        weights = [p.detach().clone() for p in model.parameters()]
    stepper.close()
    assert by_hand or not model.layers[0]._forward_pre_hooks
    return weights, losses


def kind(_: str, parameter: Tensor) -> str:
    return "low" if parameter.dtype is LOW else "full"


def every_strategy() -> list[str]:
    wrong: list[str] = []
    for strategy in STRATEGIES:
        (asked, losses), (expected, by_hand) = trained(strategy, by_hand=False), trained(strategy, by_hand=True)
        if losses != by_hand or not all(map(torch.equal, asked, expected)):
            wrong.append(strategy)
    return wrong


def test_what_a_stepper_casts_has_the_bits_of_casts_by_hand() -> None:
    for wrong in run(2, every_strategy):
        assert wrong == []


def test_one_value_casts_the_inputs_of_all_units_and_the_outputs_of_the_model() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4, dtype=LOW))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.inner(x.double())
            assert found.dtype is LOW  # the outputs of a unit stay
            return found

    model = Plain()
    stepper = FlatStepper(
        model, eb.sgd(0.1), policy=eb.policies.EXACT_BF16, units=[nn.Sequential],
        casts=Casts(inputs="bfloat16", outputs="float32"),
    )  # fmt: skip
    with stepper.microbatch(last=True):
        out = model(torch.ones(2, 4))
        out.sum().backward()
    assert out.dtype is torch.float32
    assert not stepper.step().skipped


def test_casts_that_cannot_be_are_refused() -> None:
    def made(casts: Any) -> FlatStepper:
        return FlatStepper(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), eb.sgd(0.1), units=[nn.Linear], casts=casts)

    with pytest.raises(ValueError, match=r"^Casts.inputs: got 'int8'; accepted are 'float64', 'float32'"):
        Casts(inputs="int8")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^casts: got 'bfloat16'; accepted are Casts\(...\), a dict of them by unit"):
        made("bfloat16")
    with pytest.raises(TypeError, match=r"^casts: got torch.bfloat16 for 0; accepted are Casts"):
        made({nn.Linear: LOW})
    with pytest.raises(
        ValueError, match=r"^casts: ReLU is no unit, nor the model; these are of the classes Linear, Seq"
    ):
        made({nn.ReLU: Casts(inputs="bfloat16")})


def differing() -> str:
    with pytest.raises(ValueError, match="casts of the model") as caught:
        FlatStepper(nn.Linear(2, 2), eb.sgd(0.1), casts=Casts(outputs="bfloat16" if dist.get_rank() else "float32"))
    return str(caught.value)


def test_ranks_that_cast_differently_are_told_so() -> None:
    first, second = run(2, differing)
    assert first == second
    assert "rank 0 has Casts(inputs=None, outputs='float32'), and rank 1 has" in first
