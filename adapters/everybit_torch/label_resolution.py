"""Evaluate masks and labels for parameters, and specialize transforms and policies to the results.

A mask, the labels of a partition and those of ``by_label`` are functions of (path, parameter), or trees. They are evaluated once, on
whole parameters, when parameters get their state, so that the results do not depend on the layout. A step that works on a buffer, or on one
parameter, does not know the names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

import everybit as eb
from everybit.combinators import Masked, Partition, chain, missed
from everybit.policies import AnyPolicy, ByLabel, Resolved, resolve_tree
from everybit.protocol import ALONE, any_draws, any_per_tensor, map_parts, then, transforms_in
from everybit_torch import notices

P = TypeVar("P")
Tree = Mapping[Any, Tensor]
"""Parameters by their names, or by their numbers in a param group that has no names."""


def choices(transform: eb.Transform[Any]) -> list[Any]:
    """The masks and labels in it, by which it treats parameters differently, in order."""
    return [
        node.mask if isinstance(node, Masked) else node.labels
        for node in transforms_in(transform)
        if isinstance(node, (Masked, Partition))
    ]


def chosen(transform: eb.Transform[Any], decisions: tuple[Any, ...]) -> eb.Transform[Any]:
    """Specialize a transform to parameters for which its masks and labels evaluated to ``decisions``.

    Raises:
        TypeError: A mask that is neither True nor False.
        ValueError: A label for which there is no transform.
    """
    left = iter(decisions)

    def decide(node: Any) -> Any:
        if isinstance(node, Masked):
            keep, inner = next(left), decide(node.transform)
            if not isinstance(keep, bool):
                raise TypeError(f"masked: the mask is {keep!r}; accepted are True and False.")
            return inner if keep else _reductions_only(inner)
        if isinstance(node, Partition):
            label = next(left)
            if label not in node.transforms:
                raise ValueError(
                    f"partition: labelled {label!r}, for which there is no transform; there is one for"
                    f" {', '.join(map(repr, node.transforms))}."
                )
            parts = {name: decide(part) for name, part in node.transforms.items()}
            return chain(*(part if name == label else _reductions_only(part) for name, part in parts.items()))
        return map_parts(decide, node)

    return decide(transform)  # type: ignore[no-any-return]


def _reductions_only(transform: eb.Transform[Any]) -> eb.Transform[Any]:
    return _ReductionsOnly(transform) if transform.reduces else eb.identity()


def require_labels_used(
    transform: eb.Transform[Any],
    decisions: Sequence[tuple[Any, ...]],
    tree: Tree,
    others: Sequence[tuple[Any, Tree]] = (),
) -> None:
    """Refuse a partition with a label that no parameter has, unless it is optional, and a mask that selects no parameter.

    Args:
        transform: A transform. Its partitions and masks inside of others see some parameters only, and are accepted.
        decisions: What its masks and labels said of parameters.
        tree: All parameters, also those without a decision.
        others: Other transforms of the same factory, with all their parameters.

    Raises:
        ValueError: The message has the labels without parameters, or the parameters of a mask that selects no parameter.
    """
    found = [node for node in transforms_in(transform) if isinstance(node, (Masked, Partition))]
    inside = {id(one) for node in found for one in transforms_in(node) if one is not node}
    for number, node in enumerate(found):
        if id(node) in inside:
            continue
        required = {*node.transforms} - node.optional if isinstance(node, Partition) else {True}
        said = [decision[number] for decision in decisions if len(decision) > number]
        if not required <= {*said}:
            for one, own in ((transform, tree), *others):
                asked = choices(one)
                if len(asked) > number:
                    said += ask(
                        asked[number], own, list(own.values()), name="mask" if isinstance(node, Masked) else "labels"
                    )
            trees = [tree, *(own for _, own in others)]
            names = [path for own in trees for path in eb.tree.paths(own)]
            if isinstance(node, Partition):
                node.require_used(said, names, [leaf for own in trees for leaf in own.values()])
            else:
                node.require_used(said, names)


def warn_of_missed(transform: eb.Transform[Any], tree: Tree) -> None:
    """Warn of large weights that labels for matrices leave to another transform, where no rule names them. Frozen weights do not count."""
    found = missed(transform, OrderedDict((name, p) for name, p in tree.items() if p.requires_grad and not is_lazy(p)))
    if found:
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        notices.warn(
            f"matrices: large weights go to the optimizer of the others, and no rule names them: {', '.join(found[:3])}{more}. Accepted are"
            " a view for them, Matrices(views=...), or Matrices(others=...) with an expression for their names."
        )


def tree_of(values: Mapping[str, Any]) -> Tree:
    """The parameters of a param group as a tree. A parameter's path is ``['weight']`` if it has a name, and ``[0]`` if not."""
    params = values["params"]
    return OrderedDict(zip(values.get("param_names") or range(len(params)), params, strict=True))


def ask(choice: Any, tree: Tree, wanted: Sequence[Tensor], *, name: str) -> list[Any]:
    """Evaluate a mask, or labels, for the ``wanted`` parameters of ``tree``; functions are called for no others.

    Raises:
        ValueError: A tree that does not fit the parameters'.
    """
    ids = {id(parameter) for parameter in wanted}
    if callable(choice):
        paths = eb.tree.paths(tree)
        found = {id(p): choice(path, p) for path, p in zip(paths, tree.values(), strict=True) if id(p) in ids}
    else:
        # Parameters of lazy modules are no leaves yet.
        found = dict(
            zip(map(id, tree.values()), eb.tree.label(choice, OrderedDict.fromkeys(tree, 0), name=name), strict=True)
        )
    return [found[id(parameter)] for parameter in wanted]


@dataclass(frozen=True, slots=True)
class Decision:
    """The results of an optimizer's masks and labels for the parameters of a unit, which are the same for all of them.

    Attributes:
        choices: The result of each mask and each partition.
        label: The result of the policy's labels; None if it has no labels.
    """

    choices: tuple[Any, ...]
    label: str | None

    def applied(self, optimizer: eb.Optimizer[Any]) -> eb.Optimizer[Any]:
        """The optimizer of these parameters.

        Raises:
            ValueError: The transform has other masks than the evaluated transform.
        """
        transform, policy = optimizer.transform, optimizer.policy
        if len(choices(transform)) != len(self.choices):
            raise ValueError(
                f"{transform}: has {len(choices(transform))} masks and partitions, and had {len(self.choices)} when parameters were placed;"
                " make a new optimizer."
            )
        policy = policy.policy_for(self.label) if isinstance(policy, ByLabel) else policy
        return replace(optimizer, transform=chosen(transform, self.choices), policy=policy)


def decide(optimizer: eb.Optimizer[Any], tree: Tree, parameters: Sequence[Tensor]) -> list[Decision | None]:
    """Evaluate the masks and labels of ``optimizer`` for each of ``parameters``, some of ``tree``; None without masks and labels.

    Raises:
        ValueError: A tree of masks or labels that does not fit the parameters'.
    """
    asked = choices(optimizer.transform)
    if not asked and not isinstance(optimizer.policy, ByLabel):
        return [None] * len(parameters)
    said = [ask(choice, tree, parameters, name="mask or labels") for choice in asked]
    labels: Sequence[str | None] = [None] * len(parameters)
    if isinstance(optimizer.policy, ByLabel):
        labels = ask(optimizer.policy.labels, tree, parameters, name="by_label: labels")
    return [Decision(tuple(column[index] for column in said), label) for index, label in enumerate(labels)]


def applied(optimizer: eb.Optimizer[Any], decision: Decision | None) -> eb.Optimizer[Any]:
    """Return ``optimizer`` specialized to a decision; the same optimizer without a decision."""
    return optimizer if decision is None else decision.applied(optimizer)


def resolve_parameters(policies: Mapping[torch.dtype, AnyPolicy], tree: Tree) -> dict[int, Resolved]:
    """The resolved policy of each parameter of a group, by id.

    Raises:
        TypeError: A parameter that is no floating-point tensor.
        ValueError: A policy that does not fit a parameter, or a label without a policy; the message has its path.
    """
    found: dict[int, Resolved] = {}
    for path, parameter in zip(eb.tree.paths(tree), tree.values(), strict=True):
        policy = policies[parameter.dtype]
        shape = torch.empty(0, dtype=parameter.dtype)  # a lazy parameter has a dtype, and no elements
        if isinstance(policy, ByLabel):
            (label,) = ask(policy.labels, tree, [parameter], name="by_label: labels")
            try:
                policy = policy.policy_for(label)
            except ValueError as error:
                raise ValueError(f"params{path}: {error}") from None
        try:
            (found[id(parameter)],) = resolve_tree(policy, [shape])
        except (TypeError, ValueError) as error:
            raise type(error)(str(error).replace("params[0]", f"params{path}", 1)) from None
    return found


@dataclass(frozen=True, slots=True)
class _ReductionsOnly:
    """Takes part in the reductions of a transform of other parameters, without elements and without an effect.

    A reduction goes over all parameters, so that all of them have to take part in it, in the same order.
    """

    transform: eb.Transform[Any]

    @property
    def cut(self) -> eb.Cut:
        """Anywhere, since it does not change elements."""
        return "element"

    @property
    def reduces(self) -> bool:
        """Whether the transform makes requests."""
        return self.transform.reduces

    @property
    def draws(self) -> bool:
        """Whether the transform draws random bits. Elements that are not contributed draw them as well."""
        return any_draws([self.transform])

    @property
    def per_tensor(self) -> bool:
        """Whether the transform requests numbers of each parameter."""
        return any_per_tensor([self.transform])

    def init(self, params: P) -> Any:
        """Return the empty state of ``identity``."""
        return eb.identity().init(params)

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        """Return the updates unchanged, after taking part in the transform's reductions."""

        def nothing(tree: P) -> P:
            return eb.tree.map(lambda x: x.reshape(-1)[:0], tree)

        none = nothing(params)
        contribution = self.transform.update(nothing(updates), self.transform.init(none), none, ctx)
        return then(contribution, lambda _: (updates, state))
