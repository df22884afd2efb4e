"""A compiled step is one vectorised loop, with nothing in it that belongs before it; and it is slow rather than wrong without that."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit.base.rounding import nan_mask, to_nearest, with_nan_of
from everybit_torch import AdamW
from everybit_torch.torch_internals import compiler as torch_compiler
from everybit_torch.torch_internals import cpp_vectors
from tests.support.float_patterns import borders, from_bits, spread
from tests.support.small_models import give_gradients, same_bits, values

torch_cpp: Any = import_module("torch._inductor.codegen.cpp")
inductor_config: Any = import_module("torch._inductor.config")
run_and_get_code: Any = import_module("torch._inductor.utils").run_and_get_code

needs_vectors = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this processor has no vector instructions torch knows"
)


def stepped(name: str, *, compile: bool = True) -> list[Tensor]:
    """Weights and state after two steps of one long tensor."""
    generator = torch.Generator().manual_seed(5)
    dtype = torch.float32 if name == "FP32" else torch.bfloat16
    parameter = nn.Parameter(torch.randn(1003, generator=generator).to(dtype))
    optimizer = AdamW([parameter], lr=1e-3, betas=(0.9, 0.95), policy=eb.policies.PRESETS[name], compile=compile)
    for _ in range(2):
        parameter.grad = torch.randn(1003, generator=generator).to(dtype)
        optimizer.step()
    return [parameter.detach(), *optimizer.state[parameter].values()]


def generated(name: str) -> tuple[list[Tensor], str]:
    """What compiled steps give, and their code."""
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False):
        results, (code, *others) = run_and_get_code(lambda: stepped(name))
    assert not others
    return results, str(code)


@needs_vectors
@pytest.mark.parametrize(
    "name",
    [
        "LEAN_BF16",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("FP32", "MIXED_BF16", "EXACT_BF16", "KAHAN_BF16", "TIGHT_BF16", "FLOOR_BF16")
        ),
    ],
)
def test_steps_are_compiled_to_one_loop_over_registers_with_eagers_bits(name: str) -> None:
    results, code = generated(name)
    assert same_bits(results, stepped(name, compile=False))
    assert "at::vec::" in code
    # What torch's own generator does with a reinterpretation: one element after the other, through memory.
    assert "tmpbuf" not in code
    # One pass, of any length: a single loop over the elements beside what is computed from scalars.
    (start,) = [match.start() for match in re.finditer(r"for \(int64_t place = 0; place < whole;", code)]
    assert "const int64_t length = ks0;" in code
    assert "1003" not in code[start:].split("async_compile.wait")[0]
    # All threads share it, though 1,003 elements alone would not be worth it: the code is for any length.
    assert "#pragma omp for" in code[:start].rstrip().splitlines()[-1]
    # Coefficients are computed before it.
    loop = code[start:]
    loop = loop[: loop.index("''')")]
    assert "double" not in loop
    assert "pow" not in loop


@pytest.mark.parametrize(
    "name",
    [
        "EXACT_BF16",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("TIGHT_BF16", "LEAN_BF16", "KAHAN_BF16")),
    ],
)
@pytest.mark.exhaustive
@pytest.mark.slow
def test_without_vectors_for_bits_the_bits_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    expected = stepped(name, compile=False)
    monkeypatch.setattr(cpp_vectors, "_arrange", list)
    with inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False):
        assert same_bits(stepped(name), expected)


@pytest.mark.slow
def test_without_scalars_before_the_loop_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    expected = stepped("FP32", compile=False)
    monkeypatch.setattr(torch_compiler, "_scalars_first", dict)
    with inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False):
        assert same_bits(stepped("FP32"), expected)


@needs_vectors
def test_where_numbers_are_nan_vectors_have_eagers_bits() -> None:
    """Of all kinds of NaN, in vectors and in the scalars behind them."""
    x = torch.cat([borders(), spread(1003, seed=1), from_bits([0x7F800001, 0xFFFFFFFF] * 9)])

    def masked(x: Tensor) -> list[Tensor]:
        return [nan_mask(x), with_nan_of(x, x.view(torch.int32).clone()), to_nearest(x, "bfloat16").view(torch.int16)]

    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False), cpp_vectors.vector_bits():
        assert same_bits(torch.compile(masked, fullgraph=True)(x), masked(x))
    torch._dynamo.reset()


@needs_vectors
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_number_of_16_bits_is_widened_exactly(dtype: torch.dtype) -> None:
    """In vectors and in the scalars behind them, by code that has no loop over single elements."""
    x = torch.arange(-(2**15), 2**15 + 7).to(torch.int16).view(dtype)

    def wide(x: Tensor) -> Tensor:
        return x.to(torch.float64) + 0.0

    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False), cpp_vectors.vector_bits():
        found, (code,) = run_and_get_code(torch.compile(wide, fullgraph=True), x)
    torch._dynamo.reset()
    assert "at::vec::convert<float" in code
    assert torch.equal(found.nan_to_num(1.5e300), x.double().nan_to_num(1.5e300))


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
    with cpp_vectors.vector_bits() as arranged:
        assert arranged
        assert all(one is not other for one, other in zip(seen(), before, strict=True))
    assert seen() == before
    with pytest.raises(ZeroDivisionError), cpp_vectors.vector_bits():
        _ = 1 / 0
    assert seen() == before


@pytest.mark.parametrize("missing", ["to_dtype_bitcast", "arange", "_get_vec_load_line", "_get_num_vectors"])
def test_a_generator_that_has_changed_is_left_alone(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = torch_cpp.CppVecOverrides if hasattr(torch_cpp.CppVecOverrides, missing) else torch_cpp.CppVecKernel
    for one in owner.__mro__:
        if missing in vars(one):
            monkeypatch.delattr(one, missing)
    before = [torch_cpp.CppVecOverrides.to_dtype, list(torch_cpp.VECTORIZABLE_DTYPES)]
    with cpp_vectors.vector_bits() as arranged:
        assert not arranged
        assert [torch_cpp.CppVecOverrides.to_dtype, list(torch_cpp.VECTORIZABLE_DTYPES)] == before


def forget_vectors() -> None:
    """Forget which vector instructions were found, by torch and by us."""
    isa: Any = import_module("torch._inductor.cpu_vec_isa")
    torch_compiler.trust_in_vectors.cache_clear()
    isa.valid_vec_isa_list.cache_clear()
    for one in isa.supported_vec_isa_list:
        for method in ("__bool__", "is_avx512_bf16_supported"):
            for owner in type(one).__mro__:
                getattr(vars(owner).get(method), "cache_clear", lambda: None)()
        vars(one).pop("_is_avx512_bf16_supported", None)


def vectors() -> list[tuple[str, str]]:
    """The vector instructions that torch uses, best first, with their flags."""
    isa: Any = import_module("torch._inductor.cpu_vec_isa")
    return [(str(one), one.build_arch_flags()) for one in isa.valid_vec_isa_list()]


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch is left to find out")
def test_vectors_are_believed_where_torch_would_find_them() -> None:
    """torch's own answer takes seconds; ours is the same list, with the same flags."""
    forget_vectors()
    with inductor_config.patch({"cpp.vec_isa_ok": None}):
        expected = vectors()
    forget_vectors()
    believed = torch_compiler.trust_in_vectors()
    with inductor_config.patch(believed):
        assert vectors() == expected
    assert expected


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch is left to find out")
def test_no_program_is_compiled_to_try_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    isa: Any = import_module("torch._inductor.cpu_vec_isa")
    tried: list[str] = []

    def check_build(self: Any, code: str) -> bool:
        tried.append(str(self))
        return True

    monkeypatch.setattr(isa.VecISA, "check_build", check_build)
    forget_vectors()
    with inductor_config.patch(torch_compiler.trust_in_vectors()):
        assert vectors()
    assert tried == []
    assert isa.VecISA.check_build is check_build
    forget_vectors()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch is left to find out")
def test_a_torch_that_tries_vectors_otherwise_finds_them_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    isa: Any = import_module("torch._inductor.cpu_vec_isa")
    forget_vectors()
    monkeypatch.delattr(isa.VecISA, "check_build")
    assert torch_compiler.trust_in_vectors() == {}
    forget_vectors()


def test_vectors_are_not_believed_if_the_compiler_does_not_know_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-mavx512*|*-mavx2*) exit 1;; esac\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(import_module("torch._inductor.cpp_builder"), "get_cpp_compiler", lambda: str(compiler))
    torch_compiler.trust_in_vectors.cache_clear()
    assert torch_compiler.trust_in_vectors() == {}
    compiler.write_text("#!/bin/sh\n")
    torch_compiler.trust_in_vectors.cache_clear()
    with inductor_config.patch({"cpp.vec_isa_ok": False}):
        assert torch_compiler.trust_in_vectors() == {}  # the user said so
    torch_compiler.trust_in_vectors.cache_clear()


@pytest.mark.exhaustive
def test_a_first_step_inside_of_a_users_compiled_function() -> None:
    p, q = (nn.Parameter(torch.ones(64)) for _ in range(2))
    optimizer, other = AdamW([p], lr=1e-2, compile=True), AdamW([q], lr=1e-2, compile=False)
    compiled = torch.compile(lambda: optimizer.step())
    for _ in range(3):
        p.grad = q.grad = torch.full((64,), 0.5)
        compiled()
        other.step()
    assert torch.equal(p, q)
    assert float(optimizer.state[p]["step"]) == 3.0


@pytest.mark.slow
def test_steps_that_a_user_compiles_from_the_first_on_alternate_with_others() -> None:
    """State that begins inside of the user's compiled code is stepped outside of it, with the same bits."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(5, 3).bfloat16()
        optimizer = AdamW(model.parameters(), lr=1e-2, policy="LEAN_BF16", compile=False)
        step: Any = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for number in range(4):
            give_gradients(model, number)
            (step if number % 2 == 0 else optimizer.step)()
        results.append([*values(model), *optimizer.export_fp32()[0]])
    assert same_bits(*results)
    torch._dynamo.reset()
