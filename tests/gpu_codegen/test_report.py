"""The tool that compiles for GPUs without one: what it writes, and what it says where it cannot work. Needs no Triton."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_codegen.__main__ import chosen, main
from gpu_codegen.capture import Wrapper
from gpu_codegen.cases import cases
from gpu_codegen.expected import Traffic, traffic
from gpu_codegen.laws import broken_between_sums
from gpu_codegen.report import BEGIN, END, table, write_into


def test_without_triton_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")  # older ones are refused before
    assert main([]) == 2
    assert "triton: not installed." in (said := capsys.readouterr().err)
    assert "pip install --constraint constraints.txt triton" in said


def test_a_torch_that_it_was_not_written_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    assert main([]) == 2
    assert "torch: got 2.10.1+cpu; accepted is 2.11 or newer" in capsys.readouterr().err


def test_every_policy_is_compiled_with_four_optimizers_and_every_optimizer_once() -> None:
    names = [case.name for case in cases()]
    assert len(names) == len(set(names))
    from everybit.testing.own_transforms import REGISTRY
    from gpu_codegen.cases import without_blocks

    assert {one for one in names if ":" not in one} == {
        f"{optimizer} under {policy}"
        for policy in without_blocks()
        for optimizer in ("adamw", "lion", "sgd with momentum", "clip and adamw")
    }
    assert {one for one in names if "registry" in one} == {f"registry: {name} under LEAN_BF16" for name in REGISTRY}


def test_a_pattern_stands_for_all_cases_that_it_fits() -> None:
    assert chosen(["registry: sgd [dn]*"]) == [
        f"registry: sgd {name} under LEAN_BF16" for name in ("dampening", "nesterov")
    ]
    assert len(chosen([])) == len(cases())
    with pytest.raises(ValueError, match="cases: got adamw under LEAN; accepted are adamw under FP64, "):
        chosen(["adamw under LEAN"])


# Parameter, parts beside it, two moments; and the gradient, which is only loaded.
@pytest.mark.parametrize(
    ("name", "loaded", "stored"),
    [
        ("adamw under FP64", 32, 24),
        ("adamw under FP32", 16, 12),
        ("adamw under EXACT_BF16", 2 + 2 + 4 + 4 + 2, 2 + 2 + 4 + 4),
        ("adamw under LEAN_BF16", 10, 8),
        ("adamw under TIGHT_BF16", 9, 7),
        ("adamw under FLOOR_BF16", 8, 6),
        ("lion under LEAN_BF16", 2 + 2 + 2 + 2, 2 + 2 + 2),
        ("registry: sgd under LEAN_BF16", 2 + 2 + 2, 2 + 2),
        # A stepper's main gradients are float32, and its main weights lie beside the model's.
        ("stepper: adamw under LEAN_BF16", 10 + 2, 8),
        ("stepper: lion under EXACT_BF16", 2 + 2 + 4 + 4, 2 + 2 + 4),
        ("stepper: adamw under MixedPrecision", 2 + 4 + 4 + 4 + 4, 2 + 4 + 4 + 4),
        ("stepper: adamw under MixedPrecision, float32", 16, 12),
        # Steps with sums between their kernels, of whole tensors and for numbers of each parameter.
        ("registry: soap under LEAN_BF16", 0, 0),
        ("registry: lamb under LEAN_BF16", 0, 0),
    ],
)
def test_bytes_that_a_policy_needs_are_its_parts_and_the_gradient(name: str, loaded: float, stored: float) -> None:
    (case,) = (one for one in cases() if one.name == name)
    assert traffic(case) == Traffic(loaded, stored)


def test_the_table_is_written_between_the_markers_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_into(page, "new")
    assert page.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="between which tables are written"):
        write_into(page, "new")


def test_a_row_says_what_a_step_moves_and_lists_what_differs_between_architectures() -> None:
    coefficients: dict[str, Any] = dict.fromkeys(
        ("contracted", "approximate", "flushing", "spills", "loaded", "stored"), 0
    )
    coefficients |= {"registers": 99, "widest": 8}
    moving = coefficients | {"registers": 56, "widest": 16, "loaded": 10.0, "stored": 8.0}
    result = {
        "optimizer": "adamw", "policy": "LEAN_BF16", "launches": 2, "eager": [], "broken": [],
        "expected": {"loaded": 10.0, "stored": 8.0},
        "counts": {"sm_90": [coefficients, moving], "gfx942": [coefficients, moving | {"registers": 33, "contracted": 1}]},
    }  # fmt: skip
    assert table([result]).splitlines()[-1] == (
        "| adamw, `LEAN_BF16` | 2 | 0 | 10 | 8 | 10 + 8 | 0 / 1 | 0 | 0 | 0 | 16 | 56 / 33 |"
    )


def test_between_kernels_with_sums_only_operators_of_everybit_run() -> None:
    def code(*lines: str) -> Wrapper:
        return Wrapper("\n    ".join(["def call(args):", *lines]))

    own, others = "torch.ops.everybit.matrix_products.default(a, b)", "extern_kernels.mm(a, b, out=c)"
    assert list(broken_between_sums(code(own), {})) == []
    assert list(broken_between_sums(code(own, others), {})) == [
        "eager operators: got mm; accepted are everybit's own, and aten.sort.stable."
    ]
    assert list(broken_between_sums(code("x = a.item()"), {})) == [
        "values read by the host: got .item(); accepted are none."
    ]
