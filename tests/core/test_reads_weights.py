"""A transform that promises to look at no weights needs none."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from typing import Any

import pytest
import torch

import everybit as eb
import everybit.transforms
from everybit.protocol import transforms_in
from everybit.testing.own_transforms import REGISTRY


def silent() -> list[Any]:
    """A transform of each class that promises to look at no weights, as the registered optimizers and the defaults have them."""
    found: dict[type[Any], Any] = {}
    for build in REGISTRY.values():
        for node in transforms_in(build(0.1)):
            if getattr(node, "reads_weights", True) is False:
                found.setdefault(type(node), node)
    for module in pkgutil.iter_modules(everybit.transforms.__path__):
        for kind in vars(importlib.import_module(f"everybit.transforms.{module.name}")).values():
            promises = (
                isinstance(kind, type) and hasattr(kind, "update") and kind.__dict__.get("reads_weights") is False
            )
            if promises and kind not in found:
                found[kind] = kind()
    return [found[kind] for kind in sorted(found, key=lambda kind: kind.__name__)]


@pytest.mark.parametrize("transform", silent(), ids=lambda one: type(one).__name__)
def test_what_promises_to_look_at_no_weights_needs_none(transform: Any) -> None:
    """Weights without memory give the updates and the state that others give."""
    transform = replace(transform, view=None) if getattr(transform, "view", None) is not None else transform
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(6, 4, generator=generator)
    found = []
    for params in (weights, torch.empty(6, 4, device="meta")):
        state, updates = transform.init([weights]), []
        for step in (1, 2, 3):
            ctx = eb.Context(step=torch.tensor(step), seed=3)
            gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
            update, state = transform.update([gradient], state, [params], ctx)
            updates += update
        found.append([*updates, *eb.tree.leaves(state)])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
