"""A pass over Inductor's graph that computes scalars before the loop instead of inside.

Inductor inlines a 0-d expression such as ``1 - beta`` into the loop that uses it, float64 and all: a load, a subtraction and a conversion
per vector, and a power per element if the transform raises one. So before code is made, everything that is computed from scalars alone
is moved to the front, brought into the dtype in which tensors meet it, and packed into one small tensor per dtype, which the loop reads
ready-made. The same values, bit for bit: torch converts a 0-d operand to the dtype of the others before it computes.

On an accelerator no scalar is opaque or packed: the compiler writes one kernel of one element, which
computes all of them and counts the step, and another that moves memory.

Importing this module imports Inductor; only :mod:`everybit_torch.torch_internals.compiler` does, when a step is compiled.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx.node import map_arg

from everybit_torch.torch_internals import cpp_loops, cpp_statements, cpp_vectors

aten = torch.ops.aten
# Operations on elements in which a 0-d operand takes on the dtype of the others.
_ON_ELEMENTS = {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Tensor, aten.maximum.default,
    aten.minimum.default, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor, aten.eq.Tensor, aten.ne.Tensor,
    aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor, aten.where.self,
}  # fmt: skip


# A copy to the compiler, as `everybit::materialize` is, which calls it through autograd at a cost of 30 microseconds: this one costs 5.
# The graph is not differentiated after this pass.
_LIBRARY: Any = cast(Any, torch.library).Library("everybit_torch", "FRAGMENT")
_LIBRARY.define("computed(Tensor x) -> Tensor")
_LIBRARY.impl("computed", torch.clone, "CompositeExplicitAutograd")
_COMPUTED = torch.ops.everybit_torch.computed.default
# What Inductor puts in memory, and does not inline; an Inductor without it calls the copy, once for each scalar.
_REALIZED = getattr(getattr(torch.ops._inductor_test, "realize", None), "default", _COMPUTED)
# Their roots and cosines are what eager code calls on a device: correctly rounded, or of the same library.
_WRITTEN = {torch.ops.everybit.sqrt.default: aten.sqrt.default, torch.ops.everybit.cos.default: aten.cos.default}


class ScalarsFirst(CustomGraphPass):
    """A pass that computes first whatever depends on 0-d inputs alone, and passes it to the loops packed."""

    def __call__(self, graph: fx.Graph) -> None:
        """Change the graph in place."""
        on_device = _is_for_device(graph)
        if on_device:
            _without_eager_scalars(graph)
        scalars = _pure_scalars(graph)
        for node in list(scalars):
            # Scalars that only loops read are packed below. Those of other scalars keep their barrier, or each would compute them again.
            barrier = node.op == "call_function" and node.target is torch.ops.everybit.materialize.default
            if barrier and not any(user in scalars for user in node.users):
                node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
                graph.erase_node(node)
                del scalars[node]
        for node in graph.nodes:
            if node.op == "call_function" and node.target is torch.ops.everybit.materialize.default:
                node.target = _REALIZED if on_device else _COMPUTED
        wanted: dict[torch.dtype, dict[fx.Node, list[fx.Node]]] = {}
        for node in graph.nodes:
            if node.op == "call_function" and node.target in _ON_ELEMENTS and _value(node).ndim > 0:
                operands = node.args[1:] if node.target is aten.where.self else node.args
                values = [_value(x) for x in operands if isinstance(x, fx.Node)]
                # A number may be that of rows, which the compiler has a symbol for.
                dtypes = {x.dtype for x in values if isinstance(x, Tensor) and x.ndim > 0}
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
        if on_device:
            _add_others(graph, scalars, wanted)
        if not wanted:
            return
        last = _move_to_front(graph, scalars)
        with graph.inserting_before(last.next):
            for dtype, users in wanted.items():
                (_realize if on_device else _pack)(graph, dtype, users)
        graph.lint()

    def uuid(self) -> bytes:
        """Return the cache key of compiled code beside the graph: a hash of this pass and of the vector code."""
        return get_hash_for_files((__file__, *(one.__file__ for one in (cpp_vectors, cpp_loops, cpp_statements))))


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
    """Move the computed scalars behind the inputs, and return the last."""
    last: fx.Node = next(node for node in reversed(list(graph.nodes)) if node.op == "placeholder")
    for node in scalars:
        if node.op != "placeholder":
            last.append(node)
            last = node
    return last


def _pack(graph: fx.Graph, dtype: torch.dtype, users: dict[fx.Node, list[fx.Node]]) -> None:
    """Scalars as elements of one vector, which a loop on a CPU reads."""
    ready = [_call(graph, aten.unsqueeze.default, _as(graph, x, dtype), 0) for x in users]
    # A concatenation is memory that the loop reads. Of a single tensor it would be inlined, so that a single scalar is there twice.
    packed = _call(graph, aten.cat.default, ready if len(ready) > 1 else ready * 2)
    for index, (scalar, nodes) in enumerate(users.items()):
        element = _call(graph, aten.select.int, packed, 0, index)
        for node in nodes:
            node.replace_input_with(scalar, element)


def _add_others(
    graph: fx.Graph, scalars: dict[fx.Node, None], wanted: dict[torch.dtype, dict[fx.Node, list[fx.Node]]]
) -> None:
    """Find the other scalars that tensors meet, in their dtypes: scalars read where memory is moved are not computed there."""
    known = {(scalar, node) for users in wanted.values() for scalar, nodes in users.items() for node in nodes}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, Tensor) and value.ndim > 0:
            for operand in node.all_input_nodes:
                if operand in scalars and (operand, node) not in known:
                    wanted.setdefault(_value(operand).dtype, {}).setdefault(operand, []).append(node)


def _realize(graph: fx.Graph, dtype: torch.dtype, users: dict[fx.Node, list[fx.Node]]) -> None:
    """Scalars in memory, each by itself: ``device_options`` have the compiler write all of them by one kernel."""
    for scalar, nodes in users.items():
        realized = _call(graph, _REALIZED, _as(graph, scalar, dtype))
        for node in nodes:
            node.replace_input_with(scalar, realized)


def _as(graph: fx.Graph, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return x if _value(x).dtype is dtype else _call(graph, torch.ops.prims.convert_element_type.default, x, dtype)


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node: fx.Node = graph.call_function(target, args)
    node.meta["val"] = target(*map_arg(args, _value))
    return node


def _is_for_device(graph: fx.Graph) -> bool:
    """Whether a graph's tensors are on an accelerator, for which Inductor writes Triton kernels."""
    return any(
        isinstance(x := node.meta.get("val"), Tensor) and x.device.type != "cpu"
        for node in graph.nodes
        if node.op == "placeholder"
    )


def _without_eager_scalars(graph: fx.Graph) -> None:
    """Let the compiler see operations that are opaque to it on a CPU only: a launch costs as much as a kernel of a million elements."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _WRITTEN:
            node.target = _WRITTEN[node.target]
