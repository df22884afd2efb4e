"""The contract of a transform, checked where the transform is used, so that a mistake is named where it is made.

:mod:`everybit.testing` checks all promises. This module checks those that would otherwise be broken without an error and train wrongly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from everybit.base import tree
from everybit.base.barriers import separate
from everybit.protocol.transform import Transform

P = TypeVar("P")
S = TypeVar("S")


def require_state(transform: Transform[Any], state: object, params: object) -> None:
    """Refuse a state without the slots that a policy has to store.

    Raises:
        TypeError: Something that is neither a tensor nor registered with ``@eb.state``, or tensors outside of slots that have elements. The
            message says where, and what to write.
    """
    whole = len(tree.leaves(params))

    def walk(node: object, path: str) -> None:
        where = f"{_name(transform)}.init: state{path}"
        slots = tree.slot_fields(node)
        if slots is not None:
            for name, is_slot in slots.items():
                if is_slot:
                    require_factors(getattr(node, name), f"{where}.{name}")
                else:
                    require_no_parameter_tree(getattr(node, name), f"{path}.{name}", name)
                    walk(getattr(node, name), f"{path}.{name}")
        elif isinstance(node, Tensor):
            if node.ndim:
                raise TypeError(
                    f"{where}: got a tensor of shape {tuple(node.shape)} outside of a slot, where no policy stores it and no shard cuts it."
                    f" Accepted there are 0-d tensors; annotate what has the shapes of the parameters as a slot: {_last(path)}: eb.Slot[P]."
                )
        elif isinstance(node, tuple) and hasattr(node, "_fields"):
            raise TypeError(
                f"{where}: got the named tuple {type(node).__name__}; accepted is a dataclass with @eb.state above"
                " @dataclass(frozen=True, slots=True), whose slots are annotated eb.Slot[P]."
            )
        elif isinstance(node, (tuple, list)):
            for index, child in enumerate(node):
                walk(child, f"{path}[{index}]")
        elif isinstance(node, dict):
            for key, child in node.items():
                walk(child, f"{path}[{key!r}]")
        elif node is not None:
            unregistered = dataclasses.is_dataclass(node)
            got = f"an instance of {type(node).__name__}" if unregistered else repr(node)
            hint = (
                f"; put @eb.state above the @dataclass of {type(node).__name__}"
                if unregistered
                else ", such as torch.zeros((), dtype=torch.int64) for a counter"
            )
            raise TypeError(f"{where}: got {got}; accepted are tensors and classes registered with @eb.state{hint}.")

    def require_factors(slot: Any, where: str) -> None:
        for index, value in enumerate(tree.flatten_up_to(params, slot)):
            if isinstance(value, dict) and not value:
                raise TypeError(
                    f"{where}{tree.paths(params)[index]}: got an empty dict; accepted are a tensor of the parameter's shape, and a dict of"
                    " factors, tensors by name. Where there is nothing to keep, keep one factor without elements."
                )

    def require_no_parameter_tree(value: object, path: str, name: str) -> None:
        if isinstance(value, (dict, list)) and whole and tree.same_structure(value, params):
            raise TypeError(
                f"{_name(transform)}.init: state{path}: got one tensor for each parameter outside of a slot, where no policy"
                f" stores it and no shard cuts it. Annotate it as a slot: {name}: eb.Slot[P]."
            )

    walk(state, "")


def require_cut(transform: Transform[Any], state: object, params: object) -> None:
    """Refuse factors, which do not have their parameter's shape, in the state of a transform with parameters that may be cut.

    Raises:
        ValueError: The message names the slot.
    """
    for name, slot in tree.slots(state) if transform.cut == "element" else ():
        if any(isinstance(value, dict) for value in tree.flatten_up_to(params, slot)):
            raise ValueError(
                f"{_name(transform)}.init: state.{name}: got factors, tensors by name that have other shapes than their parameter, of a"
                " transform that says that parameters may be cut anywhere. Accepted is cut = 'tensor'."
            )


def separated(state: S, params: object) -> S:
    """Return ``state`` with memory of its own for every tensor, shared with no other entry and no parameter.

    A transform may give one tree of zeros to two slots, which is harmless until a slot is written in place; adapters do write in
    place.
    """
    if torch.compiler.is_compiling():
        # Dynamo knows no memory, and Inductor gives equal values one.
        return tree.replace(state, [separate(leaf, number) for number, leaf in enumerate(tree.leaves(state))])
    seen = {_memory(leaf) for leaf in tree.leaves(params)}

    def own(leaf: Tensor) -> Tensor:
        where = _memory(leaf)
        overlaps = any(stride == 0 and size > 1 for stride, size in zip(leaf.stride(), leaf.shape, strict=True))
        if where in seen or overlaps:
            return leaf.clone(memory_format=torch.contiguous_format)
        seen.add(where)
        return leaf

    return tree.map(own, state)


class Unwritten:
    """Detects writes to tensors: ``require(...)`` raises for tensors with a changed version.

    Compilers and ``torch.func`` trace writes to a copy, and are not checked.
    """

    def __init__(self, inputs: Mapping[str, Sequence[Tensor]]) -> None:
        self._inputs = inputs
        self._versions: Sequence[int] | None = None if torch.compiler.is_compiling() else _versions(inputs)

    def require(self, transform: Transform[Any], **trees: object) -> None:
        """Refuse a transform that wrote to an input.

        Args:
            transform: The transform.
            trees: The inputs as trees, by name, for the message.

        Raises:
            TypeError: The message names the tensor.
        """
        if self._versions is None:
            return
        now = _versions(self._inputs)
        if now is None or now == self._versions:
            return
        names = (f"{name}{path}" for name in self._inputs for path in tree.paths(trees[name]))
        written = next(name for name, a, b in zip(names, self._versions, now, strict=True) if a != b)
        raise TypeError(
            f"{_name(transform)}.update wrote to {written}, which was passed in; accepted is an update that makes new tensors:"
            " m = decay * m + g, not m.mul_(decay).add_(g)."
        )


def _versions(inputs: Mapping[str, Sequence[Tensor]]) -> Sequence[int] | None:
    try:
        return [leaf._version for tensors in inputs.values() for leaf in tensors]
    except RuntimeError:  # inference tensors have no versions
        return None


def _memory(leaf: Tensor) -> int:
    """Tells apart the memory of tensors; of those that have no storage to look at (inside ``torch.func``), the tensors themselves."""
    try:
        return int(leaf.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(leaf)


def _name(transform: object) -> str:
    return type(transform).__name__


def _last(path: str) -> str:
    """The name of the innermost field in a path."""
    return path.rsplit(".", 1)[-1].split("[", 1)[0]
