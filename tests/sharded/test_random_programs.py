"""Whatever program trains, in one process or on several ranks, under every strategy: the bits are those of plain torch."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.random_programs import Cycle, Microbatch, Program, Way, differences, programs
from tests.support.ranks import run


def require_plain_torchs_bits(ranks: int, drawn: list[Program]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for found in run(ranks, all_differences, drawn, Path(directory), timeout=30):
            assert not found


def all_differences(drawn: list[Program], directory: Path) -> list[str]:
    return [
        f"{program}: {wrong}" for n, program in enumerate(drawn) for wrong in differences(program, directory / str(n))
    ]


def test_a_reentrant_checkpoint_covers_a_unit_with_units_and_functions_of_the_users() -> None:
    """Units after the first function seemed to be another checkpoint's, whose gradients were sent before they came."""
    way = Way((0, 1), True, "reentrant", False, 2)
    nested = Way((0, 1, 3), True, "nested reentrant", False, 4)
    cycle = Cycle(
        tuple(Microbatch((one, one), None, (), False, False) for one in (way, nested)), "microbatch", None, None
    )
    require_plain_torchs_bits(2, [Program((cycle,), reshard, False, (None, None)) for reshard in (True, False)])


def test_a_checkpoint_covers_frozen_units_before_trained_ones() -> None:
    """It runs them again, as a reentrant one does, but not for a backward pass of their own: what they return requires no gradient."""
    way = Way((0, 1, 2, 3), False, "nested", False, 13)
    cycle = Cycle((Microbatch((way, way), None, ("entry", "units.0"), False, False),), "microbatch", None, None)
    require_plain_torchs_bits(2, [Program((cycle,), reshard, False, (None, None)) for reshard in (True, False)])


def test_a_rank_whose_gradients_all_come_from_a_reentrant_checkpoint_sends_them_in_time() -> None:
    """Its graph says that it accumulates nothing, as in torch.autograd.grad; the others waited for its sums, and it for their weights."""
    plain, covered = Way((3,), False, "no", False, 99), Way((0,), False, "reentrant", False, 88)
    microbatch = Microbatch((plain, covered, plain), None, ("entry", "exit"), False, False)
    cycle = Cycle((microbatch,), "microbatch", None, None)
    require_plain_torchs_bits(3, [Program((cycle,), reshard, False, (None,) * 3) for reshard in (True, False)])


@settings(max_examples=3)
@given(st.lists(programs(2), min_size=3, max_size=3))
def test_random_programs_have_the_bits_of_plain_torch(drawn: list[Program]) -> None:
    require_plain_torchs_bits(2, drawn)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_many_random_programs_have_the_bits_of_plain_torch(ranks: int) -> None:
    @settings(max_examples=12)
    @given(st.lists(programs(ranks), min_size=5, max_size=5))
    def law(drawn: list[Program]) -> None:
        require_plain_torchs_bits(ranks, drawn)

    law()
