"""The ranks that hold other parts of the same model, beside those that a stepper shards over: tensor-parallel parts, stages, experts.

A stepper sends nothing to them but what is about the whole model: how large all gradients are together, whether a step is skipped, and what
a transform reduces over everything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from everybit_torch.collectives.communicator import Communicator
from everybit_torch.collectives.meshes import Mesh
from everybit_torch.dtensors import mesh_of


@dataclass(frozen=True, slots=True)
class ModelParallel:
    """The ranks beside a stepper's.

    Attributes:
        communicators: One for each dimension of the mesh of tensor parallelism, and of what the stepper was given.
        tensor_parallel: The mesh of the model's DTensors.
    """

    communicators: tuple[Communicator, ...] = ()
    tensor_parallel: DeviceMesh | None = None

    @classmethod
    def of(
        cls,
        parameters: Sequence[Tensor],
        given: Mesh,
        ranks: Collection[int],
        near: torch.device | None,
    ) -> ModelParallel:
        """Return the ranks beside a model's.

        Args:
            parameters: Those that the stepper lays out; DTensors among them say over which mesh they lie.
            given: Stages of a pipeline, or experts: a process group, or a mesh of any number of dimensions.
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
        return cls(tuple(Communicator(group, near=near) for group in found), mesh)

    @property
    def is_alone(self) -> bool:
        """Whether there are no such ranks."""
        return all(one.size == 1 for one in self.communicators)

    @property
    def of_tensors(self) -> tuple[Communicator, ...]:
        """Those of tensor parallelism: one for each dimension of its mesh."""
        return self.communicators[: 0 if self.tensor_parallel is None else self.tensor_parallel.ndim]

    @property
    def given(self) -> tuple[Communicator, ...]:
        """Those whose parts are other parameters, and not parts of the same ones."""
        return self.communicators[len(self.of_tensors) :]

    @property
    def part(self) -> tuple[int, int] | None:
        """The number of this rank's part of the model, and how many there are; None if it is all of it.

        Parts have different parameters. Tensor-parallel ranks have parts of the same ones, and so the same part of the model.
        """
        return _part(self.given)

    @property
    def former_part(self) -> tuple[int, int] | None:
        """The same as checkpoints had it in which each tensor-parallel rank was a part by itself."""
        return _part(self.communicators)

    @property
    def cuts_tensors(self) -> bool:
        """Whether there are other ranks with parts of the same parameters."""
        return any(one.size > 1 for one in self.of_tensors)

    def ranks_of_tensors(self, ranks: Sequence[int]) -> list[int]:
        """All ranks that hold something of the same parameters, numbered as in the world. Every rank has to call it.

        Args:
            ranks: Those that this rank's stepper shards over.
        """
        return _all_of(self.of_tensors, ranks)

    def ranks_of_model(self, ranks: Sequence[int]) -> list[int]:
        """All ranks that hold something of the model, numbered as in the world. Every rank has to call it.

        Args:
            ranks: Those that this rank's stepper shards over.
        """
        return _all_of(self.communicators, ranks)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of ranks along each dimension."""
        return tuple(one.size for one in self.communicators)

    def elements_before(self, counts: Mapping[torch.dtype, int]) -> dict[torch.dtype, int]:
        """How many elements of each dtype ranks with other parameters have before this one's. Every rank has to call it.

        Args:
            counts: Of this rank's part of the model: elements of whole tensors.
        """
        known = (
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
        )  # of what is trained, the same on all ranks
        before, total = [0] * len(known), [counts.get(dtype, 0) for dtype in known]
        for communicator in reversed(self.given):
            rows = _gather(communicator, total)
            before = [b + sum(row[n] for row in rows[: communicator.rank]) for n, b in enumerate(before)]
            total = [sum(row[n] for row in rows) for n in range(len(known))]
        return dict(zip(known, before, strict=True))

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


def _part(communicators: Sequence[Communicator]) -> tuple[int, int] | None:
    number, parts = 0, 1
    for one in communicators:
        number, parts = number * one.size + one.rank, parts * one.size
    return None if parts == 1 else (number, parts)


def _all_of(communicators: Sequence[Communicator], ranks: Sequence[int]) -> list[int]:
    found = list(ranks)
    for communicator in communicators:
        found = _joined(communicator, found)[1]
    return sorted(set(found))


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
