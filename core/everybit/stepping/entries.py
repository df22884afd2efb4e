"""The entries of an optimizer's state: the name of each tensor, its role, and how it may be cut.

Code that cuts a state, names its tensors in a checkpoint, shards them or counts their bytes uses these instead of shapes.

An entry goes by the name of its slot, and a part that is not the first of a value also by its own: ``momentum``, ``momentum.residual``,
``variance#2.scale``. Factors, which have other shapes than their parameter, go by theirs: ``variance.rows``, ``variance.rows.scale``. Of
the weights the first part is the model's own tensor, so that their entries are ``param.remainder`` and the like.
Other entries go by their path in the transform's state: ``inner.step``. Field names hold neither ``.`` nor ``#``, and a slot that is
called ``param``, ``step`` or ``inner`` is numbered, as a second slot of one name is (``param#2``); so no two entries have one name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from everybit.base import tree
from everybit.formats import PartSpec
from everybit.formats.protocol import parts_of
from everybit.policies import Resolved
from everybit.stepping.optimizer import OptimizerState

STEP, WEIGHTS, INNER = "step", "param", "inner"
"""Names of entries that are no slots: the optimizer's count, what the model does not hold of the weights, a transform's counts."""

VERSION = 2
"""Of the names: state dicts say under :data:`VERSION_KEY` by which they are written."""

VERSION_KEY = "format_version"

Role = Literal["weights", "slot", "shared"]
"""The role of an entry: a part of the weights beside the model's own tensor, a slot, or a value that parameters stepped together share."""

Cut = Literal["element", "tensor", "copy"] | int
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
    cut: Cut
    leading: bool = True

    @property
    def field(self) -> str:
        """The name without that of the part: ``momentum#2`` of ``momentum#2.scale``."""
        return self.name if self.role == "shared" else self.name.split(".")[0]

    def shape(self, parameter: Sequence[int], own: Sequence[int]) -> tuple[int, ...]:
        """The entry's shape for a parameter of this shape; ``own`` is that which it has here."""
        if self.cut in ("tensor", "copy"):
            return tuple(own)
        return tuple(parameter) if self.part is None else self.part.shape(parameter)

    def range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of the entry's numbers that belong to the elements ``start`` to ``stop`` of its parameter.

        Raises:
            ValueError: The entry cannot be cut there; the message names it.
        """
        if self.cut in ("tensor", "copy"):
            raise ValueError(f"{self.name}: cannot be cut; its rule is {self.cut!r}.")
        try:
            return (start, stop) if self.part is None else self.part.range(start, stop)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None


class Field(NamedTuple):
    """A field of a state: a slot with something for each parameter, or a number that they share.

    Attributes:
        name: Unique.
        value: A tree of tensors, or of tuples of parts; or a tensor.
        is_slot: Whether there is something for each parameter.
    """

    name: str
    value: Any
    is_slot: bool


def fields(state: OptimizerState[Any]) -> list[Field]:
    """Everything in a state, by names that are unique.

    Slots go by their own names, ``param`` by that of the parts of parameters that the model does not hold; counters by their path. A slot
    name is taken, by a slot before it or by another entry, is numbered: ``momentum#2``, ``param#2``. Whether ``param`` is taken
    does not depend on whether this policy has such parts, so that a slot's name is the same under every policy.
    """
    found = [Field(STEP, state.step, is_slot=False)]
    if tree.leaves(state.extra):
        found.append(Field(WEIGHTS, state.extra, is_slot=True))
    name_of = _Names()
    slots = [Field(name_of(name), subtree, is_slot=True) for name, subtree in tree.slots(state.inner)]
    found += [slot for slot in slots if tree.leaves(slot.value)]
    counters = tree.map_slots(lambda *_: None, state.inner)
    paths = [f"{INNER}{path}" for path in tree.paths(counters)]
    return found + [Field(path, leaf, is_slot=False) for path, leaf in zip(paths, tree.leaves(counters), strict=True)]


class _Names:
    """Numbers slots of a name that is taken."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = dict.fromkeys((STEP, WEIGHTS, INNER), 1)

    def __call__(self, name: str) -> str:
        count = self._seen[name] = self._seen.get(name, 0) + 1
        return name if count == 1 else f"{name}#{count}"


def _specs(field: str, stored: Resolved) -> tuple[PartSpec, ...]:
    """The parts of a field of a tensor's state."""
    return parts_of(stored.params)[1:] if field == WEIGHTS else parts_of(stored.slot(field.split("#")[0]))


def entries(state: OptimizerState[Any], stored: Resolved | None) -> list[tuple[Entry, Tensor]]:
    """List the entries of a state, in order.

    Args:
        state: The state of a list of one tensor.
        stored: How the tensor and its state are stored; None: in the compute dtype, as :meth:`~everybit.Optimizer.decode` gives it.
    """
    found: list[tuple[Entry, Tensor]] = []
    for name, value, is_slot in fields(state):
        if is_slot:
            found += _of_value(name, value[0], None if stored is None else _specs(name, stored))
        else:
            found.append((Entry(name, "shared", None, "copy"), value))
    return found


def _of_value(name: str, value: Any, parts: tuple[PartSpec, ...] | None) -> Iterator[tuple[Entry, Tensor]]:
    role: Role = "weights" if name == WEIGHTS else "slot"
    if value is None:
        return
    if isinstance(value, dict):
        for factor, stored in value.items():
            for entry, x in _of_value(f"{name}.{factor}", stored, parts):
                yield replace(entry, cut="tensor"), x
        return
    if parts is None:
        yield Entry(name, role, None, "element"), value
        return
    tensors = value if isinstance(value, tuple) else (value,)
    for number, (part, x) in enumerate(zip(parts, tensors, strict=True)):
        if x is None:
            continue
        first = number == 0 and name != WEIGHTS
        own_name = name if first else f"{name}.{part.name}"
        yield Entry(own_name, role, part, "element" if part.block == 1 else part.block, first), x


def field_of(name: str) -> str:
    """The field that holds a shared number, by the name of its entry: ``mu_product`` of ``inner.states[1].mu_product``; else ``""``."""
    return name.rpartition(".")[2] if name.startswith((f"{INNER}.", f"{INNER}[")) else ""


OnPart = Callable[[Tensor, PartSpec], Tensor]


def map_parts(
    state: OptimizerState[Any], stored: Resolved, on_part: OnPart, on_shared: Callable[[Tensor], Tensor]
) -> OptimizerState[Any]:
    """A state with every tensor replaced.

    Args:
        state: The state of a list of one tensor.
        stored: How the tensor and its state are stored.
        on_part: A function of a part, and the facts about it, to a tensor.
        on_shared: A function of a count, or another tensor that is no element's, to a tensor.
    """
    name_of = _Names()

    def mapped(name: str, values: list[Any]) -> list[Any]:
        return [_mapped_value(value, _specs(name, stored), on_part) for value in values]

    inner = tree.map_slots(lambda name, values: mapped(name_of(name), values), state.inner, on_shared)
    return OptimizerState(on_shared(state.step), mapped(WEIGHTS, state.extra), inner)


def _mapped_value(value: Any, parts: tuple[PartSpec, ...], on_part: OnPart) -> Any:
    if value is None:
        return None
    if isinstance(value, dict):
        # The parts of a factor do not follow the parameter's elements, but for their number.
        return {factor: _mapped_value(stored, parts, on_part) for factor, stored in value.items()}
    if isinstance(value, tuple):
        return tuple(None if x is None else on_part(x, part) for x, part in zip(value, parts, strict=True))
    return on_part(value, parts[0])


def cut(
    state: OptimizerState[Any], stored: Resolved, start: int, stop: int, on_shared: Callable[[Tensor], Tensor]
) -> OptimizerState[Any]:
    """Return the state of the elements ``start`` to ``stop`` of a vector, as views; ``on_shared`` makes uncut entries.

    Raises:
        ValueError: A part has one number for elements on both sides of ``start``.
    """

    def part(x: Tensor, spec: PartSpec) -> Tensor:
        return x[slice(*spec.range(start, stop))]

    return map_parts(state, stored, part, on_shared)
