"""What torch since 2.13 has, and optree 0.20 with it, for older torch: its compiler traces trees, and ``torch.func.vmap`` reads bits."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import optree.registry
import torch
from torch import Tensor


def let_views_batch() -> None:
    """Give an older torch the rule, by its public interface for that; its own fallback takes no operation that returns a view."""
    if torch.__version__ < "2.13":
        torch.library.register_vmap(torch.ops.aten.view.dtype, _view)


def _view(_info: Any, batched: tuple[int | None, ...], x: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    # In front: the last dimension changes its size where the dtypes' do.
    return x.movedim(batched[0] or 0, 0).view(dtype), 0


def let_trees_trace() -> None:
    """Have an older torch trace optree 0.20: without it, a compiled function in which trees are taken apart is refused.

    That compiler compares ``sys.version_info`` with a tuple wrongly, and lists of a class of one's own by identity. What optree
    computes stays the same.
    """
    if torch.__version__ >= "2.13":
        return
    registry: Any = optree.registry
    if hasattr(registry, "DictMetaData"):
        registry.sys = SimpleNamespace(version_info=tuple(sys.version_info))
        registry.DictMetaData.__eq__ = _equal


def _equal(keys: list[Any], other: object) -> bool:
    return list(keys) == list(other) if isinstance(other, list) else NotImplemented
