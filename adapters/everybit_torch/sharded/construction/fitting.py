"""Whether a source has what a model needs: all names, shapes and dtypes are judged at once, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from everybit.base import dtype_name, torch_dtype
from everybit.policies import resolve
from everybit_torch.sharded.construction.reading import Entry
from everybit_torch.sharded.construction.tensors import ModelTensor
from everybit_torch.sharded.layout import ParameterSpec
from everybit_torch.sharded.shard_optimizer import LabelledTransform

SHOWN = 10
"""Problems that a message lists."""


def widest_dtype(
    spec: ParameterSpec | None, labelled: Mapping[str, LabelledTransform], own: torch.dtype
) -> torch.dtype:
    """Return the dtype with the most bits that a tensor's values may have.

    That is the one in which steps are computed, where weights have parts beside the model's tensor, which keep more bits than it; else the
    model's.
    """
    if spec is None or not spec.requires_grad:
        return own
    resolved = resolve(labelled[spec.label].policy, dtype_name(spec.dtype, field=spec.name))
    compute = torch_dtype(resolved.policy.compute)
    return compute if len(resolved.params.parts()) > 1 and compute.itemsize > own.itemsize else own


def require_fit(
    tensors: Sequence[ModelTensor], labelled: Mapping[str, LabelledTransform], table: Mapping[str, Entry], where: str
) -> None:
    """Refuse a source that lacks tensors, has others, or has them in other shapes, or in dtypes that do not fit.

    Raises:
        ValueError: It does; the message lists what differs.
    """
    problems = list(_problems(tensors, labelled, table))
    if problems:
        listed = "\n  ".join(problems[:SHOWN])
        more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ValueError(f"values: {where} does not fit the model, and nothing was changed:\n  {listed}{more}")


def _problems(
    tensors: Sequence[ModelTensor], labelled: Mapping[str, LabelledTransform], table: Mapping[str, Entry]
) -> Iterator[str]:
    known: set[str] = set()
    for one in tensors:
        known.update(one.names)
        found = [name for name in one.names if name in table]
        if not one.is_saved:
            yield from (f"{name} is a buffer that the model does not save (persistent=False)" for name in found)
            continue
        if not found and one.is_absent:
            also = f" (nor is {', '.join(one.names[1:])}, which is the same tensor)" if one.names[1:] else ""
            yield f"{one.name} is missing{also}"
        for name in found:
            entry, shape = table[name], tuple(one.tensor.shape)
            if entry.shape != shape:
                yield f"{name} has the shape {entry.shape}; accepted is {shape}"
                continue
            own = one.tensor.dtype
            widest = widest_dtype(one.spec, labelled, own)
            if not _holds(widest, entry.dtype, own, is_parameter=one.spec is not None):
                accepted = f"{own}, or up to {widest}, which main weights keep" if widest is not own else f"{own}"
                yield f"{name} is {entry.dtype}; accepted is {accepted}"
            elif entry.dtype is not table[found[0]].dtype:
                yield f"{name} is {entry.dtype}, and {found[0]}, which is the same tensor in the model, {table[found[0]].dtype}"
    for name in sorted(table.keys() - known):
        yield f"{name} is not in the model"


def _holds(widest: torch.dtype, given: torch.dtype, own: torch.dtype, *, is_parameter: bool) -> bool:
    """Whether a dtype has a place: what the tensor is, or floating-point numbers of a parameter that lose no bit in the widest."""
    if given is own:
        return True
    both_float = given.is_floating_point and widest.is_floating_point
    return is_parameter and both_float and torch.promote_types(given, widest) is widest
