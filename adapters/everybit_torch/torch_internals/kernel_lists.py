"""Kernels of a GPU that step several segments with one launch.

A kernel that Inductor writes is given the addresses of one segment's tensors, and its length. A model of 200 tensors then takes 400
launches, and the host longer for them than the device for its work. Here the source of a kernel is written once more, with addresses and
lengths in a table::

    row of a segment | its first piece | address, address, ..., length |
    owners           | 0 0 0 0 0 0 1 1 2 2 2 2 ... |        the segment of each piece, which is a few programs

Each program finds the segment to which its piece belongs, reads that row, and goes on as the kernel does. The operations are the kernel's,
and so are the bits. Gradients are other tensors at each step, so their addresses are a table of their own.
"""

from __future__ import annotations

import ast
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from everybit_torch.torch_internals.kernel_calls import CompiledGraph, KernelCalls, Prepared

_LOGGER = logging.getLogger("everybit_torch")

PROGRAMS = 4
"""Programs of a piece. One of Inductor's has 1,024 elements, mostly."""


class NotListedError(ValueError):
    """A kernel with an unexpected source; segments are then stepped one after the other."""


def launches(calls: Sequence[KernelCalls], varying: Sequence[Tensor]) -> list[Prepared]:
    """Return what steps segments of one graph, each with its tensor in the place of what varies.

    That is one launch for each kernel of the graph if there are several segments, and each segment's own launches where a kernel's source
    is not as expected. The caller has autograd count the writes.

    Args:
        calls: The calls of the segments' kernels, on one queue of a GPU.
        varying: A tensor for each.
    """
    if len(calls) > 1:
        first = calls[0]
        kept = first.together
        if not (isinstance(kept, KernelList) and kept.is_of(calls)):
            first.together = kept = _listed(calls)
        if isinstance(kept, KernelList):
            return kept.prepared(varying)
    return [one for call, tensor in zip(calls, varying, strict=True) for one in call.prepared(tensor)]


@dataclass(slots=True)
class KernelList:
    """The kernels of a graph, each launched once for several segments.

    Attributes:
        calls: The calls of the segments' kernels.
        kernels: The kernels with their arguments.
        addresses: Where each segment's varying tensor begins, on the device.
    """

    calls: list[KernelCalls]
    kernels: list[Prepared]
    addresses: Tensor
    _known: list[int] = field(default_factory=list)

    def is_of(self, calls: Sequence[KernelCalls]) -> bool:
        """Whether these are the segments."""
        return len(calls) == len(self.calls) and all(one is other for one, other in zip(calls, self.calls, strict=True))

    def prepared(self, varying: Sequence[Tensor]) -> list[Prepared]:
        """Return the launches, with the addresses of these tensors on the device, and without a wait for it."""
        addresses = [*map(Tensor.data_ptr, varying)]
        if addresses != self._known:
            # CUDA stages a copy from memory that is not pinned, and queues it behind the kernels that read the last addresses.
            self.addresses.copy_(torch.tensor(addresses), non_blocking=True)
            self._known = addresses
        return self.kernels


class _ListedKernel(NamedTuple):
    """A kernel for a list.

    Attributes:
        launcher: What launches it.
        piece: Elements of a piece.
        length: The number of the argument that is the length.
    """

    launcher: Any
    piece: int
    length: int


def _listed(calls: Sequence[KernelCalls]) -> KernelList | None:
    """Launches for all of these segments; None: a kernel's source is not as expected."""
    graph, queue = calls[0].graph, calls[0].queue
    assert queue is not None
    if graph.listed is None:
        try:
            graph.listed = [*_written(graph, calls[0])]
        except Exception as error:  # what was written for another compiler: a step does not fail for it
            graph.listed = []
            _LOGGER.info("steps of several tensors are not launched at once: %s", error)
    if not graph.listed:
        return None
    device = calls[0].written[0].device
    addresses = torch.zeros(len(calls), dtype=torch.int64, device=device)
    kernels: list[Prepared] = []
    for number, kernel in enumerate(graph.listed):
        rows, pieces = list[list[int]](), list[int]()
        for call in calls:
            arguments = call.calls[number].arguments
            rows.append([sum(pieces), *(x.data_ptr() if isinstance(x, Tensor) else x or 0 for x in arguments)])
            pieces.append(-(-arguments[kernel.length] // kernel.piece))
        owners = torch.arange(len(calls), dtype=torch.int32).repeat_interleave(torch.tensor(pieces))
        tables = (one.to(device, non_blocking=True) for one in (torch.tensor(rows), owners))
        run = partial(kernel.launcher.run, stream=queue.stream)
        kernels.append((run, [*tables, addresses, len(owners) * kernel.piece]))
    return KernelList([*calls], kernels, addresses)


def _written(graph: CompiledGraph, calls: KernelCalls) -> Iterator[_ListedKernel]:
    """Write and compile the kernels of a graph for lists."""
    from torch._inductor.async_compile import AsyncCompile

    (module,) = (one for one in graph.modules if hasattr(one, "call"))
    sources = dict(kernel_sources(inspect.getsource(module)))
    compiler: Any = AsyncCompile()
    for call in calls.calls:
        (launcher,) = call.launcher.launchers  # the configuration that was measured
        written = listed_source(sources[call.name], call.name, launcher.config, call.places)
        made = compiler.triton(written.name, written.source, device_str="cuda")
        made = made.result() if hasattr(made, "result") else made
        yield _ListedKernel(made, written.piece, written.length)


def kernel_sources(module: str) -> Iterator[tuple[str, str]]:
    """Yield the names and sources of the kernels that a module of Inductor defines, in order."""
    for line in ast.parse(module).body:
        match line:
            case ast.Assign(
                targets=[ast.Name()],
                value=ast.Call(
                    func=ast.Attribute(attr="triton"), args=[ast.Constant(str(name)), ast.Constant(str(source)), *_]
                ),
            ):
                yield name, source
            case _:
                pass


class ListedSource(NamedTuple):
    """A kernel's source for a list.

    Attributes:
        name: The name of its function.
        source: A module that defines it.
        piece: Elements of a piece.
        length: The number of the argument that is the length of a segment.
    """

    name: str
    source: str
    piece: int
    length: int


def listed_source(source: str, name: str, config: Any, varying: Sequence[int]) -> ListedSource:
    """Write a kernel of Inductor again, for launches that step several segments.

    Args:
        source: A module that defines it.
        name: The name of its function.
        config: Triton's configuration with which it is launched.
        varying: The numbers of its arguments that vary from step to step.

    Returns:
        The source of a kernel of rows, owners, addresses of what varies, and the number of elements of all pieces.

    Raises:
        NotListedError: It is not one kernel over one dimension, or its arguments are not tensors and whole numbers.
    """
    module = ast.parse(source)
    function = next(one for one in module.body if isinstance(one, ast.FunctionDef) and one.name == name)
    decorator = function.decorator_list[0]
    if not isinstance(decorator, ast.Call):
        raise NotListedError(f"{name}: got no call as its decorator")
    given = {one.arg: one.value for one in decorator.keywords}
    triton, inductor = _entries(given["triton_meta"]), _entries(given["inductor_meta"])
    signature: dict[str, str] = ast.literal_eval(triton["signature"])
    constants: dict[str, Any] = ast.literal_eval(triton["constants"])
    (divisible,) = ast.literal_eval(triton["configs"])
    options = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
    block = int(options["XBLOCK"])
    if ast.literal_eval(inductor["grid_type"]) != "Grid1D" or sum(map(_asks_for_program, ast.walk(function))) != 1:
        raise NotListedError(f"{name}: got a grid of several dimensions")
    programs = 1 if block == 1 else PROGRAMS  # a kernel of one element has one program
    arguments = [one.arg for one in function.args.args if one.arg != "XBLOCK"]
    begin = [
        "program = tl.program_id(0)",
        f"segment = tl.load(owners + program // {programs})",
        f"row = rows + segment * {len(arguments) + 1}",
        f"program = program - tl.load(row).to(tl.int32) * {programs}",
    ]
    for place, argument in enumerate(arguments):
        kind = signature[argument]
        if kind == "constexpr":
            begin.append(f"{argument} = {constants[argument]!r}")
            continue
        if not (kind[0] == "*" or kind in ("i32", "i64")):
            raise NotListedError(f"{name}: got an argument of type {kind}")
        kind = f"tl.pointer_type(tl.{_NAMES[kind[1:]]})" if kind[0] == "*" else f"tl.{_NAMES[kind]}"
        found = f"tl.load({'addresses + segment' if place in varying else f'row + {place + 1}'}).to({kind})"
        is_divisible = ["tt.divisibility", 16] in divisible.get((place,), [])
        begin.append(f"{argument} = {f'tl.multiple_of({found}, 16)' if is_divisible else found}")
    function = _InOwnPieces().visit(function)
    function.name = f"listed_{name}"
    own = {"rows": "*i64", "owners": "*i32", "addresses": "*i64", "xnumel": "i64"}
    function.args.args = [*map(ast.arg, own), ast.arg("XBLOCK", ast.parse("tl.constexpr", mode="eval").body)]
    function.body = [*ast.parse("\n".join(begin)).body, *function.body]
    triton |= _literals(
        signature=own | {"XBLOCK": "constexpr"},
        constants={},
        configs=[{(place,): [["tt.divisibility", 16]] for place in range(3)}],
    )
    inductor |= _literals(kernel_name=function.name, mutated_arg_names=[])
    decorator.func = ast.parse("triton_heuristics.fixed_config", mode="eval").body
    decorator.args = [_literal(options)]
    decorator.keywords = [
        ast.keyword("filename", given["filename"]),
        ast.keyword("triton_meta", _dict(triton)),
        ast.keyword("inductor_meta", _dict(inductor)),
    ]
    text = ast.unparse(ast.fix_missing_locations(module))
    return ListedSource(function.name, text, programs * block, arguments.index("xnumel"))


_NAMES = {
    "i1": "int1", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8", "u16": "uint16", "u32": "uint32",
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64",
}  # fmt: skip
"""Triton's names of types, by those of its signatures."""


def _asks_for_program(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.program_id"


class _InOwnPieces(ast.NodeTransformer):
    """Has a program count from the segment's first piece."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return ast.Name("program") if _asks_for_program(node) else self.generic_visit(node)


def _entries(node: ast.expr) -> dict[str, ast.expr]:
    if not isinstance(node, ast.Dict):
        raise NotListedError(f"got {ast.unparse(node)} in the place of a dict")
    return {ast.literal_eval(key): value for key, value in zip(node.keys, node.values, strict=True) if key is not None}


def _literal(value: object) -> ast.expr:
    return ast.parse(repr(value), mode="eval").body


def _literals(**values: object) -> dict[str, ast.expr]:
    return {name: _literal(value) for name, value in values.items()}


def _dict(entries: Mapping[str, ast.expr]) -> ast.Dict:
    return ast.Dict([ast.Constant(name) for name in entries], [*entries.values()])
