"""A policy for each parameter, by its label or its dtype; and what all policies of a model have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from everybit.base import DTYPES, FLOAT_DTYPES, LOW_DTYPES, FloatDType, dtype_name, is_dense, require_member, tree
from everybit.formats import Nearest
from everybit.policies.policy import FrozenMapping, Policy, Resolved, resolve

LOW = tuple(map(DTYPES.__getitem__, LOW_DTYPES))


@dataclass(frozen=True, slots=True)
class ByLabel:
    """Several policies, chosen by label for each parameter; see :func:`by_label`."""

    labels: Any = field(hash=False)
    policies: Mapping[str, Policy]

    def __post_init__(self) -> None:
        object.__setattr__(self, "policies", FrozenMapping(self.policies))

    def policy_for(self, label: object) -> Policy:
        """Return the policy for a label.

        Raises:
            ValueError: A label without policy; the message names the labels with a policy.
        """
        found = self.policies.get(label) if isinstance(label, str) else None
        if found is None:
            listed = ", ".join(map(repr, self.policies))
            raise ValueError(f"labelled {label!r}, for which by_label has no policy; it has one for {listed}.")
        return found


def by_label(labels: Callable[[str, torch.Tensor], str] | object, policies: Mapping[str, Policy]) -> ByLabel:
    """A policy per parameter: norm weights in float32, say, and matrices in bfloat16.

    Args:
        labels: A function of (path, parameter), or a tree of labels with a structure that is a prefix of the parameters'. It sees whole
            parameters, never a shard's slice of one, so that the choice does not depend on how a model is sharded.
        policies: Policy for each label.

    Raises:
        TypeError: ``policies`` is not a mapping to policies.

    Examples:
        >>> import everybit as eb
        >>> policy = eb.by_label(
        ...     lambda path, p: "matrix" if p.ndim > 1 else "vector",
        ...     {"matrix": eb.policies.LEAN_BF16, "vector": eb.policies.EXACT_BF16},
        ... )
    """
    if not isinstance(policies, Mapping) or not all(isinstance(policy, Policy) for policy in policies.values()):
        raise TypeError(f"by_label: policies: got {policies!r}; accepted is a mapping from labels to Policy.")
    return ByLabel(labels, policies)


def by_dtype(policies: Mapping[str, Policy]) -> ByLabel:
    """A policy for each dtype of a model's parameters: bfloat16 matrices beside float32 norms or adapters, say.

    One policy for 16-bit weights does for such a model, too: it keeps the float32 parameters in float32, and their state as it keeps the
    others'. See :func:`for_dtype`.

    Args:
        policies: Policy for each dtype, by its name.

    Raises:
        TypeError: ``policies`` is not a mapping to policies.
        ValueError: A name of no dtype, or a policy that cannot be applied to parameters of its dtype.

    Examples:
        >>> import everybit as eb
        >>> policy = eb.by_dtype({"bfloat16": eb.policies.LEAN_BF16, "float32": eb.policies.FP32})
    """
    chosen = by_label(_dtype_of, policies)
    for dtype, policy in policies.items():
        require_member(dtype, FLOAT_DTYPES, field="by_dtype: policies")
        try:
            resolve(policy, dtype_name(getattr(torch, dtype), field=dtype))
        except ValueError as error:
            raise ValueError(f"by_dtype: policies[{dtype!r}]: {error}") from None
    return chosen


def _dtype_of(path: str, parameter: torch.Tensor) -> str:
    return dtype_name(parameter.dtype, field=path)


AnyPolicy = Policy | ByLabel


def policies_of(policy: AnyPolicy) -> list[Policy]:
    """The policies that there are for some parameter or other."""
    return list(policy.policies.values()) if isinstance(policy, ByLabel) else [policy]


def draws_bits(policy: AnyPolicy) -> bool:
    """Whether any format rounds stochastically."""
    return any(one.draws_bits for one in policies_of(policy))


def block_of(policy: AnyPolicy) -> int:
    """Return the least number of elements at multiples of which, from a parameter's first, all stored tensors may be cut."""
    return math.lcm(*(one.block for one in policies_of(policy)))


def for_dtype(policy: AnyPolicy, model: FloatDType, *, mixed: bool) -> AnyPolicy:
    """The policy for parameters of one dtype, among those of a model.

    Float32 parameters beside 16-bit ones are a model's norms, or adapters. A policy for 16-bit weights keeps them in float32, whole,
    and stores their state as that of the others. In all other cases a :class:`Policy` is returned as it is.

    Args:
        policy: The policy of the whole model.
        model: dtype of the parameters.
        mixed: Whether the model has 16-bit parameters.
    """
    if isinstance(policy, ByLabel):
        if policy.labels is _dtype_of and model in policy.policies:
            return policy.policies[model]
        return ByLabel(
            policy.labels, {label: _kept(one, model) if mixed else one for label, one in policy.policies.items()}
        )
    return _kept(policy, model) if mixed else policy


def _kept(policy: Policy, model: FloatDType) -> Policy:
    if model != "float32" or policy.model_dtype not in LOW_DTYPES:
        return policy
    try:
        if policy.params.for_params(model).parts()[0].dtype is torch.float32:
            return policy
    except ValueError:
        pass  # a format of two parts, the first of which has 16 bits
    return replace(policy, params=Nearest("float32"))


def resolve_tree(policy: AnyPolicy, params: object, squares: frozenset[str] = frozenset()) -> list[Resolved]:
    """Return the resolved policy of each leaf of ``params``, in order. Beside 16-bit leaves, float32 leaves stay so: :func:`for_dtype`.

    Raises:
        TypeError: A leaf that is not a floating-point tensor.
        ValueError: A policy that cannot be applied to a leaf, or a label without policy. Messages name the path.
    """
    leaves = tree.leaves(params)
    labels = tree.label(policy.labels, params) if isinstance(policy, ByLabel) else [None] * len(leaves)
    known: dict[tuple[str | None, torch.dtype], Resolved] = {}
    mixed = any(isinstance(leaf, torch.Tensor) and leaf.dtype in LOW for leaf in leaves)
    resolved = []
    for index, (leaf, label) in enumerate(zip(leaves, labels, strict=True)):
        dense = is_dense(leaf)
        one = known.get((label, leaf.dtype)) if dense else None
        if one is None:
            if not dense:
                kind = f"a {leaf.layout} tensor" if isinstance(leaf, torch.Tensor) else repr(leaf)
                raise TypeError(
                    f"params{tree.paths(params)[index]}: got {kind}; accepted are dense floating-point tensors (None where there is"
                    f" none).{_hint(leaf)}"
                )
            try:
                model = dtype_name(leaf.dtype, field="parameter")
                chosen = policy.policy_for(label) if isinstance(policy, ByLabel) else policy
                one = resolve(_kept(chosen, model) if mixed else chosen, model, squares)
            except (TypeError, ValueError) as error:
                raise type(error)(f"params{tree.paths(params)[index]}: {error}") from None
            known[label, leaf.dtype] = one
        resolved.append(one)
    return resolved


def _hint(leaf: object) -> str:
    """Suggest what to write instead of something that holds a model's parameters and is no tree of them."""
    if isinstance(leaf, (Iterator, str)) or hasattr(leaf, "named_parameters"):
        return " The parameters of a model, as a tree: dict(model.named_parameters())."
    return ""
