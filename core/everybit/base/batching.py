"""A rule for ``torch.func.vmap`` that torch has since 2.13: to read a tensor's bits as another dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def let_views_batch() -> None:
    """Give an older torch the rule, by its public interface for that; its own fallback takes no operation that returns a view."""
    if torch.__version__ < "2.13":
        torch.library.register_vmap(torch.ops.aten.view.dtype, _view)


def _view(_info: Any, batched: tuple[int | None, ...], x: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    # In front: the last dimension changes its size where the dtypes' do.
    return x.movedim(batched[0] or 0, 0).view(dtype), 0
