"""Any range of a tensor's elements is a few boxes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from everybit_torch.checkpoint.boxes import boxes

SHAPES = [(), (0,), (1,), (7,), (3, 5), (5, 1), (2, 3, 4), (3, 1, 5), (4, 3, 2), (2, 2, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_cover_a_range_exactly_with_few_pieces(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    index = torch.arange(numel).view(shape)
    for low, high in itertools.combinations_with_replacement(range(numel + 1), 2):
        found = boxes(shape, low, high)
        assert len(found) <= max(2 * len(shape) - 1, 1)
        elements: list[int] = []
        for box in found:
            assert box.start == len(elements)  # one after the other, in the range's order
            part = index[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
            elements += part.reshape(-1).tolist()
        assert elements == list(range(low, high))


def test_the_bound_on_the_number_of_boxes_is_reached() -> None:
    for dimensions in range(1, 5):
        shape = (4,) * dimensions
        assert len(boxes(shape, 1, 4**dimensions - 1)) == 2 * dimensions - 1


def test_a_range_beyond_a_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"range 2 to 7: accepted is a range within the 6 elements of \(2, 3\)"):
        boxes((2, 3), 2, 7)
