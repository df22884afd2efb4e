"""A GPU that is not there: what torch's compiler asks of a device before it writes code for one, answered without a driver.

The compiler asks for the properties of a device and for streams, and makes code from tensors that have no memory. It never launches
anything here. All that is replaced inside of torch and Triton is replaced in this module, for the length of a ``with`` block.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SUPPORTED = ((2, 11), (2, 16))
"""The torch releases that this was written for: from the first, to below the second."""


@dataclass(frozen=True, slots=True)
class Device:
    """What the compiler is told of a GPU.

    Attributes:
        name: For messages.
        capability: Major and minor compute capability.
        multiprocessors: How many.
    """

    name: str = "NVIDIA H100"
    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 132

    def properties(self) -> Any:
        """What ``torch.cuda.get_device_properties`` returns, as far as the compiler reads it."""
        major, minor = self.capability
        return SimpleNamespace(
            name=self.name, major=major, minor=minor, multi_processor_count=self.multiprocessors, warp_size=32,
            regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
            total_memory=80 << 30, L2_cache_size=50 << 20, shared_memory_per_block=48 << 10,
            shared_memory_per_block_optin=227 << 10, shared_memory_per_multiprocessor=228 << 10, gcnArchName="",
        )  # fmt: skip


class UnsupportedError(RuntimeError):
    """This torch, or this machine, is not one that code for a GPU can be made with here."""


def require_triton() -> None:
    """Refuse to go on without Triton, and say what to install.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        import triton  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            "triton: not installed. Code for GPUs is made with torch's CPU build and Triton from PyPI, of the version that belongs to torch"
            f" {torch.__version__}. `make gpu-codegen` installs it, and so does: pip install --constraint constraints.txt triton"
        ) from None


def require_torch() -> None:
    """Refuse a torch that this was not written for.

    Raises:
        UnsupportedError: The message has the versions.
    """
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not SUPPORTED[0] <= version < SUPPORTED[1]:
        low, high = (".".join(map(str, one)) for one in SUPPORTED)
        raise UnsupportedError(f"torch: got {torch.__version__}; accepted is {low} or newer, below {high}.")


@contextmanager
def fake_gpu(device: Device = Device()) -> Iterator[None]:
    """Within it torch's compiler takes tensors without memory for tensors on a CUDA device.

    Raises:
        UnsupportedError: A torch or Triton that it does not know, or none.
    """
    require_torch()
    require_triton()
    _let_operators_run()
    with ExitStack() as stack:
        for owner, answers in _answers(device):
            for name, answer in answers.items():
                stack.enter_context(mock.patch.object(owner, name, answer, create=True))
        stack.enter_context(_triton_target(device))
        yield


@cache
def _let_operators_run() -> None:
    """Give torch a device guard for CUDA that does nothing, which every operator on a tensor without memory asks for as well."""
    if torch.version.cuda is not None:
        torch._C._ensureCUDADeviceGuardSet()
        return
    from torch._inductor.cpp_builder import get_cpp_compiler

    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "device_guard.so"
        flags = ["-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10"]
        source = Path(__file__).with_name("device_guard.cpp")
        subprocess.run([get_cpp_compiler(), str(source), *flags, "-o", str(library)], check=True)
        ctypes.CDLL(str(library))


def _answers(device: Device) -> Iterator[tuple[Any, dict[str, Callable[..., Any]]]]:
    """What is replaced, and by what: functions of the device, of its interface to Dynamo, and those that would start a driver."""
    import torch._inductor.fx_passes.joint_graph as joint_graph
    import torch._inductor.fx_passes.post_grad as post_grad
    import torch._subclasses.fake_tensor as fake_tensor
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime import triton_helpers

    properties = device.properties()
    stream = SimpleNamespace(cuda_stream=0, stream_id=0, device_index=0, device=torch.device("cuda", 0))

    def always(value: object) -> Callable[..., Any]:
        return lambda *_args, **_kwargs: value

    present = {
        "is_available": always(True),
        "device_count": always(1),
        "current_device": always(0),
        "get_device_properties": always(properties),
        "is_bf16_supported": always(True),
        "current_stream": always(stream),
        "synchronize": always(None),
    }
    exchanging = {"set_device": always(None), "exchange_device": always(0), "maybe_exchange_device": always(0)}
    yield (
        torch.cuda,
        {
            **present,
            "get_device_capability": always(device.capability),
            "is_initialized": always(True),
            "is_current_stream_capturing": always(False),
            "get_rng_state": always(torch.zeros(16, dtype=torch.uint8)),
            "set_rng_state": always(None),
            "_lazy_init": always(None),
            "_exchange_device": always(0),
            "_maybe_exchange_device": always(0),
        },
    )
    yield torch.cuda.graphs, {"is_current_stream_capturing": always(False)}
    yield torch.accelerator, {"is_available": always(False)}
    yield (
        torch._C,
        {
            "_cuda_getDevice": always(0),
            "_cuda_getDeviceCount": always(1),
            "_cuda_isCurrentStreamCapturing": always(False),
            "_cuda_getCurrentRawStream": always(0),
            "_accelerator_getDeviceIndex": always(0),
        },
    )
    major, minor = device.capability
    of_interface = {
        **present,
        **exchanging,
        "get_compute_capability": always(10 * major + minor),
        "get_raw_stream": always(0),
        "raise_if_triton_unavailable": always(None),
        "is_triton_capable": always(True),
    }
    yield CudaInterface, {name: staticmethod(answer) for name, answer in of_interface.items()}
    of_worker = {
        "get_device_properties": always(properties), "current_device": always(0), "set_device": always(None)
    }  # fmt: skip
    yield CudaInterface.Worker, {name: staticmethod(answer) for name, answer in of_worker.items()}
    yield triton_helpers, {"set_driver_to_gpu": always(None)}
    yield fake_tensor, {"init_gpu_context": always(None)}
    # These run matrix products on the device to look for patterns in graphs, of which a step has none.
    yield joint_graph, {"lazy_init": always(None)}
    yield joint_graph.UniformValueConstantFolder, {"_deduce_value": _deduced_on_the_host(joint_graph)}
    yield post_grad, {"lazy_init": always(None)}


class _OnTheHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes on the CPU what is asked for on CUDA."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def _deduced_on_the_host(joint_graph: Any) -> Callable[..., Any]:
    """Constants of a graph, which the compiler computes with one element each: elsewhere on the device that the graph is for."""
    on_the_device = joint_graph.UniformValueConstantFolder._deduce_value

    def deduce(self: Any, node: Any) -> Any:
        with _OnTheHost():  # type: ignore[no-untyped-call]
            return on_the_device(self, node)

    return deduce


@contextmanager
def _triton_target(device: Device) -> Iterator[None]:
    import triton
    from triton.backends.compiler import GPUTarget

    major, minor = device.capability

    class Driver:
        """A driver that knows its target, and launches nothing."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 10 * major + minor, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:  # noqa: ARG002  # called by name
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_benchmarker(self) -> Callable[..., float]:
            return lambda *_args, **_kwargs: 0.0

    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(Driver())
    try:
        yield
    finally:
        triton.runtime.driver._active = before
