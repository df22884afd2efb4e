"""The function by which ``torch.nn.utils.clip_grad_norm_`` scales gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

_NAME = "_clip_grads_with_norm_"


@functools.cache
def watch(look: Callable[[list[Tensor]], None]) -> None:
    """Pass the parameters of every call of ``clip_grad_norm_`` to a function; a torch that has no such function is left alone.

    The wrapped function is looked up at each call, so that calls of a ``clip_grad_norm_`` that was imported before are seen, too.
    """
    original = getattr(clip_grad, _NAME, None)
    if original is None:
        return

    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        # A compiler that traces it sees torch's function alone.
        if not torch.compiler.is_compiling():
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            look(parameters)
        return original(parameters, *args, **kwargs)

    setattr(clip_grad, _NAME, clip)
