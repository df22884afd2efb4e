"""Placements of DTensors: each is understood, in totals and in random bits, or refused by name."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import everybit as eb
from everybit.policies import PolicyName
from everybit_torch import TorchOptimizer
from everybit_torch.segments import segment, short
from everybit_torch.segments.segment import PIECE
from everybit_torch.torch_internals.dtensors import is_cut, local, offset_of_local_part
from tests.support.ranks import run

R, S0, S1 = Replicate(), Shard(0), Shard(1)
STRIDED = _StridedShard(0, split_factor=2)  # FSDP2 over column parallelism
PLACEMENTS: list[tuple[Placement, Placement]] = [
    (STRIDED, S0),
    (S0, R),
    (R, S0),
    (S0, S1),
    (S1, S0),
    (R, R),
    (R, S1),
    (S0, S0),
]
SHAPES = ((7, 6), (5, 4), (9,), (3, 5, 2))
ROUNDED = ("momentum", "variance", "param.remainder")
"""State of LEAN_BF16 in which all random bits are seen, as they are not in weights of 8 bits after three steps."""
TRANSFORMS: dict[str, Any] = {
    "clip": lambda learning_rate: eb.chain(eb.clip_by_global_norm(0.05), eb.sgd(learning_rate)),
    "lamb": eb.lamb,
    "lars": eb.lars,
    "stable_adamw": eb.stable_adamw,
    "prodigy": lambda learning_rate: eb.prodigy(learning_rate * 100),
}


def part(whole: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """This rank's part: cut along the mesh's dimensions from right to left if the left one is strided, else from left to right."""
    coordinate, piece = mesh.get_coordinate(), whole
    assert coordinate is not None
    order = range(mesh.ndim) if STRIDED not in placements else reversed(range(mesh.ndim))
    for number in order:
        placement: Any = placements[number]
        if is_cut(placement):
            pieces = piece.chunk(mesh.size(number), placement.dim if piece.ndim > 1 else 0)
            at = coordinate[number]
            piece = pieces[at] if at < len(pieces) else piece[:0]
    return DTensor.from_local(
        piece.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def steps(name: str, policy: PolicyName, placements: tuple[Placement, Placement] | None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float64 if policy == "FP64" else torch.bfloat16
    # A vector has one dimension.
    fits = [shape for shape in SHAPES if placements is None or len(shape) > 1 or S1 not in placements]
    start = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]
    grads = [
        [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES] for _ in range(3)
    ]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if placements is not None else None

    def placed(x: Tensor) -> Tensor:
        cut = x.shape in [torch.Size(shape) for shape in fits]
        return x.clone() if mesh is None or placements is None else part(x, mesh, placements if cut else (R, R))

    parameters = [nn.Parameter(placed(x)) for x in start]
    factory = TRANSFORMS.get(name, eb.adamw)
    optimizer = TorchOptimizer(parameters, factory, lr=1e-2, policy=policy, compile=False)
    for own in grads:
        for parameter, grad in zip(parameters, own, strict=True):
            parameter.grad = placed(grad)
        optimizer.step()
    rounded = [] if policy == "FP64" else [optimizer.state[p][name] for p in parameters for name in ROUNDED]
    return [p.detach() for p in parameters] + rounded


def compare(name: str, policy: PolicyName, how: str = "") -> list[str]:
    wrong, whole = [], steps(name, policy, None)
    for placements in PLACEMENTS:
        # With `how` each parameter is stepped by itself. Processes are used again: what was there comes back.
        with (
            patch.object(short, "SHORT", 0 if how else short.SHORT),
            patch.object(segment, "PIECE", 4 if how else PIECE),
        ):
            found = steps(name, policy, placements)
        for x, expected in zip(found, whole, strict=True):
            assert isinstance(x, DTensor)
            same = part(expected, x.device_mesh, tuple(x.placements)).to_local()
            # Squares of 101 numbers, added in other orders: a few units in the last place of a norm.
            fits = (
                torch.allclose(local(x), same, rtol=1e-13, atol=1e-15)
                if policy == "FP64"
                else torch.equal(local(x), same)
            )
            if not fits:
                wrong.append(f"{placements}: {tuple(expected.shape)} wrong")
    return wrong


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.sampled(2)
def test_totals_over_all_elements_and_over_each_parameter_are_those_of_one_process_under_every_placement(
    name: str,
) -> None:
    assert run(4, compare, name, "FP64") == [[]] * 4


@pytest.mark.parametrize("how", ["", "in pieces"])
def test_random_bits_are_those_of_one_process(how: str) -> None:
    """Of parts of rows and columns, that are stepped together, or by themselves in pieces."""
    assert run(4, compare, "adamw", "LEAN_BF16", how) == [[]] * 4


def strange() -> list[str]:
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), []
    in_strides = DTensor.from_local(torch.zeros(2, 6), mesh, (_StridedShard(0, split_factor=3), R), run_check=False)
    cases: list[tuple[Tensor, PolicyName]] = [
        (in_strides.bfloat16(), "LEAN_BF16"),
        (DTensor.from_local(torch.zeros(2), mesh, (Partial(), R)), "FP32"),
    ]
    for x, policy in cases:
        parameter = nn.Parameter(x)
        parameter.grad = torch.zeros_like(parameter)
        try:
            TorchOptimizer([parameter], TRANSFORMS["clip"], lr=1.0, policy=policy, compile=False).step()
        except ValueError as error:
            found.append(str(error))
    dist.barrier()
    return found


def test_strides_that_are_no_runs_and_sums_that_are_still_to_be_made_are_refused() -> None:
    for strided, partial in run(4, strange):
        assert "_StridedShard" in strided
        assert "Accepted are Shard, also over tensor parallelism, and Replicate" in strided
        assert "Partial" in partial
        assert "accepted are Shard, _StridedShard and Replicate" in partial


def test_the_offset_of_a_part_is_torchs() -> None:
    assert all(run(4, offsets))


def offsets() -> bool:
    mesh, whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), torch.arange(42).view(7, 6)
    found = []
    for placements in PLACEMENTS:
        x = part(whole, mesh, placements)
        where = tuple(slice(a, a + n) for a, n in zip(offset_of_local_part(x), local(x).shape, strict=True))
        found.append(torch.equal(whole[where], local(x)))
    dist.barrier()
    return all(found)
