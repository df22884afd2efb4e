"""How evenly whole tensors, and their parts that must stay whole, are distributed over ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from everybit_torch.sharded.layout import Group, Layout


@dataclass(frozen=True, slots=True)
class WholeTensors:
    """How whole tensors are distributed over the ranks that step different parameters.

    Work is what a step costs by the transform's own account: multiply-adds of Muon's iteration, or else elements.

    Attributes:
        tensors: How many there are.
        parts: How many there are if those that may be cut are: heads and experts one by one.
        ranks: Over which they are distributed.
        without: The numbers of the ranks that have none, counted as in the mesh.
        work: Of the planned rank.
        mean_work: Of a rank on average.
        most_work: Of the rank with the most.
        elements: Of the planned rank.
        mean_elements: Of a rank on average.
        most_elements: Of the rank with the most.
        fullest: That rank's number, counted as in the mesh.
    """

    tensors: int
    parts: int
    ranks: int
    without: tuple[int, ...]
    work: float
    mean_work: float
    most_work: float
    elements: int
    mean_elements: float
    most_elements: int
    fullest: int

    @property
    def idle(self) -> int:
        """How many ranks have none."""
        return len(self.without)

    @property
    def imbalance(self) -> float:
        """The work of the rank with the most, over the mean: how much longer all ranks take than if the work were even."""
        return self.most_work / self.mean_work

    def __str__(self) -> str:
        who = f" ({', '.join(_ranges(self.without))})" if self.without else ""
        parts = f" ({self.parts:,} with their parts)" if self.parts != self.tensors else ""
        return (
            f"{self.tensors:,} whole tensors{parts} on {self.ranks:,} ranks, {self.idle:,} of which have none{who};"
            f" of the mean, the busiest rank has {self.imbalance:.2f} times the work and the fullest"
            f" {self.most_elements / self.mean_elements:.2f} times the elements"
        )


def distribution(layout: Layout, shares: int, share: int) -> WholeTensors | None:
    """Return how the whole tensors of a layout are distributed; None: there are none.

    Args:
        layout: Of the model.
        shares: How many ranks step different parameters.
        share: That of the planned rank.
    """
    costs, elements = [0.0] * shares, [0] * shares
    tensors = parts = 0
    for group in layout.groups:
        for place in group.placements:
            if place.spec.whole and place.spec.numel and group.requires_grad:
                tensors, parts = tensors + 1, parts + place.spec.parts
        for one, numel, cost in _pieces(group, shares):
            costs[one] += cost
            elements[one] += numel
    if not tensors:
        return None
    fullest = max(range(shares), key=lambda one: (elements[one], costs[one], -one))
    without = [one for one in range(shares) if not elements[one]]
    return WholeTensors(
        tensors, parts, shares, tuple(without), costs[share], sum(costs) / shares, max(costs), elements[share],
        sum(elements) / shares, elements[fullest], fullest,
    )  # fmt: skip


def _ranges(numbers: Sequence[int], shown: int = 4) -> Iterator[str]:
    """Ascending numbers as ranges, the first of them."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    yield from ("-".join(map(str, one)) for one in found[:shown])
    if len(found) > shown:
        yield "..."


def _pieces(group: Group, shares: int) -> Iterator[tuple[int, int, float]]:
    """What each share has of each whole tensor: the share, the elements, and the work."""
    if not any(place.spec.whole for place in group.placements):
        return
    sizes = group.sizes(shares) or [group.padded // shares] * shares
    ends = list(accumulate(sizes))
    for place in group.placements:
        share, start = bisect_right(ends, place.start), place.start
        while start < place.stop:
            stop = min(ends[share], place.stop)
            if start < stop:
                yield share, stop - start, place.spec.cost_of(start - place.start, stop - place.start)
            share, start = share + 1, stop
