"""Other implementations that are stepped on the problem of :mod:`tests.support.following`; for tests of ``make conformance``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import Tensor

from tests.support.following import PEAK, SHAPES, Shapes, Tensors, gradients, start

jax.config.update("jax_enable_x64", True)

Noted = Callable[[str, str, float], None]
"""Of an oracle and an optimizer, notes the deviation."""


def optax_rate(count: Any) -> Any:
    """The learning rate as a schedule of optax's."""
    return PEAK / (1 + jnp.asarray(count, jnp.float64) / 50)


def theirs_of_optax(transform: Any, shapes: Shapes = SHAPES) -> list[Tensors]:
    """The weights after each step of a transformation of optax's."""
    params = {name: jnp.asarray(value.numpy()) for name, value in start(shapes=shapes).items()}
    state, found = transform.init(params), []
    step = jax.jit(transform.update)
    for gradient in gradients(shapes=shapes):
        updates, state = step({name: jnp.asarray(value.numpy()) for name, value in gradient.items()}, state, params)
        params = optax.apply_updates(params, updates)
        found.append({name: torch.tensor(np.asarray(value)) for name, value in params.items()})
    return found


def from_timm(name: str, module: str | None = None, **options: Any) -> Callable[[list[Tensor]], Any]:
    """Return what makes an optimizer of timm's, from a module that is called as its class in small letters if nothing else is said.

    timm is not among the packages of `make conformance`: the torchvision that it needs is one for CUDA. Its optimizers do not need that,
    but ``timm`` and ``timm.optim`` import it; so only the module that is asked for is imported, from packages that are empty.
    """
    loaded = module_alone(f"timm.optim.{module or name.lower()}")
    return lambda params: getattr(loaded, name)(params, **options)


def module_alone(name: str) -> Any:
    """Import a module of a package without what the packages around it import; where it is not installed the test is skipped."""
    outermost, *inner = name.split(".")[:-1]
    found = importlib.util.find_spec(outermost)
    if found is None or found.submodule_search_locations is None:
        pytest.skip(f"{outermost} is not installed")
    (folder,) = found.submodule_search_locations
    paths = {outermost: folder}
    for one in inner:
        paths[f"{outermost}.{one}"] = folder = f"{folder}/{one}"
    for package, path in paths.items():
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [path]
    try:
        return importlib.import_module(name)
    finally:
        for package in paths:
            del sys.modules[package]
