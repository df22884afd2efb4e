"""``optimizer.state`` over units: what a stepper keeps for each parameter, as views of its memory."""

from __future__ import annotations

from collections.abc import Sequence

from everybit_torch.optim.states import States
from everybit_torch.units import Unit


class UnitStates(States):
    """The state of all parameters, by parameter; and whatever others keep under keys of their own."""

    def show(self, unit: Unit) -> None:
        """Show each parameter's share of a unit's state, as views; what others keep here stays."""
        for member in unit.members:
            self[member.parameter].publish(unit.published(member), self.torch_names)

    def follow(self, unit: Unit, begun: Sequence[str], ended: Sequence[str]) -> None:
        """Show a unit whose slots have changed: those that ended are put aside, and those that began go on from what is here."""
        for member in unit.members:
            self.migrate(member.parameter, unit.published(member), begun, ended)
