"""Blockwise state against bitsandbytes' and torchao's: levels, and the state of their optimizers decoded, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb

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
