"""State dicts that earlier versions wrote, from files: they load, bit for bit, and go on as they did."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import SGD, FlatStepper, TorchOptimizer
from everybit_torch.checkpoint.sharded import load_sharded, load_sharded_into

VERSION_1 = Path(__file__).parents[1] / "data" / "version_1"
POLICY = eb.Policy(params=eb.Split(16), momentum=eb.Kahan(), variance=eb.Split(8, rounding="stochastic"))
NOW = {
    "step", "param.remainder", "momentum", "momentum.residual", "variance", "variance.remainder", "inner.step",
}  # fmt: skip


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False)).to(torch.bfloat16)


def gradients(module: nn.Module, step: int) -> list[Tensor]:
    return [torch.sin(torch.arange(p.numel()).view(p.shape) + 3.0 * step).to(p.dtype) for p in module.parameters()]


def third_step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p, g in zip(module.parameters(), gradients(module, 3), strict=True):
        p.grad = g
    optimizer.step()


def require_same(module: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, value in module.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_a_state_dict_of_version_1_goes_on_bit_for_bit(alone: bool) -> None:
    saved = torch.load(VERSION_1 / "state_dict.pt", weights_only=True)
    assert {"momentum.1", "variance.1", "param"} < saved["optimizer"]["state"][0].keys()
    module = model()
    module.load_state_dict(saved["model"])
    optimizer = TorchOptimizer(module.parameters(), eb.adamw, lr=0.5, policy=POLICY)
    optimizer.load_state_dict(saved["optimizer"])
    state = optimizer.state_dict()
    assert state["format_version"] == 2
    for number, entries in saved["optimizer"]["state"].items():
        assert state["state"][number].keys() == NOW
        assert all(torch.equal(a, b) for a, b in zip(entries.values(), state["state"][number].values(), strict=True))
    third_step(module, optimizer)
    require_same(module, saved["after"]["model"])
    for got, expected in zip(optimizer.export_fp32()[0], saved["after"]["fp32"][0], strict=True):
        assert torch.equal(got, expected)


def test_what_was_put_aside_by_version_1_is_taken_up() -> None:
    policy = eb.Policy(params=eb.Split(16), momentum=eb.Kahan(), state=eb.Kahan())
    module = model()
    optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9, policy=policy)
    third_step(module, optimizer)
    optimizer.param_groups[0]["momentum"] = 0.0
    state = optimizer.state_dict()
    names = {name for name in state["state"][0] if name.startswith("unused.")}
    (second,) = (name for name in names if name.endswith(".residual"))
    for entries in state["state"].values():
        entries[second.removesuffix("residual") + "1"] = entries.pop(second)
    kept = [entries[second.removesuffix(".residual")].clone() for entries in state["state"].values()]
    state.pop("format_version")
    other = SGD(module.parameters(), lr=0.1, momentum=0.0, policy=policy)
    other.load_state_dict(state)
    other.param_groups[0]["momentum"] = 0.9
    slot = second.removeprefix("unused.").removesuffix(".residual")
    for entries, value in zip(other.state_dict()["state"].values(), kept, strict=True):
        assert torch.equal(entries[slot], value)


def test_a_version_that_is_to_come_is_refused() -> None:
    module = model()
    optimizer = TorchOptimizer(module.parameters(), eb.adamw, policy=POLICY)
    state = optimizer.state_dict()
    for version in (3, 0, "2", True):
        with pytest.raises(ValueError, match=r"state_dict\['format_version'\]: got .*; accepted .* are 1 to 2"):
            optimizer.load_state_dict(state | {"format_version": version})


@pytest.mark.parametrize("plain", [False, True])
def test_a_sharded_checkpoint_of_version_1_goes_on_bit_for_bit(plain: bool) -> None:
    expected = torch.load(VERSION_1 / "sharded_after.pt", weights_only=True)["model"]
    module = model()
    optimizer: torch.optim.Optimizer
    if plain:
        optimizer = TorchOptimizer(module.parameters(), eb.adamw, lr=0.01, policy=POLICY)
        load_sharded_into(module, optimizer, VERSION_1 / "sharded")
        third_step(module, optimizer)
    else:
        stepper = FlatStepper(module, eb.adamw(0.01), policy=POLICY, strategy="optim")
        load_sharded(stepper, VERSION_1 / "sharded")
        for p, g in zip(module.parameters(), gradients(module, 3), strict=True):
            (p * g).sum().backward()  # type: ignore[no-untyped-call]
        stepper.step()
    require_same(module, expected)
