"""Sums over ranks: whole numbers come out exactly, whatever the strategy, and an exact wire loses nothing but the rounding at its end."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import everybit as eb
from everybit.policies import resolve
from everybit_torch.collectives.communicator import Communicator
from everybit_torch.collectives.reduction import CHUNK, Wire, accumulate, all_reduce_into, install, reduce_scatter_into
from everybit_torch.planning.plan import plan
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import STRATEGIES
from tests.support.exact_models import whole_of
from tests.support.programs import integer_gradients, on_a_mesh, on_buffers
from tests.support.ranks import run

WIRES = [
    eb.Grads(main="float32"),
    eb.Grads(main="float32", comm="bfloat16"),
    eb.Grads(main="float32", comm="bfloat16", reduce="float32"),
    eb.Grads(main="float32", comm="float16"),
    eb.Grads(main="float32", comm="float16", reduce="float32"),
]
PATTERNS = ["microbatch", "no_sync", "neither"]


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (2, torch.bfloat16),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (
            (3, torch.float32),
            (1, torch.float32), (1, torch.bfloat16), (2, torch.float32), (3, torch.bfloat16), (4, torch.float32), (4, torch.bfloat16),
        )),
    ],
)  # fmt: skip
def test_every_gradient_is_counted_once(size: int, dtype: torch.dtype) -> None:
    """The bug that came back three times elsewhere: a sum added to itself. Numbers up to 200, which all of these dtypes hold."""
    for wrong in run(size, integer_gradients, list(STRATEGIES), [1, 3], WIRES, PATTERNS, dtype):
        assert not wrong


@pytest.mark.parametrize(
    ("outer", "inner"), [(2, 2), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((4, 1), (1, 3)))]
)
@pytest.mark.exhaustive
def test_every_gradient_is_counted_once_in_two_dimensions(outer: int, inner: int) -> None:
    strategies = [*STRATEGIES, "optim_grads_params+outer"]
    arguments = (
        integer_gradients,
        outer,
        inner,
        strategies,
        [1, 3],
        WIRES[::2],
        ["microbatch", "neither"],
        torch.bfloat16,
    )
    for wrong in run(outer * inner, on_a_mesh, *arguments):
        assert not wrong


# -- exactness -----------------------------------------------------------------------------------------------------------------------


def sums(dtype: torch.dtype, exact: bool, numel: int, spread: int) -> tuple[Tensor, Tensor, Tensor, dict[str, int]]:
    """This rank's part of a sum, the whole sum by all-reduce, what this rank contributed, and what was sent."""
    communicator = Communicator(dist.group.WORLD)
    generator = torch.Generator().manual_seed(communicator.rank)
    mine = (torch.randn(numel, generator=generator) * torch.exp(spread * torch.randn(numel, generator=generator))).to(
        dtype
    )
    wire = Wire(dtype, exact)
    part, whole = torch.empty(numel // communicator.size), torch.empty(numel)
    reduce_scatter_into(part, mine.clone(), communicator, wire, mode="copy", divisor=3.0).finish()
    sent = dict(communicator.sent)
    all_reduce_into(whole, mine.clone(), communicator, wire, divisor=3.0).finish()
    return part, whole, mine, sent


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_exact_wire_is_right_to_half_a_unit_in_the_last_place(dtype: torch.dtype) -> None:
    numel = 4 * (CHUNK + 3)
    ranks = run(4, sums, dtype, True, numel, 4 if dtype is torch.bfloat16 else 1)  # float16 ends at 65504
    true = sum(mine.double() for _, _, mine, _ in ranks) / 3
    assert isinstance(true, Tensor)
    nearest = true.float()
    for values in (torch.cat([part for part, _, _, _ in ranks]), ranks[0][1], ranks[3][1]):
        # Four numbers of 8 or 11 bits, added in float64: exact unless their sizes are 2**42 apart, when the smaller is far below an ulp
        # of the sum; then rounded for the division by three, and once more to float32. Ties between the two are rarer than this test.
        ulp = torch.nextafter(nearest.abs(), torch.tensor(torch.inf)) - nearest.abs()
        assert ((values.double() - true).abs() <= 0.5001 * ulp.double()).all()
    assert ranks[0][3] == {"all_to_all": 3 * numel // 4 * dtype.itemsize}


SIZES = (401, 97)


class Weighted(nn.Module):
    """The gradient of each parameter is what it is weighted with."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in SIZES])

    def forward(self, weights: list[Tensor]) -> Tensor:
        return sum(((p * w).sum() for p, w in zip(self.parts, weights, strict=True)), torch.zeros(()))


def weights_of_rank(rank: int, dtype: torch.dtype) -> list[Tensor]:
    """Of sizes 2**30 apart in bfloat16, 2**12 in float16, which ends at 65504; and of either sign, so that some sums cancel."""
    generator = torch.Generator().manual_seed(rank)
    spread = 4 if dtype is torch.bfloat16 else 1
    random = [torch.randn(2, size, generator=generator) for size in SIZES]
    return [(sign * torch.exp(spread * power)).to(dtype).float() for sign, power in random]


def mean_gradients(comm: Any, reduce: Any, mesh: Any) -> list[tuple[Any, list[Tensor]]]:
    """By strategy: the mean of the ranks' gradients, found by stepping from zero by minus that."""
    found: list[tuple[Any, list[Tensor]]] = []
    told = eb.Policy(params=eb.Nearest("float32"), grads=eb.Grads(main="float32", comm=comm, reduce=reduce))
    cases: list[tuple[Any, Any, eb.Policy]] = [(strategy, "no_shard", told) for strategy in STRATEGIES]
    cases += [("optim_grads_params", "optim", told), ("optim_grads", "no_shard", eb.policies.FP32)]
    for strategy, outer, policy in cases:
        model = Weighted()
        stepper = FlatStepper(model, eb.sgd(1.0), policy=policy, mesh=mesh, strategy=strategy, outer=outer)
        if policy is not told:
            stepper.set_grad_comm(comm, reduce)
        with stepper.microbatch(last=True):
            model(weights_of_rank(dist.get_rank(), getattr(torch, comm))).backward()
        stepper.step()
        found.append(((strategy, outer), [-whole_of(p).clone() for p in model.parameters()]))
    return found


def half_ulp(x: Fraction) -> Fraction:
    """Of float32, at a number of this size."""
    # Rounding to float64 first may lead to the next binade, where the unit is larger.
    exponent = math.frexp(float(abs(x)))[1]
    return Fraction(2) ** (max(exponent, -125) - 25)


@pytest.mark.parametrize("comm", ["bfloat16", "float16"])
def test_exact_means_exact_on_a_mesh_of_two_dimensions(comm: str) -> None:
    """Against rational arithmetic; with copies on the outer ranks (HSDP), and with state sharded over them (HFSDP)."""
    dtype = getattr(torch, comm)
    parts = [[Fraction(x) for x in torch.cat(weights_of_rank(rank, dtype)).tolist()] for rank in range(4)]
    inner = [[a + b for a, b in zip(parts[low], parts[low + 1], strict=True)] for low in (0, 2)]
    true = [(a + b) / 4 for a, b in zip(*inner, strict=True)]
    # Each inner sum is rounded once to float32, the mean of the two once more. What float64 rounds on the way is less than 2**-20 of that.
    limits = [
        ((half_ulp(a) + half_ulp(b)) / 4 + half_ulp(mean)) * (1 + Fraction(1, 2**20))
        for a, b, mean in zip(*inner, true, strict=True)
    ]
    for found in run(4, on_a_mesh, mean_gradients, 2, 2, comm, "float32"):
        assert len(found) == 6
        for _, gradients in found:
            got = [Fraction(x) for x in torch.cat(gradients).tolist()]
            assert all(abs(x - y) <= limit for x, y, limit in zip(got, true, limits, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copies_alone_send_what_ranks_in_one_dimension_send(strategy: Any) -> None:
    """With one inner rank there are no sums yet that would need more than the wire's 16 bits."""
    policy = eb.Policy(params=eb.Nearest("float32"), grads=eb.Grads(main="float32", comm="bfloat16", reduce="float32"))
    with torch.device("meta"):
        model = nn.Linear(64, 64)
    line, mesh = (
        plan(model, eb.sgd(1.0), policy=policy, strategy=strategy, ranks=ranks).wire["all_to_all"]
        for ranks in (4, (4, 1))
    )
    assert mesh == line == 3 * 64 * 65 // 4 * torch.bfloat16.itemsize


def test_natively_summed_in_bfloat16_it_is_not() -> None:
    true = sum(torch.cat(weights_of_rank(rank, torch.bfloat16)).double() for rank in range(4)) / 4
    assert isinstance(true, Tensor)
    for _, gradients in run(4, on_a_mesh, mean_gradients, 2, 2, "bfloat16", "native")[0]:
        # Two roundings by up to 2**-9 each, of numbers of random digits.
        assert float((torch.cat(gradients).double() - true).norm() / true.norm()) > 2**-12


def test_the_librarys_own_sum_in_bfloat16_is_visibly_worse() -> None:
    def error(exact: bool) -> float:
        ranks = run(4, sums, torch.bfloat16, exact, 4096, 0)
        true = sum(mine.double() for _, _, mine, _ in ranks) / 3
        assert isinstance(true, Tensor)
        got = torch.cat([part for part, _, _, _ in ranks]).double()
        return float((got - true).norm() / true.norm())

    # bfloat16 rounds each of three additions by up to 2**-9; float32 rounds once by up to 2**-25 (an error of the norm is smaller).
    assert error(exact=False) > 2**-11
    assert error(exact=True) < 2**-24


def test_a_sum_in_float16_does_not_overflow_on_the_way() -> None:
    """Four times 40000 is beyond float16; halved twice before it is sent, it is not, and powers of two are exact."""
    resolved = resolve(eb.Policy(grads=eb.Grads(main="float32", comm="float16")), "float32")
    assert [Wire.of(resolved, ranks).prescale for ranks in (1, 2, 3, 4, 5)] == [1, 1 / 2, 1 / 4, 1 / 4, 1 / 8]
    for got in run(4, overflowing):
        assert torch.equal(got, torch.full((4,), 40000.0))


def overflowing() -> Tensor:
    from everybit_torch.sharded.stepper import FlatStepper
    from tests.support.programs import Addend

    model = Addend((4,))
    policy = eb.Policy(grads=eb.Grads(main="float32", comm="float16"))
    stepper = FlatStepper(model, eb.sgd(0.0), policy=policy, strategy="no_shard")
    model.number = 40000
    with stepper.microbatch(last=True):
        model(torch.zeros(())).backward()
    return on_buffers(stepper).buffers[0].own.clone()


# -- one process ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_accumulating_is_the_wide_sum_rounded_once(into: torch.dtype, gradient: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    for shape in [(), (0,), (3, 5), (2, CHUNK)]:
        start, given = (
            torch.randn(shape).to(into),
            torch.randn(shape[::-1]).to(gradient).permute(tuple(range(len(shape)))[::-1]),
        )
        flat = start.reshape(-1).clone()
        accumulate(flat, given, mode="add", scale=scale)
        expected = (start.double() + scale * given.double()).to(torch.float32 if into is torch.bfloat16 else into)
        # bfloat16 goes through float32, in which this sum of two such numbers is rounded first.
        assert torch.equal(flat.view(shape), expected.to(into))
        accumulate(flat, given, mode="copy", scale=scale)
        assert torch.equal(flat.view(shape), (scale * given.double()).to(into))


def test_one_is_added_to_256() -> None:
    """In a bfloat16 accumulator 256 + 1 is 256."""
    main = torch.full((3,), 256.0)
    accumulate(main, torch.ones(3, dtype=torch.bfloat16), mode="add")
    assert main.tolist() == [257.0] * 3


def test_the_mean_of_three_equal_gradients_is_that_gradient() -> None:
    """Averaging on the wire multiplies by a rounded third: off by 0.2 % in bfloat16, every time."""
    main = torch.zeros(5)
    part = torch.full((5,), 1.5)
    install(main, [part, part, part], mode="copy", divisor=3.0)
    assert main.tolist() == [1.5] * 5


@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_the_error_of_an_exact_sum_does_not_grow_with_the_number_of_ranks(ranks: int) -> None:
    """What a receiver does with so many parts, in this process; beside it a ring, which rounds to bfloat16 at every hop."""
    torch.manual_seed(ranks)
    parts = [torch.randn(2000).bfloat16() for _ in range(ranks)]
    true = torch.stack([part.double() for part in parts]).sum(0)
    main, ring = torch.empty(2000), parts[0].clone()
    install(main, parts, mode="copy", divisor=None)
    for part in parts[1:]:
        ring += part
    # Sums of numbers of 8 bits within 2**-20 and 2**3 of each other are exact in float64; then rounded once to float32.
    ulp = torch.nextafter(main.abs(), torch.tensor(torch.inf)) - main.abs()
    assert ((main.double() - true).abs() <= 0.5001 * ulp.double()).all()
    # A ring's hops are off by up to 2**-9 of sums of size sqrt(k): errors of random signs, which add up to about 2**-10 sqrt(ranks).
    assert float((ring.double() - true).norm() / true.norm()) > 2**-12 * ranks**0.5


def test_a_sum_is_never_added_to_itself() -> None:
    main = torch.ones(4)
    with pytest.raises(ValueError, match="accepted is 'copy'"):
        install(main, [main], mode="add", divisor=None)
