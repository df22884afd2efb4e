"""Embeddings of a model, found by the types of its modules, for labels that would otherwise find them by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import nn
from torch.nn.parameter import is_lazy

import everybit as eb
from everybit.combinators import Masked, Partition
from everybit.policies import ByLabel
from everybit.protocol import map_parts, transforms_in
from everybit_torch.compiled import Factory
from everybit_torch.label_resolution import Tree

P = TypeVar("P")


@runtime_checkable
class LooksForEmbeddings(Protocol):
    """Labels, or a mask, that treat embeddings in another way, and that find them by name if they are not given."""

    def with_embeddings(self, names: Collection[str]) -> Any:
        """Return the same labels, which know that these parameters are all embeddings there are."""
        ...


def embeddings_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of a model's parameters that are the table of an ``nn.Embedding`` or ``nn.EmbeddingBag``, or tied to one."""
    tables = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for parameter in module.parameters(recurse=False)
    }
    named = model.named_parameters(remove_duplicate=False)
    return tuple(name for name, parameter in named if id(parameter) in tables)


def with_embeddings(transform: eb.Transform[Any], names: Collection[str]) -> eb.Transform[Any]:
    """Return a transform with masks and labels that know the embeddings of a model by ``names``."""
    looks = [node for node in transforms_in(transform) if isinstance(_choice(node), LooksForEmbeddings)]

    def known(node: Any) -> Any:
        if not any(one is node for one in looks):
            return map_parts(known, node)
        name = "labels" if isinstance(node, Partition) else "mask"
        return replace(map_parts(known, node), **{name: _choice(node).with_embeddings(names)})

    return known(transform) if looks else transform


def _choice(node: Any) -> Any:
    return node.labels if isinstance(node, Partition) else node.mask if isinstance(node, Masked) else None


def policy_with_embeddings(policy: P, names: Collection[str]) -> P:
    """Return a policy with labels that know the embeddings of a model by ``names``."""
    if isinstance(policy, ByLabel) and isinstance(policy.labels, LooksForEmbeddings):
        return replace(policy, labels=policy.labels.with_embeddings(names))
    return policy


@dataclass(frozen=True, slots=True)
class FactoryForModel:
    """A factory of transforms that know the embeddings of a model.

    Attributes:
        factory: A function from hyperparameters to a transform.
        names: The names of the embeddings.
    """

    factory: Factory
    names: tuple[str, ...]

    @property
    def __wrapped__(self) -> Factory:
        """The wrapped factory, with the signature of this object."""
        return self.factory

    @property
    def __name__(self) -> str:
        """The factory's name."""
        return str(getattr(self.factory, "__name__", self.factory))

    def __call__(self, *args: Any, **kwargs: Any) -> eb.Transform[Any]:
        """Make the transform."""
        return with_embeddings(self.factory(*args, **kwargs), self.names)


def require_names(optimizers: Iterable[eb.Optimizer[Any]], tree: Tree) -> None:
    """Refuse parameters without names where masks or labels would find embeddings by name; other masks and labels are not called.

    Args:
        optimizers: The optimizers of a param group.
        tree: Its parameters.

    Raises:
        ValueError: A parameter has no name; the message says what to pass.
    """
    for one in optimizers:
        choices = [_choice(node) for node in transforms_in(one.transform)] + [getattr(one.policy, "labels", None)]
        for choice in choices:
            if isinstance(choice, LooksForEmbeddings) and callable(choice):
                for path, parameter in zip(eb.tree.paths(tree), tree.values(), strict=True):
                    if not is_lazy(parameter):
                        choice(path, parameter)
