"""The layout of a step: every value that a policy stores, in the order in which it lies, with its format and its random bits.

A layout is found once for each structure, and what does not fit is refused there. A step then goes through two lists, and what names,
cuts or counts the tensors of a state reads the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from everybit.base import (
    DTYPES,
    FLOAT_DTYPES,
    Blocks,
    ComputeDType,
    FirstElement,
    FloatDType,
    Key,
    Lane,
    Numbering,
    first_of_whole,
    is_parameter,
    rounding,
    stream,
    tree,
)
from everybit.formats import BUILT_IN, Format, Parts, PartSpec
from everybit.formats.protocol import parts_of
from everybit.policies import Resolved

P = TypeVar("P")

STEP, WEIGHTS, INNER = "step", "param", "inner"
"""Names of entries that are no slots: the optimizer's count, what the model does not hold of the weights, a transform's counts."""

_LANES: dict[str, Literal[0, 1, 2]] = {"momentum": 0, "variance": 1, "params": 2}
"""Which number of one random word rounds a tensor, by the name of its stream: the three tensors of a parameter share one word."""


_ACCEPTED: dict[ComputeDType, dict[torch.dtype, FloatDType]] = {
    "float64": {DTYPES[one]: one for one in FLOAT_DTYPES},
    "float32": {DTYPES[one]: one for one in FLOAT_DTYPES[1:]},
}
"""The dtypes of gradients, by that in which they are computed with."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One value: a parameter's weights, what a slot has for a parameter, one factor of that, or a number that parameters share.

    Attributes:
        name: The name of its entry: ``param``, ``momentum#2``, ``variance.rows``, ``inner.step``.
        leaf: The number of its parameter.
        where: The tensors that it is stored as, among those of the state; of weights, among the parts that the model does not hold.
        stored: How its parameter is stored; None: a shared number, which is stored as it is.
        format: Its format.
        parts: What the format makes of it.
        slot: The name of its slot.
        stream: Of the random bits that round it.
        lane: The stream of the word that it shares with other tensors, and which number of that word is its own.
        factor: The name of the factor; None: the value has its parameter's shape.
    """

    name: str
    leaf: int
    where: slice
    stored: Resolved | None = None
    format: Format | None = None
    parts: tuple[PartSpec, ...] = ()
    slot: str = ""
    stream: int = 0
    lane: tuple[int, Literal[0, 1, 2]] | None = None
    factor: str | None = None

    def decode(self, parts: Parts, leaf: Tensor) -> Tensor:
        """Return the value in the compute dtype. A factor has the shape of its first part, which no parameter tells."""
        assert self.stored is not None
        assert self.format is not None
        shape = leaf.shape if self.factor is None else parts[0].shape
        return self.format.decode(parts, shape, self.stored.policy.compute)


class Draws(NamedTuple):
    """The random bits of one step.

    Attributes:
        seed: The optimizer's.
        step: Number of the update.
        first: The index of the first element.
        numbering: The indices of each parameter's elements.
        drawn: The words that were drawn for each parameter.
    """

    seed: int | Tensor
    step: Tensor
    first: FirstElement
    numbering: tuple[Numbering, ...]
    drawn: list[list[Tensor]]

    def key(self, row: Row) -> Key:
        """Name the bits that round a value.

        The indices of the next parameter's factor lie 2**24 times as far as that parameter: a factor has at most the square of one of the
        parameter's sides.
        """
        first = self.numbering[row.leaf].first
        if row.factor is not None:
            return Key(self.seed, self.step, row.stream, first_of_whole(first) << 24)
        lane = None if row.lane is None else Lane(*row.lane, self.drawn[row.leaf])
        return Key(self.seed, self.step, row.stream, first, lane)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """How the tensors of a step are stored.

    Attributes:
        formats: How each parameter and its state are stored.
        params: The structure of the parameters.
        extra: The structure of the parts that the model does not hold.
        packed: The structure of the transform's state as it is stored.
        open: The structure of that state as it is computed with.
        weights: The row of each parameter.
        state: The row of each value of the transform's state.
    """

    formats: tuple[Resolved, ...]
    params: tree.Structure
    extra: tree.Structure
    packed: tree.Structure
    open: tree.Structure
    weights: tuple[Row, ...]
    state: tuple[Row, ...]

    @staticmethod
    def of(
        params: object, formats: Sequence[Resolved], inner: object, extra: object = None, *, is_checked: bool = True
    ) -> Layout:
        """Find the layout of a state.

        Args:
            params: The parameters.
            formats: How each is stored.
            inner: The transform's state.
            extra: The parts of the parameters that the model does not hold: the state is as it is stored. None: it is in the compute dtype.
            is_checked: Whether tensors are compared with their formats; not of a state that was made for these parameters.

        Raises:
            TypeError: A factor that is no tensor.
            ValueError: A slot with another structure than the parameters', or stored parts that do not belong to the parameters under their
                formats. Messages name the path.
        """
        counters = () if torch.compiler.is_compiling() else tree.paths(tree.map_slots(lambda *_: None, inner))
        finder = _Finder(params, formats, counters, is_stored=extra is not None, is_checked=is_checked)
        weights = finder.weights(extra)
        found = tree.map_slots(finder.slot, inner, finder.shared)
        state: list[Any] = tree.leaves(found)
        # Dicts of a state may have another order than those of the parameters: these structures read them by key.
        others = tree.replace(params, [(0,) * (len(row.parts) - 1) for row in weights])
        packed = tree.map(lambda row: 0 if len(row.parts) < 2 else (0,) * len(row.parts), found)
        of = tree.Structure.of
        return Layout(tuple(formats), of(params), of(others), of(packed), of(found), tuple(weights), tuple(state))

    def wide_gradients(self, grads: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor] | None:
        """The gradients in the compute dtypes; None if one of them is no gradient of its parameter."""
        wide = []
        for grad, leaf, one in zip(grads, leaves, self.formats, strict=True):
            if grad.shape != leaf.shape or not _is_gradient(grad, one):
                return None
            wide.append(_wide_gradient(grad, one.wide))
        return wide

    def decode_weights(self, leaves: Sequence[Tensor], extra: Sequence[Tensor]) -> list[Tensor]:
        """Return the weights in the compute dtype, of the parameters and the tensors that the model does not hold."""
        return [row.decode((leaf, *extra[row.where]), leaf) for leaf, row in zip(leaves, self.weights, strict=True)]

    def decode_state(self, leaves: Sequence[Tensor], inner: Sequence[Tensor]) -> list[Tensor]:
        """Return the values of the state in the compute dtype, of the parameters and the tensors of the transform's state."""
        return [
            inner[row.where.start] if row.stored is None else row.decode(tuple(inner[row.where]), leaves[row.leaf])
            for row in self.state
        ]

    def encode(
        self, leaves: Sequence[Tensor], weights: Sequence[Tensor], values: Sequence[Tensor], draws: Draws
    ) -> tuple[Any, Any, Any]:
        """Return what is stored: the parameters, the parts that the model does not hold, and the transform's state.

        Raises:
            ValueError: A value with another shape than its parameter, or in another dtype than the compute dtype. The message names the
                path.
        """
        parts = [self._encoded(row, x, x.shape, draws) for row, x in zip(self.weights, weights, strict=True)]
        inner: list[Tensor] = []
        for row, x in zip(self.state, values, strict=True):
            inner += [x] if row.stored is None else self._encoded(row, x, leaves[row.leaf].shape, draws)
        extra = [x for of_one in parts for x in of_one[1:]]
        return self.params.tree([of_one[0] for of_one in parts]), self.extra.tree(extra), self.packed.tree(inner)

    def draws(self, leaves: Sequence[Tensor], seed: int | Tensor, step: Tensor, first: FirstElement) -> Draws:
        """The random bits of a step."""
        drawn: list[list[Tensor]] = [[] for _ in leaves]
        models = [one.model for one in self.formats]
        return Draws(seed, step, first, Numbering.through(leaves, first, models), drawn)

    def _encoded(self, row: Row, x: Tensor, shape: torch.Size, draws: Draws) -> Parts:
        assert row.stored is not None
        assert row.format is not None
        if row.factor is None and x.shape != shape:
            raise ValueError(
                f"{self.path(row)}: got the shape {tuple(x.shape)}; accepted is that of its parameter, {tuple(shape)}."
            )
        if x.dtype is not row.stored.wide:
            raise ValueError(
                f"{self.path(row)}: got {x.dtype}; accepted before encoding is {row.stored.policy.compute}."
            )
        # Zeros in gaps, where a step may have computed anything, and which scales of blocks must not see.
        kept = draws.first.filled(x) if isinstance(draws.first, Blocks) else x
        parts = row.format.encode(kept, draws.key(row))
        if type(row.format) not in BUILT_IN and not _fits(parts, row.parts, x.shape):
            raise ValueError(
                f"{self.path(row)}: {row.format}.encode returned [{_listed(parts)}] for a value of shape {tuple(x.shape)}; accepted is what"
                f" its parts() say, [{_named(row.parts, x.shape)}]."
            )
        return parts

    def path(self, row: Row) -> str:
        """The place of a value in messages: ``state.momentum['w']``."""
        path = tree.paths(self.params.template)[row.leaf]
        return f"params{path}" if row.name == WEIGHTS else _in_slot(row.slot, path, row.factor)


# -- the compute dtype --------------------------------------------------------------------------------------------------------


def widened_param(leaf: Tensor, one: Resolved) -> Tensor:
    """A parameter as stored, in the compute dtype; never the parameter itself, which a transform might keep in its state.

    A module's parameter is detached, or the state would keep a graph; a plain tensor is not: a start may be differentiated by.
    """
    plain = leaf.detach() if is_parameter(leaf) else leaf
    value = plain.to(one.wide)
    return value.clone() if value.dtype is leaf.dtype else value


def widened(grads: P, params: P, formats: Sequence[Resolved], *, name: str = "grads") -> P:
    """``grads`` in the compute dtype, after a look at each."""
    tree.require_same_structure(grads, params, name=name, reference_name="params")
    wide = []
    # By the parameters' order: the keys of a dict may come in another.
    for index, (grad, one) in enumerate(zip(tree.flatten_up_to(params, grads), formats, strict=True)):
        compute = one.policy.compute
        if not _is_gradient(grad, one):
            path = f"{name}{tree.paths(params)[index]}"
            kind = f"a {grad.layout} tensor" if grad.layout is not torch.strided else str(grad.dtype)
            raise TypeError(
                f"{path}: got {kind} with Policy.compute={compute!r}; accepted are dense, real floating-point tensors:"
                f" {', '.join(_ACCEPTED[compute].values())}."
            )
        wide.append(_wide_gradient(grad, one.wide))
    return tree.replace(params, wide)


def _is_gradient(grad: Tensor, one: Resolved) -> bool:
    """Whether a step can take a tensor as a gradient: it is dense, and of a dtype not above the compute dtype."""
    return grad.layout is torch.strided and grad.dtype in _ACCEPTED[one.policy.compute]


def _wide_gradient(grad: Tensor, wide: torch.dtype) -> Tensor:
    """``grad`` in the compute dtype, with the rounding that its own dtype stands for.

    A user's compiled function may round a gradient to 16 bits and step in one graph; the compiler would then fold the two casts and hand
    on the number as it was before the rounding. In eager code a cast is a cast, and can be differentiated.
    """
    if torch.compiler.is_compiling() and grad.dtype is torch.bfloat16:
        return (grad.view(torch.int16).to(torch.int32) << 16).view(torch.float32).to(wide)
    if torch.compiler.is_compiling() and grad.dtype is torch.float16:
        return rounding.nearest(grad.float(), "float16").to(wide)
    return (grad if grad.dtype.itemsize >= 4 else grad.float()).to(wide)


# -- finding ------------------------------------------------------------------------------------------------------------------


class _Finder:
    """Finds the rows of parameters and of slots."""

    def __init__(
        self, params: object, formats: Sequence[Resolved], counters: Sequence[str], *, is_stored: bool, is_checked: bool
    ) -> None:
        self._params, self._formats, self._counters = params, formats, iter(counters)
        self._is_stored, self._is_open = is_checked and is_stored, is_checked and not is_stored
        self._leaves = tree.leaves(params)
        self._slots: dict[str, int] = dict.fromkeys((STEP, WEIGHTS, INNER), 1)
        self._counts: dict[str, list[int]] = {}
        self._streams: dict[str, int] = {}
        self._end = 0

    def shared(self, _: Tensor) -> Row:
        """The row of a number that parameters share."""
        return Row(f"{INNER}{next(self._counters, '')}", 0, self._next(1))

    def weights(self, extra: object) -> list[Row]:
        """The rows of the parameters."""
        found = [self._row(WEIGHTS, index, one.params, "", "params") for index, one in enumerate(self._formats)]
        self._end = 0
        if not self._is_stored:
            return found
        try:
            held = tree.flatten_up_to(self._params, extra)
        except ValueError as error:
            raise ValueError(f"state.extra: structure differs from params: {error}") from None
        for row, leaf, rest in zip(found, self._leaves, held, strict=True):
            parts = (leaf, *rest) if isinstance(rest, tuple) else (leaf, rest)
            _require_parts(parts, self._formats[row.leaf].params, leaf, lambda: f"params{self._path(row.leaf)}")  # noqa: B023
        return found

    def slot(self, name: str, slot: Any) -> Any:
        """The rows of a slot, in its structure."""
        try:
            held = tree.flatten_up_to(self._params, slot)
        except ValueError as error:
            raise ValueError(f"state.{name}: structure differs from params: {error}") from None
        number = self._slots[name] = self._slots.get(name, 0) + 1
        # A name that a parameter has twice draws two streams. Slots in which it has a hole do not count: an engine that steps it without
        # the transforms of other labels would draw other bits.
        before = self._counts.get(name, [0] * len(held))
        counts = self._counts[name] = [count + (x is not None) for count, x in zip(before, held, strict=True)]
        rows = [
            self._of(name, number, count, index, x) for index, (count, x) in enumerate(zip(counts, held, strict=True))
        ]
        return tree.replace(self._params, rows)

    def _of(self, name: str, number: int, count: int, index: int, value: Any) -> Any:
        if value is None:
            return None
        entry, own = _numbered(name, number), _numbered(name, count)
        format = self._formats[index].slot(name)
        if not isinstance(value, dict):
            if self._is_stored:
                parts = value if isinstance(value, tuple) else (value,)
                _require_parts(parts, format, self._leaves[index], lambda: _in_slot(name, self._path(index)))
            return self._row(entry, index, format, name, own)
        rows = {}
        for factor, x in value.items():
            where = lambda factor=factor: _in_slot(name, self._path(index), factor)  # noqa: E731
            if self._is_stored:
                parts = x if isinstance(x, tuple) else (x,)
                _require_parts(parts, format, parts[0], where)
            if self._is_open:
                _require_factor(factor, x, format, lambda: _in_slot(name, self._path(index)))
            rows[factor] = self._row(f"{entry}.{factor}", index, format, name, f"{name}.{factor}", factor=factor)
        return rows

    def _row(
        self,
        name: str,
        leaf: int,
        format: Format,
        slot: str,
        own: str,
        *,
        factor: str | None = None,
    ) -> Row:
        one, parts = self._formats[leaf], parts_of(format)
        where = self._next(len(parts) - 1 if name == WEIGHTS else len(parts))
        number = None if factor is not None else _LANES.get(own)
        lane = None if number is None else (self._stream(f"moments:{one.model}"), number)
        return Row(name, leaf, where, one, format, parts, slot, self._stream(f"{own}:{one.model}"), lane, factor)

    def _next(self, count: int) -> slice:
        """The places of the next tensors."""
        self._end += count
        return slice(self._end - count, self._end)

    def _stream(self, name: str) -> int:
        if name not in self._streams:
            self._streams[name] = stream(name)
        return self._streams[name]

    def _path(self, leaf: int) -> str:
        return tree.paths(self._params)[leaf]


def _numbered(name: str, number: int) -> str:
    return name if number < 2 else f"{name}#{number}"


def _in_slot(slot: str, path: str, factor: str | None = None) -> str:
    return f"state.{slot}{path}" + ("" if factor is None else f"[{factor!r}]")


# -- what does not fit --------------------------------------------------------------------------------------------------------


def _require_factor(factor: object, x: object, format: Format, where: Callable[[], str]) -> None:
    """Refuse a factor without a name, a factor that is not a tensor, or a format that does not keep its shape."""
    if not isinstance(factor, str) or not factor.isidentifier():
        raise ValueError(f"{where()}: got a factor called {factor!r}; accepted are identifiers, such as 'rows'.")
    if not isinstance(x, Tensor):
        raise TypeError(f"{where()}[{factor!r}]: got {x!r}; accepted are tensors.")
    if format.parts()[0].block != 1:
        raise ValueError(
            f"{where()}: got {format} for factors of other shapes than the parameter's, whose first part has one number for"
            f" {format.parts()[0].block} elements; accepted are formats whose first part has the value's shape, such as those of 8 bits."
        )


def _require_parts(parts: Sequence[Any], format: Format, leaf: Tensor, where: Callable[[], str]) -> None:
    """Refuse stored parts that another format made, or that belong to a tensor of another shape."""
    specs = parts_of(format)
    if not _fits(parts, specs, leaf.shape):
        raise ValueError(
            f"{where()}: stored as [{_listed(parts)}], but {format} stores {_named(specs, leaf.shape)}: this state was made under another"
            " policy, or for other parameters. export_fp32 and import_fp32 carry weights from one policy to another."
        )


def _fits(parts: object, specs: Sequence[PartSpec], shape: torch.Size) -> bool:
    return (
        isinstance(parts, tuple)
        and len(parts) == len(specs)
        and all(
            isinstance(part, Tensor)
            and part.dtype is spec.dtype
            and part.shape == (shape if spec.block == 1 else spec.shape(shape))
            for part, spec in zip(parts, specs, strict=True)
        )
    )


def _listed(parts: object) -> str:
    listed = parts if isinstance(parts, tuple) else (parts,)
    return ", ".join(f"{p.dtype} {tuple(p.shape)}" if isinstance(p, Tensor) else repr(p) for p in listed)


def _named(specs: Sequence[PartSpec], shape: torch.Size) -> str:
    return ", ".join(f"{spec.name} ({spec.dtype} {spec.shape(shape)})" for spec in specs)
