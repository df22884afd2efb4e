"""Eighty-eight seeded faults: one-line changes of the library, each with the tests that have to fail on it.

    python -m tests.support.broken                # all: about ten minutes on two cores
    python -m tests.support.broken kahan visits   # those whose file or tests have one of these words in their names

Each fault runs in a copy of the packages of its own. A fault that its tests pass "lives": the tests have lost power.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("core/everybit", "adapters/everybit_torch", "adapters/everybit_cli")


@dataclass(frozen=True, slots=True)
class Fault:
    """A line of the library, and what stands in its place.

    Attributes:
        file: Below the repository.
        right: A text that is in the file once.
        wrong: What replaces it.
        law: Tests that fail then: a file below ``tests``, and what their names contain, after two colons.
    """

    file: str
    right: str
    wrong: str
    law: str

    def __str__(self) -> str:
        return f"{self.file}: {self.wrong.strip()}"

    def broken(self) -> str:
        """The file with the fault."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        assert text.count(self.right) == 1, f"{self.file}: has {self.right!r} {text.count(self.right)} times"
        return text.replace(self.right, self.wrong)


def _of(folder: str, *faults: tuple[str, str, str, str]) -> Iterator[Fault]:
    for file, right, wrong, law in faults:
        yield Fault(f"{folder}/{file}", right, wrong, law)


FAULTS: tuple[Fault, ...] = (
    *_of(
        "core/everybit/base",
        ("rounding.py", "((1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1))", "(1 << (dropped - 1))", "core/test_rounding.py"),
        ("rounding.py", "bits & ((1 << DROPPED_BITS[dtype]) - 1)", "bits & ((1 << DROPPED_BITS[dtype]) - 2)", "core/test_rounding.py"),
        ("rounding.py", "bits.bitwise_or_(nan_mask(x)) if may_have_nan(x) else bits", "bits", "core/test_formats.py"),
        ("random_bits.py", "upper.mul_(_THIRD_OF_UPPER).add_(word, alpha=_THIRD_OF_LOWER)", "upper", "core/test_random_bits.py"),
        ("random_bits.py", "_mix(word ^ _add(high, 1))", "_mix(word ^ high)", "core/test_random_bits.py"),
        ("barriers.py", "return _root_of_one(x)", "return x.sqrt()", "core/test_rounding.py::one_number"),
        ("barriers.py", "x.double().rsqrt_().reciprocal_().to(x.dtype)", "x.rsqrt().reciprocal_()", "core/test_rounding.py"),
    ),
    *_of(
        "core/everybit/formats",
        ("kahan.py", "torch.where(tie & finite, neighbour, value), residual", "value, residual", "core/test_formats.py"),
        ("kahan.py", "some & (residual.abs() <= reach)", "some", "core/test_formats.py"),
        ("split.py", "kept + 0x8000", "kept + 0x7FFF", "core/test_formats.py"),
        ("split.py", "return (bits + (1 << (count - 1))) & -(1 << count)", "return bits & -(1 << count)", "core/test_formats.py"),
        ("blockwise.py", "(right < left) | ((right == left) & ((low & 1) == 1))", "right <= left", "core/test_blockwise.py"),
        ("blockwise.py", "index = torch.where(x > 0, index.clamp(min=1), index)", "pass", "core/test_blockwise.py"),
        ("blockwise.py", "pairs[:, 0] << 4 | pairs[:, 1]", "pairs[:, 1] << 4 | pairs[:, 0]", "core/test_blockwise.py"),
        ("main_copy.py", "torch.where(rounded == value, main, value.to(main.dtype))", "main", "core/test_formats.py"),
    ),
    *_of(
        "core/everybit",
        ("stepping/layout.py", '"momentum": 0, "variance": 1, "params": 2', '"momentum": 0, "variance": 0, "params": 0', "core/test_random_bits.py"),
        ("policies/checks.py", "MARGIN = 8.0", "MARGIN = 0.0", "core/test_checks.py"),
        ("stepping/metrics.py", "(moving & (x == y)).sum().double()", "(x == y).sum().double()", "core/test_metrics.py"),
        ("transforms/adam.py", "unbias_square = (\n            materialize(1 / bias_correction(b1, step)),\n            materialize(1 / bias_correction(b2, step)),", "unbias_square = (\n            materialize(1 / bias_correction(b1, step)),\n            materialize(1 / bias_correction(b1, step)),", "torch/test_parity.py"),
        ("transforms/momentum.py", "lambda g, m: g + decay * m, updates, momentum), TraceState", "lambda g, m: g + m, updates, momentum), TraceState", "torch/test_parity.py"),
        ("transforms/trust_ratio.py", "counts = (weight > 0) & (move > 0)", "counts = move > 0", "core/test_more_optimizers.py"),
        ("transforms/averages.py", "along = materialize(rate * (b1 * (1 - share) - 1))", "along = materialize(rate * (b1 - 1))", "core/test_more_optimizers.py"),
        ("linalg/orthogonalization.py", "return (matrix.mT if tall else matrix)", "return matrix", "core/test_muon.py"),
        ("combinators/skipping.py", "apply = bad == 0", "apply = bad >= 0", "core/test_combinators.py"),
        ("combinators/skipping.py", "apply = square < self.limit * self.limit", "apply = square < self.limit", "core/test_small_transforms.py"),
        ("protocol/requests.py", 'axis.sum(partial) if result.kind == "sum" else axis.max(partial)', "axis.sum(partial)", "core/test_combinators.py"),
    ),
    *_of(
        "core/everybit/linalg",
        ("views.py", "whole = whole.transpose(-3, -2)", "pass", "core/test_muon.py::view"),
        ("views.py", "torch.split(each, list(self.rows), dim=-2)", "torch.split(each, list(self.rows)[::-1], dim=-2)", "core/test_muon.py::view"),
        ("orthogonalization.py", '"bfloat16": (1, 2)', '"bfloat16": (2, 3)', "core/test_muon.py::greatest"),
        ("orthogonalization.py", "r = product(r, z, r, a, 1.0)", "r = product(r, z, r, 1.0, a)", "core/test_muon.py::interval"),
    ),
    *_of(
        "adapters/everybit_torch/optim/state_dicts",
        ("full_precision.py", "write(segment.state.extra, state.extra)\n    return params[0]", "return params[0]", "sharded/test_scaled_rows.py::optimizer"),
    ),
    *_of(
        "adapters/everybit_torch/segments",
        ("segment.py", "first = self.first + start if isinstance(self.first, int)", "first = self.first if isinstance(self.first, int)", "segments/test_segments.py"),
        ("segment.py", "self.first.size if isinstance(self.first, Blocks) else self.stored.block", "self.stored.block", "sharded/test_placements.py::bits"),
        ("host_state.py", "held.copy_(new, non_blocking=True)", "pass", "torch/test_offloaded_state.py"),
        ("host_state.py", "write(segment.shared(), staged.shared())", "pass", "torch/test_offloaded_state.py"),
        ("host_state.py", "streams.come_after(stepped, self._device)", "pass", "torch/test_offloaded_state.py::order"),
        ("host_state.py", "slot.free = streams.mark(self._device)  # until", "pass  # until", "torch/test_offloaded_state.py::order"),
        ("segment.py", "self.mask.bitwise_or_(changed.to(torch.int8).neg_())", "self.mask.copy_(changed)", "torch/test_changes.py"),
        ("segment.py", "write(self.shared(), part.shared())", "pass", "segments/test_segments.py"),
        ("segment.py", "if not torch.compiler.is_compiling():  # one of a trace", "if True:  # one of a trace", "torch/test_compiling.py::user_compiles"),
        ("totals.py", 'torch.maximum(value, added)', "value + added", "torch/test_totals.py"),
        ("totals.py", "work[number].grad if work[number].counts else work[number].grad[:0]", "work[number].grad", "sharded/test_placements.py"),
        ("totals.py", "[1][id(part)] = part", "[1][object()] = part", "torch/test_totals.py"),
        ("short.py", "self._starts.append(-(-end // block) * block)", "self._starts.append(end)", "torch/test_blocks_of_elements.py"),
        ("contiguous.py", "has_indices = optimizer.draws_bits or block > 1", "has_indices = False", "sharded/test_random_programs.py"),
        ("steps.py", "if self._steps.follow(arguments):\n            self._kept.clear()", "self._steps.follow(arguments)", "torch/test_kernel_calls.py"),
        ("steps.py", "fits = same_objects(kept.totals, totals) and", "fits =", "torch/test_kernel_calls.py::totals"),
        ("steps.py", "self._kept.clear()  # kernels", "pass  # kernels", "torch/test_kernel_calls.py::captured"),
    ),
    *_of(
        "adapters/everybit_torch",
        ("placements.py", "place * math.prod(self.whole[dimension + 1 :])", "place * math.prod(self.shape[dimension + 1 :])", "sharded/test_changes.py"),
        ("placements.py", "Blocks(first + rows.long(), None, size)", "Blocks(rows.long(), None, size)", "sharded/test_placements.py::bits"),
    ),
    *_of(
        "adapters/everybit_torch/collectives",
        ("reduction.py", "sum.add_(other.copy_(main[low:high]))", "pass", "sharded/test_reduction.py"),
        ("reduction.py", "if scale != 1.0:\n            sum.mul_(scale)", "if False:\n            sum.mul_(scale)", "sharded/test_reduction.py"),
        ("reduction.py", "torch.float64 if parts > 1 or main is torch.float64 else torch.float32", "torch.float32", "sharded/test_reduction.py"),
        ("reduction.py", "2.0 ** -math.ceil(math.log2(ranks)) if half else 1.0", "1.0", "sharded/test_reduction.py"),
    ),
    *_of(
        "adapters/everybit_torch/flat",
        ("buffers.py", "sums[gap].zero_()", "pass", "sharded/test_random_programs.py"),
        ("buffers.py", 'mode: Mode = "add" if number in self._arrived else "copy"', 'mode: Mode = "copy"', "sharded/test_random_programs.py"),
        ("places.py", "offset = min(self.offset + start - self.start, self.offset + self.numel)", "offset = 0", "flat/test_layout.py"),
        ("cycle.py", "scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)", "scale = max_norm / (norm + 1e-6)", "sharded/test_gradient_norm.py"),
        ("cycle.py", 'self.completeness.mark_incomplete("a step ended in an error after weights had been changed")', "pass", "sharded/test_recovery.py"),
        ("shard_gradient.py", "if _of(gradients).nonfinite:", "if False:", "sharded/test_everyday.py"),
    ),
    *_of(
        "adapters/everybit_torch/fsdp2",
        ("main_gradients.py", 'return "copy" if self._is_fresh else "add"', 'return "copy"', "fsdp2/test_contract.py"),
        ("main_gradients.py", "self._cursor, self._is_fresh, self._waits, self._output = 0, False, False, None", "self._cursor, self._is_fresh, self._waits, self._output = 0, True, False, None", "fsdp2/test_contract.py"),
        ("exact_reduce_scatter.py", "float(communicator.size) if op == dist.ReduceOp.AVG else None", "None", "sharded/test_fsdp2.py"),
    ),
    *_of(
        "adapters/everybit_torch/optim",
        ("torch_optimizer.py", "self._settle_parameters(groups)\n        self.own.relocate(groups)\n        self.own.take_back()", "self._settle_parameters(groups)\n        self.own.relocate(groups)", "torch/test_assigned_state.py"),
        ("watching.py", "return parameter in self._known and self._known[parameter] == self._place(parameter)", "return parameter in self._known", "torch/test_changes.py"),
        ("visits.py", "one.watched.note(held, rows)", "pass", "sharded/test_changes.py"),
        ("gradient_release.py", "self._norm = self._joint_norm(self._squares)", "self._norm = None", "torch/test_gradient_release.py"),
        ("gradient_release.py", "if len(waiting.arrived) == waiting.expected:", "if waiting.arrived:", "torch/test_gradient_release.py"),
        ("visits.py", "edges[rank + 1] - edges[rank]", "edges[1] - edges[0]", "fsdp2/test_visits.py"),
        ("visits.py", "(-costs[number], number)", "(number, -costs[number])", "fsdp2/test_cost_of_visits.py"),
        ("stepping.py", "parameters.come_apart(mixed)", "pass", "torch/test_random_lives.py"),
        ("common_numbers.py", "x.copy_(found[one.group.source, name])", "pass", "torch/test_common_numbers.py"),
        ("state_dicts/loading.py", "return name if plain in own else plain", "return plain", "torch/test_loading.py"),
    ),
    *_of(
        "adapters/everybit_torch/checkpoint",
        ("parts.py", "low, _ = entry.range(place.offset, place.offset + place.numel)", "low = place.offset", "sharded/test_block_formats.py"),
        ("inventory.py", 'return record.get("checksum") == _seal(', 'return True or record.get("checksum") == _seal(', "checkpoint/test_damaged_checkpoints.py"),
        ("inventory.py", 'if found["checksum"] != _whole_seal(', 'if False and found["checksum"] != _whole_seal(', "checkpoint/test_damaged_checkpoints.py"),
        ("folders.py", "kept = whole[len(whole) - keep :] if keep else []", "kept = whole[:keep]", "checkpoint/test_sharded_checkpoints.py"),
        ("writing.py", "zlib.crc32(data, self.checksum)", "zlib.crc32(data)", "checkpoint/test_sharded_checkpoints.py"),
    ),
    *_of(
        "adapters/everybit_torch",
        ("torch_internals/kernel_calls.py", "self.queue == _Queue.present(self.stream_of)", "True", "torch/test_kernel_calls.py::gpu"),
        ("torch_internals/kernel_calls.py", "(_is_aligned(varying) and", "(True and", "torch/test_kernel_calls.py::gpu"),
        ("torch_internals/kernel_calls.py", " if queues <= {queue} else None", "", "torch/test_kernel_calls.py::gpu"),
        ("torch_internals/kernel_lists.py", "- tl.load(row).to(tl.int32) * {programs}", "- tl.load(row).to(tl.int32)", "torch/test_kernel_calls.py::segments"),
        ("torch_internals/kernel_lists.py", "if addresses != self._known:", "if not self._known:", "torch/test_kernel_calls.py::segments"),
        ("torch_internals/cpp_statements.py", 'f"logical({self.shifted[left][0]}, {self.shifted[left][1]})"', 'f"{self.shifted[left][0]} >> {self.shifted[left][1]}"', "torch/test_loops.py"),
        ("torch_internals/cpp_loops.py", 'place < {row["width"]} * (x0 + 1);', 'place < {row["width"]} * x0 + 16;', "torch/test_blocks_of_elements.py::compiled_gives"),
        ("compiled/variants.py", "all(map(Variable.holds, self._variables))", "True", "torch/test_direct_calls.py::users"),
        ("compiled/variants.py", "if one is not None and one.key == keys[kind]", "if one is not None", "torch/test_compiled_hyperparameters.py"),
        ("planning/allocations.py", "weakref.finalize(storage, self.change, -storage.nbytes())", "pass", "planning"),
    ),
)  # fmt: skip


def failed(fault: Fault) -> bool:
    """Whether the tests of a fault fail on it, in a copy of the packages."""
    path, _, names = fault.law.partition("::")
    with tempfile.TemporaryDirectory() as folder:
        for package in PACKAGES:
            shutil.copytree(ROOT / package, Path(folder, package), ignore=shutil.ignore_patterns("__pycache__"))
        Path(folder, fault.file).write_text(fault.broken(), encoding="utf-8")
        paths = os.pathsep.join([f"{folder}/core", f"{folder}/adapters"])
        # Code that was compiled for other sources is not found again.
        variables = os.environ | {
            "PYTHONPATH": paths,
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "OMP_NUM_THREADS": "1",
        }
        chosen = ["-k", names] if names else []
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not exhaustive",
            *chosen,
            f"tests/{path}",
        ]
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{fault}: pytest ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-500:]}")
    return done.returncode == 1


def alive(faults: Iterable[Fault]) -> list[Fault]:
    """The faults whose tests pass. Each is told of as soon as its tests end."""
    faults, found = list(faults), []
    with ThreadPoolExecutor(2) as several:
        for number, (fault, killed) in enumerate(zip(faults, several.map(failed, faults), strict=True), start=1):
            print(f"{number}/{len(faults)} {'killed' if killed else 'LIVES'}: {fault.law}: {fault}", flush=True)  # noqa: T201
            if not killed:
                found.append(fault)
    return found


if __name__ == "__main__":
    wanted = [one for one in FAULTS if not sys.argv[1:] or any(word in one.file + one.law for word in sys.argv[1:])]
    living = alive(wanted)
    print(f"{len(wanted) - len(living)} of {len(wanted)} killed")  # noqa: T201
    sys.exit(1 if living else 0)
