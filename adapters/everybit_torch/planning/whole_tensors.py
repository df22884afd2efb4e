"""How evenly tensors that must stay whole are distributed over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from everybit_torch.flat import Buffer


@dataclass(frozen=True, slots=True)
class WholeTensors:
    """How whole tensors are distributed over the ranks that step different parameters.

    Work is the cost of a step by the transform's own account: multiply-adds of Muon's iteration, or else elements.

    Attributes:
        tensors: How many there are.
        ranks: Over which they are distributed.
        without: The numbers of the ranks without whole tensors, counted as in the mesh.
        work: Work of the planned rank.
        mean_work: Mean work of the ranks.
        most_work: Work of the rank with the most.
        elements: Elements of the planned rank.
        mean_elements: Mean elements of the ranks.
        most_elements: Elements of the rank with the most.
        fullest: That rank's number, counted as in the mesh.
    """

    tensors: int
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
        """The number of ranks without whole tensors."""
        return len(self.without)

    @property
    def imbalance(self) -> float:
        """The work of the rank with the most, over the mean: how much longer all ranks take than if the work were even."""
        return self.most_work / self.mean_work

    def __str__(self) -> str:
        who = f" ({', '.join(_ranges(self.without))})" if self.without else ""
        return (
            f"{self.tensors:,} whole tensors on {self.ranks:,} ranks, {self.idle:,} of which have none{who};"
            f" of the mean, the busiest rank has {self.imbalance:.2f} times the work and the fullest"
            f" {self.most_elements / self.mean_elements:.2f} times the elements"
        )


def distribution(buffers: Sequence[Buffer], shares: int, share: int) -> WholeTensors | None:
    """Return the distribution of the whole tensors of a layout; None without whole tensors.

    Args:
        buffers: The layout.
        shares: How many ranks step different parameters.
        share: That of the planned rank.
    """
    costs, elements, tensors = [0.0] * shares, [0] * shares, 0
    for buffer in buffers:
        owned = [place for place in buffer.places if place.spec.is_whole and place.numel]
        tensors += len(owned)
        for rank in range(shares):
            for place in owned:
                if place.within(buffer.share(rank)).numel:
                    costs[rank] += place.spec.cost or place.numel
                    elements[rank] += place.numel
    if not tensors:
        return None
    fullest = max(range(shares), key=lambda rank: (elements[rank], costs[rank], -rank))
    without = tuple(rank for rank in range(shares) if not elements[rank])
    return WholeTensors(
        tensors, shares, without, costs[share], sum(costs) / shares, max(costs), elements[share],
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
