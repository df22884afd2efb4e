"""Blockwise state against bitsandbytes' and torchao's: levels, and the state of their optimizers decoded, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
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
    bitsandbytes_state_dict,
    load_bitsandbytes_state_dict,
    load_torchao_state_dict,
    torchao_state_dict,
)

bitsandbytes: Any = pytest.importorskip("bitsandbytes")
of_bitsandbytes: Any = pytest.importorskip("bitsandbytes.functional")
torchao: Any = pytest.importorskip("torchao.optim")
subclass_4bit: Any = pytest.importorskip("torchao.optim.subclass_4bit")
subclass_8bit: Any = pytest.importorskip("torchao.optim.subclass_8bit")

SHAPES = [
    (64, 96),
    (33, 200),
    (30,),
    (8192,),
]  # the second one's last block is not whole; torchao keeps it, and the third, wide
STEPS = 20
KINDS: tuple[eb.SlotKind, ...] = ("signed", "non-negative")


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """Torchao compiles its step, which takes half a minute; what it computes is the same formula."""
    with torch.compiler.set_stance("force_eager"):
        yield


def trained(make: Any, **options: Any) -> tuple[list[nn.Parameter], Any]:
    """Parameters and their optimizer after some steps, with gradients of three magnitudes and some that are zero."""
    generator = torch.Generator().manual_seed(3)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = make(params, lr=1e-3, **options)
    for step in range(STEPS):
        for p in params:
            drawn = torch.randn(p.shape, generator=generator) * 10.0 ** (step % 3 - 3)
            p.grad = torch.where(torch.rand(p.shape, generator=generator) < 0.1, 0.0, drawn)
        optimizer.step()
    return params, optimizer


def levels(name: Any, bits: Any, kind: eb.SlotKind) -> Tensor:
    return eb.Blockwise(name, bits, kind=kind).levels()


@pytest.mark.parametrize("signed", [True, False])
def test_levels_are_those_of_bitsandbytes_and_torchao(signed: bool) -> None:
    kind: eb.SlotKind = "signed" if signed else "non-negative"
    assert torch.equal(levels("dynamic", 8, kind), of_bitsandbytes.create_dynamic_map(signed=signed))
    of_torchao = (subclass_8bit.get_qmap_signed if signed else subclass_8bit.get_qmap_unsigned)()
    assert torch.equal(levels("dynamic", 8, kind), torch.tensor(of_torchao))
    of_torchao = (subclass_4bit.get_qmap_signed if signed else subclass_4bit.get_qmap_unsigned)()
    assert torch.equal(levels("dynamic" if signed else "linear", 4, kind), torch.tensor(of_torchao))


def test_state_of_bitsandbytes_is_decoded_bit_for_bit() -> None:
    params, optimizer = trained(bitsandbytes.optim.AdamW8bit)
    compared = 0
    for p in params:
        state = optimizer.state[p]
        for number, kind in zip("12", KINDS, strict=True):
            codes = state[f"state{number}"]
            if codes.dtype is not torch.uint8:
                assert p.numel() < 4096
                continue
            scale = state[f"absmax{number}"]
            expected = of_bitsandbytes.dequantize_blockwise(
                codes, absmax=scale, code=state[f"qmap{number}"], blocksize=256
            )
            got = eb.Blockwise(kind=kind).decode((codes, scale), codes.shape, "float32")
            assert torch.equal(got, expected)
            assert int(codes.unique().numel()) > 100
            compared += 1
    assert compared == 6


@pytest.mark.parametrize("name_of_class", ["AdamW8bit", "AdamW4bit"])
def test_state_of_torchao_is_decoded_bit_for_bit(name_of_class: str) -> None:
    params, optimizer = trained(getattr(torchao, name_of_class))
    compared = 0
    for p in params:
        for name, kind in zip(("exp_avg", "exp_avg_sq"), KINDS, strict=True):
            value = optimizer.state[p][name]
            if type(value) is Tensor:
                assert p.numel() < 4096 or p.numel() % 128
                continue
            format = eb.Blockwise(block=256, kind=kind)
            if name_of_class == "AdamW4bit":
                format = eb.Blockwise("dynamic" if kind == "signed" else "linear", 4, 128, kind=kind)
            got = format.decode((value.codes, value.scale), value.shape, "float32")
            assert torch.equal(got, value.dequantize())
            assert int(value.codes.unique().numel()) > 10
            compared += 1
    assert compared == 4


@pytest.mark.parametrize("kind", ["signed", "non-negative"])
def test_codes_to_nearest_are_those_of_bitsandbytes_or_nearer(kind: eb.SlotKind) -> None:
    """Its kernel for CPUs takes a neighbour at times (of 3.5e-7 of the block's greatest the level at 4e-6): in 3 % of these."""
    x = torch.randn(256 * 64, generator=torch.Generator().manual_seed(5))
    x = x if kind == "signed" else x.square()
    qmap = of_bitsandbytes.create_dynamic_map(signed=kind == "signed")
    codes, state = of_bitsandbytes.quantize_blockwise(x, code=qmap, blocksize=256)
    theirs, format = codes.view(-1).int(), eb.Blockwise(rounding="nearest", kind=kind)
    ours, scale = format.encode(x, eb.Key(0, torch.tensor(1), 0))
    same = scale == state.absmax  # but where a block's greatest number is negative, which is exact in ours
    assert int(same.sum()) >= 24
    exact = x.double().view(-1, 256) / state.absmax.double()[:, None]
    apart = [(format.levels().double()[c.int()].view(-1, 256) - exact).abs()[same] for c in (ours, theirs)]
    # Quotients of float32 are rounded, by 2**-24 of themselves.
    assert bool((apart[0] <= apart[1] + 2.0**-23).all())
    assert float((apart[0] != apart[1]).double().mean()) < 0.05


# -- state dicts from and to them --------------------------------------------------------------------------------------------------

DYNAMIC = eb.Policy(momentum=eb.Blockwise(), variance=eb.Blockwise())
FOUR_BITS = eb.Policy(momentum=eb.Blockwise("dynamic", 4, 128), variance=eb.Blockwise("linear", 4, 128))
FP32 = eb.policies.FP32
PAIRS: list[Any] = [
    ("AdamW8bit", AdamW, DYNAMIC, {}),
    ("Adam8bit", Adam, DYNAMIC, {}),
    ("Lion8bit", Lion, DYNAMIC, {"weight_decay": 0.1}),
    ("SGD8bit", SGD, DYNAMIC, {"momentum": 0.9}),
]


def copies(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in params]


def blocks_only(policy: eb.Policy, least: int, block: int) -> Any:
    """The policy for what they keep in blocks, float32 for the rest."""
    labels = lambda _path, p: "blocks" if p.numel() >= least and p.numel() % block == 0 else "wide"  # noqa: E731
    return eb.by_label(labels, {"blocks": policy, "wide": FP32})


def same(one: Any, other: Any) -> bool:
    """Whether two states have the same bits, in containers and quantized tensors."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if hasattr(one, "codes"):
        parts = ("codes", "scale", "qmap")
        return type(one) is type(other) and all(torch.equal(getattr(one, n), getattr(other, n)) for n in parts)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.parametrize(("name", "ours", "policy", "options"), PAIRS)
def test_state_of_bitsandbytes_comes_in_and_goes_out_bit_for_bit(
    name: str, ours: Any, policy: eb.Policy, options: dict[str, Any]
) -> None:
    params, theirs = trained(getattr(bitsandbytes.optim, name), **options)
    given = theirs.state_dict()
    mine = copies(params)
    optimizer = ours(mine, lr=1.0, policy=blocks_only(policy, 4096, 1), compile=False, **options)
    losses = load_bitsandbytes_state_dict(optimizer, given)
    assert all(loss.error == 0 for loss in losses.values())
    assert losses.keys() == ({"momentum", "variance"} if "Adam" in name else {"momentum"})
    assert optimizer.param_groups[0]["lr"] == 1e-3
    back = bitsandbytes_state_dict(optimizer)
    assert same(back["state"], given["state"])
    assert [*map(sorted, back["param_groups"])] == [*map(sorted, given["param_groups"])]
    # bitsandbytes takes it, and one step from there is the step of the one that it came from.
    again = copies(params)
    resumed = getattr(bitsandbytes.optim, name)(again, lr=0.5, **options)
    resumed.load_state_dict(back)
    for group in (params, again, mine):
        for number, p in enumerate(group):
            p.grad = torch.full_like(p, 1e-3 * (number + 1))
    for one in (theirs, resumed, optimizer):
        one.step()
    assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))
    # One step of ours from there is theirs, up to the rounding of the arithmetic and the place of eps.
    for a, b in zip(params, mine, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_adam_of_bitsandbytes_with_decoupled_decay_is_refused_by_adam() -> None:
    params, theirs = trained(bitsandbytes.optim.Adam8bit, weight_decay=0.1)
    optimizer = Adam(copies(params), policy=DYNAMIC, compile=False)
    with pytest.raises(ValueError, match=r"param group 0, weight_decay: got 0.1; accepted here is 0.0"):
        load_bitsandbytes_state_dict(optimizer, theirs.state_dict())
    assert optimizer.state_dict()["state"] == {}
    load_bitsandbytes_state_dict(AdamW(copies(params), policy=DYNAMIC, compile=False), theirs.state_dict())


@pytest.mark.parametrize(("name", "policy", "block"), [("AdamW8bit", DYNAMIC, 256), ("AdamW4bit", FOUR_BITS, 128)])
def test_state_of_torchao_comes_in_and_goes_out_bit_for_bit(name: str, policy: eb.Policy, block: int) -> None:
    params, theirs = trained(getattr(torchao, name))
    given = theirs.state_dict()
    mine = copies(params)
    optimizer = AdamW(mine, lr=1.0, policy=blocks_only(policy, 4096, block), compile=False)
    losses = load_torchao_state_dict(optimizer, given)
    assert losses.keys() == {"momentum", "variance"}
    assert all(loss.error == 0 for loss in losses.values())
    back = torchao_state_dict(optimizer)
    assert same(back["state"], given["state"])
    assert back["param_groups"] == given["param_groups"]
    again = copies(params)
    resumed = getattr(torchao, name)(again, lr=0.5)
    resumed.load_state_dict(back)
    for group in (params, again, mine):
        for number, p in enumerate(group):
            p.grad = torch.full_like(p, 1e-3 * (number + 1))
    for one in (theirs, resumed, optimizer):
        one.step()
    assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))
    for a, b in zip(params, mine, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_other_formats_round_once_and_say_so(tmp_path: Path) -> None:
    params, theirs = trained(torchao.AdamW4bit)
    torch.save(theirs.state_dict(), tmp_path / "state.pt")
    given = torch.load(tmp_path / "state.pt", weights_only=True)
    exact = AdamW(copies(params), policy="FP32", compile=False)
    assert all(loss.error == 0 for loss in load_torchao_state_dict(exact, given).values())
    rounded = AdamW(copies(params), policy=DYNAMIC, compile=False)
    losses = load_torchao_state_dict(rounded, given)
    assert all(0 < loss.relative < 0.05 for loss in losses.values())
    # Out of float32 nothing is rounded: bitsandbytes goes on in 32 bits.
    resumed = bitsandbytes.optim.AdamW8bit(copies(params))
    resumed.load_state_dict(bitsandbytes_state_dict(exact))
    wide = exact.full_state_dict()["state"]
    for number, p in enumerate(resumed.param_groups[0]["params"]):
        assert torch.equal(resumed.state[p]["state2"], wide[number]["variance"])
