"""Reductions over each parameter: sums and norms of a whole tensor, from pieces of it too.

A transform that needs one number of each parameter, such as a trust ratio, may still be cut anywhere: it asks ``ctx.per_tensor`` for the
number, computes with numbers, and lets ``ctx.per_tensor.expand`` give each element that of its parameter.

*Numbers* are a tree of the parameters' structure, with a vector in the place of each leaf: one float64 number for each parameter that has
elements in the leaf. A leaf of a model's tree is one parameter. A piece of a flat buffer may hold elements of several, and of the first
and the last of them only some: :class:`Members` says which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from everybit.base import barriers, tree
from everybit.protocol.requests import Owned, Request, stacked

P = TypeVar("P")
A = TypeVar("A")

SHORT = 1 << 11
"""Mean number of elements of a leaf's parameters, below which a CPU works on all of them by one operation."""


@tree.state
@dataclass(frozen=True, slots=True)
class Members:
    """The parameters that a leaf's elements belong to, where a leaf is not one whole parameter.

    Attributes:
        numbers: Number of each such parameter among all that share the step: int64, 1-d.
        edges: Position in the leaf of the first element of each, and the leaf's number of elements: int64, one longer. A parameter may
            have no element in it.
        sizes: Number of elements of every parameter that shares the step, in order: float64, 1-d.
    """

    numbers: Tensor
    edges: Tensor
    sizes: Tensor

    def cut(self, start: int, stop: int) -> Members:
        """Return the members of the leaf's elements ``start`` to ``stop``."""
        return Members(self.numbers, self.edges.clamp(start, stop) - start, self.sizes)


@dataclass(frozen=True)
class Numbers(Request[A]):
    """Sums over the elements of each parameter; made by the methods of :class:`PerTensor`.

    Attributes:
        trees: Trees of the parameters' structure and shapes, which are reduced together.
        of: Sums a tensor, or the squares of one.
        members: Of each leaf; None: every leaf is one whole parameter.
        finish: From the sums of each tree, as numbers, to the answer.
    """

    trees: tuple[Any, ...]
    of: Callable[[Tensor], Tensor]
    members: tuple[Members, ...] | None
    finish: Callable[..., A]

    def here(self) -> A:
        """Return the numbers of leaves that are whole parameters, or of elements that are all there are."""
        if self.members is None:
            return self.finish(*(tree.map(lambda x: self.of(x).reshape(1), values) for values in self.trees))
        return self.answer(self.partial(lambda values: values))

    def is_met(self) -> bool:
        """Whether every leaf is one whole parameter."""
        return self.members is None

    def partial(self, owned: Owned) -> Tensor:
        """Return the sums here for every parameter that shares the step: float64, 1-d; 2-d for several trees."""
        return stacked([self._of_all(owned(values)) for values in self.trees])

    def answer(self, total: Tensor) -> A:
        """Return the numbers of the parameters that have elements here."""
        each = [total] if total.ndim == 1 else total.unbind()
        return self.finish(
            *(_map(self.members, partial(_at, one), values) for values, one in zip(self.trees, each, strict=True))
        )

    def _of_all(self, values: Any) -> Tensor:
        members = _of_leaves(self.members, values)
        return _added([_partial(x, one, self.of) for x, one in zip(tree.leaves(values), members, strict=True)])


@dataclass(frozen=True, slots=True)
class PerTensor:
    """Requests for numbers of each whole parameter, for transforms: ``ctx.per_tensor``.

    Sums are taken in float64, so that those of pieces add up to that of the whole but for a float64's last bits. All processes that share
    the step make the same requests, in the same order.

    Attributes:
        members: Of each leaf, in order; None: every leaf is one whole parameter, and requests are met at once.
    """

    members: tuple[Members, ...] | None

    def sum(self, values: P) -> Request[P]:
        """The sum of each parameter's elements, as numbers."""
        return self._numbers((values,), _sum, _same)

    def sum_of_squares(self, values: P) -> Request[P]:
        """The sum of the squares of each parameter's elements, as numbers."""
        return self._numbers((values,), barriers.sum_of_squares, _same)

    def norm(self, values: P) -> Request[P]:
        """The Euclidean norm of each parameter's elements, as numbers."""
        return self._numbers((values,), barriers.sum_of_squares, _roots)

    def norms(self, *trees: P) -> Request[tuple[P, ...]]:
        """:meth:`norm` of each of several trees of the same structure, found by one reduction of all of them."""
        return self._numbers(trees, barriers.sum_of_squares, lambda *sums: tuple(map(_roots, sums)))

    def mean(self, values: P) -> Request[P]:
        """The mean of each parameter's elements, as numbers; 0 of a parameter without elements."""
        return self._numbers((values,), _sum, lambda sums: tree.map(_divided, sums, self.size(values)))

    def mean_of_squares(self, values: P) -> Request[P]:
        """The mean of the squares of each parameter's elements, as numbers; 0 of a parameter without elements."""
        return self._numbers(
            (values,), barriers.sum_of_squares, lambda squares: tree.map(_divided, squares, self.size(values))
        )

    def _numbers(self, trees: tuple[Any, ...], of: Callable[[Tensor], Tensor], finish: Callable[..., A]) -> Numbers[A]:
        for values in trees if self.members is not None else ():
            _of_leaves(self.members, values)
        return Numbers(trees, of, self.members, finish)

    def size(self, values: P) -> P:
        """The number of elements of each parameter, as numbers; of the whole of it, wherever the rest is."""
        if self.members is None:
            return tree.map(lambda x: torch.full((1,), x.numel(), dtype=torch.float64, device=x.device), values)
        return _map(self.members, lambda _, members: members.sizes[members.numbers], values)

    def expand(self, numbers: P, like: P) -> P:
        """Give each element its parameter's number, in the dtype of ``like``.

        Args:
            numbers: One number for each parameter, as the other methods return them and as computed from those.
            like: A tree of the parameters' structure and shapes.

        Returns:
            A tree of tensors that broadcast against those of ``like``.

        Raises:
            ValueError: A leaf of ``numbers`` that is not one vector of a number for each parameter.
        """
        if self.members is None:
            return tree.map(_broadcast, numbers, like)
        return _map(self.members, _expanded, like, numbers)


def _map(members: tuple[Members, ...] | None, function: Callable[..., Tensor], values: P, *others: P) -> P:
    """Apply a function to the leaves of trees, with the members of each as its second argument."""
    leaves = [tree.leaves(one) for one in (values, *others)]
    found = [function(x, *rest) for x, *rest in zip(leaves[0], _of_leaves(members, values), *leaves[1:], strict=True)]
    return tree.replace(values, found)


def _of_leaves(members: tuple[Members, ...] | None, values: object) -> tuple[Members, ...]:
    assert members is not None
    if len(tree.leaves(values)) != len(members):
        raise ValueError(
            f"ctx.per_tensor: got {len(tree.leaves(values))} tensors; accepted is a tree of the {len(members)} parameters'"
            " structure. A combinator that leaves some out passes ctx.of(chosen) on."
        )
    return members


def _same(sums: P) -> P:
    return sums


def _roots(squares: P) -> P:
    return tree.map(barriers.sqrt, squares)


def _partial(x: Tensor, members: Members, of: Callable[[Tensor], Tensor]) -> Tensor:
    """The sum for every parameter that shares the step, of the elements here: float64, 1-d."""
    count = len(members.numbers)
    sums = of(x).reshape(1) if count == 1 else _sums_of_members(x, members.edges, of is barriers.sum_of_squares)
    return sums.new_zeros(len(members.sizes)).index_copy(0, members.numbers, sums)


def _added(partials: list[Tensor]) -> Tensor:
    return torch.stack(partials).sum(0) if len(partials) != 1 else partials[0]


def _at(total: Tensor, _: Tensor, members: Members) -> Tensor:
    return total[members.numbers]


def _sum(x: Tensor) -> Tensor:
    return barriers.sum(x.double())


def _divided(total: Tensor, size: Tensor) -> Tensor:
    return total / size.clamp(min=1)


def _broadcast(numbers: Tensor, like: Tensor) -> Tensor:
    if numbers.shape != (1,):
        raise ValueError(_unfit(numbers, 1))
    return barriers.materialize(numbers.to(like.dtype)).reshape((1,) * like.ndim)


def _expanded(like: Tensor, members: Members, numbers: Tensor) -> Tensor:
    count = len(members.numbers)
    if count == 1:
        return _broadcast(numbers, like)
    if numbers.shape != (count,):
        raise ValueError(_unfit(numbers, count))
    if not like.numel():
        return torch.empty_like(like)
    values = barriers.materialize(numbers.to(like.dtype))
    if like.device.type == "meta":
        return torch.empty_like(like)
    if like.device.type == "cpu":
        expand = _expand_op if torch.compiler.is_compiling() else _expand
        return expand(values, members.edges, like.numel()).reshape(like.shape)
    return _found(values, members.edges, like.numel()).reshape(like.shape)


def _found(values: Tensor, edges: Tensor, size: int) -> Tensor:
    """:func:`_expand` on an accelerator: a search for each element, which compiled code does in the loop that uses it."""
    places = torch.arange(size, dtype=torch.int64, device=values.device)
    return values[torch.bucketize(places, edges[1:], out_int32=True, right=True)]


def _unfit(numbers: Tensor, count: int) -> str:
    return (
        f"ctx.per_tensor.expand: got numbers of shape {tuple(numbers.shape)}; accepted is one for each of the {count} parameters in the"
        f" leaf, {(count,)}."
    )


def _expand(values: Tensor, edges: Tensor, size: int) -> Tensor:
    """Repeat each value for the elements of its member."""
    if _are_short(edges, size):
        return values.repeat_interleave(edges.diff(), output_size=size)
    # No indices are made, which would take twice the memory.
    found: Tensor = values.new_empty(size)
    for number, (start, stop) in enumerate(pairwise(edges.tolist())):
        if stop > start:
            found[start:stop] = values[number]
    return found


def _sums_of_members(x: Tensor, edges: Tensor, squares: bool) -> Tensor:
    return (_sums_op if torch.compiler.is_compiling() else _sums)(x, edges, squares)


def _sums(x: Tensor, edges: Tensor, squares: bool) -> Tensor:
    flat = x.reshape(-1)
    # Made from `x`, so that it can be told what it is computed from where there are no elements, too.
    found = flat.new_zeros(len(edges) - 1, dtype=torch.float64)
    if not flat.numel() or x.device.type == "meta":
        return found
    if x.device.type == "cpu" and not _are_short(edges, flat.numel()):
        scratch = barriers.scratch_for([flat]) if squares else None
        for number, (start, stop) in enumerate(pairwise(edges.tolist())):
            if stop > start:
                part = flat[start:stop]
                found[number] = barriers.sum_of_squares(part, scratch) if squares else _sum(part)
        return found
    return found + _segments(flat, edges, squares)


def _are_short(edges: Tensor, size: int) -> bool:
    """Whether members on a CPU have so few elements that a call of an operation for each takes longer than the elements do."""
    return size < SHORT * (len(edges) - 1)


def _segments(flat: Tensor, edges: Tensor, squares: bool) -> Tensor:
    """The sums by one kernel for all members, over a chunk at a time, so that no copy of a long tensor is widened."""
    found = flat.new_zeros(len(edges) - 1, dtype=torch.float64)
    chunk = barriers.CHUNK if flat.is_cpu else barriers.DEVICE_CHUNK
    for start in range(0, flat.numel(), chunk):
        # A copy where it is squared in place: float64 is as wide already, and would be the caller's tensor.
        wide = flat[start : start + chunk].to(torch.float64, copy=squares)
        here = edges.clamp(start, start + len(wide)) - start
        found += torch.segment_reduce(wide.square_() if squares else wide, "sum", offsets=here, unsafe=True, initial=0)
    return found


@torch.library.custom_op("everybit::sums_of_members", mutates_args=())
def _sums_op(x: Tensor, edges: Tensor, squares: bool) -> Tensor:
    return _sums(x, edges, squares)


@torch.library.custom_op("everybit::expand_members", mutates_args=())
def _expand_op(values: Tensor, edges: Tensor, size: int) -> Tensor:
    return _expand(values, edges, size)


_sums_op.register_fake(lambda x, edges, squares: x.new_empty(len(edges) - 1, dtype=torch.float64))  # noqa: ARG005
_expand_op.register_fake(lambda values, edges, size: values.new_empty(size))  # noqa: ARG005
