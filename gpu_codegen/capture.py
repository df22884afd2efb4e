"""The code that torch's compiler writes for a step: the wrapper that allocates and launches, and the kernels that it launches."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from everybit_torch.torch_internals.kernel_lists import kernel_sources


@dataclass(frozen=True, slots=True)
class Kernel:
    """One Triton kernel.

    Attributes:
        name: Of its function.
        source: A module that defines it.
    """

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class Wrapper:
    """The code around the kernels.

    Attributes:
        source: A module whose ``call`` runs the step.
    """

    source: str

    @property
    def body(self) -> str:
        """The lines that run at each call, without comments."""
        _, _, code = self.source.partition("def call(")
        lines = itertools.takewhile(lambda line: not line or line[0] in " #", code.splitlines()[1:])
        return "\n".join(line for line in lines if not line.lstrip().startswith("#"))

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels that it defines, in the order of their definition."""
        return tuple(Kernel(name, source) for name, source in kernel_sources(self.source))

    @property
    def launches(self) -> tuple[str, ...]:
        """The names of the kernels that a call launches, in order."""
        return tuple(re.findall(r"(\w+)\.run\(", self.body))

    @property
    def eager(self) -> tuple[str, ...]:
        """Operators of torch that a call runs beside its kernels."""
        return tuple(re.findall(r"(?:torch\.ops|aten|extern_kernels)\.([\w.]+)\(", self.body))

    @property
    def reads_back(self) -> tuple[str, ...]:
        """Expressions by which a call waits for a value of the device."""
        return tuple(re.findall(r"\.item\(\)|\.cpu\(\)|\.tolist\(\)|synchronize\(\)", self.body))

    @property
    def allocations(self) -> tuple[str, ...]:
        """The shapes of the tensors that a call allocates, as written in its code."""
        return tuple(re.findall(r"empty_strided\w*\(\((.*?)\), \(", self.body))


class Module:
    """A compiled module that was captured: it runs nothing, and remembers what it was called with.

    Attributes:
        wrapper: Its code.
        arguments: Of its first call.
    """

    def __init__(self, wrapper: Wrapper) -> None:
        self.wrapper = wrapper
        self.arguments: list[Any] = []

    def call(self, arguments: list[Any]) -> tuple[()]:
        """Take the arguments of a call, as compiled code does."""
        self.arguments = self.arguments or list(arguments)
        arguments.clear()
        return ()


@contextmanager
def captured() -> Iterator[list[Module]]:
    """Within it the compiler's code is kept and not run: what is compiled does nothing."""
    import torch._inductor.config as inductor_config
    from torch._inductor.graph import GraphLowering

    found: list[Module] = []

    def compile_to_module(self: Any) -> Module:
        wrapper, _ = self.codegen()
        found.append(Module(Wrapper(wrapper.value)))
        return found[-1]

    # What runs nothing is not to be kept in torch's caches.
    without_caches = inductor_config.patch(force_disable_caches=True)
    with without_caches, mock.patch.object(GraphLowering, "compile_to_module", compile_to_module):
        yield found
