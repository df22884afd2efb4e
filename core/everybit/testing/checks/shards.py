"""A step of shards: pieces of the parameters on several ranks, played in one process."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from everybit.base import tree
from everybit.combinators import Masked, Partition, needs_whole_tensors
from everybit.protocol import Context, Pending, any_per_tensor, map_parts, transforms_in
from everybit.protocol.requests import Kind
from everybit.stepping import Optimizer, OptimizerState, with_policy
from everybit.testing.checks.cuts import flattened, promises, stored_slots
from everybit.testing.examples import (
    LEARNING_RATE,
    STORED,
    Build,
    Stored,
    assert_same_bits,
    example_grads,
    example_params,
)

P = TypeVar("P")

AGREEMENT = 1e-5
"""How far a sum over shards may be from the sum of the whole, relative to what the shards contribute in magnitude.

The 58 elements of the examples, added up in float32 in another order, differ by at most 58 * 2**-24 = 3.5e-6 of their magnitudes."""


def check_shards_equal_whole(build: Build, stored: Stored = STORED) -> None:
    """The pieces of a model, stepped on the ranks of a sharded run, get the bits that the whole model gets.

    The parameters lie end to end and are cut anywhere, within tensors too, and pieces are vectors: one for each tensor. Of a transform
    without masks and labels that requests no numbers of each parameter they are then one for each piece, as in a flat buffer. A transform
    with cut ``"tensor"``, or with a part of that cut, gets whole tensors, each on a rank of its own. One rank is empty, and another has a
    copy of elements that a third rank counts. Masks and labels that are functions see the whole parameters. Under a policy with one number
    for a block of elements, which no piece may cut, the pieces are whole parameters.

    Ranks share only the requests of a transform: all make the same requests, in the same order. The contribution of the whole
    to a reduction is that of its pieces together, a maximum exactly, and a sum to the rounding of another order of addition; pieces and
    whole then go on with the same number.
    """
    for dtype, policy in stored:
        params = example_params(dtype)
        transform = _decided(build(LEARNING_RATE), params)
        sizes = [leaf.numel() for leaf in tree.leaves(params)]
        size = sum(sizes)
        flat = not needs_whole_tensors(transform)
        anywhere = flat and policy.block == 1
        cuts = [1, size // 2, size // 2, size // 2 + 1, size - 1, size] if anywhere else itertools.accumulate(sizes)
        edges = [0, *cuts]
        chooses = any(isinstance(one, (Masked, Partition)) for one in transforms_in(transform))
        joins = anywhere and not chooses and not any_per_tensor([transform])
        for joined in (False, True) if joins else (False,):
            pieces = [_Shard(a, b, flat, joined) for a, b in itertools.pairwise(edges)]
            pieces.append(pieces[0]._replace(counted=False))
            what = f"{promises(transform)}: {size} {dtype} elements on shards that begin at {tuple(edges[:-1])}"
            _check_pieces(with_policy(transform, policy), params, pieces, what)


def _check_pieces(optimizer: Optimizer[Any], params: Any, pieces: list[_Shard], what: str) -> None:
    state = optimizer.init(params)
    parts = [piece.of(params) for piece in pieces]
    whole = _Shard(0, sum(leaf.numel() for leaf in tree.leaves(params)), flat=False)
    states = [optimizer.init(part, piece.context()) for piece, part in zip(pieces, parts, strict=True)]
    for step in (1, 2):
        grads = example_grads(params, step)
        now = f"{what}, step {step}"
        ranks = [_Rank(piece, part, piece.of(grads), s) for piece, part, s in zip(pieces, parts, states, strict=True)]
        totals, stepped = _step_together(optimizer, ranks, now)
        params, state = _step_whole(optimizer, _Rank(whole, params, grads, state), totals, now)
        parts, states = [out[0] for out in stepped], [out[1] for out in stepped]
        counted = [out for out, piece in zip(stepped, pieces, strict=True) if piece.counted]
        _require_same_bits(counted, (params, state), f"{now}: against the whole")
        evaluated = [optimizer.eval_params(part, own) for part, own in counted]
        whole_evaluated = flattened(optimizer.eval_params(params, state))
        assert_same_bits(
            torch.cat([flattened(x) for x in evaluated]), whole_evaluated, f"{now}: weights for evaluation"
        )
        assert_same_bits(
            stepped[-1], stepped[0], f"{now}: a copy that another rank counts, against what it is a copy of"
        )


def _require_same_bits(pieces: list[tuple[Any, OptimizerState[Any]]], whole: tuple[Any, Any], what: str) -> None:
    params, state = whole
    assert_same_bits(torch.cat([flattened(part) for part, _ in pieces]), flattened(params), f"{what}: parameters")
    found = [stored_slots(part, own) for part, own in pieces]
    for name, stored in stored_slots(params, state).items():
        together = [torch.cat(part) for part in zip(*(one[name] for one in found), strict=True)]
        assert_same_bits(together, stored, f"{what}: {name}")
    for _, own in pieces:
        assert_same_bits(_shared(own), _shared(state), f"{what}: what is no slot")


def _shared(state: OptimizerState[Any]) -> list[Tensor]:
    """List the entries of a state other than slots, counters and estimates, which are the same on all ranks."""
    return [state.step, *tree.leaves(tree.map_slots(lambda _name, _slot: None, state.inner))]


class _Shard(NamedTuple):
    """A rank's range of the elements of a tree, which lie end to end.

    Attributes:
        start: First element.
        stop: One past the last.
        flat: Whether tensors are vectors here, of the rank's elements; otherwise they are whole or empty.
        joined: Whether the rank's elements of all tensors are one vector.
        counted: Whether this rank contributes these elements to reductions.
    """

    start: int
    stop: int
    flat: bool
    joined: bool = False
    counted: bool = True

    def of(self, values: Any) -> Any:
        """The same tree, or a vector; a tensor that lies elsewhere has no elements."""
        position, found = 0, []
        for leaf in tree.leaves(values):
            first, last = (min(max(edge - position, 0), leaf.numel()) for edge in (self.start, self.stop))
            whole = last - first == leaf.numel() and not self.flat
            # A matrix of another rank is a matrix without elements here, as on FSDP2.
            none = leaf.new_empty((0,) * max(leaf.ndim, 1)) if not self.flat else leaf.reshape(-1)[first:last].clone()
            found.append(leaf.clone() if whole else none)
            position += leaf.numel()
        return torch.cat(found) if self.joined else tree.replace(values, found)

    def context(self) -> Context:
        """Return the context of a step."""
        return Context(first_element=self.start, pending=True)


class _Rank(NamedTuple):
    piece: _Shard
    params: Any
    grads: Any
    state: OptimizerState[Any]


class _Total(NamedTuple):
    """The total of a reduction, and the sum of the magnitudes of its partial results."""

    kind: Kind
    value: Tensor
    magnitude: Tensor


def _step_whole(
    optimizer: Optimizer[Any], rank: _Rank, totals: list[_Total], what: str
) -> tuple[Any, OptimizerState[Any]]:
    """Step the whole model with the totals of its shards, and hold its own contributions against them."""
    result: Any = optimizer.step(rank.params, rank.grads, rank.state, rank.piece.context())
    made: list[tuple[Kind, Tensor]] = []
    while isinstance(result, Pending):
        made.append((result.kind, result.partial()))
        if len(made) > len(totals):
            raise AssertionError(f"{what}: only the whole requests the {result.kind} of {made[-1][1]}.")
        result = result.resume(totals[len(made) - 1].value)
    _require_agreement(made, totals, what)
    stepped: tuple[Any, OptimizerState[Any]] = result
    return stepped


def _step_together(
    optimizer: Optimizer[Any], ranks: list[_Rank], what: str
) -> tuple[list[_Total], list[tuple[Any, OptimizerState[Any]]]]:
    """Step all ranks, and return the totals of their reductions and each rank's result."""
    totals: list[_Total] = []
    results: list[Any] = [optimizer.step(rank.params, rank.grads, rank.state, rank.piece.context()) for rank in ranks]
    while any(isinstance(one, Pending) for one in results):
        waiting = [one for one in results if isinstance(one, Pending)]
        if any(one.request.each for one in waiting) and not optimizer.per_tensor:
            raise AssertionError(
                f"{what}: requests numbers of each parameter; promised is per_tensor = True of a transform that does."
            )
        # Another rank has contributed the copy's elements: to a sum the copy adds zero, and a maximum stays as it is.
        partials: list[tuple[Kind, Tensor]] = [
            (one.kind, one.partial() if rank.piece.counted or one.kind == "max" else torch.zeros_like(one.partial()))
            for one, rank in zip(results, ranks, strict=True)
            if isinstance(one, Pending)
        ]
        made = {(kind, value.shape, value.dtype) for kind, value in partials}
        if len(waiting) < len(ranks) or len(made) > 1:
            raise AssertionError(
                f"{what}: {len(waiting)} of {len(ranks)} ranks make request {len(totals) + 1}, of {sorted(map(str, made))}; promised"
                " is that all ranks make the same, also one that has no elements."
            )
        totals.append(_reduced(partials))
        results = [one.resume(totals[-1].value) for one in waiting]
    return totals, results


def _reduced(partials: list[tuple[Kind, Tensor]]) -> _Total:
    kind, dtype = partials[0][0], partials[0][1].dtype
    values = torch.stack([value.double() for _, value in partials])
    value = values.sum(0) if kind == "sum" else values.amax(0)
    return _Total(kind, value.to(dtype), values.abs().sum(0))


def _require_agreement(asked: list[tuple[Kind, Tensor]], totals: list[_Total], what: str) -> None:
    if len(asked) != len(totals):
        raise AssertionError(f"{what}: the whole makes {len(asked)} requests, its shards {len(totals)}.")
    for number, ((kind, value), total) in enumerate(zip(asked, totals, strict=True), start=1):
        bound = AGREEMENT * total.magnitude if kind == "sum" else 0.0
        # Shapes that differ would be broadcast.
        alike = (kind, value.shape, value.dtype) == (total.kind, total.value.shape, total.value.dtype)
        same = alike and bool(((value.double() - total.value.double()).abs() <= bound).all())
        if not same and not (alike and torch.equal(value, total.value)):
            raise AssertionError(
                f"{what}: reduction {number}: the {total.kind} over the shards is {total.value}, and the {kind} of the whole {value}."
                " Promised is that each element contributes once: what is requested is computed from ctx.owned(...)."
            )


def _decided(node: Any, params: Any) -> Any:
    """A transform with its masks and labels as trees, as they come out for whole ``params``: a piece does not know its shape."""
    if isinstance(node, Masked):
        mask = tree.label(node.mask, params, name="mask")
        return replace(node, mask=tree.replace(params, mask), transform=_decided(node.transform, _chosen(params, mask)))
    if isinstance(node, Partition):
        labels = tree.label(node.labels, params)
        parts = {
            name: _decided(part, _chosen(params, [label == name for label in labels]))
            for name, part in node.transforms.items()
        }
        return replace(node, labels=tree.replace(params, labels), transforms=parts)
    return map_parts(lambda part: _decided(part, params), node)


def _chosen(params: P, mask: list[bool]) -> P:
    return tree.replace(params, [leaf if keep else None for leaf, keep in zip(tree.leaves(params), mask, strict=True)])
