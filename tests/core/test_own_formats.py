"""Formats of the user's own: what a policy asks of them, and parts with one number for a block of elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import everybit as eb
from everybit.formats import bytes_of
from everybit.testing.examples import assert_same_bits
from tests.support.block_formats import Int8Blocks, Int8Residual, blocks_of

INT8 = eb.Policy(momentum=Int8Blocks(), variance=Int8Blocks())
EVERYWHERE = eb.Policy(params=Int8Residual(), momentum=Int8Blocks(), variance=Int8Blocks(48))
loose: Any = eb


def example(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"matrix": (5, 13), "vector": (96,), "number": (), "empty": (0, 3)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def gradients(step: int, params: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(p.shape, generator=generator) for name, p in params.items()}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 100), st.integers(1, 40), st.integers(0, 2**31 - 1), st.sampled_from(["signed", "non-negative"]))
def test_a_run_of_blocks_is_encoded_as_in_the_whole(numel: int, block: int, seed: int, kind: eb.SlotKind) -> None:
    format = Int8Blocks(block).for_slot(kind, "float32")
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    x = x if kind == "signed" else x.abs()
    key = eb.Key(0, torch.tensor(1), 1)
    codes, scale = format.encode(x, key)
    for cut in range(0, numel, block):
        one = format.encode(x[cut:], key)
        assert_same_bits(one, (codes[cut:], scale[cut // block :]), "a run of blocks")
    exact = blocks_of(x.double(), block)
    units = exact.abs().amax(1) / (127 if kind == "signed" else 255)
    # Half a unit of a block's scale, and what float32 loses of a quotient and a product of at most 255.
    error = (blocks_of(format.decode((codes, scale), x.shape, "float32").double(), block) - exact).abs()
    assert bool((error <= units[:, None] * (0.5 + 255 * 2.0**-22)).all())


@pytest.mark.parametrize(("policy", "dtype"), [(INT8, torch.float32), (EVERYWHERE, torch.bfloat16)])
def test_blocks_are_counted_from_each_parameters_first_element_and_their_bytes_are_exact(
    policy: eb.Policy, dtype: torch.dtype
) -> None:
    params = example(dtype)
    optimizer = eb.with_policy(eb.adamw(1e-2), policy)
    state = optimizer.init(params)
    for step in (1, 2, 3):
        params, state = optimizer.step(params, gradients(step, params), state)
    found: Any = next(one for one in state.inner.states if hasattr(one, "variance"))
    for name, p in params.items():
        assert [tuple(part.shape) for part in found.momentum[name]] == [tuple(p.shape), (-(-p.numel() // 32),)]
        assert found.momentum[name][0].dtype is torch.int8
        assert found.variance[name][0].dtype is torch.uint8
    table = optimizer.bytes_table(params)
    assert table["momentum"] == sum(part.nbytes for parts in found.momentum.values() for part in parts)
    assert table["variance"] == sum(part.nbytes for parts in found.variance.values() for part in parts)
    assert table.get("compensation", 0) == sum(part.nbytes for parts in state.extra.values() for part in parts)
    assert dict(bytes_of(Int8Blocks(), 33)) == {"codes": 33, "scale": 8}
    per_element = policy.bytes_table()
    assert per_element["momentum"] == 1 + 4 / 32


def test_a_parameter_is_stepped_as_it_is_alone() -> None:
    params = example()
    optimizer = eb.with_policy(eb.adamw(1e-2), INT8)
    state = optimizer.init(params)
    alone = {name: {name: p} for name, p in params.items()}
    states = {name: optimizer.init(one) for name, one in alone.items()}
    for step in (1, 2):
        grads = gradients(step, params)
        params, state = optimizer.step(params, grads, state)
        for name in params:
            alone[name], states[name] = optimizer.step(alone[name], {name: grads[name]}, states[name])
            assert_same_bits(alone[name][name], params[name], name)


def test_a_slot_of_squares_is_non_negative_only_if_every_declaration_says_so() -> None:
    assert eb.with_policy(eb.adam(1e-3), INT8).formats(example())[0].slot("variance") == Int8Blocks(32, "non-negative")
    assert eb.with_policy(eb.adam(1e-3), INT8).formats(example())[0].slot("momentum") == Int8Blocks(32, "signed")


@dataclass(frozen=True, slots=True)
class Wrong(Int8Blocks):
    """A format that stores something else than it says."""

    def encode(self, x: Tensor, key: eb.Key) -> tuple[Tensor, ...]:
        return super(Wrong, self).encode(x, key)[:1]


@dataclass(frozen=True, slots=True)
class TwoNames(Int8Blocks):
    def parts(self) -> tuple[eb.PartSpec, ...]:
        return eb.PartSpec("codes", torch.int8), eb.PartSpec("codes", torch.float32, 32)


@dataclass(frozen=True, slots=True)
class OtherBlocks(Int8Blocks):
    def for_slot(self, kind: eb.SlotKind, compute: Any) -> Int8Blocks:
        return Int8Blocks(32 if kind == "signed" else 64, kind)


@dataclass(frozen=True, slots=True)
class Float32Only(Int8Blocks):
    def objection(self, compute: Any) -> str | None:
        return None if compute == "float32" else "codes have no float64 to keep. Accepted is compute='float32'."


class Half:
    def encode(self) -> None: ...
    def decode(self) -> None: ...


class Unhashable(Int8Residual):
    __hash__: Any = None


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda: loose.Policy(momentum=Int8Residual()),
            TypeError,
            r"Policy.momentum: got Int8Residual\(block=32\); accepted are "
            r"Nearest, Stochastic, Kahan, Split, Blockwise, and formats of your own,"
            r" which subclass everybit.StateFormat. It has no for_slot: it is for parameters only",
        ),
        (lambda: loose.Policy(params=Int8Blocks()), TypeError, r"Policy.params: .*no for_params: it is for slots"),
        (lambda: loose.Policy(state=Int8Blocks), TypeError, r"Policy.state: got <class .*Did you mean Int8Blocks\(\)"),
        (lambda: loose.Policy(state=Half()), TypeError, r"Policy.state: .*It has no parts, resolution, objection"),
        (lambda: eb.Policy(params=Unhashable()), TypeError, r"Policy.params: .*cannot be hashed"),
        (lambda: loose.Policy(state=TwoNames()), ValueError, r"Policy.state: TwoNames.*each of a name of its own"),
        (
            lambda: loose.Policy(slots={"mean": OtherBlocks()}),
            ValueError,
            r"Policy.slots\['mean'\]: OtherBlocks.*blocks",
        ),
        (
            lambda: eb.Policy(compute="float64", params=eb.Nearest("float64"), variance=Float32Only()),
            ValueError,
            r"Policy.variance: got Float32Only.* with compute='float64'; codes have no float64",
        ),
        (lambda: eb.PartSpec("1", torch.int8), ValueError, r"PartSpec.name: got '1'; accepted is an identifier"),
        (lambda: eb.PartSpec("scale", torch.int8, 0), ValueError, r"PartSpec.block: got 0; accepted is"),
        (lambda: loose.PartSpec("scale", "int8"), TypeError, r"PartSpec.dtype: got 'int8'; accepted is"),
        (
            lambda: eb.with_policy(eb.adam(1e-3), eb.Policy(momentum=Wrong())).init(example()),
            ValueError,
            r"state.momentum\['matrix'\]: Wrong.*encode returned \[torch.int8 \(5, 13\)\].*"
            r"parts\(\) say, \[codes \(torch.int8 \(5, 13\)\), scale \(torch.float32 \(3,\)\)\]",
        ),
        (
            lambda: eb.with_policy(eb.adam(1e-3), eb.Policy(params=Int8Residual())).init(example()),
            ValueError,
            r"params\['matrix'\]: Policy.params: Int8Residual: got float32 parameters; accepted are bfloat16",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_state_with_blocks_of_another_size_is_refused() -> None:
    params = example()
    state = eb.with_policy(eb.adam(1e-2), INT8).init(params)
    other = eb.with_policy(eb.adam(1e-2), eb.Policy(momentum=Int8Blocks(16), variance=Int8Blocks()))
    with pytest.raises(ValueError, match=r"state.momentum\['matrix'\]: stored as .*scale \(torch.float32 \(5,\)\)"):
        other.step(params, gradients(1, params), state)
