"""Optimization barriers: operations that a compiler may neither move nor rewrite.

Compiled code gives the bits of eager code as long as it does the same operations in the same order. A compiler would change a few of
them, and those are made opaque here: expressions outside of the loop over elements stay outside, sums keep eager's order, and functions
that depend on the library in their last bit are taken from the library that eager code calls. In eager code these functions are the plain
expressions, except for :func:`sqrt`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

# Elements that are widened at a time. On a CPU a quarter of them takes half as long again.
CHUNK = 1 << 18
DEVICE_CHUNK = 1 << 24


def materialize(x: Tensor) -> Tensor:
    """Return ``x``; compiled code computes it once, before the loop over elements, as eager code does.

    A compiler inlines a 0-d expression such as ``beta ** step`` into the loop that uses it: a power per element, from a vector
    library that differs from the scalar one in its last bit.
    """
    return _materialize(x) if torch.compiler.is_compiling() else x


def bias_correction(base: Tensor | float, step: Tensor) -> Tensor:
    """The bias correction ``1 - base ** step`` of a running mean, 0-d and float64: in less it loses every digit for small steps."""
    return 1 - base ** step.double()


def separate(x: Tensor, number: int) -> Tensor:
    """Return a copy of ``x`` in memory of its own, also in compiled code, where copies with different numbers never share memory.

    A compiler computes equal expressions once: two clones of one tensor of zeros are then one output, given out twice.
    """
    copy: Tensor = _separate(x, number)
    return copy


def sum(x: Tensor) -> Tensor:
    """The sum of all elements, 0-d, in the dtype of ``x``; in compiled code added up in eager's order."""
    return _sum(x) if torch.compiler.is_compiling() else x.sum()


def total(terms: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the sum of 0-d tensors, added up as :func:`sum` does, or a zero like ``like`` if there are no terms."""
    return sum(torch.stack(list(terms))) if terms else torch.zeros_like(like)


def sum_of_squares(x: Tensor) -> Tensor:
    """The sum of the squares of all elements, 0-d, float64; in compiled code added up in eager's order.

    Squares are taken and added up in float64, so that parts of a tensor add up to the whole but for a float64's last bits: the norm of
    shards is the norm. Elements are widened a chunk at a time: there is no copy of a long tensor.

    A ``TorchFunctionMode`` sees it as one function, and can so tell of which tensor a norm is computed.
    """
    if not torch.compiler.is_compiling() and has_torch_function_unary(x):
        answer: Tensor = handle_torch_function(sum_of_squares, (x,), x)
        return answer
    return _sum_of_squares(x) if torch.compiler.is_compiling() else _squares(x)


def sum_of_all_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements of some tensors, 0-d, float64: :func:`sum_of_squares` of one vector of them all.

    It takes a few operations for each chunk, however many tensors it has, and one chunk's memory for all. It has no derivative.

    Args:
        tensors: At least one, all on one device, of any shapes and floating dtypes.
    """
    return _sum_of_all_squares([*tensors]) if torch.compiler.is_compiling() else _all_squares(tensors)


def _all_squares(tensors: Sequence[Tensor]) -> Tensor:
    sums, scratch = list[Tensor](), tensors[0].new_empty(0, dtype=torch.float64)
    for parts, length in _in_chunks(tensors, _chunk(tensors[0])):
        # The first chunk is the longest.
        scratch = scratch[:length] if sums else scratch.new_empty(length)
        torch.ops.aten._foreach_copy_(torch.split(scratch, [part.numel() for part in parts]), parts)
        sums.append(torch.dot(scratch, scratch))
    return total(sums, scratch.new_empty(()))


def _in_chunks(tensors: Sequence[Tensor], size: int) -> Iterator[tuple[list[Tensor], int]]:
    """The elements of all tensors in order, as vectors of ``size`` elements together, and of those that are left; with their number."""
    parts, room = list[Tensor](), size
    for x in tensors:
        flat = x.reshape(-1)
        while flat.numel() >= room:
            yield [*parts, flat[:room]], size
            flat, parts, room = flat[room:], [], size
        if flat.numel():
            parts.append(flat)
            room -= flat.numel()
    if parts:
        yield parts, size - room


def sqrt(x: Tensor) -> Tensor:
    """The square root, element by element; correctly rounded below float64, and the same eager and compiled.

    Eager torch takes it from a library that on some processors is wrong in the last bit (MKL's vector mathematics: for half a percent of
    all float32 numbers on a Xeon with AVX-512, and one percent of float64 numbers on an EPYC); compiled code uses the processor's
    instruction, which is exact. Rounding the float64 root to float32 is exact too: no root of a float32 lies within 2**-51 of a half-way
    case (of 25 bits, its square would have 50), and the float64 root is wrong by less than 2**-51.4. Of one float64 number the root is
    exact as well: the library is not asked for roots of complex numbers. For tensors of float64 compiled code calls the library. (A
    graph that is traced and then run by eager torch, ``backend="eager"``, has the library's roots.)
    """
    by_library = x.dtype is torch.float64 and x.ndim > 0 and x.is_cpu
    if torch.compiler.is_compiling():
        return _sqrt(x) if by_library else x.sqrt()
    if by_library or not x.is_cpu:
        return x.sqrt()
    if x.dtype is torch.float64:
        return _root_of_one(x)
    if torch.is_grad_enabled():
        return x.double().sqrt().to(x.dtype)
    # Three operations that are each rounded once, with the processor's instruction: half of the time of the library's root.
    return x.double().rsqrt_().reciprocal_().to(x.dtype)


def _root_of_one(x: Tensor) -> Tensor:
    """The root of a float64 number, correctly rounded, with the derivative of torch's."""
    root, exact = x.sqrt(), torch.complex(x, torch.zeros_like(x)).sqrt().real
    if not torch.is_grad_enabled():
        return torch.where(x > 0, exact, root)
    # Neighbours: their difference is exact, and so is the sum.
    return torch.where((x > 0) & (x < math.inf), root + (exact - root).detach(), root)


def cos(x: Tensor) -> Tensor:
    """The cosine, element by element."""
    return _cos(x) if torch.compiler.is_compiling() else x.cos()


def log(x: Tensor) -> Tensor:
    """The natural logarithm, element by element."""
    return _log(x) if torch.compiler.is_compiling() else x.log()


def exp(x: Tensor) -> Tensor:
    """The exponential function, element by element."""
    return _exp(x) if torch.compiler.is_compiling() else x.exp()


def atan(x: Tensor) -> Tensor:
    """The arctangent, element by element."""
    return _atan(x) if torch.compiler.is_compiling() else x.atan()


@torch.library.custom_op("everybit::materialize", mutates_args=())
def _materialize(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("everybit::separate", mutates_args=())
def _separate(x: Tensor, number: int) -> Tensor:  # noqa: ARG001  # by which copies differ
    return x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("everybit::sum", mutates_args=())
def _sum(x: Tensor) -> Tensor:
    return x.sum()


@torch.library.custom_op("everybit::sum_of_squares", mutates_args=())
def _sum_of_squares(x: Tensor) -> Tensor:
    return _squares(x)


@torch.library.custom_op("everybit::sum_of_all_squares", mutates_args=())
def _sum_of_all_squares(tensors: list[Tensor]) -> Tensor:
    return _all_squares(tensors)


@_sum_of_all_squares.register_fake
def _(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((), dtype=torch.float64)


def _squares(x: Tensor) -> Tensor:
    sums = []
    for part in torch.split(x.reshape(-1), _chunk(x)):
        # A copy of float64, too: some libraries add up in an order that depends on the address.
        wide = part.to(torch.float64, copy=True)
        sums.append(torch.dot(wide, wide))
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _chunk(x: Tensor) -> int:
    return CHUNK if x.device.type in ("cpu", "meta") else DEVICE_CHUNK


@torch.library.custom_op("everybit::sqrt", mutates_args=())
def _sqrt(x: Tensor) -> Tensor:
    return x.sqrt()


@torch.library.custom_op("everybit::cos", mutates_args=())
def _cos(x: Tensor) -> Tensor:
    return x.cos()


@torch.library.custom_op("everybit::log", mutates_args=())
def _log(x: Tensor) -> Tensor:
    return x.log()


@torch.library.custom_op("everybit::exp", mutates_args=())
def _exp(x: Tensor) -> Tensor:
    return x.exp()


@torch.library.custom_op("everybit::atan", mutates_args=())
def _atan(x: Tensor) -> Tensor:
    return x.atan()


def _register(
    op: Any, derivative: Callable[[Tensor], Tensor], *, reduces: bool = False, dtype: torch.dtype | None = None
) -> None:
    """Tell a function of one tensor's elements, or a sum of such (in ``dtype``), to compiler, autograd and vmap."""
    op.register_fake(lambda x: x.new_empty((), dtype=dtype) if reduces else torch.empty_like(x))
    op.register_autograd(
        lambda ctx, gradient: gradient * derivative(ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),  # noqa: ARG005  # called by name
    )

    def batched(_info: object, in_dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int | None]:
        if in_dims[0] is None or not reduces:
            return op(x), in_dims[0]
        # Member by member, so that each sum has the order that it has alone.
        return torch.stack([op(member) for member in x.unbind(in_dims[0])]), 0

    op.register_vmap(batched)


_register(_materialize, torch.ones_like)
_register(_sum, torch.ones_like, reduces=True)
_register(_sum_of_squares, lambda x: 2 * x, reduces=True, dtype=torch.float64)
_register(_sqrt, lambda x: 0.5 / x.sqrt())
_register(_log, lambda x: 1 / x)
_register(_exp, lambda x: x.exp())
_register(_cos, lambda x: -x.sin())
_register(_atan, lambda x: 1 / (1 + x * x))

_separate.register_fake(lambda x, _number: torch.empty_like(x, memory_format=torch.contiguous_format))
_separate.register_autograd(lambda _ctx, gradient: (gradient, None))
_separate.register_vmap(lambda _info, in_dims, x, number: (_separate(x, number), in_dims[0]))


def mean(x: Tensor, dim: int) -> Tensor:
    """The mean along one dimension, in the dtype of ``x``; in compiled code added up in eager's order.

    Args:
        x: A tensor of one dimension or more.
        dim: Counted from the end, below zero.

    Raises:
        ValueError: ``dim`` is not counted from the end.
    """
    if dim >= 0:
        raise ValueError(f"dim: got {dim}; accepted is a dimension counted from the end, such as -1.")
    return _mean(x, dim) if torch.compiler.is_compiling() else x.mean(dim)


@torch.library.custom_op("everybit::mean", mutates_args=())
def _mean(x: Tensor, dim: int) -> Tensor:
    return x.mean(dim)


def _setup(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:  # noqa: ARG001  # called by name
    ctx.shape, ctx.dim = inputs[0].shape, inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return (gradient / ctx.shape[ctx.dim]).unsqueeze(ctx.dim).expand(ctx.shape), None


def _batched(_info: object, in_dims: tuple[int | None, None], x: Tensor, dim: int) -> tuple[Tensor, int | None]:
    if in_dims[0] is None:
        return _mean(x, dim), None
    # Member by member, so that each sum has the order that it has alone.
    return torch.stack([_mean(member, dim) for member in x.unbind(in_dims[0])]), 0


_mean.register_fake(lambda x, dim: x.new_empty((*x.shape[:dim], *(x.shape[dim + 1 :] if dim < -1 else ()))))
_mean.register_autograd(_backward, setup_context=_setup)
_mean.register_vmap(_batched)
