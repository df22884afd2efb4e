"""A compiled step is one vectorised loop, with nothing in it that belongs before it; and it is slow rather than wrong without that."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest
import torch
from small_models import same_bits
from torch import Tensor, nn

import everybit as eb
from everybit_torch import AdamW, vectorized

torch_cpp: Any = import_module("torch._inductor.codegen.cpp")
inductor_config: Any = import_module("torch._inductor.config")

needs_vectors = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this processor has no vector instructions torch knows"
)


def one_step(name: str) -> list[Tensor]:
    """Weights after a compiled step of one long tensor."""
    generator = torch.Generator().manual_seed(5)
    dtype = torch.float32 if name == "FP32" else torch.bfloat16
    parameter = nn.Parameter(torch.randn(1003, generator=generator).to(dtype))
    parameter.grad = torch.randn(1003, generator=generator).to(dtype)
    optimizer = AdamW([parameter], lr=1e-3, betas=(0.9, 0.95), policy=eb.policies.PRESETS[name], compile=True)
    optimizer.step()
    return [parameter.detach(), *optimizer.state[parameter].values()]


def generated(name: str) -> str:
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False):
        _, (code, *others) = run_and_get_code(lambda: one_step(name))
    assert not others
    return str(code)


@needs_vectors
@pytest.mark.parametrize("name", ["EXACT_BF16", "LEAN_BF16", "KAHAN_BF16", "TIGHT_BF16", "FLOOR_BF16"])
def test_bits_are_handled_in_registers(name: str) -> None:
    code = generated(name)
    assert "at::vec::" in code
    # What torch's own generator does with a reinterpretation: one element after the other, through memory.
    assert "tmpbuf" not in code
    # One pass: a single loop over the elements beside what is computed from scalars.
    assert len(re.findall(r"for\(int64_t x0.*x0<static_cast<int64_t>\(1003L\)", code)) == 1


@needs_vectors
def test_coefficients_are_computed_before_the_loop() -> None:
    code = generated("FP32")
    loop = code[code.index("x0<static_cast<int64_t>(1003L)") :]
    loop = loop[: loop.index("''')")]
    assert "double" not in loop
    assert "pow" not in loop


@pytest.mark.parametrize("name", ["LEAN_BF16", "KAHAN_BF16", "TIGHT_BF16"])
def test_without_vectors_for_bits_the_bits_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    with_vectors = one_step(name)
    torch._dynamo.reset()
    monkeypatch.setattr(vectorized, "_arrange", list)
    with inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False):
        assert same_bits(one_step(name), with_vectors)


def seen() -> list[object]:
    names = ("arange", "_get_vec_load_line", "_get_store_line")
    return [
        torch_cpp.CppVecOverrides.to_dtype_bitcast,
        torch_cpp.CppVecOverrides.to_dtype,
        *[getattr(torch_cpp.CppVecKernel, name) for name in names],
        list(torch_cpp.VECTORIZABLE_DTYPES),
    ]


def test_torch_is_as_it_was_afterwards() -> None:
    before = seen()
    with vectorized.vector_bits() as arranged:
        assert arranged
        assert all(one is not other for one, other in zip(seen(), before, strict=True))
    assert seen() == before
    with pytest.raises(ZeroDivisionError), vectorized.vector_bits():
        _ = 1 / 0
    assert seen() == before


@pytest.mark.parametrize("missing", ["to_dtype_bitcast", "arange", "_get_vec_load_line", "_get_num_vectors"])
def test_a_generator_that_has_changed_is_left_alone(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = torch_cpp.CppVecOverrides if hasattr(torch_cpp.CppVecOverrides, missing) else torch_cpp.CppVecKernel
    for one in owner.__mro__:
        if missing in vars(one):
            monkeypatch.delattr(one, missing)
    before = [torch_cpp.CppVecOverrides.to_dtype, list(torch_cpp.VECTORIZABLE_DTYPES)]
    with vectorized.vector_bits() as arranged:
        assert not arranged
        assert [torch_cpp.CppVecOverrides.to_dtype, list(torch_cpp.VECTORIZABLE_DTYPES)] == before
