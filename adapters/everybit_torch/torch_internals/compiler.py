"""Torch's compiler, Dynamo and Inductor: how it gets a graph, with which options.

The compiler is imported when a step is compiled, since that takes longer than ``import torch``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, fx

from everybit_torch.torch_internals import cpp_vectors
from everybit_torch.torch_internals.kernel_calls import CompiledGraph, loaded_modules

EXACT_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    # Triton makes a product and a sum one operation unless this is set, and leaves out pairs of casts that round.
    "emulate_precision_casts": True,
    # Otherwise its division of float32 is off in the last bit.
    "eager_numerics.division_rounding": True,
    # Library functions else take subnormal numbers for zero.
    "eager_numerics.disable_ftz": True,
    # The same for a CPU, where both are off unless somebody sets them.
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
}
"""Options of ``torch.compile`` with which compiled code rounds as eager code does: ``torch.compile(step, options=EXACT_OPTIONS)``.

Steps that this library compiles have them. A function of your own that you compile, and that contains a step, has the options that you
give it.
"""

_FEW_KERNELS = {
    # Kernels of one element share no input, and are otherwise not fused: a launch takes as long as a step of a million elements.
    "aggressive_fusion": True,
    "score_fusion_memory_threshold": 0,
    # A step over elements and the maxima of their blocks are else taken for loops over different memory, and not made one.
    "loop_ordering_after_fusion": False,
}


_OPERATIONS = 16
"""Operations of an expression from which on Inductor gives it a buffer."""


class MissingOptionError(RuntimeError):
    """This torch has no option by which compiled code rounds as eager code does."""


@cache
def device_options() -> dict[str, Any]:
    """The options for steps on an accelerator.

    Raises:
        MissingOptionError: torch has not all that decide on bits, so that steps are not to be compiled.
    """
    known = import_module("torch._inductor.config").get_config_copy()
    exact = {name: value for name, value in EXACT_OPTIONS.items() if not name.startswith("cpp.")}
    missing = [name for name in exact if name not in known]
    if missing:
        raise MissingOptionError(
            f"this torch has no option {', '.join(missing)}, without which code for an accelerator rounds otherwise than eager code"
        )
    return {**exact, **{name: value for name, value in _FEW_KERNELS.items() if name in known}}


def reached_recompile_limit(error: BaseException) -> bool:
    """Whether Dynamo refused to make one more graph of the same code. Without Dynamo's class for it no error is such."""
    # An error of that class was raised by a module that is imported.
    errors = sys.modules.get("torch._dynamo.exc")
    return isinstance(error, getattr(errors, "FailOnRecompileLimitHit", ()))


def let_length_vary(vector: Tensor, dimension: int = 0) -> None:
    """Have Dynamo make code for vectors of any length at once; without its function it does so at the second length."""
    mark: Any = getattr(_module("torch._dynamo"), "maybe_mark_dynamic", None)
    if mark is not None:
        mark(vector, dimension)


@cache
def accept_default(kind: type) -> None:
    """Have Dynamo accept objects of a class as defaults of arguments of methods, though another value is given.

    Dynamo before torch 2.13 looks at the default in any case, and refuses objects of classes that it does not know. Where it keeps no table
    of those that it knows, it refuses still, and the step runs uncompiled.
    """
    builder: Any = _module("torch._dynamo.variables.builder")
    handlers = getattr(getattr(builder, "SourcelessBuilder", None), "_type_handlers", None)
    wrap = getattr(builder, "UserDefinedObjectVariable", None)
    if torch.__version__ < "2.13" and isinstance(handlers, dict) and wrap is not None:
        handlers.setdefault(kind, lambda _, value: wrap(value))


@cache
def compare_classes() -> None:
    """Have Dynamo compare classes with each other; states are compared by their classes where trees are matched leaf by leaf.

    Dynamo of torch 2.11 calls ``__eq__`` of a class, and finds its instances' if the class, such as a dataclass, defines one. It
    looks its rule up by the function, so the function's code is replaced. Without such a function this is a no-op, and such a step runs
    uncompiled.
    """
    compare = getattr(_module("torch._dynamo.polyfills"), "cmp_eq", None)
    if torch.__version__ < "2.12" and compare is not None:
        compare.__code__ = _equal.__code__


def _equal(a: Any, b: Any) -> Any:
    if type(a) is type:
        return a is b
    result = a.__eq__(b)
    if result is NotImplemented:
        result = b.__eq__(a)
    return result is not NotImplemented and result


@cache
def round_reciprocals() -> None:
    """Have code for accelerators round ``1 / x`` as other divisions.

    Inductor before torch 2.13 writes it as a whole number over a float32, and rounds only quotients of two float32.
    """
    operations: Any = getattr(_module("torch._inductor.codegen.common"), "OpDecompositions", None)
    if torch.__version__ < "2.13" and operations is not None:
        operations.reciprocal = staticmethod(_reciprocal)


@cache
def know_multiples() -> None:
    """Have code for accelerators know that a length is a multiple of a number if a guard of the code says so.

    Inductor of torch 2.11 looks for sympy's remainder, and guards have torch's. Threads then load single elements instead of 16 bytes.
    """
    lengths: Any = getattr(_module("torch._inductor.sizevars"), "SizeVarAllocator", None)
    asked = getattr(lengths, "statically_known_multiple_of", None)
    if torch.__version__ >= "2.12" or asked is None:
        return
    sympy, functions = import_module("sympy"), import_module("torch.utils._sympy.functions")

    def is_known(self: Any, numerator: Any, denominator: Any) -> bool:
        found = asked(self, numerator, denominator)
        if found or not isinstance(numerator, sympy.Symbol):
            return bool(found)
        return bool(self.statically_known_true(sympy.Eq(functions.Mod(numerator, denominator), 0)))

    lengths.statically_known_multiple_of = is_known


def _reciprocal(x: Any) -> Any:
    from torch._inductor.virtualized import ops

    return ops.truediv(ops.constant(1.0, torch.float32), x)


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor uses; None where it is looked for in another way than expected, which Inductor then does itself.

    Raises:
        Exception: An error of Inductor's, if it finds no compiler.
    """
    find = getattr(_module("torch._inductor.cpp_builder"), "get_cpp_compiler", None)
    return None if find is None else str(find())


def compile_graph(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> CompiledGraph:
    """A graph compiled by Inductor: scalars computed before the loop, arithmetic as it is written, and bits handled in vectors.

    An Inductor without a place for a pass compiles without it: to the same bits, which are computed more slowly.

    Raises:
        MissingOptionError: An Inductor that cannot be told to round as eager code does on the accelerator that the inputs are on.
    """
    from torch._inductor.compile_fx import compile_fx

    with cpp_vectors.vector_bits(), loaded_modules() as modules:
        on_device = any(isinstance(x, Tensor) and x.device.type != "cpu" for x in inputs)
        if on_device:
            round_reciprocals()
            know_multiples()
            has_maxima = any(node.target in ("amax", torch.amax) for node in graph.graph.nodes)
            of_kind = device_options() | (_sizes_tried() if has_maxima else {})
        else:
            of_kind = trust_in_vectors() | _short_expressions()
        run = compile_fx(
            graph,
            list(inputs),
            config_patches={
                **_scalars_first(),
                **_as_written(),
                **_threads_for_any_length(),
                **_without_asserts(),
                **of_kind,
            },
        )
    return CompiledGraph(cast("Callable[..., Any]", run), modules)


def _sizes_tried() -> dict[str, Any]:
    """Several sizes of programs for a step with the greatest number of each block, of which Triton measures the fastest.

    By default Inductor gives each thread 32 elements. A step of three blocks then needs more registers than there are.
    """
    is_there = hasattr(_module("torch._inductor.config"), "max_autotune_pointwise")
    return {"max_autotune_pointwise": True} if is_there else {}


def _short_expressions() -> dict[str, Any]:
    """Expressions of few operations, so that Inductor does not write long ones out again for each use.

    It gives longer ones a buffer each, and leaves the buffers out of the one loop that is made of all expressions. With torch's own limits,
    30 and from 2.13 on 50, a first step takes up to twice as long.
    """
    config = _module("torch._inductor.config")
    names = [name for name in ("realize_cpu_opcount_threshold", "realize_opcount_threshold") if hasattr(config, name)]
    return dict.fromkeys(names[:1], _OPERATIONS)


def _module(name: str) -> Any:
    """A module of torch, or None."""
    try:
        return import_module(name)
    except ImportError:
        return None


def _scalars_first() -> dict[str, Any]:
    if not hasattr(_module("torch._inductor.config"), "post_grad_custom_post_pass"):
        return {}
    graph_pass = _module("everybit_torch.torch_internals.scalars_first")
    return {} if graph_pass is None else {"post_grad_custom_post_pass": graph_pass.ScalarsFirst()}


@cache
def _as_written() -> dict[str, Any]:
    """Arithmetic as it is written, whatever a user has set for other code: products and sums are not contracted, nor reordered."""
    wanted = {"cpp.enable_floating_point_contract_flag": "off", "cpp.enable_unsafe_math_opt_flag": False}
    cpp = getattr(_module("torch._inductor.config"), "cpp", None)
    return {name: value for name, value in wanted.items() if hasattr(cpp, name.removeprefix("cpp."))}


@cache
def _threads_for_any_length() -> dict[str, Any]:
    """Loops over elements that all threads share, whatever the length for which they are compiled.

    Code is made once for all lengths, and kept on disk. Inductor otherwise makes a loop of one thread where that first length is short.
    """
    cpp = getattr(_module("torch._inductor.config"), "cpp", None)
    return {"cpp.dynamic_threads": True} if hasattr(cpp, "dynamic_threads") else {}


@cache
def _without_asserts() -> dict[str, Any]:
    """Code that does not compare the sizes of its inputs again: a microsecond for each input. Guards, or direct calls, have done it."""
    config = _module("torch._inductor.config")
    return {name: False for name in ("size_asserts", "alignment_asserts") if hasattr(config, name)}


@cache
def trust_in_vectors() -> dict[str, Any]:
    """Have torch believe which vector instructions there are, where the processor lists them and the compiler knows their flags.

    On its own it compiles and loads programs, with all of its headers or linked with all of its libraries, to try each set of them: half of
    of a first step on a machine with an empty compile cache. It keeps its findings for the process, and so this list is kept too.
    """
    try:
        inductor_config, isa = import_module("torch._inductor.config"), import_module("torch._inductor.cpu_vec_isa")
        if sys.platform != "linux" or inductor_config.cpp.vec_isa_ok is not None:
            return {}
        here = isa.x86_isa_checker()
        listed = [one for one in isa.supported_vec_isa_list if all(name in here for name in str(one).split())]
        compiler = str(cpp_compiler())
        if not all(_accepts(compiler, one.build_arch_flags()) for one in listed):
            return {}
        _find_vectors(inductor_config, isa, compiler)
    except Exception:
        # Whatever is not as expected: torch finds out by itself.
        return {}
    return {"cpp.vec_isa_ok": True} if listed else {}


@cache
def _accepts(compiler: str, flags: str) -> bool:
    """Whether a compiler knows flags."""
    command = [compiler, *flags.split(), "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _find_vectors(inductor_config: Any, isa: Any, compiler: str) -> None:
    """Let torch make its list of vector instructions, without compiling its trial programs if the flags are known."""
    tried = isa.VecISA.check_build
    isa.VecISA.check_build = lambda self, _code: _accepts(compiler, self.build_arch_flags())
    try:
        with inductor_config.patch({"cpp.vec_isa_ok": True}):
            isa.valid_vec_isa_list()
    finally:
        isa.VecISA.check_build = tried
