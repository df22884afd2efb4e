"""A plugin that gives axolotl the names of :mod:`everybit_torch.names.trainer`.

plugins: [everybit_torch.names.axolotl.EverybitPlugin]
optimizer: everybit_adamw
optim_args: {policy: LEAN_BF16}
"""

from typing import Any

from axolotl.integrations.base import BasePlugin

from everybit_torch.names import trainer


class EverybitPlugin(BasePlugin):
    """Adds the names when axolotl reads its file."""

    def register(self, cfg: Any) -> None:  # noqa: ARG002  # names depend on no configuration
        """Add the names, which a second plugin may have done."""
        trainer.register()
