"""Parts of parameters that lie one after the other in memory, as their gradients do: both are stepped where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor

import everybit as eb
from everybit_torch.segments.segment import HostMemory, Segment
from everybit_torch.segments.short import Bucket, indices, upper_words
from everybit_torch.segments.single import Places
from everybit_torch.torch_internals.tensors import foreach_copy


class Memory(NamedTuple):
    """Memory of several parameters, and of their gradients at the same positions.

    Attributes:
        weights: A vector.
        gradient: A vector of the same length.
    """

    weights: Tensor
    gradient: Tensor


def neighbours(lengths: Sequence[int], firsts: Sequence[int], short: int) -> list[slice]:
    """Return which parameters that lie one after the other are stepped at once, if each element draws random bits by its index.

    Those with consecutive indices are, and short parameters with any indices: they keep 4 bytes for each element.

    Args:
        lengths: The number of elements of each parameter.
        firsts: Global index of the first element of each.
        short: The number of elements from which on indices are not kept.
    """
    edges, elements, in_a_row, end = [0], 0, True, firsts[0]
    for number, (length, first) in enumerate(zip(lengths, firsts, strict=True)):
        if not length:
            continue
        words = {*upper_words(firsts[edges[-1]], 1), *upper_words(end - 1, 1), *upper_words(first, length)}
        follows = in_a_row and (end == first or not elements)
        if follows or (elements + length < short and len(words) == 1):
            elements, in_a_row = elements + length, follows
        else:
            edges.append(number)
            elements, in_a_row = length, True
        end = first + length
    return [slice(start, stop) for start, stop in zip(edges, [*edges[1:], len(lengths)], strict=True)]


class Run(Bucket):
    """Parts of parameters that lie one after the other in memory.

    If a format stores one number for a block of elements, each begins at a multiple of a block, and gaps hold zeros.

    Args:
        optimizer: The optimizer, as masks and labels came out.
        parameters: Vectors over the memory, in order.
        firsts: Global index of the first element of each.
        memory: Where they and their gradients lie.
        host: The host's memory in which their state lies.
    """

    def __init__(
        self,
        optimizer: eb.Optimizer[Any],
        parameters: Sequence[Tensor],
        firsts: Sequence[int],
        memory: Memory,
        host: HostMemory | None = None,
    ) -> None:
        begin = int(parameters[0].storage_offset())
        self.parameters, self._firsts, self.is_sharded = list(parameters), list(firsts), False
        self._starts = [int(p.storage_offset()) - begin for p in parameters]
        self._ranges = [slice(a, a + p.numel()) for a, p in zip(self._starts, parameters, strict=True)]
        (stored,) = optimizer.formats([parameters[0]])
        block = stored.block
        start = begin - memory.weights.storage_offset()
        stop = min(start + -(-self._ranges[-1].stop // block) * block, memory.weights.numel())
        self._gradient = memory.gradient[start:stop]
        self.places, self._addresses = Places(parameters), [*map(Tensor.data_ptr, parameters)]
        self._parts_of_gradient = [self._gradient[where] for where in self._ranges]
        self._gradient_places = Places(self._parts_of_gradient)
        self._seen: Sequence[Tensor] = ()  # gradients that were found to be these parts
        vector = memory.weights[start:stop]
        has_indices = optimizer.draws_bits or block > 1
        first = indices([p.numel() for p in parameters], firsts, block, vector.device) if has_indices else firsts[0]
        self.segment = Segment.new(optimizer, vector, first, host=host)

    def in_place(self) -> bool:
        """Whether all parameters have the memory that they had at first; the memory itself is stepped, whatever their shapes are."""
        return [*map(Tensor.data_ptr, self.parameters)] == self._addresses

    def relocate(self) -> None:
        """Refuse: the memory is a stepper's.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "as_optimizer(): its parameters are pieces of the stepper's buffers; accepted is to leave them there."
        )

    def gather(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the gradients as one vector: their memory, to which those are copied that somebody has put elsewhere."""
        if len(grads) == len(self._seen) and all(map(is_, grads, self._seen)):
            return self._gradient
        if self._gradient_places.hold(grads):
            self._seen = grads
        else:
            foreach_copy(self._parts_of_gradient, grads)
        return self._gradient

    def scatter(self) -> None:
        """A no-op: the new values are in the parameters' memory."""
