"""Sums and steps along a mesh's outer dimension: ranks sum gradients (HSDP), and each may step a part of the rows (HFSDP)."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from everybit_torch.collectives import Communicator, all_reduce_into, as_sent, divide, reduce_scatter_into
from everybit_torch.fsdp2.main_gradients import MainGradient
from everybit_torch.placements import row_edges
from everybit_torch.torch_internals.dtensors import local

# In the names of meshes: torch's caches give back an earlier mesh that compares equal, and with it process groups that may be gone.
_MESHES = itertools.count()


class OuterRows:
    """The rows of each parameter that this rank steps: all of FSDP2's, or the outer ranks' part of these.

    Args:
        parameters: FSDP2's, by name.
        mesh: A mesh of one dimension, or of two, (outer, inner).
        outer: The ranks that hold the same rows.
        is_cut: Whether they cut them once more.
        whole: The names of parameters that are stepped whole, by owners among all ranks, and are not cut once more.

    Attributes:
        stepped: The tensor that is stepped for each parameter: the parameter, or a DTensor over this rank's part of its rows.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mesh: DeviceMesh,
        outer: Communicator,
        *,
        is_cut: bool,
        whole: Collection[str] = (),
    ) -> None:
        self._outer, self._device = outer, torch.device(mesh.device_type)
        self._edges = {
            p: row_edges(local(p).shape[0], outer.size)
            for name, p in parameters.items()
            if is_cut and name not in whole
        }
        self.stepped: dict[str, nn.Parameter] = dict(parameters)
        if is_cut:
            groups = [mesh.get_group(1), mesh.get_group(0)]
            number = next(_MESHES)
            both = DeviceMesh.from_group(
                groups, mesh.device_type, mesh=mesh.mesh.T.contiguous(),
                mesh_dim_names=(f"inner{number}", f"outer{number}"),
            )  # fmt: skip
            self.stepped = {name: self._part_of(p, both) for name, p in parameters.items()}

    def _part_of(self, parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
        outer = Shard(0) if self.cuts(parameter) else Replicate()
        rows = DTensor.from_local(
            self._rows(local(parameter).detach(), parameter, self._outer.rank), mesh, [Shard(0), outer],
            run_check=False, shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
        part = nn.Parameter(rows, requires_grad=parameter.requires_grad)
        part.grad_dtype = None
        return part

    def _rows(self, rows: Tensor, parameter: nn.Parameter, rank: int) -> Tensor:
        """An outer rank's part of the rows that this inner rank has of a parameter."""
        edges = self._edges.get(parameter)
        return rows if edges is None else rows[edges[rank] : edges[rank + 1]]

    def cuts(self, parameter: nn.Parameter) -> bool:
        """Whether the outer ranks step different rows of a parameter."""
        return parameter in self._edges

    def finish(self, main: MainGradient, divisor: float) -> dict[nn.Parameter, Tensor]:
        """Sum a unit's main gradient over the outer ranks, and divide it. Every rank of these has to call it.

        Returns:
            The gradients of the rows that this rank steps. They may be scaled in place.
        """
        gradients = main.gradients()
        if not gradients:
            return gradients
        assert main.main is not None
        if self._outer.size == 1:
            divide(main.main, divisor)
            return gradients
        wire, what = main.grads.outer, f"gradients of {main.unit}, outer dimension"
        own = {p: gradient for p, gradient in gradients.items() if self.cuts(p)}
        if not own:
            sums = as_sent(main.main, wire)
            all_reduce_into(main.main, sums, self._outer, wire, divisor=divisor, what=what).finish()
            return gradients
        kept = {p: gradient for p, gradient in gradients.items() if p not in own}
        found = self._scattered(main, own, divisor, what)
        return found | self._summed(main, kept, divisor, what) if kept else found

    def _summed(
        self, main: MainGradient, gradients: Mapping[nn.Parameter, Tensor], divisor: float, what: str
    ) -> dict[nn.Parameter, Tensor]:
        """The sums of all rows, on every outer rank."""
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients.values()])
        # An exact sum is made in equal parts.
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % self._outer.size))
        wire = main.grads.outer
        all_reduce_into(padded, as_sent(padded, wire), self._outer, wire, divisor=divisor, what=what).finish()
        parts = torch.split(padded[: flat.numel()], [gradient.numel() for gradient in gradients.values()])
        return {p: part.view(gradient.shape) for (p, gradient), part in zip(gradients.items(), parts, strict=True)}

    def _scattered(
        self, main: MainGradient, gradients: Mapping[nn.Parameter, Tensor], divisor: float, what: str
    ) -> dict[nn.Parameter, Tensor]:
        """The sums of the rows that this outer rank steps."""
        assert main.main is not None
        wire = main.grads.outer
        whole, lengths = self._packed(gradients)
        own = whole.new_empty(lengths[self._outer.rank], dtype=main.main.dtype)
        sums = as_sent(whole, wire)
        reduce_scatter_into(
            own, sums, self._outer, wire, mode="copy", divisor=divisor, what=what, lengths=lengths
        ).finish()
        return self._unpacked(own, gradients, self._outer.rank)

    def hand_out(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Give the outer ranks the new values of the rows that this rank has stepped. Every rank of these has to call it."""
        if not self._edges or self._outer.size == 1:
            return
        by_dtype: dict[torch.dtype, dict[nn.Parameter, Tensor]] = {}
        for parameter in (one for one in parameters.values() if self.cuts(one)):
            by_dtype.setdefault(parameter.dtype, {})[parameter] = local(parameter).detach()
        for weights in by_dtype.values():
            packed, lengths = self._packed(weights)
            packed = packed.to(self._device)
            parts = self._outer.parts(packed, lengths)
            self._outer.all_gather(packed, parts[self._outer.rank], "new weights", lengths).wait()
            for rank, part in enumerate(parts):
                for parameter, new in self._unpacked(part, weights, rank).items():
                    self._rows(weights[parameter], parameter, rank).copy_(new)

    def _packed(self, tensors: Mapping[nn.Parameter, Tensor]) -> tuple[Tensor, list[int]]:
        """The outer ranks' rows of all tensors, one rank's after the other's; and how many elements each rank has."""
        parts = [[self._rows(t, p, rank).reshape(-1) for p, t in tensors.items()] for rank in range(self._outer.size)]
        return torch.cat([x for own in parts for x in own]), [sum(x.numel() for x in own) for own in parts]

    def _unpacked(self, part: Tensor, like: Mapping[nn.Parameter, Tensor], rank: int) -> dict[nn.Parameter, Tensor]:
        """One rank's part of :meth:`_packed`, by parameter, in the shapes of the rows."""
        shapes = {p: self._rows(x, p, rank).shape for p, x in like.items()}
        pieces = torch.split(part, [shape.numel() for shape in shapes.values()])
        return {p: piece.view(shape) for (p, shape), piece in zip(shapes.items(), pieces, strict=True)}
