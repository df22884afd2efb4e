"""The device of the tests that need a GPU: CUDA, or the CPU on which ``make gpu DEVICE=cpu`` rehearses them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest
import torch

DEVICE = os.environ.get("EVERYBIT_DEVICE", "cuda")
"""The device's type."""

T = TypeVar("T")


def require_device() -> None:
    """Skip the module of tests that calls it where the device is missing: as one, and not case by case."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device; `make gpu` runs this on one", allow_module_level=True)


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
