"""The main law of sharded training: a random program on any number of ranks ends with the bits of one process."""

from __future__ import annotations

import pytest
import torch

from tests.support.random_programs import Program, alone, drawn, on_ranks
from tests.support.ranks import run

TOGETHER = 12
"""Programs that the same processes carry out one after the other."""

GROUPS = 12
"""Groups of programs for each number of ranks; `make test` has the first, and `make exhaustive` all, 576 programs."""


@pytest.mark.parametrize("ranks", [3, 1, 2, 4])
@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=() if group == 0 else pytest.mark.exhaustive) for group in range(GROUPS)]
)
@pytest.mark.sampled(4)
def test_a_random_program_has_the_bits_of_one_process(ranks: int, group: int) -> None:
    holds([drawn(1000 * ranks + TOGETHER * group + number, ranks) for number in range(TOGETHER)], ranks)


def test_a_program_that_once_failed() -> None:
    """A mask outside of which a block has gaps: its request has no elements there."""
    holds([drawn(1108, 1)], 1)


def holds(programs: list[Program], ranks: int) -> None:
    every = run(ranks, on_ranks, programs)
    for number, program in enumerate(programs):
        weights, norms = alone(program)
        for found, theirs in (each[number] for each in every):
            assert theirs == norms, program
            assert [name for name in weights if not torch.equal(found[name], weights[name])] == [], program
