"""Captured code run on the CPU: its kernels by Triton's interpreter, which computes with NumPy, one operation after the other.

This shows that a kernel computes what it should: its indices and masks, the order of its operations, what it reads and where it writes.
It cannot show what an assembler makes of a product and a sum; that is counted in :mod:`gpu_codegen.counting`. Triton's interpreter cuts
float32 off where it converts to bfloat16, so a kernel that leaves that rounding to a conversion has other bits here: kernels whose formats
round bits are not concerned. Functions of a library are those of torch on the CPU.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gpu_codegen.capture import Wrapper
from gpu_codegen.fake_gpu import fake_gpu

BLOCK = 512
"""Elements of one program."""

ROWS = 4
"""Of one program that finds something of each row."""

_NUMBER = itertools.count()


def run(wrapper: Wrapper, arguments: Sequence[Tensor | int]) -> None:
    """Run captured code on tensors of the CPU, in place."""
    with loaded(wrapper) as module:
        module.call(list(arguments))


@contextmanager
def loaded(wrapper: Wrapper) -> Iterator[ModuleType]:
    """Captured code as a module, whose ``call`` runs on tensors of the CPU, in place."""
    from torch._inductor.async_compile import AsyncCompile

    with (
        fake_gpu(),
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(torch.cuda, "_DeviceGuard", return_value=nullcontext()),
        mock.patch.object(torch.cuda, "set_device"),
        _interpreter(Path(folder)) as load,
        mock.patch.object(AsyncCompile, "triton", lambda _, name, source, **_rest: _Launcher(load, name, source)),
    ):
        module = load(wrapper.source)
        module.empty_strided_cuda = module.empty_strided_cpu
        module.get_raw_stream = lambda _index: 0
        yield module


class _Launcher:
    """Takes the place of a kernel's launcher in a wrapper."""

    def __init__(self, load: Callable[[str], ModuleType], name: str, source: str) -> None:
        self._function: Any = getattr(load(source), name)
        self._in_rows = name.startswith("triton_per_")
        listed = re.search(r"fixed_config\(\{'XBLOCK': (\d+)", source)
        self._block = int(listed[1]) if listed else ROWS if self._in_rows else None

    def run(self, *arguments: Any, stream: int) -> None:  # noqa: ARG002  # called by name
        elements = arguments[-2] if self._in_rows else arguments[-1]
        block = self._block or (BLOCK if elements > 1 else 1)
        config = SimpleNamespace(kwargs={"XBLOCK": block}, num_warps=4, num_stages=1)
        self.launchers = [SimpleNamespace(config=config)]
        self._function[(math.ceil(elements / block),)](*arguments, XBLOCK=block)


@contextmanager
def _interpreter(folder: Path) -> Iterator[Any]:
    """Load sources whose kernels are interpreted."""
    import triton.language
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from triton import knobs
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def load(source: str) -> ModuleType:
        path = folder / f"interpreted_{next(_NUMBER)}.py"
        path.write_text(source, encoding="utf-8")
        module = _imported(path)
        module.__dict__.update({"libdevice": _LIBRARY} if "libdevice" in module.__dict__ else {})
        module.__dict__.update({"triton_helpers": helpers} if "triton_helpers" in module.__dict__ else {})
        return module

    def undecorated(*_args: Any, **_kwargs: Any) -> Any:
        return lambda function: function

    with knobs.runtime.scope(), ExitStack() as stack:
        knobs.runtime.interpret = True
        for language in (triton.language, triton.language.standard):
            for name, function in list(vars(language).items()):
                if isinstance(function, JITFunction):
                    stack.enter_context(mock.patch.object(language, name, InterpretedFunction(function.fn)))
        # The compiler's own helpers again, interpreted as well.
        helpers = _imported(Path(str(triton_helpers.__file__)), package=f"{triton_helpers.__package__}.")
        for kind in ("pointwise", "persistent_reduction", "fixed_config"):
            stack.enter_context(mock.patch.object(triton_heuristics, kind, undecorated))
        yield load


def _imported(path: Path, package: str = "") -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{package}{path.stem}_{next(_NUMBER)}", path)
    if spec is None or spec.loader is None:
        raise ImportError(str(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Library:
    """Functions that a GPU has in a library, elsewhere torch's."""

    def __getattr__(self, name: str) -> Any:
        from triton.runtime.interpreter import TensorHandle

        def function(*arguments: Any) -> Any:
            import triton.language as tl

            handles = [one.handle.data if isinstance(one, tl.tensor) else one for one in arguments]
            # Number by number, as eager code computes its coefficients.
            values = [torch.as_tensor(one) for one in handles]
            values = list(torch.broadcast_tensors(*values))  # type: ignore[no-untyped-call]
            columns = [one.reshape(-1).unbind() for one in values]
            made = torch.stack([_OF_TORCH[name](*numbers) for numbers in zip(*columns, strict=True)]).reshape(
                values[0].shape
            )
            first: Any = next(one for one in arguments if isinstance(one, tl.tensor))
            return tl.tensor(TensorHandle(made.numpy(), first.dtype.scalar), first.type)

        return function


_OF_TORCH: dict[str, Callable[..., Tensor]] = {
    "pow": torch.pow,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log2": torch.log2,
    "floor": torch.floor,
    "cos": torch.cos,
    "sqrt": torch.sqrt,
    "round": torch.round,
    "nearbyint": torch.round,
}
_LIBRARY = _Library()
