"""A transform for some of the leaves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from everybit.base import tree
from everybit.combinators.wrapping import Composed, Wrapping
from everybit.protocol import ALONE, Context, Cut, Transform, enter, eval_params, require_transform

P = TypeVar("P")


@tree.state
class MaskedState:
    """The inner transform's state, with holes (``None``) where the mask is False."""

    inner: Any


@tree.state
class PartitionState:
    """Each label's state, with holes where the label is another."""

    by_label: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Masked(Wrapping):
    """The inner transform sees the selected leaves; the others pass unchanged and have no state."""

    transform: Transform[Any]
    mask: Any = field(hash=False)

    @property
    def cut(self) -> Cut:
        """``"tensor"``: an element does not know its leaf. Code that evaluates the mask first may cut as the inner transform allows."""
        return "tensor"

    def eval_params(self, params: P, state: MaskedState) -> P:
        """Return the inner transform's weights for evaluation where selected, else those given."""
        chosen = _mask(self.mask, params)
        return _merge(params, eval_params(self.transform, _select(params, chosen), state.inner))

    def init(self, params: P) -> MaskedState:
        """The inner state of the selected leaves.

        Raises:
            ValueError: The mask is a function, and selects no leaf, although there are some.
        """
        chosen = _mask(self.mask, params)
        self.require_used(chosen, tree.paths(params))
        return MaskedState(self.transform.init(_select(params, chosen)))

    def require_used(self, chosen: Collection[bool], names: Sequence[str]) -> None:
        """Refuse a function that selects no parameter; a tree of bools may be False everywhere.

        Args:
            chosen: The values of the function for all parameters.
            names: The parameters' names, for the message.

        Raises:
            ValueError: The message has the first parameters.
        """
        if names and not any(chosen) and callable(self.mask):
            raise ValueError(
                f"masked: the mask selects none of the {len(names)} parameters, {', '.join(names[:5])}"
                f"{' and others' if len(names) > 5 else ''}. Drop the transform, or mend the mask."
            )

    def update(self, updates: P, state: MaskedState, params: P, ctx: Context = ALONE) -> tuple[P, MaskedState]:
        """The inner update where selected, else what came in."""
        updates = tree.ordered_as(params, updates)
        chosen = _mask(self.mask, params)
        own, weights = _select(updates, chosen), _select(params, chosen)
        return enter(
            self.transform, own, state.inner, weights, ctx.of(chosen),
            lambda moves, inner: (_merge(updates, moves), MaskedState(inner)),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Partition(Composed):
    """Update each leaf with the transform of its label. The ``optional`` labels need no leaf."""

    transforms: Mapping[str, Transform[Any]] = field(hash=False)
    labels: Any = field(hash=False)
    optional: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name, transform in self.transforms.items():
            require_transform(transform, who=f"partition, {name!r}")

    def parts(self) -> tuple[Transform[Any], ...]:
        """Return the transforms of all labels."""
        return tuple(self.transforms.values())

    @property
    def cut(self) -> Cut:
        """``"tensor"``, since an element does not know its label. Code that evaluates the labels first may cut as the parts allow."""
        return "tensor"

    def eval_params(self, params: P, state: PartitionState) -> P:
        """Return each label's weights for evaluation of its leaves."""
        labels = self._labels(params)
        merged = params
        for name, transform in self.transforms.items():
            own = _select(params, [label == name for label in labels])
            merged = _merge(merged, eval_params(transform, own, state.by_label[name]))
        return merged

    def init(self, params: P) -> PartitionState:
        """Each label's state of its leaves."""
        labels = self._labels(params)
        self.require_used(labels, tree.paths(params), tree.leaves(params))
        states = {
            name: transform.init(_select(params, [label == name for label in labels]))
            for name, transform in self.transforms.items()
        }
        return PartitionState(states)

    def require_used(self, labels: Collection[str], names: Sequence[str], params: Sequence[Tensor]) -> None:
        """Refuse a transform with a label that no parameter has, unless that is optional.

        Args:
            labels: The labels of all parameters.
            names: The names of some of them, for the message.
            params: These.

        Raises:
            ValueError: A label is unused; the message has all of these.
        """
        unused = [name for name in self.transforms if name not in labels and name not in self.optional]
        if unused:
            raise ValueError(
                f"partition: no parameter is labelled {', '.join(map(repr, unused))}; the labels given are"
                f" {', '.join(map(repr, dict.fromkeys(labels)))}, to {_shown(names, params)}. Drop the transform, or mend the labels."
            )

    def update(self, updates: P, state: PartitionState, params: P, ctx: Context = ALONE) -> tuple[P, PartitionState]:
        """Each label's update of its leaves."""
        updates = tree.ordered_as(params, updates)
        return self._run(self._labels(params), updates, state, params, ctx, updates, {})

    def _run(
        self,
        labels: list[str],
        updates: P,
        state: PartitionState,
        params: P,
        ctx: Context,
        merged: P,
        done: dict[str, Any],
    ) -> tuple[P, PartitionState]:
        """Update the leaves of the labels from number ``len(done)`` on."""
        if len(done) == len(self.transforms):
            return merged, PartitionState(done)
        name = list(self.transforms)[len(done)]
        chosen = [label == name for label in labels]

        # A closure that refers to itself would keep its tensors until Python's collector comes.
        def further(moves: Any, inner: Any) -> tuple[P, PartitionState]:
            return self._run(labels, updates, state, params, ctx, _merge(merged, moves), done | {name: inner})

        # By position, as in a chain: a front end that knows the labels replaces a partition so.
        inside = ctx.of(chosen).inside(len(done))
        own, weights = _select(updates, chosen), _select(params, chosen)
        return enter(self.transforms[name], own, state.by_label[name], weights, inside, further)

    def _labels(self, params: object) -> list[str]:
        labels = tree.label(self.labels, params)
        for index, label in enumerate(labels):
            if label not in self.transforms:
                raise ValueError(
                    f"partition: params{tree.paths(params)[index]} is labelled {label!r}, for which there is no transform;"
                    f" there is one for {', '.join(map(repr, self.transforms))}."
                )
        return labels


def masked(
    transform: Transform[Any], mask: object = None, *, where: Callable[[str, Tensor], bool] | None = None
) -> Masked:
    """Apply ``transform`` to some leaves only; the others pass unchanged, and no state is kept for them.

    Args:
        transform: What to apply.
        mask: A tree of bools with a structure that is a prefix of the parameters'.
        where: Instead of a mask, a function of (path, parameter); see :func:`everybit.tree.paths` for how paths are written.

    Raises:
        TypeError: Neither or both of ``mask`` and ``where``, or ``transform`` is not a transform.
        ValueError: From ``init``: a function that selects no parameter. (A tree of bools may be False everywhere.)

    Examples:
        >>> import everybit as eb
        >>> decay = eb.masked(eb.add_decayed_weights(0.1), where=lambda path, p: p.ndim > 1)
    """
    if (mask is None) == (where is None):
        raise TypeError("masked: give either mask=, a tree of bools, or where=, a function of (path, parameter).")
    return Masked(transform, where if mask is None else mask)


def partition(
    transforms: Mapping[str, Transform[Any]],
    labels: Callable[[str, Tensor], str] | object,
    *,
    optional: Collection[str] = (),
) -> Partition:
    """Apply to each leaf the transform of its label. Leaves given :func:`set_to_zero` are frozen, and have no state.

    Args:
        transforms: Transform for each label.
        labels: A tree of labels with a structure that is a prefix of the parameters', or a function of (path, parameter).
        optional: Labels that no parameter need have.

    Raises:
        TypeError: A value that is no transform.
        ValueError: An optional label without transform. From ``init``: a label without transform, or a transform without parameters
            under a label that is not optional; the message names them.
    """
    unknown = [name for name in optional if name not in transforms]
    if unknown:
        raise ValueError(
            f"optional: got {', '.join(map(repr, unknown))}; accepted are labels with a transform, {', '.join(map(repr, transforms))}."
        )
    return Partition(dict(transforms), labels, frozenset(optional))


def _shown(names: Sequence[str], params: Sequence[Tensor]) -> str:
    """The first parameters with their shapes."""
    shown = [f"{name} of shape {tuple(leaf.shape)}" for name, leaf in list(zip(names, params, strict=True))[:5]]
    return f"{', '.join(shown) or 'no parameter'}{' and others' if len(params) > 5 else ''}"


def _mask(mask: object, params: object) -> list[bool]:
    chosen = tree.label(mask, params, name="mask")
    for index, value in enumerate(chosen):
        if not isinstance(value, bool):
            raise TypeError(f"masked: mask{tree.paths(params)[index]}: got {value!r}; accepted are True and False.")
    return chosen


def _select(values: P, chosen: list[bool]) -> P:
    return tree.replace(
        values, [leaf if keep else None for leaf, keep in zip(tree.leaves(values), chosen, strict=True)]
    )


def _merge(values: P, replacements: object) -> P:
    """``values`` with every leaf replaced for which ``replacements`` has one."""
    new = tree.flatten_up_to(values, replacements)
    old = tree.leaves(values)
    return tree.replace(values, [b if a is None else a for a, b in zip(new, old, strict=True)])
