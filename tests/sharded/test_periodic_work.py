"""Periodic work on shards: done at the steps at which it is due, on all ranks; with reductions in it all ranks take part in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import everybit as eb
from everybit_torch import TorchOptimizer
from everybit_torch.checkpoint.sharded import load_sharded, load_sharded_into, save_sharded
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import Strategy
from tests.support.exact_models import whole_of
from tests.support.programs import FLAT
from tests.support.ranks import run
from tests.support.readbacks import Readbacks
from tests.support.transforms import WORK, counted, counted_and_clipped, old_norm

SIZES = (9, 5, 14)
PERIOD, STEPS = 3, 10
DUE = [1, 4, 7, 10]


class Part(nn.Module):
    """One parameter, whose gradient is what the model is called with."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, size))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.weight * x[: self.weight.numel()]).sum()
        return out


class Model(nn.Module):
    """Parameters that lie on different ranks, some of them on both."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(size) for size in SIZES)

    def forward(self, step: int, rank: int, absent: tuple[int, ...] = ()) -> Tensor:
        total = torch.zeros(())
        for number, part in enumerate(self.parts):
            if number not in absent:
                total = total + part(given(step, rank, number))
        return total


def given(step: int, rank: int, number: int) -> Tensor:
    """Quarters, exact in every order of addition."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    return torch.randint(-8, 9, (max(SIZES),), generator=generator).float() / 4


def a_step(model: Model, stepper: FlatStepper, step: int, absent: tuple[int, ...] = ()) -> None:
    with stepper.microbatch(last=True):
        model(step, dist.get_rank(), absent).backward()
    stepper.step()


def weights_of(stepper: FlatStepper) -> list[list[float]]:
    return [whole_of(p).tolist() for p in stepper.model.parameters()]


def made(transform: eb.Transform[Any], strategy: Strategy, **options: Any) -> tuple[Model, FlatStepper]:
    model = Model()
    return model, FlatStepper(model, transform, strategy=strategy, units=[Part], divisor=1.0, **options)


# -- when work is done -----------------------------------------------------------------------------------------------------------


def worked(folder: str) -> dict[tuple[str, str], list[int]]:
    """At which steps work was done, by strategy and transform; after a resume at step 6 too. After the first step nothing is read."""
    found: dict[tuple[str, str], list[int]] = {}
    for strategy in FLAT:
        for transform in (counted, counted_and_clipped):
            model, stepper = made(transform(0.1), strategy)
            readbacks, waited = Readbacks(refuse=False), [0]
            done = []
            for step in range(1, STEPS + 1):
                WORK.clear()
                with stepper.microbatch(last=True):
                    model(step, dist.get_rank()).backward()
                with readbacks.watching():
                    stepper.step()
                waited.append(readbacks.waited)
                if WORK:
                    done.append(step)
                if step == 5:
                    save_sharded(stepper, f"{folder}/{strategy}/{transform.__name__}")
            # The first step reads the counts that it begins with.
            assert len(set(waited[1:])) == 1
            found[strategy, transform.__name__] = done
            expected = weights_of(stepper)
            stepper.close()
            model, stepper = made(transform(0.1), strategy)
            a_step(model, stepper, 1)
            a_step(model, stepper, 2)
            load_sharded(stepper, f"{folder}/{strategy}/{transform.__name__}")
            done = []
            for step in range(6, STEPS + 1):
                WORK.clear()
                a_step(model, stepper, step)
                if WORK:
                    done.append(step)
            found[strategy, f"{transform.__name__}, resumed"] = done
            assert weights_of(stepper) == expected
            stepper.close()
    return found


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.sampled(2)
def test_work_is_done_at_the_steps_at_which_it_is_due_and_after_a_resume(size: int, tmp_path: Path) -> None:
    for found in run(size, worked, str(tmp_path)):
        assert found == {
            (strategy, f"{name}{resumed}"): [step for step in DUE if not resumed or step > 5]
            for strategy in FLAT
            for name in ("counted", "counted_and_clipped")
            for resumed in ("", ", resumed")
        }


def with_parameters_without_gradients() -> list[dict[int, int]]:
    """For each rank how many elements were worked on, by step, where parameters count for themselves; reductions are around the work."""
    found = []
    for transform in (counted, counted_and_clipped):
        model, stepper = made(transform(0.1), "optim_grads")
        done: dict[int, int] = {}
        for step in range(1, STEPS + 1):
            WORK.clear()
            a_step(model, stepper, step, (1,) if step == 2 else ())
            done[step] = sum(WORK)
        found.append({step: numel for step, numel in done.items() if numel})
        stepper.close()
    return found


def test_each_parameter_is_worked_on_at_its_own_updates_on_all_ranks() -> None:
    """The second has no gradient at step 2."""
    ranks = run(2, with_parameters_without_gradients)
    others = SIZES[0] + SIZES[2]
    for one in zip(*ranks, strict=True):
        total = {step: sum(done.get(step, 0) for done in one) for step in range(1, STEPS + 1)}
        # A transform that reduces is also run on no elements, which adds nothing; and in both phases if its work is before a reduction.
        phases = total[1] // sum(SIZES)
        assert phases in (1, 2)
        expected = {1: sum(SIZES), 4: others, 5: SIZES[1], 7: others, 8: SIZES[1], 10: others}
        assert {step: numel // phases for step, numel in total.items() if numel} == expected


# -- reductions in the work ------------------------------------------------------------------------------------------------------

ABSENT: dict[int, tuple[int, ...]] = {2: (1,), 3: (1,), 4: (0,), 8: (0, 2)}


def reference(ranks: int, absent: dict[int, tuple[int, ...]], steps: int) -> list[Tensor]:
    """In float64: each parameter is divided by the norm of all gradients at its own last update at which that was asked for."""
    weights = [torch.linspace(-1, 1, size).double() for size in SIZES]
    norms, counts = [0.0] * len(SIZES), [0] * len(SIZES)
    for step in range(1, steps + 1):
        grads = {
            number: torch.stack([given(step, rank, number)[: SIZES[number]] for rank in range(ranks)]).double().sum(0)
            for number in range(len(SIZES))
            if number not in absent.get(step, ())
        }
        norm = sum(float(g.square().sum()) for g in grads.values()) ** 0.5
        for number in grads:
            if counts[number] % PERIOD == 0:
                norms[number] = norm
            counts[number] += 1
        scaled = {number: g / (norms[number] + 1) for number, g in grads.items()}
        length = sum(float(u.square().sum()) for u in scaled.values()) ** 0.5
        for number, u in scaled.items():
            weights[number] -= 0.1 * min(1.0, 0.5 / length) * u
    return weights


def with_reductions_in_the_work(strategies: tuple[Strategy, ...], compile: bool) -> dict[str, list[list[float]]]:
    found = {}
    for strategy in strategies:
        for name, absent in (("all", {}), ("some", ABSENT)):
            model, stepper = made(old_norm(0.1), strategy, compile=compile)
            for step in range(1, STEPS + 1):
                a_step(model, stepper, step, absent.get(step, ()))
            found[f"{strategy}, {name}"] = weights_of(stepper)
            stepper.close()
    return found


@pytest.mark.parametrize(
    ("size", "compile"), [(1, False), (2, False), pytest.param(2, True, marks=pytest.mark.exhaustive)]
)
def test_reductions_in_the_work_go_over_all_gradients_though_ranks_have_different_counts(
    size: int, compile: bool
) -> None:
    """A parameter that is missing lies on one rank only, so that the other cannot know that counts differ."""
    strategies: tuple[Strategy, ...] = ("optim",) if compile else FLAT
    for found in run(size, with_reductions_in_the_work, strategies, compile):
        assert len(found) == 2 * len(strategies)
        for name, weights in found.items():
            expected = reference(size, ABSENT if name.endswith("some") else {}, STEPS)
            for got, right in zip(weights, expected, strict=True):
                # Ten updates of at most 0.05, each of whose few operations rounds by 2**-24 of it, and weights of at most 1.5 by as much.
                torch.testing.assert_close(torch.tensor(got).double(), right, rtol=0, atol=10 * 6 * 2.0**-24)


def when_alone() -> dict[str, list[int]]:
    """The steps at which work with a reduction in it is done where no other rank takes part in it."""
    found: dict[str, list[int]] = {}
    for strategy in FLAT:
        model, stepper = made(old_norm(0.1), strategy)
        done = []
        for step in range(1, STEPS + 1):
            WORK.clear()
            a_step(model, stepper, step)
            if WORK:
                done.append(step)
        found[strategy] = done
        stepper.close()
    return found


def test_work_with_reductions_is_done_at_every_step_where_other_ranks_take_part_and_else_when_it_is_due() -> None:
    every = list(range(1, STEPS + 1))
    assert run(1, when_alone) == [dict.fromkeys(FLAT, DUE)]
    # Ranks that hold copies reduce nothing over each other.
    assert run(2, when_alone) == [dict.fromkeys(FLAT, every) | {"no_shard": DUE}] * 2


# -- FSDP2 -----------------------------------------------------------------------------------------------------------------------


def by_fsdp2(folder: str) -> list[tuple[list[int], list[list[float]]]]:
    found = []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    transforms: list[Callable[..., Any]] = [counted, counted_and_clipped, old_norm]
    for transform in transforms:
        model = Model()
        for part in model.parts:
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = TorchOptimizer(model.parameters(), transform, lr=0.1, compile=False)
        done = []
        for step in range(1, STEPS + 1):
            WORK.clear()
            optimizer.zero_grad()
            model(step, dist.get_rank()).backward()
            for p in model.parameters():
                assert p.grad is not None
                p.grad.mul_(dist.get_world_size())
            optimizer.step()
            if WORK:
                done.append(step)
        found.append((done, [p.full_tensor().tolist() for p in model.parameters()]))  # type: ignore[attr-defined]
    # A stepper's checkpoint, in the middle of a period.
    other, stepper = made(counted(0.1), "optim")
    for step in range(1, 6):
        a_step(other, stepper, step)
    save_sharded(stepper, folder)
    stepper.close()
    plain = Model()
    optimizer = TorchOptimizer(plain.parameters(), counted, lr=0.1, compile=False)
    load_sharded_into(plain, optimizer, folder)
    done = []
    for step in range(6, STEPS + 1):
        WORK.clear()
        optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            plain(step, rank).backward()
        optimizer.step()
        if WORK:
            done.append(step)
    found.append((done, [p.tolist() for p in plain.parameters()]))
    return found


def test_the_torch_optimizer_on_fsdp2_and_from_a_stepper_s_checkpoint(tmp_path: Path) -> None:
    for (plain, weights), (clipped, _), (reducing, norms), (loaded, resumed) in run(2, by_fsdp2, str(tmp_path)):
        assert plain == clipped == DUE
        assert reducing == list(range(1, STEPS + 1))
        for got, right in zip(norms, reference(2, {}, STEPS), strict=True):
            torch.testing.assert_close(torch.tensor(got).double(), right, rtol=0, atol=10 * 6 * 2.0**-24)
        assert loaded == [7, 10]
        assert resumed == weights
