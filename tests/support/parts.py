"""A model that tensor parallelism cuts in every way, also into parts of different sizes and into empty ones."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from everybit_torch.sharded.stepper import FlatStepper

SHAPES: dict[str, tuple[int, ...]] = {
    "rows": (5, 3), "columns": (3, 5), "few": (2, 4), "cube": (3, 4, 5), "copy": (3,), "plain": (4,),
    "frozen": (3, 4), "frozen_copy": (7,),
}  # fmt: skip

BY_COLUMNS: Mapping[str, Placement] = {
    "rows": Shard(0), "columns": Shard(1), "few": Shard(0), "cube": Shard(1), "copy": Replicate(), "frozen": Shard(1),
    "frozen_copy": Replicate(),
}  # fmt: skip
"""Along all kinds of dimensions."""

BY_ROWS: Mapping[str, Placement] = {
    name: Shard(0) for name in SHAPES if name not in ("copy", "plain", "frozen_copy")
} | {"frozen_copy": Replicate()}
"""Along the first dimensions, as policies that draw bits need it."""


def gradient(name: str, like: Tensor, step: int, rank: int) -> Tensor:
    """Multiples of a quarter, whose sums are exact in every order."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + sum(map(ord, name)))
    return (torch.randint(-8, 9, tuple(like.shape), generator=generator).float() / 4).to(like.dtype)


def weighted(module: nn.Module, name: str, step: int, rank: int) -> Tensor:
    """A sum of all parameters, by factors that are their gradients, whatever parts of a parameter ranks have."""
    total = torch.zeros((), dtype=torch.float64)
    for key, parameter in module.named_parameters():
        factor = gradient(f"{name}.{key}", parameter, step, rank)
        if isinstance(parameter, DTensor):
            factor = distribute_tensor(factor, parameter.device_mesh, parameter.placements)
        found = (parameter * factor).double().sum()
        total = total + (found.full_tensor() if isinstance(found, DTensor) else found)
    return total


class Layer(nn.Module):
    """A unit."""

    def __init__(self, name: str, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        self.name = name
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        for key, shape in shapes.items():
            values = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(key, nn.Parameter(values, requires_grad="frozen" not in key))
        self.register_buffer("table", torch.arange(3.0))

    def reset_parameters(self) -> None:
        """Draws everything anew, whole."""
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        with torch.no_grad():
            self.table.copy_(torch.arange(3.0))  # type: ignore[operator]

    def forward(self, step: int, rank: int) -> Tensor:
        return weighted(self, self.name, step, rank)


class Layers(nn.Module):
    """Two units, and a weight of the second that is the first's."""

    def __init__(
        self, dtype: torch.dtype, names: tuple[str, ...] = ("one", "two"), shapes: Mapping[str, tuple[int, ...]] = SHAPES,
        *, tied: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.layers = nn.ModuleDict({name: Layer(name, dtype, shapes) for name in names})
        if tied:
            self.layers[names[-1]].rows = self.layers[names[0]].rows

    def forward(self, step: int, rank: int) -> Tensor:
        return torch.stack([layer(step, rank) for layer in self.layers.values()]).sum()


_NAMES = itertools.count()


class Mesh:
    """Ranks in two dimensions: those that a stepper shards over, and those of tensor parallelism.

    torch keeps what it found out about an operation on DTensors by their mesh, which is equal to one of an earlier program in this process
    and has the groups of that one: so no two meshes have the same names.

    Args:
        data: The number of data-parallel ranks.
        tensor: The number of tensor-parallel ranks.
    """

    def __init__(self, data: int, tensor: int) -> None:
        self._names = {"data": "data", "tensor": f"tensor{next(_NAMES)}"}
        self._mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=tuple(self._names.values()))

    def __getitem__(self, name: str) -> DeviceMesh:
        return self._mesh[self._names[name]]

    def place(self, name: str) -> int:
        """This rank's number along a dimension."""
        return self._mesh.get_local_rank(self._names[name])


def cut(model: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Any]) -> None:
    """Parameters become DTensors, by the last part of their names; one that is tied stays tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name not in placements:
                continue
            if id(parameter) not in made:
                given = placements[name]
                part = distribute_tensor(parameter.detach(), mesh, given if isinstance(given, list) else [given])
                made[id(parameter)] = nn.Parameter(part, requires_grad=parameter.requires_grad)
            module.register_parameter(name, made[id(parameter)])


def trained(model: nn.Module, stepper: FlatStepper, rank: int, ranks: int, steps: range) -> None:
    """Every rank has the gradients of its share of two ranks' work: the same sums, whatever the number of ranks."""
    for step in steps:
        with stepper.microbatch(last=True):
            model(step, rank).backward() if ranks == 2 else sum(model(step, one) for one in range(2)).backward()
        stepper.step()


def whole(x: Tensor) -> Tensor:
    """All of a tensor, as a plain one of its own."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()
