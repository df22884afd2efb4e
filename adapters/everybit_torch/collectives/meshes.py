"""The ranks of a stepper: process groups and device meshes."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from everybit_torch.collectives.communicator import Communicator

Mesh = DeviceMesh | dist.ProcessGroup | None


def communicators(mesh: Mesh, near: torch.device | None = None) -> tuple[Communicator, Communicator]:
    """The inner and the outer ranks of a mesh.

    Args:
        mesh: The mesh.
        near: The device of the tensors that are sent.

    Raises:
        TypeError: It is no mesh.
        ValueError: A mesh of more than two dimensions; or no mesh, in several processes without a process group.
    """
    if mesh is None:
        _require_group()
        return Communicator(dist.group.WORLD if dist.is_initialized() else None, near=near), Communicator(None)
    _require_mesh(mesh)
    if isinstance(mesh, dist.ProcessGroup):
        return Communicator(mesh, near=near), Communicator(None)
    if mesh.ndim == 1:
        return Communicator(mesh.get_group(), near=near), Communicator(None)
    return Communicator(mesh.get_group(1), near=near), Communicator(mesh.get_group(0), near=near)


def ranks_of(mesh: Mesh) -> list[int]:
    """The ranks of a mesh, numbered as in the world."""
    if isinstance(mesh, DeviceMesh):
        return [int(rank) for rank in mesh.mesh.flatten().tolist()]
    if mesh is None and not dist.is_initialized():
        return [0]
    return dist.get_process_group_ranks(dist.group.WORLD if mesh is None else mesh)


def sizes_of(mesh: Mesh) -> tuple[int, int]:
    """The number of outer and of inner ranks of a mesh; without one, this process alone.

    Raises:
        TypeError: It is no mesh.
        ValueError: A mesh of more than two dimensions.
    """
    if mesh is None:
        return 1, 1
    _require_mesh(mesh)
    if isinstance(mesh, dist.ProcessGroup):
        return 1, mesh.size()
    return (1, mesh.size()) if mesh.ndim == 1 else (mesh.size(0), mesh.size(1))


def _require_mesh(mesh: object) -> None:
    if not isinstance(mesh, (DeviceMesh, dist.ProcessGroup)):
        raise TypeError(f"mesh: got {mesh!r}; accepted are a DeviceMesh, a process group, or None.")
    if isinstance(mesh, DeviceMesh) and mesh.ndim not in (1, 2):
        raise ValueError(f"mesh: got {mesh.ndim} dimensions; accepted are one, or two: (outer, inner).")


def _require_group() -> None:
    """Refuse to be alone among processes that somebody started together."""
    started = os.environ.get("WORLD_SIZE", "1")
    if not dist.is_initialized() and started.isdecimal() and int(started) > 1:
        raise ValueError(
            f"mesh: got None in one of {started} processes (RANK={os.environ.get('RANK', '?')} and WORLD_SIZE={started} are set, as"
            " torchrun sets them) without a process group, so that each would train a model of its own. Before the stepper is made, write:"
            "\n\n"
            "    import torch.distributed as dist\n"
            "    dist.init_process_group()\n"
        )
