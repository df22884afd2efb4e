"""A pass over Inductor's graph that computes scalars before the loop, and nothing in it that belongs before it.

Inductor inlines a 0-d expression such as ``1 - beta`` into the loop that uses it, float64 and all: a load, a subtraction and a conversion
per vector, and a power per element if the transform raises one. So before code is made, everything that is computed from scalars alone
is moved to the front, brought into the dtype in which tensors meet it, and packed into one small tensor per dtype, which the loop reads
ready-made. The same values, bit for bit: torch converts a 0-d operand to the dtype of the others before it computes.

Importing this module imports Inductor; only :mod:`everybit_torch.torch_internals.compiler` does, when a step is compiled.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from everybit_torch.torch_internals import cpp_vectors

aten = torch.ops.aten
# Operations on elements in which a 0-d operand takes on the dtype of the others.
_ON_ELEMENTS = {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Tensor, aten.maximum.default,
    aten.minimum.default, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor, aten.eq.Tensor, aten.ne.Tensor,
    aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor, aten.where.self,
}  # fmt: skip


# A copy to the compiler, as `everybit::materialize` is, which calls it through autograd at a cost of 30 microseconds: this one costs 5.
# Behind this pass there is nothing to differentiate.
_LIBRARY: Any = cast(Any, torch.library).Library("everybit_torch", "FRAGMENT")
_LIBRARY.define("computed(Tensor x) -> Tensor")
_LIBRARY.impl("computed", torch.clone, "CompositeExplicitAutograd")
_COMPUTED = torch.ops.everybit_torch.computed.default


class ScalarsFirst(CustomGraphPass):
    """A pass that computes first whatever depends on 0-d inputs alone, and passes it to the loops packed."""

    def __call__(self, graph: fx.Graph) -> None:
        """Change the graph in place."""
        scalars = _pure_scalars(graph)
        for node in list(scalars):
            # What only loops read is packed below. What other scalars build upon keeps its barrier, or each would compute it again.
            barrier = node.op == "call_function" and node.target is torch.ops.everybit.materialize.default
            if barrier and not any(user in scalars for user in node.users):
                node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
                graph.erase_node(node)
                del scalars[node]
        for node in graph.nodes:
            if node.op == "call_function" and node.target is torch.ops.everybit.materialize.default:
                node.target = _COMPUTED
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
        """Return the cache key of compiled code beside the graph: a hash of this pass and of the vector code."""
        return get_hash_for_files((__file__, cpp_vectors.__file__))


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
        packed = call(_COMPUTED, packed)
    for index, (scalar, nodes) in enumerate(users.items()):
        element = call(aten.select.int, packed, 0, index)
        for node in nodes:
            node.replace_input_with(scalar, element)
