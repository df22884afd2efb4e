"""Pytrees of tensors: the only module that calls optree.

A *tree* is any nesting of dicts, lists, tuples, named tuples and registered dataclasses with tensors as leaves. ``None`` is not
a leaf but a hole: "no tensor here". A frozen parameter, or a parameter that a mask leaves out, is written so.

optree's own ``PyTree[T]`` rejects a plain ``dict[str, Tensor]``, so trees are typed here by *structure*: a function that takes a
``P`` and returns a ``P`` promises the same containers, keys and holes. Dicts keep insertion order, as ``named_parameters`` does;
the layout of flat buffers and the names in checkpoints follow from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar, dataclass_transform, get_args, get_type_hints

import optree
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor

from everybit.base import barriers
from everybit.base.older_torch import let_trees_trace

P = TypeVar("P")
T = TypeVar("T")
C = TypeVar("C", bound=type[Any])
OnTensor = Callable[[Tensor], Any]

NAMESPACE = "everybit"

let_trees_trace()

# Entered and never left: the order is a property of the namespace, not of a call. The reference keeps the generator alive.
_insertion_order = optree.dict_insertion_ordered(True, namespace=NAMESPACE)
_insertion_order.__enter__()


class _SlotMark:
    """Marks a state field that holds one tensor per parameter."""


Slot = Annotated[P, _SlotMark]
"""``momentum: Slot[P]``: a state field with the structure of the parameters, which a policy may store in any format."""

_SLOTS: dict[type[Any], dict[str, bool]] = {}


@dataclass_transform(frozen_default=True)
def state(cls: C) -> C:
    """Make a class a frozen dataclass of optimizer state: a tree node for optree, and for ``torch.func`` and ``torch.compile``.

    Fields annotated ``Slot[P]`` hold one tensor per parameter; a policy finds them by name. A field annotated ``int`` is part of the
    structure, and constant where code is compiled. Every other field is a tensor (a counter, say) or nested state.

    Raises:
        TypeError: The annotations of ``cls`` cannot be resolved.
    """
    is_made = "__dataclass_fields__" in vars(cls)
    made: Any = cls if is_made else dataclasses.dataclass(frozen=True, slots=True)(cls)
    names = tuple(field.name for field in dataclasses.fields(made))
    try:
        hints = get_type_hints(made, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"@state on {made.__qualname__}: {error}; names in its annotations must be defined in its module, not inside a function."
        ) from None
    _SLOTS[made] = {name: _SlotMark in get_args(hints[name]) for name in names}
    numbers = tuple(name for name in names if hints[name] is int)
    held = tuple(name for name in names if name not in numbers)
    keys = [torch_pytree.GetAttrKey(name) for name in held]

    def flatten(node: Any) -> tuple[tuple[Any, ...], tuple[int, ...], tuple[str, ...]]:
        return tuple(getattr(node, name) for name in held), tuple(getattr(node, name) for name in numbers), held

    def unflatten(fixed: tuple[int, ...], children: Iterable[Any]) -> Any:
        return made(**dict(zip(held, children, strict=True)), **dict(zip(numbers, fixed, strict=True)))

    register: Any = optree.register_pytree_node  # its stub wants a Collection, which a dataclass need not be
    register(made, flatten, unflatten, path_entry_type=optree.DataclassEntry, namespace=NAMESPACE)

    def torchs(node: Any) -> tuple[list[Any], tuple[int, ...]]:
        children, fixed, _ = flatten(node)
        return [_with_holes(child) for child in children], fixed

    def with_keys(node: Any) -> tuple[list[Any], tuple[int, ...]]:
        children, fixed = torchs(node)
        return [*zip(keys, children, strict=True)], fixed

    torch_pytree.register_pytree_node(
        made,
        torchs,
        lambda children, fixed: unflatten(fixed, (_without_holes(child) for child in children)),
        serialized_type_name=f"{made.__module__}.{made.__qualname__}",
        flatten_with_keys_fn=with_keys,
    )
    found: C = made
    return found


class _Hole:
    """Stands for None inside of a state's field where torch's own trees look: to them None is a leaf, which ``torch.func.vmap`` refuses."""


torch_pytree.register_pytree_node(
    _Hole,
    lambda _: ([], None),
    lambda *_: _Hole(),
    serialized_type_name=f"{__name__}._Hole",
    flatten_with_keys_fn=lambda _: ([], None),
)


def _with_holes(node: Any) -> Any:
    """A field with a mark for each None inside. A field that is None stays: in the ``in_dims`` of ``vmap`` it says that it has no batch."""
    if isinstance(node, dict):
        return {key: _Hole() if child is None else _with_holes(child) for key, child in node.items()}
    if type(node) in (tuple, list):
        return type(node)(_Hole() if child is None else _with_holes(child) for child in node)
    return node


def _without_holes(node: Any) -> Any:
    if isinstance(node, _Hole):
        return None
    if isinstance(node, dict):
        return {key: _without_holes(child) for key, child in node.items()}
    return type(node)(_without_holes(child) for child in node) if type(node) in (tuple, list) else node


def slot_fields(node: object) -> dict[str, bool] | None:
    """The fields of an instance of a class registered with :func:`state`, and whether each is a slot; None of anything else."""
    return _SLOTS.get(type(node))


def same_structure(tree: object, reference: object) -> bool:
    """Whether two trees have the same containers, keys (in any order) and holes; shapes may differ."""
    return _equal(tree, reference) or _differ_in_order_only(tree, reference)


def map(function: Callable[..., Any], tree: P, *others: Any) -> P:
    """Apply ``function`` leaf by leaf.

    ``others`` have the structure of ``tree``, or hold a whole subtree (or ``None``) where ``tree`` has a leaf; the subtree is then
    handed to ``function`` as it is.
    """
    mapped: P = optree.tree_map(function, tree, *others, namespace=NAMESPACE)  # type: ignore[arg-type, assignment]
    return mapped


def elementwise(function: Callable[..., Tensor], tree: P, *others: Any) -> P:
    """Map a ``function`` of each element over trees, as :func:`map` does: the mathematics of a transform.

    ``others`` may hold something else than tensors in the place of a leaf, such as the keys of :meth:`everybit.Context.keys`.

    A 0-d leaf is shown to ``function`` as a tensor of one element. Otherwise torch would promote it to the float64 of a 0-d coefficient
    such as ``1 - beta ** step``, and the dtype of updates and state would depend on how many dimensions a parameter has.
    """

    def apply(leaf: Tensor, *rest: Any) -> Tensor:
        return function(leaf, *rest) if leaf.ndim else function(*_as_vectors(leaf, *rest)).reshape(())

    return map(apply, tree, *others)


def several(function: Callable[..., tuple[Tensor, ...]], count: int, tree: P, *others: Any) -> list[P]:
    """Map a ``function`` of each element that returns ``count`` numbers, as :func:`elementwise` does; return so many trees.

    Examples:
        >>> import torch, everybit as eb
        >>> halves, doubles = eb.tree.several(lambda x: (x / 2, x * 2), 2, {"w": torch.ones(2)})
        >>> doubles
        {'w': tensor([2., 2.])}
    """
    rows: list[tuple[Tensor, ...]] = []

    def apply(leaf: Tensor, *rest: Any) -> Tensor:
        rows.append(
            function(leaf, *rest) if leaf.ndim else tuple(x.reshape(()) for x in function(*_as_vectors(leaf, *rest)))
        )
        return leaf

    map(apply, tree, *others)
    return [replace(tree, [row[number] for row in rows]) for number in range(count)]


def _as_vectors(*values: Any) -> list[Any]:
    return [x.reshape(1) if isinstance(x, Tensor) else x for x in values]


def leaves(tree: object) -> list[Tensor]:
    """The leaves of ``tree``, depth first, dicts in insertion order."""
    found: list[Tensor] = optree.tree_leaves(tree, namespace=NAMESPACE)  # type: ignore[arg-type]
    return found


def flatten(tree: object) -> tuple[list[Any], Any]:
    """The leaves of a tree, and its structure, which can be compared and hashed."""
    return optree.tree_flatten(tree, namespace=NAMESPACE)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """The structure of a tree.

    Attributes:
        spec: What optree knows of it.
        template: A tree of this structure. Compiled code, which cannot call ``spec``, builds trees by it.
    """

    spec: Any
    template: Any

    @staticmethod
    def of(tree: object) -> Structure:
        """The structure of ``tree``, of which no tensor is kept."""
        if torch.compiler.is_compiling():
            return Structure(None, tree)  # it is used in the same trace
        found, spec = flatten(tree)
        return Structure(spec, spec.unflatten(range(len(found))))

    def tree(self, leaves: list[Any]) -> Any:
        """Build the tree of these leaves."""
        if torch.compiler.is_compiling():
            return replace(self.template, leaves)
        return self.spec.unflatten(leaves)

    def leaves(self, tree: object) -> list[Any]:
        """The leaves of a tree of this structure, whatever the order of its dicts.

        Raises:
            ValueError: It has another structure.
        """
        if not torch.compiler.is_compiling():
            found, spec = flatten(tree)
            if spec == self.spec:
                return found
        return leaves(ordered_as(self.template, tree))


def replace(tree: P, new: Iterable[Any]) -> P:
    """``tree`` with its leaves replaced, in order, by ``new`` (which may be subtrees)."""
    if torch.compiler.is_compiling():  # which takes a third of the time to trace this
        following = iter(new)
        return map(lambda _: next(following), tree)
    _, structure = optree.tree_flatten(tree, namespace=NAMESPACE)  # type: ignore[arg-type]
    rebuilt: P = optree.tree_unflatten(structure, new)  # type: ignore[assignment]
    return rebuilt


def ordered_as(reference: object, tree: P) -> P:
    """``tree`` with its dicts in the order of those of ``reference``; leaf is matched with leaf by key.

    Raises:
        ValueError: The keys or containers of ``tree`` are not those of ``reference``.
    """
    ordered: P = optree.tree_map(lambda _, subtree: subtree, reference, tree, namespace=NAMESPACE)  # type: ignore[arg-type, assignment]
    return ordered


def paths(tree: object) -> list[str]:
    """List the leaves' paths, in the order of :func:`leaves`, in Python's syntax: ``['layers'][0].weight``; ``''`` for a bare tensor."""
    accessors, _, _ = optree.tree_flatten_with_accessor(tree, namespace=NAMESPACE)  # type: ignore[arg-type]
    return [accessor.codify("") for accessor in accessors]


def label(labels: object, tree: P, *, name: str = "labels") -> list[Any]:
    """One label per leaf of ``tree``: ``labels`` is a tree-prefix of labels, or a function of (path, leaf).

    Raises:
        ValueError: ``labels`` is a tree, but no prefix; the message begins with ``name`` and tells where.
    """
    if callable(labels):
        return [labels(path, leaf) for path, leaf in zip(paths(tree), leaves(tree), strict=True)]
    structure = optree.tree_structure(tree, namespace=NAMESPACE)  # type: ignore[arg-type]
    broadcast: list[Any] = [None] * structure.num_leaves
    # Leaves are told by their numbers: a dict of labels may have its keys in another order than the tree's.
    numbers: Any = structure.unflatten(range(structure.num_leaves))

    def note(value: Any, subtree: Any) -> None:
        for number in leaves(subtree):
            broadcast[number] = value

    try:
        optree.tree_map_(note, labels, numbers, namespace=NAMESPACE)  # type: ignore[arg-type]
    except ValueError as error:
        found = optree.prefix_errors(labels, tree, namespace=NAMESPACE)  # type: ignore[arg-type]
        reasons = [" ".join(str(one(name)).split()) for one in found] or [str(error)]
        raise ValueError(f"{name}: not a prefix of the parameters' tree: {'; '.join(reasons)}") from None
    return broadcast


def flatten_up_to(params: object, slot: object) -> list[Any]:
    """List what ``slot`` holds for each leaf of ``params``: a tensor, a tuple of stored parts, or ``None`` where a mask left a hole."""
    found: list[Any] = []
    optree.tree_map_(lambda _, stored: found.append(stored), params, slot, namespace=NAMESPACE)  # type: ignore[arg-type]
    return found


def slots(state: object) -> list[tuple[str, Any]]:
    """List the slots of a state at any depth, in order: the name of each, and its tree."""
    found: list[tuple[str, Any]] = []
    map_slots(lambda name, slot: found.append((name, slot)), state)
    return found


def map_slots(function: Callable[[str, Any], Any], state: T, others: OnTensor | None = None) -> T:
    """Rebuild a state, passing each slot through ``function(name, slot)``, and other tensors through ``others``; None: they stay."""
    rebuilt: Any
    if (marks := _SLOTS.get(type(state))) is not None:
        held = ((name, getattr(state, name), is_slot) for name, is_slot in marks.items())
        children = [function(name, x) if is_slot else map_slots(function, x, others) for name, x, is_slot in held]
        rebuilt = type(state)(*children)
    elif isinstance(state, (tuple, list)) and not hasattr(state, "_fields"):
        rebuilt = type(state)([map_slots(function, child, others) for child in state])
    elif isinstance(state, dict):
        rebuilt = {key: map_slots(function, child, others) for key, child in state.items()}
    else:
        rebuilt = state if others is None or isinstance(state, int) else map(others, state)
    found: T = rebuilt
    return found


def places(state: object) -> dict[str, Any]:
    """Return all fields of a state, slots and others, by the places where they are: ``inner.states[0].momentum``.

    What lies inside of a slot, or of an optimizer's ``extra``, is not listed: it has the structure of the parameters.
    """
    found: dict[str, Any] = {}

    def walk(node: Any, place: str) -> None:
        marks = _SLOTS.get(type(node))
        if marks is not None:
            children = [(f".{name}", getattr(node, name), is_slot) for name, is_slot in marks.items()]
        elif isinstance(node, dict):
            children = [(f"[{key!r}]", child, False) for key, child in node.items()]
        elif isinstance(node, (tuple, list)):
            children = [(f"[{index}]", child, False) for index, child in enumerate(node)]
        else:
            return
        for step, child, is_slot in children:
            found[place + step] = child
            if not is_slot and place + step != ".extra":
                walk(child, place + step)

    walk(state, "")
    return {place.removeprefix("."): value for place, value in found.items()}


def get(state: object, name: str, *, path: str | None = None) -> Any:
    """Return a slot or another field of a state, as it is stored.

    Args:
        state: The state of an optimizer or a transform.
        name: The field's name, such as ``"momentum"``, or the end of its place, such as ``"states[0].momentum"``.
        path: Of a slot, what one parameter has, by its path as :func:`paths` writes it. None: all of the field.

    Returns:
        A tensor, a tuple of stored parts or a tree of such, as the policy's format has it; ``optimizer.decode(params, state)`` has tensors
        in the compute dtype.

    Raises:
        KeyError: No field or parameter, or several, by that name; the message lists those there are.

    Examples:
        >>> import torch, everybit as eb
        >>> opt = eb.with_policy(eb.sgd(0.1, momentum=0.9), eb.policies.FP32)
        >>> state = opt.init({"w": torch.ones(2)})
        >>> eb.tree.get(state, "momentum", path="['w']")
        tensor([0., 0.])
        >>> int(eb.tree.get(eb.tree.set(state, "inner.step", 3), "inner.step"))
        3
    """
    place, value = _found(state, name)
    return value if path is None else _part(value, place, path)


def set(state: P, name: str, value: Any, *, path: str | None = None) -> P:
    """Return a state with another value for a slot or another field; ``state`` is not changed.

    Args:
        state: The state of an optimizer or a transform.
        name: A name as for :func:`get`.
        value: Of the structure, shapes and dtypes of what :func:`get` returns. For a 0-d tensor a number will do.
        path: A path as for :func:`get`.

    Raises:
        KeyError: The entry is not found, as for :func:`get`.
        ValueError: Structures or shapes differ.
        TypeError: Dtypes differ; a cast would lose bits.
    """
    place, old = _found(state, name)
    if path is not None:
        old, place = _part(old, place, path), place + path
    if isinstance(old, Tensor) and not old.ndim and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = torch.full_like(old, value)
    require_same_structure(value, old, name="value", reference_name=place)
    new = leaves(ordered_as(old, value))
    for own, other in zip(leaves(old), new, strict=True):
        if own.dtype is not other.dtype:
            raise TypeError(
                f"value: got {other.dtype} for {place}; accepted is {own.dtype}, as it is stored. Nothing is cast."
            )
    left = iter(new)
    inside = [_is_inside(one.removeprefix("."), place) for one in paths(state)]
    return replace(state, [next(left) if here else leaf for here, leaf in zip(inside, leaves(state), strict=True)])


def _found(state: object, name: str) -> tuple[str, Any]:
    known = places(state)
    ends = (f".{name}", f"[{name!r}]")
    matches = [name] if name in known else [place for place in known if place.endswith(ends)]
    if len(matches) == 1:
        return matches[0], known[matches[0]]
    reason = (
        f"is the name of several fields: {', '.join(matches)}"
        if matches
        else f"is no field of the state: {', '.join(known)}"
    )
    raise KeyError(f"{name!r} {reason}. Accepted is the end of a place that only one field has.")


def _part(value: Any, place: str, path: str) -> Any:
    accessors, _, _ = optree.tree_flatten_with_accessor(value, namespace=NAMESPACE)
    for accessor in accessors:
        for length in range(len(accessor) + 1):
            if accessor[:length].codify("") == path:
                return accessor[:length](value)
    raise KeyError(f"{path!r} is no path in {place}: {', '.join(paths(value))}.")


def _is_inside(leaf: str, place: str) -> bool:
    return leaf.startswith(place) and leaf[len(place) : len(place) + 1] in ("", ".", "[")


def registered_slots() -> frozenset[str]:
    """The names of the slots of every class that was registered with :func:`state`."""
    return frozenset(name for marks in _SLOTS.values() for name, is_slot in marks.items() if is_slot)


def norm(tree: object) -> Tensor:
    """Euclidean norm over all elements: 0-d, float64; see :func:`sum_of_squares`."""
    return barriers.sqrt(sum_of_squares(tree))


def sum_of_squares(tree: object) -> Tensor:
    """Sum of the squares of all elements: 0-d, float64; zero for a tree without leaves.

    It is float64 throughout: parts of a tree add up to the whole, and results computed from it and a hyperparameter do not depend on
    how the hyperparameter is given, since those that are tensors are float64 as well.
    """
    terms = [barriers.sum_of_squares(leaf) for leaf in leaves(tree)]
    if len(terms) == 1:
        return terms[0]
    return barriers.sum(torch.stack(terms)) if terms else torch.zeros((), dtype=torch.float64, device="cpu")


def all_finite(tree: object) -> Tensor:
    """A 0-d bool: no element is infinite or NaN."""
    checks = [torch.isfinite(leaf).all() for leaf in leaves(tree)]
    return torch.stack(checks).all() if checks else torch.ones((), dtype=torch.bool, device="cpu")


def where(condition: Tensor, yes: P, no: P) -> P:
    """Leaf by leaf ``torch.where``; ``condition`` is a 0-d bool, so that choosing needs no look at its value from the host."""
    return map(lambda a, b: torch.where(condition, a, b), yes, no)


def zeros_like(tree: P) -> P:
    """Zeros of the leaves' shapes, dtypes and devices."""
    return map(torch.zeros_like, tree)


def size(tree: object) -> int:
    """Return the number of elements of all leaves."""
    return sum(math.prod(leaf.shape) for leaf in leaves(tree))


def require_same_structure(tree: object, reference: object, *, name: str, reference_name: str) -> None:
    """Refuse ``tree`` unless it has the containers, keys, holes and shapes of ``reference``.

    Raises:
        ValueError: The structures differ; the message names the first path that differs, with the found and the expected structure.
    """
    # The order of a dict's keys is not part of the comparison: trees are matched by key.
    if not same_structure(tree, reference):
        own_paths, expected_paths = paths(tree), paths(reference)
        missing = [path for path in expected_paths if path not in own_paths]
        extra = [path for path in own_paths if path not in expected_paths]
        what = [f"no tensor at {name}{path}" for path in missing[:3]] + [
            f"unexpected {name}{path}" for path in extra[:3]
        ]
        raise ValueError(
            f"{name}: structure differs from {reference_name}: "
            + (
                "; ".join(what)
                if what
                else f"containers differ: got {_structure(tree)}, expected {_structure(reference)}"
            )
            + f". {name} must have one tensor for each of the {len(expected_paths)} in {reference_name}"
            f" (got {len(own_paths)}); give zeros where there is none."
        )
    for index, (leaf, other) in enumerate(zip(leaves(tree), flatten_up_to(tree, reference), strict=True)):
        if not isinstance(leaf, Tensor):
            raise ValueError(f"{name}{paths(tree)[index]}: got {leaf!r}; accepted are tensors.")
        if leaf.shape != other.shape:
            path = paths(tree)[index]
            raise ValueError(
                f"{name}{path}: shape {tuple(leaf.shape)}, but {reference_name}{path} has {tuple(other.shape)}."
            )


def _structure(tree: object) -> str:
    return str(optree.tree_structure(tree, namespace=NAMESPACE))  # type: ignore[arg-type]


def _equal(tree: object, reference: object) -> bool:
    """Whether two trees have the same containers, keys in the same order, and holes.

    Holes are compared as leaves: Dynamo before torch 2.13 cannot compare structures that contain ``None``.
    """
    own, own_structure = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)  # type: ignore[arg-type, var-annotated]
    other, structure = optree.tree_flatten(reference, none_is_leaf=True, namespace=NAMESPACE)  # type: ignore[arg-type, var-annotated]
    return own_structure == structure and [x is None for x in own] == [x is None for x in other]


def _differ_in_order_only(tree: object, reference: object) -> bool:
    try:
        return _equal(ordered_as(reference, tree), reference)
    except ValueError:
        return False
