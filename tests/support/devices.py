"""The device of the tests that need a GPU: CUDA, or the CPU on which ``make gpu DEVICE=cpu`` rehearses them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

DEVICE = os.environ.get("EVERYBIT_DEVICE", "cuda")
"""The device's type."""

T = TypeVar("T")


def some(cases: Iterable[T]) -> list[T]:
    """All cases on a GPU; two where they are rehearsed."""
    found = list(cases)
    return found if DEVICE == "cuda" else found[:2]


def captured(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Capture a step in a CUDA graph, which does not carry it out; returns what replays it. On a CPU, which has none: the step."""
    if device.type != "cuda":
        return step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
