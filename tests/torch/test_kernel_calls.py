"""The kernels of compiled steps are called by themselves after the first steps: with eager's bits, and autograd's knowledge."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import AdamW, TorchOptimizer
from everybit_torch.segments import steps
from everybit_torch.torch_internals.kernel_calls import SCRATCH, CompiledGraph, KernelCalls, loaded_modules
from everybit_torch.torch_internals.kernel_lists import launches
from tests.support.small_models import same_bits

SIZES = [(30, 10), (7,), (400,), (16,)]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of arguments of each call of a graph through torch's layers."""
    torch._dynamo.reset()
    seen: list[int] = []
    run = CompiledGraph.__call__

    def noted(self: CompiledGraph, *args: Any) -> Any:
        seen.append(len(args))
        return run(self, *args)

    monkeypatch.setattr(CompiledGraph, "__call__", noted)
    return seen


def life(
    policy: eb.Policy,
    *,
    compile: bool,
    each_step: Callable[[TorchOptimizer, int], None],
    kind: Callable[..., TorchOptimizer] = AdamW,
) -> list[Tensor]:
    """Everything that is stored after six steps of some parameters, with another rate at each."""
    generator = torch.Generator().manual_seed(3)
    dtype = torch.float32 if policy is eb.policies.FP32 else torch.bfloat16
    parameters = [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]
    optimizer = kind(parameters, lr=1e-2, policy=policy, compile=compile)
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        each_step(optimizer, step)
        optimizer.step()
    return [x for p in parameters for x in (p.detach(), *optimizer.state[p].values())]


def other_memory(optimizer: TorchOptimizer, step: int) -> None:
    """As programs do that move state and weights away between steps."""
    if step == 4:
        for parameter, state in optimizer.state.items():
            for x in (parameter, *state.values()):
                x.data = x.detach().clone()


def other_code(optimizer: TorchOptimizer, step: int) -> None:
    optimizer.param_groups[0]["maximize"] = step >= 4


def nothing(_optimizer: TorchOptimizer, _step: int) -> None:
    pass


@pytest.mark.parametrize("alone", [True, pytest.param(False, marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("each_step", [pytest.param(nothing, marks=pytest.mark.exhaustive), other_memory, other_code])
@pytest.mark.parametrize("policy", ["FP32", pytest.param("TIGHT_BF16", marks=pytest.mark.slow)])
def test_kernels_called_by_themselves_give_the_bits_of_uncompiled_steps(
    policy: str, each_step: Callable[[TorchOptimizer, int], None], alone: bool, runs: list[int]
) -> None:
    given = eb.policies.PRESETS[policy]
    counts: list[int] = []

    def counting(optimizer: TorchOptimizer, step: int) -> None:
        counts.append(len(runs))
        each_step(optimizer, step)

    found = life(given, compile=True, each_step=counting)
    assert same_bits(found, life(given, compile=False, each_step=each_step))
    # The code is made for the first segment, and called once more for it. Memory that is followed is of another tensor: once more.
    segments = len(SIZES) if alone else 1
    more: dict[Any, int] = {other_memory: segments if alone else 0, other_code: segments + 1}
    assert counts[2] == counts[4] == segments + 1
    assert len(runs) == segments + 1 + more.get(each_step, 0)


def clipped(learning_rate: float) -> eb.Transform[Any]:
    limits = eb.clip_by_global_norm(3.0), eb.clip_by_global_norm(0.01)
    return eb.chain(limits[0], eb.scale_by_adam(), eb.scale_by_learning_rate(learning_rate), limits[1])


def no_first_gradient(optimizer: TorchOptimizer, step: int) -> None:
    """Totals then begin at another parameter."""
    if step == 4:
        optimizer.param_groups[0]["params"][0].grad = None


@pytest.mark.parametrize("alone", [True], indirect=True)
@pytest.mark.parametrize("policy", ["FP32", pytest.param("LEAN_BF16", marks=pytest.mark.slow)])
def test_steps_with_totals_call_kernels_by_themselves(policy: str, alone: bool, runs: list[int]) -> None:
    """Totals lie in the same memory at each step. A contribution to the second one is found by a graph that returns it."""
    given = eb.policies.PRESETS[policy]
    kind = partial(TorchOptimizer, factory=clipped)
    by_themselves: list[KernelCalls] = []
    prepared = KernelCalls.prepared

    def noted(self: KernelCalls, varying: Tensor) -> Any:
        by_themselves.append(self)
        return prepared(self, varying)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelCalls, "prepared", noted)
        found = life(given, compile=True, each_step=no_first_gradient, kind=kind)
    # The first step learns the code, the second the inputs of the first segment. Without the first gradient totals have other memory.
    segments = len(SIZES)
    assert len(by_themselves) == (segments - 1) + segments + segments + 0 + segments
    assert same_bits(found, life(given, compile=False, each_step=no_first_gradient, kind=kind))


@pytest.mark.slow
def test_a_number_that_is_a_constant_of_the_code_is_followed() -> None:
    """A whole number that float64 does not hold is part of the code: other code, for the same state."""

    def weights(compile: bool) -> list[Tensor]:
        parameter = nn.Parameter(torch.linspace(-1.0, 1.0, 400))
        optimizer = AdamW([parameter], lr=1e-2, compile=compile)
        for step in range(7):
            optimizer.param_groups[0]["eps"] = 1e-8 if step < 4 else 2**60 + 1
            parameter.grad = torch.cos(torch.arange(400.0) + step)
            optimizer.step()
        return [parameter.detach()]

    assert same_bits(weights(True), weights(False))


@pytest.mark.parametrize("alone", [True], indirect=True)
def test_autograd_knows_what_the_kernels_write_and_no_gradient_is_kept(alone: bool, runs: list[int]) -> None:
    parameter = nn.Parameter(torch.ones(50))
    optimizer = AdamW([parameter], compile=True)
    for _ in range(3):
        loss, before = (parameter**2).sum(), parameter._version
        parameter.grad = torch.ones(50)
        held = weakref.ref(parameter.grad)
        optimizer.step()
        assert parameter._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # type: ignore[no-untyped-call]
        parameter.grad = None
        assert held() is None
    assert len(runs) == 2, "the last step called kernels"


def _empty(size: tuple[int], stride: tuple[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def graph(body: str, *, modules: int = 1, **names: object) -> CompiledGraph:
    """A graph as if Inductor had generated this function of ``x`` and ``y``."""
    module = ModuleType("generated")
    module.__dict__.update(
        torch=torch, cpp_fused_0=print, empty_strided_cpu=_empty, reinterpret_tensor=torch.as_strided
    )
    module.__dict__.update(names)
    exec(f"def call(args):\n    x, y = args\n    args.clear()\n    {body}", module.__dict__)
    return CompiledGraph(module.call, [module] * modules)


X, Y = torch.arange(4.0), torch.ones(4)


@pytest.mark.parametrize(
    "body",
    [
        "torch.mm(x, y)",
        "x.copy_(y)",
        "cpp_fused_0(x, y); return (x,)",
        "cpp_fused_0(x, empty_strided_cpu((2000,), (1,), torch.float32)); return ()",
        "cpp_fused_0(reinterpret_tensor(x, (2,), (1,), 1), y); return ()",
        "return ()",
    ],
    ids=["other kernels", "methods", "results", "long buffers", "part of an argument", "no kernel"],
)
def test_a_graph_that_does_more_than_to_call_kernels_is_called_as_it_is(body: str) -> None:
    assert graph(body).kernels_for([X, Y], Y, [X]) is None


def test_kernels_are_called_with_the_arguments_themselves_and_the_present_gradient() -> None:
    assert SCRATCH >= 16
    seen: list[tuple[Any, ...]] = []
    body = (
        "b = empty_strided_cpu((4,), (1,), torch.float32);"
        " cpp_fused_0(reinterpret_tensor(x, (2, 2), (2, 1)), b, y, 4); cpp_fused_0(y, b); return ()"
    )
    given = graph(body, cpp_fused_0=lambda *args: seen.append(args))
    calls = given.kernels_for([X, Y], Y, [X])
    assert calls is not None
    assert not seen
    other, version = torch.zeros(4), X._version
    calls(other)
    (first, scratch, gradient, four), (again, same) = seen
    assert first is X
    assert gradient is again is other
    assert four == 4
    assert scratch is same
    assert X._version == version + 1
    assert graph(body, modules=2).kernels_for([X, Y], Y, [X]) is None
    assert given.kernels_for([X, X], X, [X]) is None, "one memory for two arguments"
    assert given.kernels_for([X, Y], Y, [X]) is None, "what was refused is not looked at at every step"


@dataclass
class Gpu:
    """What torch says of a GPU, and the launcher of a kernel for it."""

    device: int = 0
    stream: int = 7
    is_capturing: bool = False
    launchers: list[Any] = field(default_factory=list)
    launched: list[tuple[Any, ...]] = field(default_factory=list)

    def run(self, *args: Any, stream: int) -> None:
        self.launched.append((*args, stream))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    answers: dict[str, Callable[..., Any]] = {
        "_DeviceGuard": lambda _: nullcontext(), "set_device": lambda _: None, "current_device": lambda: made.device,
        "is_current_stream_capturing": lambda: made.is_capturing,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return made


def test_kernels_for_a_gpu_are_queued_where_they_were_found_and_nowhere_else(gpu: Gpu) -> None:
    """As Inductor writes it; on another stream, under a capture, or for a tensor that is not aligned, torch calls the code."""
    body = """
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        x = copy_if_misaligned(x)
        b = empty_strided_cuda((4,), (1,), torch.float32)
        raw_stream0 = get_raw_stream(0)
        triton_poi_fused_0.run(x, b, y, 4, stream=raw_stream0)
    return ()"""
    names: dict[str, Any] = {
        "copy_if_misaligned": lambda x: x,
        "empty_strided_cuda": _empty,
        "get_raw_stream": lambda _: gpu.stream,
    }
    given = graph(body, triton_poi_fused_0=gpu, **names)
    calls = given.kernels_for([X, Y], Y, [X])
    assert calls is not None
    assert calls.accepts(Y)
    calls(other := torch.zeros(4))
    ((first, _, gradient, four, stream),) = gpu.launched
    assert (first is X, gradient is other, four, stream) == (True, True, 4, 7)
    apart = torch.zeros(5)[1:]
    assert not calls.accepts(apart)
    assert given.kernels_for([X, apart], apart, [X]) is None
    for name, value in (("is_capturing", True), ("stream", 8), ("device", 1)):
        setattr(gpu, name, value)
        assert not calls.accepts(Y)
        found = given.kernels_for([X, Y], Y, [X])
        assert found is None if name != "stream" else found is not None and found.accepts(Y), (
            "of a stream their own are found"
        )
        gpu.device, gpu.stream, gpu.is_capturing = 0, 7, False
    assert given.kernels_for([X, Y], Y, [X]) is not None


KERNEL = """
@triton_heuristics.pointwise(
    size_hints={'x': 4096}, filename=__file__,
    triton_meta={'signature': {'in_ptr0': '*fp32', 'in_out_ptr0': '*bf16', 'xnumel': 'i32', 'XBLOCK': 'constexpr'}, 'device': 1,
                 'constants': {}, 'configs': [{(0,): [['tt.divisibility', 16]]}]},
    inductor_meta={'grid_type': 'Grid1D', 'kernel_name': 'triton_poi_fused_0', 'mutated_arg_names': ['in_out_ptr0']},
)
@triton.jit
def triton_poi_fused_0(in_ptr0, in_out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    tl.store(in_out_ptr0 + xindex, tl.load(in_ptr0 + xindex, xindex < xnumel), xindex < xnumel)
"""


@pytest.mark.parametrize("grid", ["Grid1D", "Grid2D"])
def test_segments_of_one_graph_are_stepped_by_one_launch_of_each_kernel(
    grid: str, gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a list's kernel reads; ``make gpu-codegen`` runs such kernels. One over two dimensions is launched for each segment."""
    from torch._inductor.async_compile import AsyncCompile

    written: list[tuple[str, str]] = []

    def compiled(_: AsyncCompile, name: str, source: str, device_str: str) -> Gpu:
        written.append((name, source))
        return launched_together

    monkeypatch.setattr(AsyncCompile, "triton", compiled)
    launched_together = Gpu()
    gpu.launchers = [SimpleNamespace(config=SimpleNamespace(kwargs={"XBLOCK": 1024}, num_warps=4, num_stages=1))]
    (tmp_path / "generated.py").write_text(
        f"triton_poi_fused_0 = async_compile.triton('triton_poi_fused_0', {KERNEL.replace('Grid1D', grid)!r}, device_str='cuda')"
    )
    names: dict[str, Any] = {"get_raw_stream": lambda _: gpu.stream, "__file__": str(tmp_path / "generated.py")}
    given = graph(
        "triton_poi_fused_0.run(y, x, x.size(0), stream=get_raw_stream(0)); return ()", triton_poi_fused_0=gpu, **names
    )
    segments = [torch.zeros(length) for length in (4097, 16)]
    found = (given.kernels_for([x, y := torch.ones(len(x))], y, [x]) for x in segments)
    calls = [call for call in found if call is not None]
    grads = [torch.ones(len(x)) for x in segments]

    def launch(*chosen: int) -> None:
        for kernel, arguments in launches([calls[one] for one in chosen], [grads[one] for one in chosen]):
            kernel(*arguments)

    launch(0, 1)
    if grid == "Grid2D":
        assert [(given[1] is x, *given[2:]) for given, x in zip(gpu.launched, segments, strict=True)] == [
            (True, 4097, 7),
            (True, 16, 7),
        ]
        return
    ((rows, owners, addresses, elements, stream),) = launched_together.launched
    assert rows.tolist() == [[0, 0, segments[0].data_ptr(), 4097], [2, 0, segments[1].data_ptr(), 16]]
    assert owners.tolist() == [0, 0, 1]
    assert (elements, stream) == (3 * 4096, 7)
    assert addresses.tolist() == [x.data_ptr() for x in grads]
    grads[1] = torch.ones(16)
    launch(0, 1)
    assert addresses.tolist() == [x.data_ptr() for x in grads]
    launch(1)
    assert len(gpu.launched) == 1, "one segment is launched by its own kernels"
    ((name, source),) = written
    options = "{'XBLOCK': 1024, 'num_warps': 4, 'num_stages': 1}"
    assert f"@triton_heuristics.fixed_config({options}, filename=__file__," in source
    assert "'mutated_arg_names': []" in source, "a kernel that is measured would step"
    lines = source[source.index(f"def {name}(") :].splitlines()
    assert [one.strip() for one in lines[:9]] == [
        "def listed_triton_poi_fused_0(rows, owners, addresses, xnumel, XBLOCK: tl.constexpr):",
        "program = tl.program_id(0)",
        "segment = tl.load(owners + program // 4)",
        "row = rows + segment * 4",
        "program = program - tl.load(row).to(tl.int32) * 4",
        "in_ptr0 = tl.multiple_of(tl.load(addresses + segment).to(tl.pointer_type(tl.float32)), 16)",
        "in_out_ptr0 = tl.load(row + 2).to(tl.pointer_type(tl.bfloat16))",
        "xnumel = tl.load(row + 3).to(tl.int32)",
        "xindex = program * XBLOCK + tl.arange(0, XBLOCK)[:]",
    ]


def test_numbers_that_a_captured_step_reads_are_not_those_of_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay what they are, and kernels that read them are not called any more."""

    def weights(compile: bool) -> list[Tensor]:
        parameter = nn.Parameter(torch.linspace(-1.0, 1.0, 400))
        optimizer = AdamW([parameter], lr=1e-2, compile=compile)
        for step in range(6):
            optimizer.param_groups[0]["lr"] = 1e-2 if step < 4 else 1e-3
            parameter.grad = torch.cos(torch.arange(400.0) + step)
            optimizer.prepare()
            with monkeypatch.context() as captured:
                if compile and step == 3:
                    captured.setattr(steps, "is_capturing", lambda: True)
                    captured.setattr(KernelCalls, "accepts", lambda *_: False)
                optimizer.step()
        return [parameter.detach()]

    assert same_bits(weights(True), weights(False))


def test_without_the_place_where_modules_are_loaded_none_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codecache import PyCodeCache

    before = PyCodeCache.__dict__["load_by_key_path"]
    with loaded_modules() as found:
        PyCodeCache.load("value = 3")
    assert [one.value for one in found] == [3]
    assert PyCodeCache.__dict__["load_by_key_path"] is before
    monkeypatch.delattr(PyCodeCache, "load_by_key_path")
    with loaded_modules() as found:
        assert found == []
