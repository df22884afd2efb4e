"""Programs that people write: GANs, gradient penalties, checkpointed blocks, plain GradScalers, clipping, one stepper after another."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import everybit as eb
from everybit_torch import AdamW, MixedPrecision, TorchOptimizer
from everybit_torch.checkpoint.sharded import load_sharded, load_sharded_into, save_sharded
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import Strategy
from tests.support.programs import FLAT, Block, data, network, on_a_mesh, on_buffers, weights_of
from tests.support.ranks import run
from tests.support.weights import Weights, equal

# -- two models, one of which stands still ------------------------------------------------------------------------------------------------


def adversaries(strategy: Strategy | None, switching: bool) -> Weights:
    """A generator and a discriminator take turns; strategy None: torch's own optimizers in one process."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3))
    judge = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    steppers: list[Any]
    if strategy is None:
        steppers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, judge)]
    else:
        steppers = [
            FlatStepper(model, eb.sgd(0.1), strategy=strategy, units=[nn.Linear]) for model in (generator, judge)
        ]
    # Both ranks have the same data: means over them are what one process has.
    for step in range(3):
        noise = data(step, 0, 0, torch.float32)[:, :2]
        for turn, (stepper, other) in enumerate([(steppers[1], steppers[0]), (steppers[0], steppers[1])]):
            judge.requires_grad_(turn == 0 or not switching)
            stepper.zero_grad()
            context = contextlib.nullcontext() if strategy is None else stepper.microbatch(last=True)
            with context:
                made = generator(noise)
                if turn == 0:
                    (judge(made.detach()).square().mean() - judge(noise @ torch.ones(2, 3)).mean()).backward()
                else:
                    judge(made).square().mean().backward()
            stepper.step()
            other.zero_grad()
    judge.requires_grad_(True)
    if strategy is None:
        named = [*generator.named_parameters("generator"), *judge.named_parameters("judge")]
        return {name: p.detach().clone() for name, p in named}
    own = [weights_of(stepper) for stepper in steppers]
    return {
        f"{name}.{key}": value
        for name, one in zip(("generator", "judge"), own, strict=True)
        for key, value in one.items()
    }


@pytest.mark.parametrize("switching", [True, False])
@pytest.mark.parametrize("strategy", FLAT)
def test_two_steppers_take_turns(strategy: Strategy, switching: bool) -> None:
    """``judge.requires_grad_(False)`` while the generator is trained, or not; then its own gradients of that pass are forgotten."""
    expected = adversaries(None, switching)
    for weights in run(2, adversaries, strategy, switching):
        for name, value in expected.items():
            # Three steps of 0.1 times gradients below 4, each a sum of at most 24 products that is rounded at most as often.
            torch.testing.assert_close(weights[name], value, rtol=0, atol=3 * 0.1 * 4 * 24 * 2**-24)


# -- gradients of gradients, and of inputs ------------------------------------------------------------------------------------------------


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """The loss of a discriminator with a gradient penalty (Gulrajani et al. 2017, https://arxiv.org/abs/1704.00028, equation 3)."""
    x = x.detach().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss: Tensor = out.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
    return loss


def penalized(strategy: Strategy, context: str) -> Weights:
    model = network()
    stepper = FlatStepper(model, eb.sgd(0.01), strategy=strategy, units=[Block])
    for step in range(2):
        for number in range(2):
            x = data(step, dist.get_rank(), number, torch.float32)
            within: Any = stepper.microbatch(last=number == 1)
            if context == "sync":
                within = stepper.sync() if number else stepper.no_sync()
            with within:
                penalty(model, x).backward()  # type: ignore[no-untyped-call]
        stepper.step()
    return weights_of(stepper)


@pytest.mark.parametrize("strategy", FLAT)
def test_a_gradient_penalty(strategy: Strategy) -> None:
    model = network()
    for step in range(2):
        model.zero_grad()
        for rank in range(2):
            for number in range(2):
                (penalty(model, data(step, rank, number, torch.float32)) / 2).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(0.01 * p.grad)
    for context in ("microbatch", "sync"):
        for weights in run(2, penalized, strategy, context):
            for name, p in model.named_parameters():
                # Gradients below 32, sums over some 64 products and 4 losses in other orders, times 0.01, twice.
                torch.testing.assert_close(weights[name], p.detach(), rtol=0, atol=2 * 0.01 * 32 * 256 * 2**-24)


def against_an_adversary(strategy: Strategy) -> Weights:
    """The gradient of the input first, by ``torch.autograd.grad``, then the pass that trains; with and without a graph kept for it."""
    model = network()
    stepper = FlatStepper(model, eb.sgd(0.1), strategy=strategy, units=[Block])
    for step in range(2):
        with stepper.microbatch(last=True):
            x = data(step, dist.get_rank(), 0, torch.float32).requires_grad_()
            loss = model(x).square().mean()
            (direction,) = torch.autograd.grad(loss, x, retain_graph=step == 1)
            (model((x + 0.1 * direction.sign()).detach()).square().mean() if step == 0 else loss).backward()
        stepper.step()
    return weights_of(stepper)


def test_gradients_of_the_input_are_no_backward_pass() -> None:
    expected = run(2, against_an_adversary, "no_shard")[0]
    for strategy in ("optim", "optim_grads"):
        for weights in run(2, against_an_adversary, strategy):
            assert equal(weights, expected), strategy


# -- checkpointed blocks ------------------------------------------------------------------------------------------------------------------


class Reentrant(nn.Module):
    """A network whose blocks are checkpointed, one by one or as a pair, with torch's older implementation."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        self.inside, self.together = network(), together

    def forward(self, x: Tensor, recompute: bool) -> Tensor:
        one, two = self.inside.blocks
        x = self.inside.entry(x)
        if not recompute:
            x = two(one(x))
        elif self.together:
            x = checkpoint(lambda x: two(one(x)), x, use_reentrant=True)
        else:
            x = checkpoint(two, checkpoint(one, x, use_reentrant=True), use_reentrant=True)
        out: Tensor = self.inside.exit(x) * self.inside.scale
        return out


def reentrant(strategy: Strategy, recompute: bool, together: bool) -> Weights:
    model = Reentrant(together)
    stepper = FlatStepper(model, eb.adamw(1e-2), strategy=strategy, units=[Block])
    for step in range(2):
        for number in range(2):
            with stepper.microbatch(last=number == 1):
                x = data(step, dist.get_rank(), number, torch.float32)
                model(x, recompute).square().mean().backward()
        stepper.step()
    return weights_of(stepper)


@pytest.mark.parametrize("strategy", FLAT)
def test_reentrant_checkpoints_around_units(strategy: Strategy) -> None:
    expected = run(2, reentrant, strategy, False, False)[0]
    for together in (False, True):
        for weights in run(2, reentrant, strategy, True, together):
            assert equal(weights, expected)


# -- infinities and norms of all ranks ----------------------------------------------------------------------------------------------------


def plainly_scaled(
    strategy: Strategy, plain: bool, unscale: bool, tiny: bool, mesh: Any = None
) -> tuple[Weights, list[float]]:
    """torch's own GradScaler; ``plain`` False: without any, and without the step that it leaves out."""
    model: nn.Module = nn.Linear(3, 1, bias=False) if tiny else network()
    if tiny:
        nn.init.ones_(model.weight)  # type: ignore[arg-type]
    stepper = FlatStepper(model, eb.sgd(1e-2), strategy=strategy, units=[Block] if not tiny else None, mesh=mesh)
    optimizer, scaler = stepper.as_optimizer(), torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    scales = []
    for step in range(4):
        if step == 2 and not plain:
            continue
        optimizer.zero_grad()
        with stepper.microbatch(last=True):
            x = data(step, dist.get_rank(), 0, torch.float32)
            if step == 2 and dist.get_rank() == 1:
                x[0, 0] = torch.inf  # one element of one gradient, which one rank has after the sum
            loss = model(x).mean() if tiny else model(x).square().mean()
            (scaler.scale(loss) if plain else loss).backward()
        if not plain:
            stepper.step()
            continue
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(float(scaler.get_scale()))
    return weights_of(stepper), scales


@pytest.mark.parametrize("strategy", FLAT)
def test_torchs_grad_scaler_skips_on_all_ranks_or_on_none(strategy: Strategy) -> None:
    for tiny, size in ((False, 2), (True, 4)):  # the tiny model has no element for one of four ranks
        expected = run(size, plainly_scaled, strategy, False, False, tiny)[0][0]
        for unscale in (False, True):
            for weights, scales in run(size, plainly_scaled, strategy, True, unscale, tiny, timeout=20):
                assert scales == [256.0, 256.0, 128.0, 128.0]
                assert equal(weights, expected)


def test_torchs_grad_scaler_on_a_mesh() -> None:
    expected = run(4, on_a_mesh, meshed, 2, 2, False)[0][0]
    for weights, scales in run(4, on_a_mesh, meshed, 2, 2, True, timeout=20):
        assert scales == [256.0, 256.0, 128.0, 128.0]
        assert equal(weights, expected)


def meshed(plain: bool, mesh: Any) -> tuple[Weights, list[float]]:
    return plainly_scaled("optim_grads", plain, False, True, mesh)


def clipped(strategy: Strategy, order: float, foreach: bool | None, tiny: bool) -> tuple[float, float, list[float]]:
    model: nn.Module = nn.Linear(2, 1, bias=False) if tiny else network()
    if tiny:
        nn.init.ones_(model.weight)  # type: ignore[arg-type]
    stepper = FlatStepper(model, eb.sgd(1.0), strategy=strategy, units=None if tiny else [Block])
    before = weights_of(stepper)
    with stepper.microbatch(last=True):
        x = data(0, dist.get_rank(), 0, torch.float32)
        (model(x[:, :2]) if tiny else model(x)).square().mean().backward()
    parameters = [p for group in stepper.as_optimizer().param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1e-3, norm_type=order, foreach=foreach)
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters], norm_type=order)
    stepper.step()
    moved = [(before[name] - value).reshape(-1) for name, value in weights_of(stepper).items()]
    return float(norm), float(total), torch.cat(moved).tolist()


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("strategy", FLAT)
@pytest.mark.sampled(3)
def test_clip_grad_norm_measures_all_ranks(strategy: Strategy, order: float) -> None:
    """It saw each rank's own parts, and scaled each rank's otherwise."""
    for tiny, size in ((False, 2), (True, 3)):
        model: nn.Module = nn.Linear(2, 1, bias=False) if tiny else network()
        if tiny:
            nn.init.ones_(model.weight)  # type: ignore[arg-type]
        model.double()
        for rank in range(size):
            x = data(0, rank, 0, torch.float32).double()
            ((model(x[:, :2]) if tiny else model(x)).square().mean() / size).backward()
        expected = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, norm_type=order))
        moved = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        for foreach in (None, False, True):
            outcomes = run(size, clipped, strategy, order, foreach, tiny, timeout=20)
            assert len({norm for norm, _, _ in outcomes}) == 1
            for norm, total, steps in outcomes:
                # float32 gradients of 64 products each, and at most 195 of them added up.
                assert norm == pytest.approx(expected, rel=2**-16)
                assert total == pytest.approx(1e-3, rel=2**-10)  # torch divides by the norm plus 1e-6
                # Steps of at most 1e-3 away from weights below 2, rounded at 2**-24 of those.
                torch.testing.assert_close(torch.tensor(steps).double(), moved, rtol=2**-14, atol=2**-22)


def mixed_with_others(foreach: bool) -> list[str]:
    """What is said of norms that would be about this rank's parts alone, or count a whole gradient once for every rank."""
    model, other = network(), network(seed=1)
    steppers = [FlatStepper(one, eb.sgd(1.0), units=[Block]) for one in (model, other)]
    gradients = []
    for one, stepper in zip((model, other), steppers, strict=True):
        with stepper.microbatch(last=True):
            one(data(0, dist.get_rank(), 0, torch.float32)).square().mean().backward()
        gradients.append([p.grad for group in stepper.as_optimizer().param_groups for p in group["params"]])
    said = []
    for given, order in (
        ([*gradients[0], torch.ones(3)], 2.0),
        ([torch.ones(3), *gradients[0]], 2.0),
        ([*gradients[0], *gradients[1]], 2.0),
        (gradients[0], 0.0),
        (gradients[0], -float("inf")),
    ):
        try:
            said.append(f"nothing, and {torch.nn.utils.get_total_norm(given, order, foreach=foreach)}")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("foreach", [True, False])
def test_norms_that_cannot_be_added_up_over_ranks_are_refused(foreach: bool) -> None:
    for said in run(2, mixed_with_others, foreach, timeout=20):
        assert all("accepted are the gradients of one as_optimizer() in one norm" in one for one in said[:3]), said
        assert all("norm_type: got" in one and "accepted are orders above zero" in one for one in said[3:]), said


def test_parts_of_gradients_are_tensors_like_others() -> None:
    model = network()
    stepper = FlatStepper(model, eb.sgd(0.1))
    with stepper.microbatch(last=True):
        model(data(0, 0, 0, torch.float32)).square().mean().backward()
    for p in stepper.as_optimizer().param_groups[0]["params"]:
        twice = p.grad * 2
        assert type(twice) is Tensor
        p.grad.mul_(2)
        assert torch.equal(p.grad, twice)
        assert float(p.grad.norm()) == float(torch.linalg.vector_norm(twice))
        torch.nn.utils.clip_grad_value_([p], 0.1)
        assert float(p.grad.abs().max()) <= float(torch.tensor(0.1))
    assert not stepper.step().skipped


# -- what as_optimizer() would do to one rank alone ---------------------------------------------------------------------------------------


ABSENT = {
    "full_state_dict": "save_sharded",
    "torch_state_dict": "save_sharded",
    "export_fp32": "save_sharded",
    "eval_params": r"stepper\.loaded\(\)",
    "load_full_state_dict": "load_sharded",
    "load_torch_state_dict": "load_sharded",
    "import_fp32": r"stepper\.loaded\(\)",
}


@pytest.mark.parametrize("name", ABSENT)
def test_what_would_be_about_one_rank_alone_is_refused(name: str) -> None:
    """``import_fp32`` and the loaders left ranks with different weights, without a word."""
    optimizer = FlatStepper(network(), eb.adamw(1e-2)).as_optimizer()
    given: tuple[Any, ...] = () if not name.startswith(("load", "import")) else ({},)
    with pytest.raises(RuntimeError, match=rf"^{name}: as_optimizer\(\) holds this rank's parts.*{ABSENT[name]}"):
        getattr(optimizer, name)(*given)


REFUSED: dict[str, tuple[Callable[[torch.optim.Optimizer], Any], str]] = {
    "state_dict": (lambda o: o.state_dict(), "save_sharded"),
    "load_state_dict": (lambda o: o.load_state_dict({}), "load_sharded"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torchs_optimizers_have_and_one_rank_cannot_do_is_refused(name: str) -> None:
    stepper = FlatStepper(network(), eb.adamw(1e-2))
    call, instead = REFUSED[name]
    with pytest.raises(
        RuntimeError, match=rf"^{name}: as_optimizer\(\) holds this rank's parts of the parameters.*{instead}"
    ):
        call(stepper.as_optimizer())


def test_a_policy_for_parameters_that_are_laid_out_is_refused() -> None:
    model = network()
    stepper = FlatStepper(model, eb.adamw(1e-2))
    stepper.as_optimizer().param_groups[0]["policy"] = eb.Policy(momentum=eb.Stochastic("bfloat16"))
    with stepper.microbatch(last=True):
        model(data(0, 0, 0, torch.float32)).square().mean().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"^param_groups\[0\]\['policy'\]: got "):
        stepper.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_the_optimizer_of_a_stepper_is_not_copied(copied: Callable[[Any], Any]) -> None:
    stepper = FlatStepper(network(), eb.adamw(1e-2))
    with pytest.raises(TypeError, match=r"as_optimizer\(\): cannot be copied or pickled.*save_sharded"):
        copied(stepper.as_optimizer())


# -- one wire for a cycle -----------------------------------------------------------------------------------------------------------------


def left_early(strategy: Strategy, early: bool) -> tuple[list[str], Weights]:
    model = network()
    stepper = FlatStepper(
        model, eb.sgd(0.1), policy=eb.Policy(grads=eb.Grads(main="float32")), strategy=strategy, units=[Block]
    )
    wires = []

    def note() -> None:
        wires.append(str(on_buffers(stepper).buffers[0].grads.inner.dtype))

    x = data(0, dist.get_rank(), 0, torch.float32)
    context = stepper.grad_comm("bfloat16")
    with context:
        model(x).square().mean().backward()
        if not early:
            stepper.step()
    note()
    if early:
        stepper.step()
    note()
    return wires, weights_of(stepper)


@pytest.mark.parametrize("strategy", FLAT)
def test_gradients_travel_as_was_said_when_they_came(strategy: Strategy) -> None:
    """Where a step sums, leaving ``grad_comm`` before it made the context do nothing."""
    (within, expected), _ = run(2, left_early, strategy, False)
    assert within == ["torch.float32", "torch.float32"]
    for wires, weights in run(2, left_early, strategy, True):
        assert wires == ["torch.bfloat16", "torch.float32"]
        assert equal(weights, expected)


# -- what is refused when it is made ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [eb.Policy(grads=eb.Grads(main="float64")), MixedPrecision(main_grads="float64")])
def test_gradients_wider_than_the_step_are_refused_at_once(policy: Any) -> None:
    """They were accumulated for a cycle, and refused in the step."""
    message = r"Grads\.main: got 'float64' with Policy\.compute='float32'"
    with pytest.raises(ValueError, match=message):
        FlatStepper(network(), eb.adamw(1e-3), policy=policy)
    if isinstance(policy, eb.Policy):
        with pytest.raises(ValueError, match=message):
            TorchOptimizer(network().parameters(), eb.adamw, lr=1e-3, policy=policy)


def test_processes_of_torchrun_without_a_group_are_told_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trained a model of its own, and all saved to one place."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match=r"(?s)one of 2 processes \(RANK=1 .*dist\.init_process_group\(\)"):
        FlatStepper(network(), eb.sgd(0.1))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert FlatStepper(network(), eb.sgd(0.1)).inner.size == 1


# -- one after another --------------------------------------------------------------------------------------------------------------------


def many(path: Path) -> tuple[int, int]:
    """Threads of this process after the second stepper, and after twenty-five."""
    counts = []
    for number in range(25):
        model = network()
        stepper = FlatStepper(model, eb.sgd(0.1), strategy="optim_grads", units=[Block])
        with stepper.microbatch(last=True):
            model(data(0, 0, 0, torch.float32)).sum().backward()
        stepper.step()
        if number in (0, 24):
            save_sharded(stepper, path)
        stepper.close()
        counts.append(len(os.listdir("/proc/self/task")))
    return counts[1], counts[-1]


def test_steppers_that_were_closed_leave_no_threads(tmp_path: Path) -> None:
    for first, last in run(2, many, tmp_path):
        assert first == last


def many_that_nobody_has(keep: bool) -> tuple[int, int, list[Weights]]:
    """As :func:`many`, without ``close()``; with ``keep`` each rank has two of the steppers for longer, not the same ones."""
    counts: list[int] = []
    kept: list[FlatStepper] = []
    weights: list[Weights] = []
    for number in range(16):
        model = network()
        stepper = FlatStepper(model, eb.sgd(0.1), strategy="optim_grads", units=[Block])
        with stepper.microbatch(last=True):
            model(data(number, 0, 0, torch.float32)).square().mean().backward()
        stepper.step()
        weights.append(weights_of(stepper))
        if keep and number % 2 == dist.get_rank():
            kept = [*kept[-1:], stepper]
        del model, stepper
        gc.collect()
        counts.append(len(os.listdir("/proc/self/task")))
    return counts[7], counts[-1], weights


@pytest.mark.parametrize("keep", [False, True])
def test_steppers_that_nobody_has_leave_no_threads(keep: bool) -> None:
    """Also where ranks lose them at different times: a group is used again when it is free on all of them."""
    outcomes = run(2, many_that_nobody_has, keep, timeout=20)
    for first, last, weights in outcomes:
        assert first == last
        assert all(equal(one, two) for one, two in zip(weights, outcomes[0][2], strict=True))


# -- one numbering of elements ------------------------------------------------------------------------------------------------------------


def half_frozen(dtype: torch.dtype, seed: int = 0) -> Any:
    model = network(dtype, seed)
    model.entry.requires_grad_(False)
    model.blocks[0].inner.requires_grad_(False)
    return model


def trained(path: Path, name: str, steps: range, load: bool) -> Weights:
    model = half_frozen(torch.bfloat16, seed=int(load))
    stepper = FlatStepper(model, eb.adamw(1e-2), policy=eb.policies.PRESETS[name], strategy="optim", units=[Block])
    if load:
        load_sharded(stepper, path)
    for step in steps:
        with stepper.microbatch(last=True):
            model(data(step, 0, 0, torch.bfloat16)).float().square().mean().backward()
        stepper.step()
    if not load:
        save_sharded(stepper, path)
    return weights_of(stepper)


@pytest.mark.parametrize("given", ["trainable", "all", "two groups", "stepped before"])
@pytest.mark.parametrize("name", ["LEAN_BF16", "FLOOR_BF16"])
def test_elements_have_one_number_in_both_front_ends(tmp_path: Path, name: str, given: str) -> None:
    """By it they draw the bits of stochastic rounding. The torch optimizer numbered what it was given."""
    (_,) = run(1, trained, tmp_path, name, range(3), False)
    (expected,) = run(1, trained, tmp_path, name, range(3, 6), True)
    model = half_frozen(torch.bfloat16, seed=2)
    parameters = list(model.parameters())
    chosen: Any = {
        "trainable": [p for p in parameters if p.requires_grad],
        "all": parameters,
        "two groups": [
            {"params": [p for p in parameters if p.requires_grad and p.ndim > 1]},
            {"params": [p for p in parameters if p.requires_grad and p.ndim <= 1]},
        ],
        "stepped before": [p for p in parameters if p.requires_grad],
    }[given]
    optimizer = AdamW(chosen, lr=1e-2, policy=eb.policies.PRESETS[name])

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(data(number, 0, 0, torch.bfloat16)).float().square().mean().backward()
        optimizer.step()

    if given == "stepped before":
        step(0)
    load_sharded_into(model, optimizer, tmp_path)
    for number in range(3, 6):
        step(number)
    assert equal({key: p.detach() for key, p in model.named_parameters()}, expected)


def test_a_load_that_is_refused_leaves_the_numbers(tmp_path: Path) -> None:
    """Else the next steps would draw other bits than without it."""
    run(1, trained, tmp_path, "LEAN_BF16", range(1), False)

    def stepped(load: bool) -> Weights:
        model = half_frozen(torch.bfloat16)
        optimizer = AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, policy=eb.policies.FLOOR_BF16)
        for number in range(3):
            if load:
                with pytest.raises(ValueError, match="policy"):
                    load_sharded_into(model, optimizer, tmp_path)
            optimizer.zero_grad()
            model(data(number, 0, 0, torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
        return {name: p.detach() for name, p in model.named_parameters()}

    assert equal(stepped(True), stepped(False))
