"""A state dict in the first rank's memory, which it sends to the others chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from everybit_torch.sharded.agreement import Everyone
from everybit_torch.sharded.construction.reading import Entry, Request, chunks, common, require_same, within
from everybit_torch.sharded.layout import Box, boxes


class FirstRank:
    """Values that the first rank has. What it has is known on every rank after :meth:`meet`.

    All of a tensor is sent to all ranks, a chunk at a time, and each keeps its part: the first rank sends each byte once either way (a
    scatter would also send every byte once), and no rank needs room for more than a chunk.

    Args:
        state_dict: On the first rank.
        ranks: All that hold something of the same parameters.

    Raises:
        TypeError: It is no state dict; or another rank than the first has one.
        ValueError: The first rank has none.
    """

    def __init__(self, state_dict: Mapping[str, Tensor] | None, ranks: Everyone) -> None:
        self._ranks = ranks
        self.where = "the first rank's state dict"
        self._table: dict[str, Entry] = {}
        self.is_first = ranks.is_first
        if not self.is_first:
            if state_dict is not None:
                raise TypeError(
                    f"FromStateDict: got a {type(state_dict).__name__} on rank {ranks.rank}; accepted is a state dict on the first rank,"
                    " and None on all others: FromStateDict(state_dict if rank == 0 else None)."
                )
            return
        if state_dict is None:
            raise ValueError("FromStateDict: got None on the first rank; accepted there is a state dict.")
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"FromStateDict: got a {type(state_dict).__name__}; accepted is a state dict: tensors by name."
            )
        for name, value in state_dict.items():
            if not isinstance(name, str) or not isinstance(value, Tensor) or value.layout is not torch.strided:
                raise TypeError(
                    f"FromStateDict: {name!r} is a {type(value).__name__}; accepted are dense tensors by name."
                )
            if value.device.type == "meta":
                raise ValueError(f"FromStateDict: {name!r} is on the meta device, without values.")
        self._values = dict(state_dict)

    def require_ties(self, names: Sequence[Sequence[str]]) -> None:
        """Refuse, on the first rank, values that differ between names of one tensor.

        Args:
            names: Of each of the model's tensors, all of them.

        Raises:
            ValueError: They do.
        """
        for several in names if self.is_first else ():
            first, *others = [name for name in several if name in self._values] or [""]
            for other in others:
                one, two = (self._values[name].detach().reshape(-1) for name in (first, other))
                require_same(one, two, (first, other), self.where)

    def meet(self) -> None:
        """Tell all ranks what there is. Every rank has to call it."""
        mine = {name: (str(x.dtype), list(x.shape)) for name, x in self._values.items()} if self.is_first else {}
        told = self._ranks.of_first(mine)
        self._table = {
            name: Entry(getattr(torch, dtype.removeprefix("torch.")), tuple(shape))
            for name, (dtype, shape) in told.items()
        }

    @property
    def table(self) -> Mapping[str, Entry]:
        """All tensors, by name."""
        return self._table

    def deliver(self, requests: Sequence[Request]) -> None:
        """Send, and keep what is asked for here."""
        for request in requests:
            name = next(name for name in request.names if name in self._table)
            entry = self._table[name]
            whole = self._values[name].detach().reshape(-1) if self.is_first else None
            numel = torch.Size(entry.shape).numel()
            for low, high in chunks(0, numel, entry.dtype.itemsize):
                part = torch.empty(high - low, dtype=entry.dtype, device=self._ranks.device)
                if whole is not None:
                    part.copy_(whole[low:high])
                # As bytes, which every backend sends.
                self._ranks.broadcast(part.view(torch.uint8), request.names[0])
                if request.part is None:
                    start, stop = max(low, request.low), min(high, request.high)
                    if start < stop:
                        request.into[start - request.low : stop - request.low].copy_(part[start - low : stop - low])
                else:
                    _take(request, boxes(entry.shape, low, high), part)


def _take(request: Request, sent: Sequence[Box], values: Tensor) -> None:
    """Keep of what was sent, which are these rectangles of the tensor, what is asked for here."""
    for wanted in request.boxes(()):
        into = request.into[wanted.start : wanted.start + math.prod(wanted.sizes)].view(wanted.sizes)
        for one in sent:
            if (both := common(one, wanted.offsets, wanted.sizes)) is not None:
                given = values[one.start : one.start + math.prod(one.sizes)].view(one.sizes)
                within(into, wanted.offsets, both).copy_(within(given, one.offsets, both))
