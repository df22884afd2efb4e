"""How a step is compiled: one pass over memory, with nothing in the loop that belongs before it.

Inductor inlines a 0-d expression such as ``1 - beta`` into the loop that uses it, float64 and all: a load, a subtraction and a conversion
per vector, and a power per element if the transform raises one. So before code is made, everything that is computed from scalars alone
is moved to the front, brought into the dtype in which tensors meet it, and packed into one small tensor per dtype, which the loop reads
ready-made. The same values, bit for bit: torch converts a 0-d operand to the dtype of the others before it computes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import torch
import torch._dynamo.exc
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from everybit_torch import vectorized

F = TypeVar("F", bound=Callable[..., Any])

aten = torch.ops.aten
# Operations on elements in which a 0-d operand takes on the dtype of the others.
_ON_ELEMENTS = {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Tensor, aten.maximum.default,
    aten.minimum.default, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor, aten.eq.Tensor, aten.ne.Tensor,
    aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor, aten.where.self,
}  # fmt: skip


def compile_step(function: F, began: Callable[[], None]) -> F:
    """``function`` compiled as a whole, with coefficients made before the loop and bits handled in vectors.

    ``began`` is called when compiled code begins to run: what is raised before that was raised by the compiler, and nothing was written.
    """

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        compiled = _backend(graph, inputs)

        def run(*args: Any) -> Any:
            began()
            return compiled(*args)

        return run

    return cast(F, torch.compile(function, fullgraph=True, backend=backend))


def reached_limit(error: BaseException) -> bool:
    """Whether the compiler refused to make one more graph of the same code."""
    return isinstance(error, getattr(torch._dynamo.exc, "FailOnRecompileLimitHit", ()))


def cause(error: BaseException) -> str:
    """Why something was not compiled, in one line."""
    inner = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(inner).splitlines()]
    # torch wraps what its code generator raises: "backend='...' raised:" says nothing yet.
    text = next((line for line in lines if line and not line.endswith("raised:")), "")
    return f"{type(inner).__name__}: {text}" if text else type(inner).__name__


def can_compile(device: torch.device) -> bool:
    """Whether steps on a device can be compiled; warns, once, if they cannot for want of a C++ compiler."""
    if device.type != "cpu" or (error := _cpp_compiler_error()) is None:
        return True
    _warn_of_missing_compiler(error)
    return False


def has_compiler(device: torch.device) -> bool:
    """Whether torch compiles for a device, and what it needs for that is installed; without a word if not."""
    if device.type == "cpu":
        return _cpp_compiler_error() is None
    return device.type in ("cuda", "xpu") and find_spec("triton") is not None


@cache
def _cpp_compiler_error() -> str | None:
    """Why there is no C++ compiler; None if there is one."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler
    except ImportError:
        # Where it is looked for has moved: torch will say what it lacks.
        return None
    try:
        get_cpp_compiler()
    except Exception as error:
        return type(error).__name__
    return None


@cache
def _warn_of_missing_compiler(error: str) -> None:
    warnings.warn(
        f"compile: got True, but torch found no C++ compiler ({error}); steps run uncompiled, with the same results and slower. Install"
        " g++ or clang++, or name one in the environment variable CXX.",
        stacklevel=3,
    )


def _backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
    from torch._inductor.compile_fx import compile_fx

    patches = {"post_grad_custom_post_pass": _HoistScalars(), **_as_written(), **_trust_in_vectors()}
    with vectorized.vector_bits():
        return compile_fx(graph, inputs, config_patches=patches)


@cache
def _as_written() -> dict[str, Any]:
    """Arithmetic as it is written, whatever a user has set for other code: products and sums are not contracted, nor reordered."""
    wanted = {"cpp.enable_floating_point_contract_flag": "off", "cpp.enable_unsafe_math_opt_flag": False}
    cpp = import_module("torch._inductor.config").cpp
    return {name: value for name, value in wanted.items() if hasattr(cpp, name.removeprefix("cpp."))}


@cache
def _trust_in_vectors() -> dict[str, Any]:
    """Have torch believe which vector instructions there are, where the processor lists them and the compiler knows their flags.

    On its own it compiles and loads a program with all of its headers for each, which is half of the time of a first step on a machine
    whose compile cache is empty.
    """
    try:
        inductor_config, isa = import_module("torch._inductor.config"), import_module("torch._inductor.cpu_vec_isa")
        if sys.platform != "linux" or inductor_config.cpp.vec_isa_ok is not None:
            return {}
        compiler = import_module("torch._inductor.cpp_builder").get_cpp_compiler()
        here = isa.x86_isa_checker()
        listed = [one for one in isa.supported_vec_isa_list if all(name in here for name in str(one).split())]
        for one in listed:
            flags = one.build_arch_flags().split()
            subprocess.run(
                [compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull], check=True, capture_output=True
            )
    except Exception:
        # Whatever is not as expected: torch finds out by itself.
        return {}
    return {"cpp.vec_isa_ok": True} if listed else {}


class _HoistScalars(CustomGraphPass):
    """What depends on 0-d inputs alone is computed first, and handed to the loops packed."""

    def __call__(self, graph: fx.Graph) -> None:
        scalars = _pure_scalars(graph)
        for node in list(scalars):
            # What only loops read is packed below. What other scalars build upon keeps its border, or each would compute it again.
            border = node.op == "call_function" and node.target is torch.ops.everybit.settle.default
            if border and not any(user in scalars for user in node.users):
                node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
                graph.erase_node(node)
                del scalars[node]
        wanted: dict[torch.dtype, dict[fx.Node, list[fx.Node]]] = {}
        for node in graph.nodes:
            if node.op == "call_function" and node.target in _ON_ELEMENTS and _value(node).ndim > 0:
                operands = node.args[1:] if node.target is aten.where.self else node.args
                dtypes = {_value(x).dtype for x in operands if isinstance(x, fx.Node) and _value(x).ndim > 0}
                dtypes = dtypes or {_value(node).dtype}  # a choice between two scalars
                for operand in operands:
                    if (
                        operand in scalars
                        and len(dtypes) == 1
                        and _meets(_value(operand).dtype, dtype := next(iter(dtypes)))
                    ):
                        wanted.setdefault(dtype, {}).setdefault(cast(fx.Node, operand), []).append(node)
                if node.target is aten.where.self and node.args[0] in scalars:
                    # A choice by a scalar: compared once, and not for every vector.
                    wanted.setdefault(torch.bool, {}).setdefault(cast(fx.Node, node.args[0]), []).append(node)
        if not wanted:
            return
        last = _move_to_front(graph, scalars)
        with graph.inserting_before(last.next):
            for dtype, users in wanted.items():
                _pack(graph, dtype, users)
        graph.lint()

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__, vectorized.__file__))


def _value(node: fx.Node) -> Tensor:
    return cast(Tensor, node.meta["val"])


def _meets(scalar: torch.dtype, tensor: torch.dtype) -> bool:
    """Whether a 0-d operand of one dtype is converted to the other's, which stays."""
    return scalar.is_floating_point == tensor.is_floating_point and torch.bool not in (scalar, tensor)


def _pure_scalars(graph: fx.Graph) -> dict[fx.Node, None]:
    """0-d tensors that are inputs, elements of inputs, or computed from such alone; in order."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        functional = node.op == "placeholder" or (
            node.op == "call_function"
            and isinstance(node.target, torch._ops.OpOverload)
            and not node.target._schema.is_mutable
        )
        if (
            isinstance(value, Tensor)
            and value.ndim == 0
            and functional
            and (all(x in found for x in node.all_input_nodes) or _is_element_of_input(node))
        ):
            found[node] = None
    return found


def _is_element_of_input(node: fx.Node) -> bool:
    """Whether a node is one element of a vector that is an input, as hyperparameters are."""
    return node.target is aten.select.int and cast(fx.Node, node.args[0]).op == "placeholder"


def _move_to_front(graph: fx.Graph, scalars: dict[fx.Node, None]) -> fx.Node:
    """The computed ones behind the inputs; returns the last."""
    last: fx.Node = next(node for node in reversed(list(graph.nodes)) if node.op == "placeholder")
    for node in scalars:
        if node.op != "placeholder":
            last.append(node)
            last = node
    return last


def _pack(graph: fx.Graph, dtype: torch.dtype, users: dict[fx.Node, list[fx.Node]]) -> None:
    def call(target: Any, *args: Any) -> fx.Node:
        node: fx.Node = graph.call_function(target, args)
        node.meta["val"] = target(*fx.node.map_arg(args, _value))
        return node

    ready = [
        call(
            aten.unsqueeze.default,
            x if _value(x).dtype is dtype else call(torch.ops.prims.convert_element_type.default, x, dtype),
            0,
        )
        for x in users
    ]
    packed = call(aten.cat.default, ready)
    if len(ready) == 1:
        # A concatenation is memory that the loop reads; of one alone it would be nothing, and inlined.
        packed = call(torch.ops.everybit.settle.default, packed)
    for index, (scalar, nodes) in enumerate(users.items()):
        element = call(aten.select.int, packed, 0, index)
        for node in nodes:
            node.replace_input_with(scalar, element)
