"""A rule for parameters with wider state than the others: small parameters, vectors, and those with given names."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from everybit.base import require_count, require_name, require_patterns
from everybit.policies.labels import ByLabel, by_label
from everybit.policies.policy import Policy
from everybit.policies.presets import PolicyName, with_name_resolved

NARROW, WIDE = "narrow", "wide"

EMBEDDINGS = (r"(^|\.)(embed\w*|\w*_embedding\w*|wte|wpe|lm_head)(\.|$)",)
"""Names of embeddings in common models: ``embed_tokens``, ``tok_embeddings``, ``wte``, ``wpe``, ``lm_head``."""


@dataclass(frozen=True, slots=True)
class Wide:
    """Labels of :func:`keep_wide`: ``"wide"`` for vectors, for small parameters and by name, ``"narrow"`` for all others."""

    smallest: int
    names: tuple[str, ...]
    embeddings: frozenset[str] = frozenset()

    def __call__(self, path: str, parameter: Tensor) -> str:
        """Return the label of a whole parameter.

        Raises:
            ValueError: A parameter without a name, which would decide.
        """
        if parameter.ndim < 2 or parameter.numel() < self.smallest:
            return WIDE
        if not self.names:
            return NARROW
        name = require_name(path, "keep_wide", "whether it is an embedding", "names=()")
        return WIDE if name in self.embeddings or any(re.search(one, name) for one in self.names) else NARROW

    def with_embeddings(self, names: Collection[str]) -> Wide:
        """Return the same labels, for a model of which these parameters are embeddings, whatever they are called."""
        return replace(self, embeddings=frozenset(names)) if self.names else self


def keep_wide(
    policy: Policy | PolicyName,
    wide: Policy | PolicyName = "LEAN_BF16",
    *,
    smallest: int = 4096,
    names: Sequence[str] = EMBEDDINGS,
) -> ByLabel:
    """A policy for most of a model, and a wider one for vectors, small parameters and embeddings.

    The rule looks at the shape and the name of a whole parameter, never at a shard's part of it: on any number of ranks the same
    parameters are stored in the same formats.

    Args:
        policy: The policy of matrices and other parameters with two dimensions or more, ``smallest`` elements or more, and other names.
        wide: The policy of all others. Vectors take little memory, and the gradients of embeddings come seldom and with very different
            sizes.
        smallest: Number of elements, at least 0.
        names: Regular expressions. A parameter with a match in its dotted name is stored under ``wide``, as are, unless ``names`` is
            empty, the tables of ``nn.Embedding`` where the model is known.

    Raises:
        TypeError: ``policy`` or ``wide`` is not a policy.
        ValueError: An unknown name of a policy, a negative ``smallest``, or a pattern that is no regular expression; from the labels, a
            parameter without a name.

    Reference:
        Dettmers et al. 2021, https://arxiv.org/abs/2110.02861, section 2.3, for embeddings; bitsandbytes and torchao keep parameters with
        fewer than 4096 elements in 32 bits.

    Examples:
        >>> import torch
        >>> import everybit as eb
        >>> policy = eb.keep_wide("LEAN_8BIT")
        >>> params = {"embed.weight": torch.zeros(100, 64), "up.weight": torch.zeros(256, 64), "up.bias": torch.zeros(256)}
        >>> {name: policy.labels(name, p) for name, p in params.items()}
        {'embed.weight': 'wide', 'up.weight': 'narrow', 'up.bias': 'wide'}
    """
    require_count("smallest", smallest, "a number of elements", 0)
    if isinstance(names, str):
        raise TypeError(f"names: got {names!r}; accepted is a sequence of regular expressions, such as ({names!r},).")
    require_patterns("names", names)
    policies = {
        NARROW: with_name_resolved(policy, field="policy"),
        WIDE: with_name_resolved(wide, field="wide"),
    }
    return by_label(Wide(smallest, tuple(names)), policies)
