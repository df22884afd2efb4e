"""Carries out the events of units' weights, where parameters are sharded: gather, wait, free, and comparisons between the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from everybit_torch.collectives.communicator import Communicator
from everybit_torch.sharded.absent_parameters import name_units
from everybit_torch.sharded.comparisons import Agreement, Comparer, Comparison, DifferentPassesError
from everybit_torch.sharded.scheduling.events import Event, Kind, PassFlags
from everybit_torch.sharded.scheduling.schedule import Schedule
from everybit_torch.sharded.scheduling.weights import WeightSchedule
from everybit_torch.sharded.weights import WeightBuffer


class Unit:
    """Weights that are gathered together: a module, and the buffers of its groups."""

    def __init__(self, name: str, module: nn.Module, buffers: Sequence[WeightBuffer]) -> None:
        self.name, self.module, self.buffers = name, module, list(buffers)

    def __str__(self) -> str:
        return self.name or "the model"

    @property
    def trained(self) -> bool:
        """Whether it has parameters that are trained."""
        return any(buffer.group.requires_grad for buffer in self.buffers)

    @property
    def shown(self) -> bool:
        """Whether the model's tensors have their values."""
        return False not in [buffer.shown for buffer in self.buffers]  # fast: asked before every module's forward pass


def each(functions: Sequence[Callable[[], None]]) -> None:
    """Call all of them, and raise what the first that failed raised."""
    first: RuntimeError | None = None
    for function in functions:
        try:
            function()
        except RuntimeError as error:
            first = first or error
    if first is not None:
        raise first


class UnitWeights:
    """Carries out the events of units' weights, and compares what the ranks do with them.

    Args:
        units: In the layout's order, the model first.
        communicator: The ranks that share the weights; nobody else sends over it.
        hosts: The inner and the outer ranks, for tensors in the host's memory.
        schedule: Whose events these are.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        communicator: Communicator,
        hosts: tuple[Communicator, Communicator],
        schedule: WeightSchedule,
    ) -> None:
        self.units, self.communicator, self._hosts, self._schedule = list(units), communicator, hosts, schedule
        self.comparer = Comparer(*hosts)
        self._comparison: Comparison | None = None

    @classmethod
    def of(
        cls,
        modules: Sequence[tuple[str, nn.Module]],
        weights: Sequence[WeightBuffer],
        schedule: Schedule,
        inner: Communicator,
        outer: Communicator,
    ) -> UnitWeights:
        """The weights of a model's units, gathered over a communicator of their own, with which the schedule is bounded.

        Args:
            modules: The units' names and modules, in the layout's order.
            weights: All buffers.
            schedule: Of the stepper.
            inner: The ranks that buffers are sharded over.
            outer: The ranks that hold copies of the same shards.
        """
        assert schedule.weights is not None
        units = [
            Unit(name, module, [one for one in weights if one.group.unit == number])
            for number, (name, module) in enumerate(modules)
        ]
        for unit in units:
            for buffer in unit.buffers:
                name_units(buffer.parameters, [place.spec.name for place in buffer.group.placements], str(unit))
        made = cls(units, inner.clone(), (inner.for_host_memory(), outer.for_host_memory()), schedule.weights)
        schedule.bounded = made.is_bounded
        return made

    @property
    def communicators(self) -> list[Communicator]:
        """Those that this has made."""
        return [self.communicator, *self._hosts]

    def is_bounded(self) -> bool:
        """Whether this rank may wait for a reduction inside the backward pass."""
        return self.agreement().bounded

    @property
    def handlers(self) -> dict[Kind, Callable[[Event], None]]:
        """The method that carries out each kind of event."""
        return {
            "gather": self._gather,
            "wait": self._wait,
            "free": self._free,
            **self.comparer.handlers,
            "compare backward": self._compare_backward,
            "require compared": lambda _: self._end_comparison(),
            "require alike": self._require_alike,
        }

    def agreement(self) -> Agreement:
        """Return what the ranks' ways have in common; it is known soon after their backward passes have begun.

        Raises:
            RuntimeError: Another rank has not begun a backward pass.
        """
        assert self._comparison is not None
        return self.comparer.result(self._comparison)

    def recover(self) -> None:
        """After an error: end all collectives, and unless units are held take the values from the shards, whatever failed."""
        self.communicator.drain()
        self._comparison = None
        if not self._schedule.held:
            freed = [unit for number, unit in enumerate(self.units) if number not in self._schedule.kept]
            for buffer in (buffer for unit in freed for buffer in unit.buffers):
                buffer.reset()

    def compare_again_with_others(self) -> bool:
        """After an error: be compared where other ranks' backward passes are, in this one or in the one that they come to next.

        Returns:
            Whether the others go on with this pass. They do not, and have sent no gradient of it, if passes with different flags were
            compared: all ranks were told so then.
        """
        if self._comparison is not None:
            try:
                self._comparison.result()
            except DifferentPassesError:
                return False
            except RuntimeError:
                self._comparison = None  # it was with a rank that was elsewhere, and will come here
        if self._comparison is None:
            self._comparison = self.comparer.start("backward", self._schedule.ways.digest)
        return True

    def _gather(self, event: Event) -> None:
        for buffer in self.units[event.number].buffers:
            buffer.start_gather(self.communicator)

    def _wait(self, event: Event) -> None:
        for buffer in self.units[event.number].buffers:
            buffer.wait()

    def _free(self, event: Event) -> None:
        each([buffer.release for buffer in self.units[event.number].buffers])

    def _compare_backward(self, event: Event) -> None:
        in_order = self._schedule.ways.in_the_layouts_order
        self._comparison = self.comparer.start(
            "backward",
            event.number,
            in_order=in_order,
            flags=PassFlags(event.place),
            retained=self._schedule.retained.digest,
        )

    def _end_comparison(self) -> None:
        self.agreement()
        self._comparison = None

    def _require_alike(self, event: Event) -> None:
        if not self.agreement().alike:
            raise RuntimeError(
                f"{self.units[event.number]}: is needed again in the backward pass after it was given back, and units ran in"
                " different orders on the ranks, so that the others do not gather it. Accepted is reshard_after_forward=False, or another"
                " strategy."
            )
