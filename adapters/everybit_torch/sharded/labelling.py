"""The label of each parameter of a model, and the transform and policy that each label means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

import everybit as eb
from everybit.base import dtype_name
from everybit.combinators import matrices_of
from everybit.policies import LOW, ByLabel, Policy, PolicyOrName, for_dtype, native, resolve, with_name_resolved
from everybit.protocol import require_transform
from everybit_torch import clip_notice
from everybit_torch.embeddings import embeddings_of, policy_with_embeddings, with_embeddings
from everybit_torch.label_resolution import choices, chosen, require_labels_used, warn_of_missed
from everybit_torch.sharded.mixed_precision import MixedPrecision

Transforms = eb.Transform[Any] | Mapping[str, eb.Transform[Any]]
Labels = Callable[[str, nn.Parameter], str]
AnyPrecision = PolicyOrName | MixedPrecision | None


@dataclass(frozen=True, slots=True)
class LabelledTransform:
    """The transform and policy that the parameters of one label are stepped with.

    Attributes:
        source: The transform's source. Labels of one source share its reductions: two labels may be two cases of one transform.
        transform: The transform, with all masks and labels evaluated.
        policy: How their weights and state are stored.
    """

    source: str
    transform: eb.Transform[Any]
    policy: Policy

    @property
    def draws_bits(self) -> bool:
        """Whether a step needs the elements' indices in the model."""
        return eb.Optimizer(self.transform, self.policy).draws_bits


@dataclass(frozen=True, slots=True)
class Labelled:
    """The labels of a model.

    Attributes:
        of: The label of each parameter that is trained, by name.
        meaning: The transform and policy of each label.
    """

    of: Mapping[str, str]
    meaning: Mapping[str, LabelledTransform]


def label_parameters(
    model: nn.Module,
    by_name: Mapping[str, nn.Parameter],
    transform: Transforms,
    policy: AnyPrecision,
    labels: Labels | None,
) -> Labelled:
    """Settle masks, labels and policies for the parameters of a model, which may be on the meta device.

    Args:
        model: The model, for its embeddings.
        by_name: The model's parameters by name, frozen parameters included.
        transform: One, or one for each label.
        policy: How parameters, state and gradients are stored.
        labels: A function from (name, parameter) to the key of a transform.

    Raises:
        TypeError: A parameter that is not floating-point, or a value that is no transform or policy.
        ValueError: A label without a transform or without parameters, a policy that does not fit a parameter, or a shape that a transform
            cannot see as matrices. The message names it.
    """
    names = embeddings_of(model)
    policy = policy_with_embeddings(policy, names)
    transforms = dict(transform) if isinstance(transform, Mapping) else {"": transform}
    transforms = {label: with_embeddings(one, names) for label, one in transforms.items()}
    if isinstance(transform, Mapping) is (labels is None):
        got = "None with several transforms" if labels is None else "a function with a single transform"
        raise ValueError(
            f"labels: got {got}; accepted are several transforms, {{'decay': ..., 'plain': ...}}, with a function of (name, parameter)"
            " that names one of them, or a single transform without."
        )
    for name, one in transforms.items():
        require_transform(one, who="transform" + (f"[{name!r}]" if name else ""))
        clip_notice.look_at(one)
    trained = {name: p for name, p in by_name.items() if p.requires_grad}
    for name, parameter in trained.items():
        if not parameter.is_floating_point():
            raise TypeError(f"{name}: got a {parameter.dtype} parameter; accepted are real floating-point parameters.")
    source = _sources(by_name, transforms, labels)
    decisions = _decisions(by_name, transforms, source)
    policies = _policies(trained, policy)
    mixed = any(parameter.dtype in LOW for parameter in by_name.values())
    of: dict[str, str] = {}
    meaning: dict[str, LabelledTransform] = {}
    for name, parameter in trained.items():
        policy_label, given = policies[name]
        dtype = dtype_name(parameter.dtype, field=name)
        own = for_dtype(given, dtype, mixed=mixed)
        assert isinstance(own, Policy)  # as labels are known
        kept = "" if own == given else dtype
        parts = [source[name], *(str(decision) for decision in decisions[name]), policy_label, kept]
        label = of[name] = ", ".join(part for part in parts if part)
        try:
            resolve(own, dtype)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None
        if label not in meaning:
            meaning[label] = LabelledTransform(source[name], chosen(transforms[source[name]], decisions[name]), own)
        if parameter.numel():
            matrices_of(meaning[label].transform, name, parameter.shape)  # which refuses shapes that do not fit
    if not trained:  # a param group without parameters, which schedulers may change
        label, one = next(iter(transforms.items()))
        meaning[label] = LabelledTransform(label, eb.identity() if choices(one) else one, Policy())
    return Labelled(of, meaning)


def _sources(
    by_name: Mapping[str, nn.Parameter], transforms: Mapping[str, eb.Transform[Any]], labels: Labels | None
) -> dict[str, str]:
    """The key of the transform of each parameter, also of frozen parameters that are labelled."""
    source = {name: labels(name, p) if labels else "" for name, p in by_name.items()}
    trained = {label for name, label in source.items() if by_name[name].requires_grad}
    for name, label in source.items():
        if label not in transforms and by_name[name].requires_grad:
            raise ValueError(
                f"labels: {name} is labelled {label!r}; there are transforms for {', '.join(map(repr, transforms))}."
            )
    if labels and (absent := [label for label in transforms if label not in source.values()]):
        raise ValueError(
            f"labels: no parameter is labelled {', '.join(map(repr, absent))}; the labels given are"
            f" {', '.join(map(repr, sorted(trained)))}. Drop the transform, or mend the labels."
        )
    return source


def _decisions(
    by_name: Mapping[str, nn.Parameter], transforms: Mapping[str, eb.Transform[Any]], source: Mapping[str, str]
) -> dict[str, tuple[Any, ...]]:
    """How masks and labels inside of the transforms come out, for each parameter that is trained."""
    found: dict[str, tuple[Any, ...]] = {}
    for label, one in transforms.items():
        members = {name: p for name, p in by_name.items() if source[name] == label}
        trained = {name: p for name, p in members.items() if p.requires_grad}
        columns = [eb.tree.label(choice, trained, name=f"a mask of transform {label!r}") for choice in choices(one)]
        for number, name in enumerate(trained):
            found[name] = tuple(column[number] for column in columns)
        require_labels_used(one, [found[name] for name in trained], members)
        warn_of_missed(one, trained)
    return found


def _policies(trained: Mapping[str, nn.Parameter], policy: AnyPrecision) -> dict[str, tuple[str, Policy]]:
    """The policy of each parameter, and what tells it from that of others."""
    policy = with_name_resolved(policy)
    if policy is None or isinstance(policy, MixedPrecision):
        by_dtype: dict[str, tuple[str, Policy]] = {}
        for name, parameter in trained.items():
            dtype = dtype_name(parameter.dtype, field=name)
            by_dtype[name] = (dtype, native(dtype) if policy is None else policy.policy(dtype))
        return by_dtype
    if isinstance(policy, Policy):
        return dict.fromkeys(trained, ("", policy))
    if not isinstance(policy, ByLabel):
        raise TypeError(
            f"policy: got {policy!r}; accepted are a Policy, such as everybit.policies.LEAN_BF16, its name,"
            " by_label(...), MixedPrecision(...), or None."
        )
    labelled: dict[str, tuple[str, Policy]] = {}
    for name, label in zip(trained, eb.tree.label(policy.labels, dict(trained)), strict=True):
        try:
            labelled[name] = label, policy.policy_for(label)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return labelled
