"""What a step reads back from the device, for which the host waits: nothing, unless a setting asks for it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import everybit as eb
from everybit_torch import AdamW, TorchOptimizer
from everybit_torch.collectives.reduction import CHUNK
from everybit_torch.flat.norm_partials import Squares
from everybit_torch.sharded.reports import NanCheck
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import Strategy
from tests.support.programs import FLAT, Block, data, network, on_a_mesh
from tests.support.ranks import run
from tests.support.readbacks import ReadBackError, Readbacks

CLIPPED = eb.chain(eb.clip_by_global_norm(0.5), eb.adamw(1e-2))
# The transform, whether the model is in bfloat16, and options.
STEPPED: list[tuple[eb.Transform[Any], bool, dict[str, Any]]] = [
    (eb.adamw(1e-2), False, {}),
    (CLIPPED, False, {}),
    (CLIPPED, True, {"policy": eb.policies.LEAN_BF16}),
    (eb.apply_if_finite(CLIPPED), False, {}),
    (eb.adamw(eb.linear_schedule(1e-2, 1e-3, 10)), False, {}),
]


def backward(model: nn.Module, stepper: FlatStepper, step: int, rank: int, passes: int = 2) -> None:
    dtype = next(model.parameters()).dtype
    for number in range(passes):
        with stepper.microbatch(last=number == passes - 1):
            model(data(step, rank, number, dtype)).float().square().mean().backward()


def stepped_without_reading(strategies: tuple[Strategy, ...] = FLAT, mesh: Any = None) -> list[str]:
    """What was read back in three steps of each kind, and norms that are no 0-d float64 tensors."""
    said = []
    for strategy, (number, (transform, low, options)) in itertools.product(strategies, enumerate(STEPPED)):
        model = network(torch.bfloat16 if low else torch.float32)
        stepper = FlatStepper(model, transform, strategy=strategy, units=[Block], mesh=mesh, **options)
        readbacks = Readbacks()
        for step in range(3):
            backward(model, stepper, step, dist.get_rank())
            try:
                with readbacks.watching():
                    report = stepper.step(loss_scale=2.0)
            except ReadBackError as error:
                said.append(f"{strategy}, {number}, step {step}: {error}")
                break
            if not (report.grad_norm.shape == () and report.grad_norm.dtype is torch.float64 and report.grad_norm > 0):
                said.append(f"{strategy}, {number}: {report.grad_norm}")
            if report.untouched or report.skipped:
                said.append(f"{strategy}, {number}: {report}")
        if readbacks.read:
            said.append(f"{strategy}, {number}: read {readbacks.read} times")
        stepper.close()
    return said


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.sampled(2)
def test_a_step_reads_nothing_back_from_the_device(size: int) -> None:
    assert run(size, stepped_without_reading) == [[]] * size


@pytest.mark.slow
def test_a_step_on_a_mesh_of_two_dimensions_reads_nothing_back() -> None:
    strategies: tuple[Strategy, ...] = ("optim", "optim_grads")
    assert run(4, on_a_mesh, on_mesh, 2, 2, strategies) == [[]] * 4


def on_mesh(strategies: tuple[Strategy, ...], mesh: Any) -> list[str]:
    return stepped_without_reading(strategies, mesh)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("clipped", [False, True])
def test_a_step_of_the_torch_optimizer_reads_nothing_back(clipped: bool, low: bool) -> None:
    model = network(torch.bfloat16 if low else torch.float32)
    policy = eb.policies.LEAN_BF16 if low else None
    if clipped:
        optimizer = TorchOptimizer(model.parameters(), lambda: CLIPPED, policy=policy, compile=False)
    else:
        optimizer = AdamW(model.parameters(), 1e-2, policy=policy, compile=False)
    readbacks = Readbacks()
    for step in range(3):
        optimizer.zero_grad()
        model(data(step, 0, 0, torch.bfloat16 if low else torch.float32)).float().square().mean().backward()
        with readbacks.watching():
            optimizer.step()
    assert readbacks.read == 0


@pytest.mark.slow
def test_a_compiled_step_reads_nothing_back() -> None:
    """Compiled code is called without Dynamo from its second call on, so that a mode sees what it asks for."""
    torch._dynamo.reset()  # what it remembers of other tests' lengths may make code for one length
    model = network(torch.bfloat16)
    policy = replace(eb.policies.EXACT_BF16, grads=eb.Grads(main="float32"))
    stepper = FlatStepper(model, eb.adamw(1e-2, b2=0.95), policy=policy, units=[Block], compile=True)
    readbacks = Readbacks()
    for step in range(4):
        with stepper.microbatch(last=True):
            model(data(step, 0, 0, torch.bfloat16)).float().square().mean().backward()
        if step < 2:
            stepper.step()
            continue
        with readbacks.watching():
            stepper.step()
    assert readbacks.read == 0
    stepper.close()


# -- who reads -----------------------------------------------------------------------------------------------------------------------------


def waits(strategy: Strategy) -> list[tuple[bool, int]]:
    """Whether a step waits, and how many parameters nobody had a gradient of: by setting, and by which ranks have a loss."""
    found = []
    cases: list[tuple[NanCheck, tuple[int, ...]]] = [
        ("off", (0, 1)), ("step", (0, 1)), ("param", (0, 1)), ("off", (1,)), ("off", ()), ("off", (0, 1)),
    ]  # fmt: skip
    for nan, having in cases:
        model = network()
        stepper = FlatStepper(model, eb.adamw(1e-2), strategy=strategy, units=[Block], nan=nan)
        with stepper.microbatch(last=True):
            if dist.get_rank() in having:
                model(data(0, 0, 0, torch.float32)).square().mean().backward()
        readbacks = Readbacks(refuse=False)
        with readbacks.watching():
            report = stepper.step()
        found.append((readbacks.waited > 0, len(report.untouched)))
        stepper.close()
    return found


@pytest.mark.parametrize("strategy", FLAT)
def test_a_check_for_nan_makes_a_rank_wait_and_parameters_without_a_gradient_do_not(strategy: Strategy) -> None:
    every = len(list(network().parameters()))
    by_setting = [(False, 0), (True, 0), (True, 0)]
    first, second = run(2, waits, strategy)
    assert first == second == [*by_setting, (False, 0), (False, every), (False, 0)]


# -- the norm ------------------------------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Its gradients are random numbers times what it is called with; the first parameter is longer than a piece."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(size, dtype=dtype) for size in (CHUNK + 5, 3, 1))

    def gradient(self, rank: int, scale: float) -> list[Tensor]:
        """A rank's, exactly."""
        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(p.shape, generator=generator).to(p.dtype) * scale for p in self.parts]

    def forward(self, rank: int, scale: float) -> Tensor:
        return sum(
            ((p * g).sum() for p, g in zip(self.parts, self.gradient(rank, scale), strict=True)), torch.zeros(())
        )


SCALES = [
    1.0,
    2.0**100,
    2.0**-100,
    2.0**60,
    2.0**-40,
]  # of which the second's and the third's squares are no float32 numbers


def norms(dtype: torch.dtype) -> list[tuple[Strategy, float, float, float]]:
    found = []
    for strategy in FLAT:
        model = Scaled(dtype)
        policy = None if dtype is not torch.bfloat16 else eb.policies.LEAN_BF16
        stepper = FlatStepper(model, eb.sgd(0.0), policy=policy, strategy=strategy, divisor=1.0)
        for scale in SCALES:
            with stepper.microbatch(last=True):
                # Only one rank's is not zero, so that sums over the ranks are exact.
                model(0, scale if dist.get_rank() == 0 else 0.0).backward()
            report = stepper.step()
            whole = torch.cat(model.gradient(0, scale)).double()
            found.append((strategy, scale, float(report.grad_norm), float(whole.norm())))
        stepper.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_the_norm_is_the_float64_norm_of_the_whole_gradient(size: int, dtype: torch.dtype) -> None:
    """Also where squares of elements are beyond float32's range."""
    for found in run(size, norms, dtype):
        for strategy, scale, norm, expected in found:
            # A sum of n float64 numbers above zero is off by n * 2**-53, relatively, at most, in whatever order; so is the reference's.
            assert norm == pytest.approx(expected, rel=2 * (CHUNK + 9) * 2.0**-53), (strategy, scale)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20),
            st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.float16]),
        ),
        max_size=4,
    )
)
def test_a_sum_of_squares_is_that_of_float64(values: list[tuple[list[float], torch.dtype]]) -> None:
    gradients = [torch.tensor(numbers, dtype=dtype) for numbers, dtype in values]
    found = float(Squares(torch.device("cpu"), compile=False)(gradients))
    exact = [x * x for gradient in gradients for x in gradient.double().tolist()]
    if all(map(math.isfinite, exact)):
        # Squares are rounded once, and each addition once; squares below float64's normal range are off by its smallest number.
        assert found == pytest.approx(math.fsum(exact), rel=100 * 2.0**-53, abs=100 * 5e-324)
    else:
        assert found == math.inf


@pytest.mark.parametrize("compile", [False, True])
def test_a_sum_of_squares_of_something_that_is_not_finite_is_not_finite(compile: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        gradients = [torch.ones(3, dtype=dtype), torch.tensor([1.0, torch.inf, 2.0], dtype=dtype)]
        gradients.append(torch.tensor([torch.nan], dtype=dtype))
        finite, infinite, nan = (Squares(torch.device("cpu"), compile=compile)([x]) for x in gradients)
        assert finite == 3
        assert infinite == math.inf
        assert nan.isnan()
        assert Squares(torch.device("cpu"), compile=compile)([torch.ones(0)]) == 0
