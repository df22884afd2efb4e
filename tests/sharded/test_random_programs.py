"""The main law of sharded training: a random program on any number of ranks ends with the bits of one process, and goes on on any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import everybit as eb
from tests.support.random_programs import Outcome, Program, alone, drawn, elsewhere, on_ranks
from tests.support.ranks import run

TOGETHER = 8
"""Programs that the same processes carry out one after the other."""

GROUPS = 24
"""Groups of programs for each number of ranks; `make test` has the first, and `make exhaustive` all, 768 programs."""

every_group = pytest.mark.parametrize(
    "group", [pytest.param(group, marks=() if group == 0 else pytest.mark.exhaustive) for group in range(GROUPS)]
)


def programs(ranks: int, group: int) -> list[Program]:
    return [drawn(1000 * ranks + TOGETHER * group + number, ranks) for number in range(TOGETHER)]


@pytest.mark.parametrize("ranks", [3, 1, 2, 4])
@every_group
@pytest.mark.sampled(4)
def test_a_random_program_has_the_bits_of_one_process(ranks: int, group: int) -> None:
    holds(programs(ranks, group), ranks)


def test_a_program_that_once_failed() -> None:
    """A mask outside of which a block has gaps: its request has no elements there."""
    grads = eb.Grads(main="float32", comm="bfloat16", reduce="float32")
    masked = replace(
        drawn(1108, 1), mesh=(1,), strategy="optim_grads", policy="LEAN_8BIT", grads=grads, transform="masked", nested=False
    )  # fmt: skip
    holds([masked], 1)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 4), (4, 2)])
@every_group
@pytest.mark.sampled(4)
@pytest.mark.slow
def test_its_checkpoint_goes_on_elsewhere(before: int, after: int, group: int, tmp_path: Path) -> None:
    """On another number of ranks, under another strategy; and in a plain model with the torch optimizer, which has no labels."""
    saved = programs(before, group)
    run(before, on_ranks, saved, tmp_path)
    then = [elsewhere(program, after) for program in saved]
    every = run(after, on_ranks, then, None, tmp_path)
    for number, (program, other) in enumerate(zip(saved, then, strict=True)):
        expected = alone(program, other)
        for found in (each[number] for each in every):
            same((found[0], [*expected[1][: -len(found[1])], *found[1]]), expected, other)
        if not program.labelled:
            plain = alone(program, other, tmp_path / str(number))
            same((plain[0], [*expected[1][: -len(plain[1])], *plain[1]]), expected, other)


def holds(some: list[Program], ranks: int) -> None:
    every = run(ranks, on_ranks, some)
    for number, program in enumerate(some):
        for found in (each[number] for each in every):
            same(found, alone(program), program)


def same(found: Outcome, expected: Outcome, program: Program) -> None:
    assert found[1] == expected[1], program
    assert [name for name in expected[0] if not torch.equal(found[0][name], expected[0][name])] == [], program
