"""Code for GPUs, made and counted without one: a step's code holds all laws, and each law finds the code that breaks it on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed; `make gpu-codegen` installs it, and runs these tests")

ROOT = Path(__file__).parents[2]
SAID = dict[str, list[str]]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A program of its own: what stands in for a GPU stays in a process."""
    command = [sys.executable, "-W", "ignore", "-m", *arguments]
    paths = [str(ROOT), str(ROOT / "core"), str(ROOT / "adapters")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def said() -> SAID:
    done = run("tests.gpu_codegen.broken_steps")
    assert done.returncode == 0, done.stderr[-2000:]
    found: SAID = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_step_as_it_is_breaks_no_law(said: SAID) -> None:
    assert said["whole"] == []


@pytest.mark.parametrize("architecture", ["sm_90", "gfx942"])
def test_contraction_is_caught(said: SAID, architecture: str) -> None:
    assert all("products and sums in one operation" in one for one in said[f"contracted, {architecture}"])
    assert said[f"contracted, {architecture}"]


def test_exact_divisions_and_roots_are_not_taken_for_contracted_ones(said: SAID) -> None:
    assert len(said["division and root"]) == 4
    assert all(one.endswith("[(0, 0)]") for one in said["division and root"])


def test_an_approximate_division_is_caught(said: SAID) -> None:
    (one,) = said["approximate"]
    assert "approximate divisions and roots: got 8" in one


def test_flushing_to_zero_is_caught(said: SAID) -> None:
    (one,) = said["flushing"]
    assert "flush subnormal numbers to zero" in one


def test_spilled_registers_are_caught(said: SAID) -> None:
    (one,) = said["spilled"]
    assert "spilled registers" in one


def test_launches_of_their_own_for_coefficients_are_caught(said: SAID) -> None:
    (one,) = said["launches"]
    assert one.startswith("launches: got ")


def test_an_eager_operator_between_kernels_is_caught(said: SAID) -> None:
    assert said["eager operators"] == ["eager operators: got everybit.materialize.default; accepted are none."]


def test_a_tensor_of_the_units_length_is_caught(said: SAID) -> None:
    (one,) = said["intermediates"]
    assert "(2512, )" in one


def test_a_value_that_the_host_reads_is_caught(said: SAID) -> None:
    assert said["read backs"] == ["values read by the host: got .item(); accepted are none."]


def test_a_cast_that_the_compiler_left_out_is_caught(said: SAID) -> None:
    assert said["cast folded"] == ["interpreted, against eager: the residual is zero."]
    assert said["cast kept"] == []


def test_bytes_that_no_format_needs_are_caught(said: SAID) -> None:
    assert said["bytes, once"] == []
    assert "got 8 loaded and 8 stored; the policy needs 8 and 4" in said["bytes, twice"][0]
    assert "the policy needs 10 and 8" in said["bytes of another policy"][0]


def test_access_element_by_element_is_caught(said: SAID) -> None:
    assert said["narrow"] == ["access to memory: got 4 bytes at a time; accepted are 8 and more."]


def test_a_users_step_is_two_launches_that_move_what_the_policy_says(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    done = run("gpu_codegen", "adamw under LEAN_BF16", "--processes", "1", "--out", str(out))
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]
    (result,) = json.loads(out.read_text())["results"]
    assert (result["launches"], result["eager"], result["broken"]) == (2, [], [])
    assert result["expected"] == {"loaded": 10.0, "stored": 8.0}
    assert set(result["counts"]) == {"sm_80", "sm_90", "sm_100", "gfx942"}
    for of_kernels in result["counts"].values():
        assert sum(one["loaded"] for one in of_kernels) == 10
        assert sum(one["stored"] for one in of_kernels) == 8


def test_an_exact_sum_is_one_kernel_without_scratch_that_reads_each_part_once() -> None:
    done = run("tests.gpu_codegen.sums")
    assert done.returncode == 0, done.stderr[-2000:]
    found: SAID = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 5
    assert {name: said for name, said in found.items() if said} == {}


@pytest.mark.slow
def test_steps_in_blocks_are_three_launches_without_tensors_of_the_units_length() -> None:
    """One preset; ``make gpu-codegen`` takes all of them with ``python -m gpu_codegen.blocks``."""
    done = run("gpu_codegen.blocks", "LEAN_8BIT")
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"LEAN_8BIT": [3, []]}
