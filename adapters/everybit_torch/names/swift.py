"""Names for ms-swift: ``swift sft --external_plugins $(python -m everybit_torch.names.swift) --optimizer everybit_adamw``.

swift takes the path of a file, which this command prints. ``--optim_args policy=LEAN_BF16`` is that of
:mod:`everybit_torch.names.trainer`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from transformers.training_args import OptimizerNames

from everybit_torch.names import trainer
from everybit_torch.names.optimizers import OPTIMIZERS


def register() -> None:
    """Add the names to Trainer's table and to swift's."""
    trainer.register()
    module: Any = import_module("swift.optimizers")
    for name in OPTIMIZERS:
        module.optimizers_map[f"everybit_{name}"] = _callback(module.OptimizerCallback, f"everybit_{name}")


def _callback(base: Any, name: str) -> Any:
    def create_optimizer(self: Any, model: Any = None) -> Any:
        self.args.optim = OptimizerNames(name)  # swift's own callback then asks Trainer, which knows it
        return base.create_optimizer(self, model)

    return type("EverybitCallback", (base,), {"create_optimizer": create_optimizer})


if __name__ == "__main__":
    print(__file__)  # noqa: T201  # the command's result
else:
    register()
