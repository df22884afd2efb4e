"""Updates added to weights without a policy."""

from __future__ import annotations

from typing import TypeVar

from everybit.base import tree

P = TypeVar("P")


def apply_updates(params: P, updates: P) -> P:
    """``params + updates``, leaf by leaf, each sum rounded to nearest in its parameter's dtype, as in optax.

    For parameters below float32 small updates are lost this way; :func:`everybit.with_policy` is the remedy.

    Args:
        params: Tensors.
        updates: Same structure and shapes.

    Raises:
        ValueError: Structures or shapes differ; the message names the path.
    """
    tree.require_same_structure(updates, params, name="updates", reference_name="params")
    return tree.map(lambda p, u: (p + u).to(p.dtype), params, updates)
