"""The ranks that hold other parts of the same model, beside those that a stepper shards over: tensor-parallel parts, stages, experts.

A stepper sends nothing to them but what is about the whole model: how large all gradients are together, whether a step is skipped, and what
a transform reduces over everything.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from everybit_torch.collectives.communicator import Communicator
from everybit_torch.collectives.meshes import Mesh
from everybit_torch.dtensors import is_counted, mesh_of


@dataclass(frozen=True, slots=True)
class ModelParallel:
    """The ranks beside a stepper's.

    Attributes:
        communicators: One for each dimension of the mesh of tensor parallelism, and of what the stepper was given.
        tensor_parallel: The mesh of the model's DTensors.
        copies: Names of parameters that another of these ranks counts.
    """

    communicators: tuple[Communicator, ...] = ()
    tensor_parallel: DeviceMesh | None = None
    copies: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        parameters: Sequence[Tensor],
        given: Mesh,
        copies: Collection[str],
        ranks: Collection[int],
        near: torch.device | None,
    ) -> ModelParallel:
        """Return the ranks beside a model's.

        Args:
            parameters: Those that the stepper lays out; DTensors among them say over which mesh they lie.
            given: Stages of a pipeline, or experts: a process group, or a mesh of any number of dimensions.
            copies: Names of parameters that another rank of ``given`` counts.
            ranks: Those that the stepper shards over.
            near: The device of what they send.

        Raises:
            TypeError: ``given`` is no mesh.
            ValueError: It has ranks that the stepper shards over, or that tensor parallelism has.
        """
        mesh = mesh_of(parameters)
        found = [] if mesh is None else _dimensions(mesh)
        taken = {"mesh": set(ranks)}
        for number, group in enumerate(found):
            taken[f"dimension {number} of the DTensors' mesh"] = set(dist.get_process_group_ranks(group))
        if given is not None and not isinstance(given, (DeviceMesh, dist.ProcessGroup)):
            raise TypeError(
                f"model_parallel: got {given!r}; accepted are a DeviceMesh, a process group, or None. (Ranks of DTensors are found.)"
            )
        for group in _dimensions(given):
            for what, others in taken.items():
                if len(both := sorted(others.intersection(dist.get_process_group_ranks(group)))) > 1:
                    raise ValueError(
                        f"model_parallel: has the ranks {', '.join(map(str, both))} in common with {what}; accepted are ranks that hold"
                        " other parts of the model: no data-parallel ranks, and none over which its DTensors lie."
                    )
            found.append(group)
        return cls(tuple(Communicator(group, near=near) for group in found), mesh, frozenset(copies))

    @property
    def is_alone(self) -> bool:
        """Whether there are no such ranks."""
        return all(one.size == 1 for one in self.communicators)

    @property
    def given(self) -> tuple[Communicator, ...]:
        """Those whose parts are other parameters, and not parts of the same ones."""
        return self.communicators[0 if self.tensor_parallel is None else self.tensor_parallel.ndim :]

    def counts(self, name: str, parameter: Tensor) -> bool:
        """Whether this rank is the one that counts its elements of a parameter, of all that hold them."""
        if name in self.copies:
            return False
        return self.tensor_parallel is None or is_counted(parameter, self.tensor_parallel)

    @property
    def part(self) -> tuple[int, int] | None:
        """The number of this rank's part of the model, and how many there are; None if it is all of it."""
        if self.is_alone:
            return None
        number, parts = 0, 1
        for one in self.communicators:
            number, parts = number * one.size + one.rank, parts * one.size
        return number, parts

    def ranks_of_model(self, ranks: Sequence[int]) -> list[int]:
        """All ranks that hold something of the model, numbered as in the world. Every rank has to call it.

        Args:
            ranks: Those that this rank's stepper shards over.
        """
        found = list(ranks)
        for communicator in self.communicators:
            found = _joined(communicator, found)[1]
        return sorted(set(found))

    def numbers_before(self, sizes: Sequence[int]) -> tuple[int, list[int]]:
        """How many parameters ranks with other parameters number before this one's, and the sizes of all of theirs, in that order.

        Every rank has to call it.

        Args:
            sizes: Of this rank's parameters.
        """
        before, table = 0, list(sizes)
        for communicator in reversed(self.given):
            earlier, table = _joined(communicator, table)
            before += earlier
        return before, table

    def add_up(self, numbers: Tensor) -> None:
        """Add up numbers of this rank's part of the model and of the others', in place. Every rank has to call it."""
        for communicator in self.communicators:
            communicator.all_reduce(numbers, "what gradients are like in the other parts of the model").wait()


def _joined(communicator: Communicator, own: Sequence[int]) -> tuple[int, list[int]]:
    """All ranks' numbers, of which each has as many as it has; and how many come before this rank's."""
    counts = [count for (count,) in _gather(communicator, [len(own)])]
    rows = _gather(communicator, [*own, *[0] * (max(counts) - len(own))])
    return sum(counts[: communicator.rank]), [x for row, count in zip(rows, counts, strict=True) for x in row[:count]]


def _gather(communicator: Communicator, row: list[int]) -> list[list[int]]:
    given = torch.tensor(row, dtype=torch.int64, device=communicator.device)
    whole = given.new_empty(communicator.size * len(row))
    communicator.all_gather(whole, given, "sizes of parameters").wait()
    return [[int(x) for x in one] for one in whole.view(communicator.size, -1).tolist()]


def _dimensions(mesh: Mesh) -> list[dist.ProcessGroup]:
    if mesh is None:
        return []
    return [mesh] if isinstance(mesh, dist.ProcessGroup) else list(mesh.get_all_groups())
