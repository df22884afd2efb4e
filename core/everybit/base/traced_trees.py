"""Replaces parts of optree 0.20 that the compiler of torch 2.11 and 2.12 cannot trace by code that it can."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import optree.registry
import torch


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
