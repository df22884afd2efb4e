"""FSDP2's reduce-scatter over a low-precision wire, with sums in full precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from everybit.base import DTYPES, LowDType, require_member
from everybit_torch.collectives import Communicator, Wire, cast, reduce_scatter_into
from everybit_torch.torch_internals.fsdp import ReduceScatter


class ExactReduceScatter(ReduceScatter):
    """Send gradients in 16 bits, and add up the received values in float64: for ``FSDPModule.set_custom_reduce_scatter``.

    Half the bytes of a float32 reduce-scatter, and an error that does not grow with the number of ranks. FSDP2 has to pass float32
    gradients, so set ``MixedPrecisionPolicy(reduce_dtype=torch.float32)``. The sharded parameters should be float32, since FSDP2 casts
    gradients to their dtype.

    Args:
        wire: The 16-bit dtype in which gradients are sent.

    Attributes:
        sent: Bytes that this rank has sent.

    Raises:
        ValueError: ``wire`` is not a 16-bit format.

    Examples:
        >>> from everybit_torch import ExactReduceScatter
        >>> exact = ExactReduceScatter("bfloat16")
        >>> # for module in model.modules():
        >>> #     if isinstance(module, FSDPModule):
        >>> #         module.set_custom_reduce_scatter(exact)
    """

    def __init__(self, wire: LowDType = "bfloat16") -> None:
        require_member(wire, ("bfloat16", "float16"), field="ExactReduceScatter.wire")
        self._wire = Wire(DTYPES[wire], exact=True)
        self.sent = 0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized tensor for FSDP2."""
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,  # noqa: ARG002
    ) -> dist.Work | None:
        """Sum, or average, ``input_tensor`` over the ranks, and put this rank's part into ``output_tensor``.

        Raises:
            TypeError: The gradients have 16 bits, so that their sum would be rounded again.
            ValueError: An operation that is neither sum nor mean.
        """
        if input_tensor.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"ExactReduceScatter: got {input_tensor.dtype} gradients; accepted is float32: fully_shard(...,"
                " mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))."
            )
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"ExactReduceScatter: got {op}; accepted are SUM and AVG. With set_gradient_divide_factor, call"
                " set_force_sum_reduction_for_comms(True) as well: the division is then made after the sum."
            )
        communicator = Communicator(group)
        sent = torch.empty_like(input_tensor, dtype=self._wire.dtype)
        cast(sent, input_tensor)
        divisor = float(communicator.size) if op == dist.ReduceOp.AVG else None
        reduction = reduce_scatter_into(
            output_tensor, sent, communicator, self._wire, mode="copy", divisor=divisor, owned=True, what="gradients"
        )
        reduction.finish()
        self.sent += sum(communicator.sent.values())
        return None
