"""Names in timm's registry, after ``import everybit_torch.names.timm``: ``everybitadamw``, ``everybitademamix`` and so on.

    optimizer = timm.optim.create_optimizer_v2(model, opt="everybitadamw", lr=1e-3, policy="LEAN_BF16")

timm's training script takes them as ``--opt everybitadamw --opt-kwargs policy=LEAN_BF16``. The names have no underscore, by which timm
would split them: ``everybitschedulefreeadamw``. Parameters come without names from timm; ``names_from=model`` gives them to optimizers that
go by names, such as ``everybitmuon``.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from everybit_torch.names.optimizers import OPTIMIZERS


def register() -> None:
    """Add the names to timm's registry; the import of this module does it. timm has one from 1.0.12 on."""
    optim: Any = import_module("timm.optim")
    if not hasattr(optim, "OptimInfo"):
        raise ImportError("timm: got a version without a registry of optimizers; accepted is timm>=1.0.12.")
    info, registry = optim.OptimInfo, import_module("timm.optim._optim_factory").default_registry
    known = set(registry.list_optimizers())
    for name, kind in OPTIMIZERS.items():
        theirs = f"everybit{name.replace('_', '')}"
        if theirs not in known:
            about = f"everybit's {name}, under the policy that opt-kwargs names (policy=LEAN_BF16)"
            # timm gives these where its own say so. Ours without momentum by default have no such argument.
            parameters = inspect.signature(kind).parameters
            eps, momentum, betas = (one in parameters for one in ("eps", "momentum", "betas"))
            registry.register(info(theirs, kind, about, eps, momentum and name != "rmsprop", betas))


register()
