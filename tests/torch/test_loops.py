"""Loops of compiled steps in the compiler's own vector types have uncompiled bits: every policy, length and kind of number."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import everybit as eb
from everybit.policies import PolicyName
from everybit_torch.segments import Segment, Steps
from everybit_torch.torch_internals import cpp_loops, cpp_statements

LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 100, 255, 1000, 4099, 70_001, 131_072)
SPECIAL = (
    0.0,
    -0.0,
    float("inf"),
    -float("inf"),
    float("nan"),
    1e-45,
    -1e-40,
    1.1754944e-38,
    3.4e38,
    -3.4e38,
    1.0,
    65504.0,
    2.0**-24,
)
OTHERS: tuple[PolicyName, ...] = (
    "FP32",
    "MIXED_BF16",
    "EXACT_BF16",
    "KAHAN_BF16",
    "TIGHT_BF16",
    "FLOOR_BF16",
    "PURE_BF16",
    "LEAN_8BIT",
    "LEAN_4BIT",
)
# Every day, tests/torch/test_compiling.py compares one length.
POLICIES = [
    pytest.param("LEAN_BF16", marks=pytest.mark.slow),
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS),
]


def numbers(length: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers of many magnitudes, with special ones in between."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, generator=generator) * 2.0 ** torch.randint(-30, 10, (length,), generator=generator)
    where = torch.arange(0, length, 5)
    x[where] = torch.tensor(SPECIAL)[(where + seed) % len(SPECIAL)]
    return x.to(dtype)


def noting(told: list[bool]) -> Callable[[str], str]:
    """The function that writes loops anew; it also notes of each whether it did."""
    function = cpp_loops.rewritten

    def noted(source: str) -> str:
        found = function(source)
        if "#pragma omp for" in source:
            told.append(found != source)
        return found

    return noted


@pytest.fixture
def rewritten(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether the loops that are compiled were written anew; torch's cache of code is not read."""
    told: list[bool] = []
    monkeypatch.setattr(cpp_loops, "rewritten", noting(told))
    torch._dynamo.reset()
    config: Any = import_module("torch._inductor.config")
    with config.patch(fx_graph_cache=False, fx_graph_remote_cache=False):
        yield told


def factory(learning_rate: float) -> eb.Transform[Any]:
    return eb.adamw(learning_rate, weight_decay=0.1)


def steps(policy: PolicyName, *, compile: bool, lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    """Weights and state after three steps of vectors of all lengths, by one code."""
    dtype = torch.float32 if policy == "FP32" else torch.bfloat16
    optimizer = eb.with_policy(factory(1e-2), policy, seed=5, unsafe="allow")
    own = Steps(factory, eb.policies.PRESETS[policy], seed=5, compile=compile)
    own.follow({"learning_rate": 1e-2})
    held: list[Tensor] = []
    for length in lengths:
        segment = Segment.new(optimizer, numbers(length, length, dtype), 1000 * length)
        for step in range(3):
            own.step(segment, numbers(length, 1000 * step + length, dtype))
        held += [segment.tensor, *(x for _, x in segment.entries())]
    return held


def bits(x: Tensor) -> Tensor:
    """Bits; all NaN are one."""
    if not x.is_floating_point():
        return x
    return torch.where(x.isnan(), torch.nan, x).reshape(-1).view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


def require_uncompiled_bits(policy: PolicyName, told: list[bool], lengths: Sequence[int] = LENGTHS) -> None:
    compiled, eager = (steps(policy, compile=compile, lengths=lengths) for compile in (True, False))
    assert told
    # Where blocks have a scale, some loops find maxima, or only move memory: these stay.
    assert any(told) if "BIT" in policy else all(told)
    for number, (x, y) in enumerate(zip(compiled, eager, strict=True)):
        assert torch.equal(bits(x), bits(y)), (number, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_loop_in_vector_types_has_the_bits_of_an_uncompiled_step(policy: PolicyName, rewritten: list[bool]) -> None:
    require_uncompiled_bits(policy, rewritten)


def whole(learning_rate: float) -> eb.Transform[Any]:
    return eb.chain(eb.centralize(), eb.adamw(learning_rate))


@pytest.mark.slow
def test_so_has_a_loop_over_a_length_that_is_a_number(rewritten: list[bool]) -> None:
    """Of tensors that must stay whole code is made for each shape."""
    found = []
    optimizer = eb.with_policy(whole(1e-2), "LEAN_BF16")
    for compile in (True, False):
        own = Steps(whole, eb.policies.LEAN_BF16, compile=compile)
        own.follow({"learning_rate": 1e-2})
        segment = Segment.new(optimizer, numbers(42, 1, torch.bfloat16).view(7, 6))
        for step in range(3):
            own.step(segment, torch.ones(7, 6, dtype=torch.bfloat16) * step)
        found.append([segment.tensor, *(x for _, x in segment.entries())])
    assert any(rewritten)
    assert all(map(torch.equal, *([bits(x) for x in one] for one in found)))


AVX2 = """
import sys
import torch._inductor.config as config
config.cpp.simdlen, config.fx_graph_cache = 256, False
from tests.torch.test_loops import LENGTHS, cpp_loops, noting, require_uncompiled_bits
told = []
cpp_loops.rewritten = noting(told)
for policy in sys.argv[1:]:
    told.clear()
    require_uncompiled_bits(policy, told, LENGTHS[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "policies",
    [
        ("LEAN_BF16", "TIGHT_BF16", "KAHAN_BF16", "EXACT_BF16"),
        pytest.param(("LEAN_8BIT",), marks=pytest.mark.exhaustive),
    ],
)
def test_vectors_of_avx2_have_the_same_bits(policies: tuple[PolicyName, ...]) -> None:
    """In a process of its own: torch finds out once which instructions there are. One element has a code without a loop."""
    environment = {**os.environ, "TORCHINDUCTOR_CPP_MARCH": "haswell", "ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-W", "ignore", "-c", AVX2, *policies]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_code_that_is_not_known_stays_as_it_is() -> None:
    assert cpp_loops.rewritten("int main() {}") == "int main() {}"
    with pytest.raises(Exception, match="tmp9"):
        cpp_statements.translated("auto tmp9 = at::vec::tan(tmp1);")


def test_cached_code_of_another_version_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of torch's cache has the files by which the code was written."""
    module: Any = import_module("everybit_torch.torch_internals.scalars_first")
    hashed: list[str] = []

    def noted(files: tuple[str, ...]) -> bytes:
        hashed.extend(files)
        return b""

    monkeypatch.setattr(module, "get_hash_for_files", noted)
    module.ScalarsFirst().uuid()
    assert {one.__file__ for one in (cpp_loops, cpp_statements, module, module.cpp_vectors)} <= set(hashed)


@pytest.mark.parametrize("is_place", [True, False])
def test_only_places_are_compared_with_a_limit_before_each_element_is(is_place: bool) -> None:
    vector = "at::vec::Vectorized<int32_t>"
    places = f"auto tmp2 = c10::convert<int32_t>(tmp1);\nauto tmp3 = {vector}(tmp2) + {vector}::arange(0, 1);\n"
    data = (
        "auto tmp2 = at::vec::Vectorized<float>::loadu(in_ptr1 + static_cast<int64_t>(x0), static_cast<int64_t>(16));\n"
        f"auto tmp3 = __builtin_bit_cast({vector}, tmp2);\n"
    )
    loop = cpp_statements.translated(
        "auto tmp0 = in_ptr0[static_cast<int64_t>(0L)];\nauto tmp1 = x0;\n"
        + (places if is_place else data)
        + f"auto tmp4 = {vector}(tmp0);\nauto tmp5 = at::vec::VecMask<int32_t,1>(tmp3 >= tmp4);\n"
        "auto tmp6 = decltype(tmp3)::blendv(tmp3, tmp4, tmp5.template cast<int32_t,1>());"
    )
    foreseen = "__builtin_expect(place + LANES <= tmp0, 1) ? tmp3 : " if is_place else ""
    assert (
        loop.body[-1] == f"Ints tmp6 = {foreseen}{'(' if is_place else ''}tmp5 ? tmp4 : tmp3{')' if is_place else ''};"
    )
