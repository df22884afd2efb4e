"""Models whose rows no number of ranks divides, cut as FSDP2 cuts them, with gradients that every rank knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from tests.support.weights import Weights


class Layer(nn.Module):
    """Rows that two, three and four ranks do not divide, and a matrix with fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 21)
        self.short = nn.Linear(9, 2, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 6, 5))
        self.conv = nn.Conv2d(2, 7, (1, 3), bias=False)


class Layers(nn.Module):
    """Two of them, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.layers = nn.Sequential(Layer(), Layer())


def new_model(policy: str) -> Layers:
    torch.manual_seed(0)
    model = Layers() if policy == "FP32" else Layers().bfloat16()
    model.get_parameter("layers.1.conv.weight").requires_grad_(False)
    return model


def mesh_of(shape: tuple[int, ...] | None = None) -> DeviceMesh:
    """All ranks as a mesh: of one dimension, or of two, the first of replicas. A program makes one: torch remembers those it has seen."""
    names = ("shard",) if shape is None else ("replicate", "shard")
    return init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)


def cut(
    model: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh | None = None, ignored: Sequence[Any] = ()
) -> None:
    mesh = mesh_of() if mesh is None else mesh
    for one in (*layers, model):
        fully_shard(one, mesh=mesh, ignored_params={*ignored})
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo's own mean is wrong


def in_parts(whole: Tensor, parameter: DTensor) -> DTensor:
    """A tensor that every rank has, cut as a parameter is: as ``distribute_tensor`` does, which sends it."""
    mesh = parameter.device_mesh
    ranks = mesh.size(mesh.ndim - 1)
    each = -(-len(whole) // ranks)
    own = whole[each * mesh.get_local_rank(mesh.ndim - 1) :][:each].contiguous()
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(own, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for name, parameter in model.named_parameters():
            whole = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            absent = (step == 1 and "layers.0.experts" in name) or (step == 3 and parameter.ndim > 1)
            if absent or not parameter.requires_grad:
                parameter.grad = None
            elif isinstance(parameter, DTensor):
                parameter.grad = in_parts(whole, parameter)
            else:
                parameter.grad = whole
        optimizer.step()


def whole(model: nn.Module) -> Weights:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }
