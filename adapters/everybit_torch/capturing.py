"""Steps that are captured in a CUDA graph, which is replayed without the host."""

from __future__ import annotations

import torch


def is_capturing() -> bool:
    """Whether what is asked of the current CUDA stream is captured in a graph, and not carried out.

    The host may then neither wait for the device, nor count what it asks for: it is asked for once, and carried out at every replay.
    """
    if torch.compiler.is_compiling():
        return False
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
