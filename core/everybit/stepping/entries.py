"""The entries of an optimizer's state: the name of each tensor, its role, and how it may be cut.

Code that cuts a state, names its tensors in a checkpoint, shards them or counts their bytes uses these instead of shapes.

An entry goes by the name of its slot, and a part that is not the first of a value also by its own: ``momentum``, ``momentum.residual``,
``variance#2.scale``. Factors, which have other shapes than their parameter, go by theirs: ``variance.rows``, ``variance.rows.scale``. Of
the weights the first part is the model's own tensor, so that their entries are ``param.remainder`` and the like.
Other entries go by their path in the transform's state: ``inner.step``. Field names hold neither ``.`` nor ``#``, and a slot that is
called ``param``, ``step`` or ``inner`` is numbered, as a second slot of one name is (``param#2``); so no two entries have one name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from everybit.base import tree
from everybit.formats import PartSpec
from everybit.stepping.layout import INNER, STEP, WEIGHTS, Layout, Row
from everybit.stepping.optimizer import OptimizerState

__all__ = [
    "INNER", "STEP", "VERSION", "VERSION_KEY", "WEIGHTS", "CutRule", "Entry", "Role", "cut", "entries", "field_of",
    "map_parts",
]  # fmt: skip

VERSION = 2
"""Of the names: state dicts say under :data:`VERSION_KEY` by which they are written."""

VERSION_KEY = "format_version"

Role = Literal["weights", "slot", "shared"]
"""The role of an entry: a part of the weights beside the model's own tensor, a slot, or a value that parameters stepped together share."""

CutRule = Literal["element", "tensor", "copy"] | int
"""How an entry may be cut where its parameter is.

``"element"``: anywhere, as the parameter's own elements. A number: at multiples of so many of the parameter's elements, counted from its
first. ``"tensor"``: not at all. ``"copy"``: every part has a copy, and all copies are equal.
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor that an optimizer keeps for a parameter.

    Attributes:
        name: The entry's name in state dicts and checkpoints.
        role: The entry's role.
        part: The part of a stored value; None for an entry that is stored as it was computed.
        cut: How it may be cut.
        leading: Whether it is the first part of a value: the value itself, rounded. Of the weights that is the model's own tensor.
    """

    name: str
    role: Role
    part: PartSpec | None
    cut: CutRule
    leading: bool = True

    @property
    def field(self) -> str:
        """The name without that of the part: ``momentum#2`` of ``momentum#2.scale``."""
        return self.name if self.role == "shared" else self.name.split(".")[0]

    def shape(self, parameter: Sequence[int], own: Sequence[int]) -> tuple[int, ...]:
        """The entry's shape for a parameter of this shape; ``own`` is that which it has here."""
        if self.cut in ("tensor", "copy"):
            return tuple(own)
        return tuple(parameter) if self.part is None or self.cut == "element" else self.part.shape(parameter)

    def range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of the entry's numbers that belong to the elements ``start`` to ``stop`` of its parameter.

        Raises:
            ValueError: The entry cannot be cut there; the message names it.
        """
        if self.cut in ("tensor", "copy"):
            raise ValueError(f"{self.name}: cannot be cut; its rule is {self.cut!r}.")
        if self.part is None or self.cut == "element":
            return start, stop
        try:
            return self.part.range(start, stop)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None


def entries(layout: Layout, state: OptimizerState[Any], *, decoded: bool = False) -> list[tuple[Entry, Tensor]]:
    """List the entries of a state, in order: the count, parts of weights, slots, and numbers that parameters share.

    Args:
        layout: That of the state.
        state: The state of a list of one tensor.
        decoded: Whether it is as :meth:`~everybit.Optimizer.decode` gives it, in the compute dtype.
    """
    extra, inner = tree.leaves(state.extra), tree.leaves(state.inner)
    found, shared = [(Entry(STEP, "shared", None, "copy"), state.step)], []
    for row in layout.weights if not decoded else ():
        found += _of_row(row, "weights", zip(row.parts[1:], extra[row.where], strict=True))
    for number, row in enumerate(layout.state):
        x = inner[number if decoded else row.where.start]
        if row.stored is None:
            shared.append((Entry(row.name, "shared", None, "copy"), x))
        elif decoded:
            found.append((Entry(row.name, "slot", None, "element" if row.factor is None else "tensor"), x))
        else:
            found += _of_row(row, "slot", zip(row.parts, inner[row.where], strict=True))
    return found + shared


def _of_row(row: Row, role: Role, parts: Iterable[tuple[PartSpec, Tensor]]) -> Iterator[tuple[Entry, Tensor]]:
    for number, (part, x) in enumerate(parts):
        leads = number == 0 and role == "slot"
        cut: CutRule = "tensor" if row.factor is not None else "element" if part.block == 1 else part.block
        yield Entry(row.name if leads else f"{row.name}.{part.name}", role, part, cut, leads), x


def field_of(name: str) -> str:
    """The field that holds a shared number, by the name of its entry: ``mu_product`` of ``inner.states[1].mu_product``; else ``""``."""
    return name.rpartition(".")[2] if name.startswith((f"{INNER}.", f"{INNER}[")) else ""


OnPart = Callable[[Tensor, PartSpec], Tensor]


def map_parts(
    layout: Layout, state: OptimizerState[Any], on_part: OnPart, on_shared: Callable[[Tensor], Tensor]
) -> OptimizerState[Any]:
    """A state with every tensor replaced.

    Args:
        layout: That of the state.
        state: The state as it is stored.
        on_part: A function of a part, and the facts about it, to a tensor.
        on_shared: A function of a count, or another tensor that is no element's, to a tensor.
    """
    extra, inner = tree.leaves(state.extra), tree.leaves(state.inner)
    others = [x for row in layout.weights for x in map(on_part, extra[row.where], row.parts[1:])]
    slots: list[Tensor] = []
    for row in layout.state:
        own = inner[row.where]
        slots += map(on_shared, own) if row.stored is None else map(on_part, own, row.parts)
    return OptimizerState(on_shared(state.step), layout.extra.tree(others), layout.packed.tree(slots))


def cut(
    layout: Layout, state: OptimizerState[Any], start: int, stop: int, on_shared: Callable[[Tensor], Tensor]
) -> OptimizerState[Any]:
    """Return the state of the elements ``start`` to ``stop`` of a vector, as views; ``on_shared`` makes uncut entries.

    Raises:
        ValueError: A part has one number for elements on both sides of ``start``.
    """
    return map_parts(layout, state, lambda x, part: x[slice(*part.range(start, stop))], on_shared)
