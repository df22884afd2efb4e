"""State dicts of bitsandbytes' and torchao's shape, written by hand: taken, given back, and refused by name.

tests/conformance/test_blockwise.py has the packages themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import (
    SGD,
    Adam,
    AdamW,
    Lion,
    TorchOptimizer,
    bitsandbytes_state_dict,
    load_bitsandbytes_state_dict,
    load_torchao_state_dict,
    torchao_state_dict,
)

SHAPE = (20, 30)  # 600 elements: two whole blocks and a part
DYNAMIC = eb.Policy(momentum=eb.Blockwise(), variance=eb.Blockwise())
NESTED = "__bnb_optimizer_quant_state__"


@dataclass
class Held:
    """What torchao's tensors in 8 and 4 bits have."""

    codes: Tensor
    scale: Tensor
    qmap: Tensor


def qmap(signed: bool, bits: Any = 8) -> Tensor:
    kind: eb.SlotKind = "signed" if signed else "non-negative"
    return eb.Blockwise("dynamic" if signed or bits == 8 else "linear", bits, kind=kind).levels()


def nested(shape: tuple[int, ...] = SHAPE, both: bool = True) -> dict[str, Tensor]:
    numbers = torch.Size(shape).numel()
    codes = (torch.arange(numbers) * 7 % 256).to(torch.uint8).view(shape)
    scale = torch.linspace(1e-3, 1.0, -(-numbers // 256))
    found = {"state1": codes, "absmax1": scale, "qmap1": qmap(True)}
    return found | ({"state2": codes.flip(0), "absmax2": scale / 2, "qmap2": qmap(False)} if both else {})


def bitsandbytes_dict(*, steps: int = 5, **group: Any) -> dict[str, Any]:
    state = {
        0: {"step": steps, NESTED: nested()},
        1: {"step": steps, NESTED: {"state1": torch.full((4,), -0.5), "state2": torch.full((4,), 0.25)}},
    }
    options = {
        "lr": 1e-3,
        "betas": (0.8, 0.99),
        "eps": 1e-7,
        "weight_decay": 0.1,
        "alpha": 0.0,
        "t_alpha": None,
        "t_beta3": None,
    }
    return {"state": state, "param_groups": [options | group | {"params": [0, 1, 2]}]}  # fmt: skip


def torchao_dict(bits: Any = 8) -> dict[str, Any]:
    """One parameter of 512 elements."""
    packed = torch.arange(512 * bits // 8) % 251
    block = 256 if bits == 8 else 128
    scale = torch.linspace(0.1, 1, 512 // block)
    codes = packed.to(torch.uint8).view((16, 32) if bits == 8 else -1)
    tensors = [Held(codes, scale, qmap(signed, bits)) for signed in (True, False)]
    state = {0: {"step": torch.tensor(7.0), "exp_avg": tensors[0], "exp_avg_sq": tensors[1]}}
    group = {"lr": torch.tensor(0.5), "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    return {"state": state, "param_groups": [group | {"params": [0]}]}


def made(ours: Any = AdamW, policy: Any = DYNAMIC, **options: Any) -> Any:
    params = [nn.Parameter(torch.ones(shape)) for shape in (SHAPE, (4,), (3,))]
    return ours(params, lr=1.0, policy=policy, compile=False, **options)


def entries(optimizer: TorchOptimizer, number: int = 0) -> dict[str, Tensor]:
    found: dict[str, Tensor] = optimizer.state_dict()["state"][number]
    return found


@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_blocks_of_bitsandbytes_are_copied_and_the_rest_is_rounded(alone: bool) -> None:
    optimizer, given = made(), bitsandbytes_dict()
    losses = load_bitsandbytes_state_dict(optimizer, given)
    theirs = given["state"][0][NESTED]
    stored = entries(optimizer)
    assert torch.equal(stored["momentum"], theirs["state1"])
    assert torch.equal(stored["momentum.scale"], theirs["absmax1"])
    assert torch.equal(stored["variance"], theirs["state2"])
    assert torch.equal(stored["variance.scale"], theirs["absmax2"])
    assert int(stored["step"]) == 5
    # -0.5 is kept but for the last bit of a scale, which is a quotient there; 0.25 is the greatest of its block.
    assert losses["momentum"].largest <= 2.0**-24
    assert losses["variance"].error == 0.0
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-3, (0.8, 0.99), 1e-7, 0.1)
    assert "alpha" not in group
    back = bitsandbytes_state_dict(optimizer)
    assert all(torch.equal(back["state"][0][NESTED][name], x) for name, x in theirs.items())
    assert back["state"][0]["step"] == 5
    assert 2 not in back["state"], "a parameter that was never stepped"
    assert back["param_groups"] == given["param_groups"]


def test_it_trains_on() -> None:
    optimizer = made()
    load_bitsandbytes_state_dict(optimizer, bitsandbytes_dict())
    for p in optimizer.param_groups[0]["params"][:2]:
        p.grad = torch.full_like(p, 1e-3)
    optimizer.step()
    assert int(entries(optimizer)["step"]) == 6


def test_other_formats_get_the_decoded_numbers_and_give_float32() -> None:
    optimizer = made(policy="FP32")
    assert all(loss.error == 0.0 for loss in load_bitsandbytes_state_dict(optimizer, bitsandbytes_dict()).values())
    theirs = nested()
    expected = theirs["qmap1"][theirs["state1"].int()].view(-1) * theirs["absmax1"].repeat_interleave(256)[:600]
    assert torch.equal(entries(optimizer)["momentum"], expected.view(SHAPE))
    back = bitsandbytes_state_dict(optimizer)["state"][0][NESTED]
    assert back.keys() == {"state1", "state2"}
    assert torch.equal(back["state1"], expected.view(SHAPE))
    coarse = made(policy=eb.Policy(momentum=eb.Blockwise("float", block=32), variance=eb.Blockwise("float")))
    losses = load_bitsandbytes_state_dict(coarse, bitsandbytes_dict())
    assert all(0 < loss.relative < 0.1 for loss in losses.values())
    assert bitsandbytes_state_dict(coarse)["state"][0][NESTED]["state1"].dtype is torch.float32


@pytest.mark.parametrize(("ours", "options"), [(Lion, {}), (SGD, {"momentum": 0.5})], ids=["lion", "sgd"])
def test_optimizers_with_a_momentum_alone(ours: Any, options: dict[str, Any]) -> None:
    optimizer = made(ours, **options)
    betas = (0.8, 0.95) if ours is Lion else (0.8, 0.0)
    given: dict[str, Any] = {
        "state": {0: {"step": 3, NESTED: nested(both=False)}},
        "param_groups": [{"lr": 1e-3, "betas": betas, "eps": 0.0, "weight_decay": 0.1, "params": [0, 1, 2]}],
    }
    losses = load_bitsandbytes_state_dict(optimizer, given)
    assert losses.keys() == {"momentum"}
    assert losses["momentum"].error == 0.0
    back = bitsandbytes_state_dict(optimizer)
    assert torch.equal(back["state"][0][NESTED]["state1"], given["state"][0][NESTED]["state1"])
    assert back["param_groups"] == given["param_groups"]


@pytest.mark.parametrize("bits", [8, 4])
def test_state_of_torchao_is_copied(bits: Any) -> None:
    policy = (
        DYNAMIC
        if bits == 8
        else eb.Policy(momentum=eb.Blockwise("dynamic", 4, 128), variance=eb.Blockwise("linear", 4, 128))
    )
    optimizer = AdamW([nn.Parameter(torch.ones(16, 32))], policy=policy, compile=False)
    given = torchao_dict(bits)
    losses = load_torchao_state_dict(optimizer, given)
    stored, theirs = entries(optimizer), given["state"][0]
    for ours, name in (("momentum", "exp_avg"), ("variance", "exp_avg_sq")):
        assert torch.equal(stored[ours].view(-1), theirs[name].codes.view(-1))
        assert torch.equal(stored[f"{ours}.scale"], theirs[name].scale)
        assert losses[ours].error == 0.0
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert int(stored["step"]) == 7


def change_group(**values: Any) -> dict[str, Any]:
    return bitsandbytes_dict(**values)


def change_state(**values: Any) -> dict[str, Any]:
    given = bitsandbytes_dict()
    held = given["state"][0][NESTED] | values
    given["state"][0][NESTED] = {name: value for name, value in held.items() if value is not None}
    return given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (change_group(alpha=5.0), r"param group 0, 'alpha': got 5.0; accepted is 0.0"),
        (change_group(betas=(0.9, 0.99, 0.999)), r"param group 0, 'betas': got a tuple of 3; accepted are two numbers"),
        (change_state(absmax1=None), r"parameter 0, 'state1', scales: got None; accepted are 3 numbers in torch.float32"),
        (change_state(qmap2=torch.zeros(16)), r"parameter 0, 'state2', levels: got .*\(16,\); accepted are 256 numbers"),
        (change_state(state1=torch.zeros(5, dtype=torch.uint8)), r"'state1', codes: got .*\(5,\); accepted are 600 numbers"),
        (change_state(max1=torch.ones(1)), r"parameter 0: has \['max1'\]; accepted is state in blocks"),
        (change_state(state2=None, qmap2=None, absmax2=None), r"parameter 0 has state .*; accepted in full precision is .*'variance'"),
        ({"state": {}}, r"state_dict: has no 'param_groups'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_changes_nothing(given: dict[str, Any], message: str) -> None:
    optimizer = made()
    with pytest.raises(ValueError, match=message):
        load_bitsandbytes_state_dict(optimizer, given)
    assert optimizer.state_dict()["state"] == {}
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_algorithms_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"param group 0, weight_decay: got 0.1; accepted here is 0.0"):
        load_bitsandbytes_state_dict(made(Adam), bitsandbytes_dict())
    with pytest.raises(ValueError, match=r"param group 0, betas\[1\] \(dampening\): got 0.99; accepted here is 0.0"):
        load_bitsandbytes_state_dict(made(SGD, momentum=0.9), bitsandbytes_dict())
    with pytest.raises(ValueError, match=r"param group 0: accepted are optimizers with 'betas' or 'momentum'"):
        load_bitsandbytes_state_dict(made(rmsprop), bitsandbytes_dict())
    amsgrad = made(amsgrad=True)
    stepped(amsgrad)
    with pytest.raises(ValueError, match=r"optimizer: keeps \['max_variance', 'momentum', 'variance'\]"):
        bitsandbytes_state_dict(amsgrad)
    with pytest.raises(ValueError, match=r"param group 0, maximize: got True; accepted here is False"):
        torchao_state_dict(made_stepped_without_blocks(maximize=True))


def rmsprop(params: Any, **options: Any) -> TorchOptimizer:
    return TorchOptimizer(params, eb.rmsprop, **options)


def made_stepped_without_blocks(**options: Any) -> Any:
    optimizer = made(policy="FP32", **options)
    stepped(optimizer)
    return optimizer


def stepped(optimizer: TorchOptimizer) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()


def test_scales_for_parts_of_blocks_are_refused_from_torchao() -> None:
    given = torchao_dict()
    given["state"][0]["exp_avg"].scale = torch.ones(3)
    optimizer = AdamW([nn.Parameter(torch.ones(16, 32))], policy=DYNAMIC, compile=False)
    with pytest.raises(ValueError, match=r"parameter 0, 'exp_avg': got 3 scales for 512 elements; accepted are whole"):
        load_torchao_state_dict(optimizer, given)


def test_float32_state_goes_to_torchao_without_the_package() -> None:
    given = torchao_state_dict(made_stepped_without_blocks())
    assert torch.equal(given["state"][0]["exp_avg"], torch.full(SHAPE, 1.0) * (1 - 0.9))
    assert given["param_groups"][0]["lr"].dtype is torch.float32
    assert given["state"][0]["step"] == 1.0
