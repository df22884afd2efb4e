"""Checkpoints of shards: never half, and refused by name where they do not fit.

That any number of ranks goes on from any other is the law of tests/sharded/test_random_programs.py.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import everybit as eb
from everybit.protocol import ALONE
from everybit_torch import AdamW, TorchOptimizer
from everybit_torch.checkpoint import sharded as checkpoint
from everybit_torch.checkpoint.boxes import boxes
from everybit_torch.checkpoint.shard_tensor import ShardTensor
from everybit_torch.checkpoint.sharded import (
    latest_checkpoint,
    load_sharded,
    load_sharded_into,
    save_sharded,
    sharded_state_dict,
)
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import STRATEGIES, Strategy
from tests.support.programs import Block, data, network, weights_of
from tests.support.ranks import attempt, run
from tests.support.weights import Weights, equal

P = TypeVar("P")


def make(strategy: Strategy, name: str, seed: int = 0, lr: float = 1e-2) -> tuple[Any, FlatStepper, torch.dtype]:
    dtype = torch.float32 if name == "FP32" else torch.bfloat16
    model = network(dtype, seed)
    model.register_buffer("seen", torch.full((2,), float(seed)))
    stepper = FlatStepper(model, eb.adamw(lr), policy=eb.policies.PRESETS[name], strategy=strategy, units=[Block])
    return model, stepper, dtype


def steps(model: Any, stepper: FlatStepper, numbers: range, dtype: torch.dtype) -> None:
    """All ranks have the same data and sums are divided by their number, so that one rank and four train alike, bit for bit."""
    for step in numbers:
        with stepper.microbatch(last=True):
            model(data(step, 0, 0, dtype)).float().square().mean().backward()
        stepper.step()


def save_and_go_on(path: Path, strategy: Strategy, name: str, asynchronous: bool = False) -> Weights:
    model, stepper, dtype = make(strategy, name)
    steps(model, stepper, range(3), dtype)
    saving = save_sharded(stepper, path, asynchronous=asynchronous)
    steps(model, stepper, range(3, 6), dtype)
    saving.result(60)
    return weights_of(stepper)


def resume(path: Path, strategy: Strategy, name: str) -> Weights:
    model, stepper, dtype = make(strategy, name, seed=1, lr=0.5)
    load_sharded(stepper, path)
    assert stepper.as_optimizer().param_groups[0]["lr"] == 1e-2
    assert model.seen.tolist() == [0.0, 0.0]
    steps(model, stepper, range(3, 6), dtype)
    return weights_of(stepper)


def test_training_goes_on_while_it_is_written(tmp_path: Path) -> None:
    saved = run(2, save_and_go_on, tmp_path, "optim_grads_params", "LEAN_BF16", True)
    for weights in run(4, resume, tmp_path, "optim", "LEAN_BF16"):
        assert equal(weights, saved[0])


def early(path: Path) -> tuple[Weights, dict[str, int]]:
    model, stepper, dtype = make("optim", "LEAN_BF16")
    save_sharded(stepper, path)
    counts = {k: int(v) for k, v in sharded_state_dict(stepper).items() if k.endswith(".step")}
    steps(model, stepper, range(3, 6), dtype)
    return weights_of(stepper), counts


def test_before_the_first_step_nothing_is_counted(tmp_path: Path) -> None:
    """Elsewhere asking for a state makes one by a step, and the next is then the second."""
    saved = run(2, early, tmp_path)
    assert set(saved[0][1].values()) == {0}
    for weights in run(4, resume, tmp_path, "optim_grads_params", "LEAN_BF16"):
        assert equal(weights, saved[0][0])


# -- what does not fit --------------------------------------------------------------------------------------------------------------


def misfit(path: Path) -> list[str]:
    messages = []
    for name, width in (("KAHAN_BF16", 5), ("FP32", 5), ("LEAN_BF16", 6)):
        from tests.support.programs import Network

        dtype = torch.float32 if name == "FP32" else torch.bfloat16
        model = Network(width).to(dtype)
        model.register_buffer("seen", torch.zeros(2))
        stepper = FlatStepper(model, eb.adamw(1e-2), policy=eb.policies.PRESETS[name], strategy="optim", units=[Block])
        before = weights_of(stepper)
        try:
            load_sharded(stepper, path)
        except ValueError as error:
            messages.append(str(error))
        assert equal(before, weights_of(stepper))
    return messages


def test_another_policy_dtype_or_model_is_refused_by_name(tmp_path: Path) -> None:
    run(2, save_and_go_on, tmp_path, "optim", "LEAN_BF16")
    for policy, dtype, shape in run(2, misfit, tmp_path):
        assert "param.residual is not there" in policy
        assert "is torch.bfloat16 there, and torch.float32 here" in dtype
        assert re.search(r"is of shape \(.*5.*\) there, and \(.*6.*\) here", shape)
        assert "nothing was changed" in policy


def test_a_place_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no whole checkpoint"):
        latest_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        latest_checkpoint(tmp_path / "nowhere")


def kept(path: Path) -> list[list[str]]:
    _, stepper, _ = make("optim", "FP32")
    seen = []
    for keep in ({}, {}, {}, {"keep": 1}, {"keep": 1}, {"keep": None}, {"keep": 0}):
        save_sharded(stepper, path, **keep)
        dist.barrier()
        seen.append(sorted(one.name for one in path.iterdir() if one.is_dir()))
        dist.barrier()
    return seen


def test_old_checkpoints_stay_unless_it_is_said_how_many(tmp_path: Path) -> None:
    for seen in run(2, kept, tmp_path):
        assert seen == [
            ["000001"],
            ["000001", "000002"],
            ["000001", "000002", "000003"],
            ["000003", "000004"],
            ["000004", "000005"],
            ["000004", "000005", "000006"],
            ["000007"],
        ]


# -- ranks that die -----------------------------------------------------------------------------------------------------------------


def killed_while_saving(path: Path, after: float) -> str:
    """Saves once, then again and again until rank 1 is killed in the middle."""
    model, stepper, dtype = make("optim_grads_params", "LEAN_BF16")
    steps(model, stepper, range(3), dtype)
    save_sharded(stepper, path)
    if dist.get_rank() == 1:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, after)
    for _ in range(1000):
        save_sharded(stepper, path)
    return "nobody was killed"


@pytest.mark.parametrize("after", [0.005, 0.03, 0.05, 0.11])
@pytest.mark.sampled(4)
def test_a_rank_killed_while_it_saves_leaves_a_checkpoint_that_loads(tmp_path: Path, after: float) -> None:
    outcomes = attempt(2, killed_while_saving, tmp_path, after, timeout=10)
    assert outcomes[1] == (False, "died")
    saved, message = outcomes[0]
    assert not saved
    assert "rank 0 of 2: " in message
    assert "did not complete: another rank died" in message
    (model, stepper, dtype), expected = make("optim", "LEAN_BF16"), {}
    steps(model, stepper, range(3), dtype)
    expected = weights_of(stepper)
    _, other, _ = make("optim_grads", "LEAN_BF16", seed=1)
    load_sharded(other, tmp_path)
    assert equal(weights_of(other), expected)
    # And the next save to the same place is none the worse for what lies about there.
    save_sharded(other, tmp_path)
    load_sharded(other, tmp_path)


def dies(where: str, strategy: Strategy) -> None:
    model, stepper, dtype = make(strategy, "FP32")
    steps(model, stepper, range(1), dtype)
    if where == "backward" and dist.get_rank() == 1:
        model.blocks[0].inner.register_full_backward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with stepper.microbatch(last=True):
        model(data(1, 0, 0, dtype)).float().square().mean().backward()
    if where == "step" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    stepper.step()


@pytest.mark.parametrize(
    ("where", "strategy"),
    [
        pytest.param(where, strategy, marks=pytest.mark.exhaustive if (number + (where == "step")) % 2 else ())
        for where in ("backward", "step")
        for number, strategy in enumerate(STRATEGIES)
    ],
)
def test_a_rank_that_dies_is_an_error_on_the_others_and_never_a_hang(where: str, strategy: Strategy) -> None:
    start = time.monotonic()
    outcomes = attempt(3, dies, where, strategy, timeout=8, limit=60)
    assert outcomes[1] == (False, "died")
    for rank in (0, 2):
        ok, message = outcomes[rank]
        assert not ok
        assert f"rank {rank} of 3" in message
        assert "another rank died" in message
    assert time.monotonic() - start < 60  # the limit, past which ranks are killed: no measurement


def test_shard_tensors_only_copy() -> None:
    shard = ShardTensor(torch.arange(3.0), (2, 3), boxes((2, 3), 1, 4))
    assert repr(shard) == "ShardTensor((2, 3), torch.float32, 3 elements here)"
    assert torch.equal(shard.clone().local, torch.arange(3.0))  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="nothing is computed with it"):
        torch.add(shard, 1)


# -- what two reviews found -----------------------------------------------------------------------------------------------------------


def other_transform(path: Path) -> list[str]:
    messages = []
    for transform in (eb.lion(1e-2), eb.sgd(1e-2), eb.sgd(1e-2, momentum=0.9)):
        model = network(torch.bfloat16)
        model.register_buffer("seen", torch.zeros(2))
        stepper = FlatStepper(model, transform, policy=eb.policies.LEAN_BF16, strategy="optim", units=[Block])
        try:
            load_sharded(stepper, path)
        except ValueError as error:
            messages.append(str(error))
    smaller = network(torch.bfloat16)
    smaller.register_buffer("seen", torch.zeros(2))
    del smaller.blocks[1]
    stepper = FlatStepper(smaller, eb.adamw(1e-2), policy=eb.policies.LEAN_BF16, strategy="optim", units=[Block])
    try:
        load_sharded(stepper, path)
    except ValueError as error:
        messages.append(str(error))
    return messages


def test_what_a_checkpoint_has_and_nobody_reads_is_refused(tmp_path: Path) -> None:
    run(2, save_and_go_on, tmp_path, "optim", "LEAN_BF16")
    for messages in run(2, other_transform, tmp_path):
        assert len(messages) == 4
        assert all("is there, and not here" in message or "is not there" in message for message in messages)
        assert "model.blocks.1" in messages[3]


def by_label(path: Path, turned: bool) -> dict[str, float]:
    model = network()
    rates = {"hot": eb.sgd(1.0), "cold": eb.sgd(1e-5)}
    where = {"hot": 1, "cold": 2} if not turned else {"cold": 1, "hot": 2}
    stepper = FlatStepper(
        model,
        rates,
        labels=lambda name, p: next(k for k, n in where.items() if (p.ndim > 1) == (n == 2)),
        strategy="optim",
    )
    if turned:
        load_sharded(stepper, path)
    else:
        save_sharded(stepper, path)
    return {group["label"]: group["lr"] for group in stepper.as_optimizer().param_groups}


def test_hyperparameters_go_by_label(tmp_path: Path) -> None:
    (saved,) = run(1, by_label, tmp_path, False)
    (loaded,) = run(1, by_label, tmp_path, True)
    assert saved == loaded == {"hot, float32": 1.0, "cold, float32": 1e-5}


def destroyed(path: Path) -> str:
    _, stepper, _ = make("optim", "FP32")
    save_sharded(stepper, path)
    slow = threading.Event()

    def later(*arguments: Any, **options: Any) -> Any:
        slow.wait(5)
        return dcp_save(*arguments, **options)

    with mock.patch.object(checkpoint, "save", later):
        saving = save_sharded(stepper, path, asynchronous=True)
        time.sleep(0.5)
        dist.barrier()
        dist.destroy_process_group()
        slow.set()
        return str(saving.exception(60))


def test_a_save_whose_group_is_destroyed_is_no_checkpoint(tmp_path: Path) -> None:
    for message in run(2, destroyed, tmp_path):
        assert message != "None"
    assert latest_checkpoint(tmp_path).name == "000001"


def failing(path: Path) -> list[str]:
    _, stepper, _ = make("optim", "FP32")
    (path / "file").write_text("") if dist.get_rank() == 0 else None
    dist.barrier()
    messages = []
    for function in (save_sharded, load_sharded):
        try:
            function(stepper, path / "file")
        except (OSError, RuntimeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_what_fails_on_one_rank_fails_on_all_at_once(tmp_path: Path) -> None:
    first, second = run(2, failing, tmp_path, timeout=30)
    assert "FileExistsError" in first[0]
    assert "on the first rank: FileExistsError" in second[0]
    assert len(first) == len(second) == 2


# -- state that is no tensor like the parameters ---------------------------------------------------------------------------------------


@eb.state
class FadingState(Generic[P]):
    """Beside a slot, single numbers of three dtypes that change at every step."""

    momentum: eb.Slot[P]
    factor: Tensor
    total: Tensor
    odd: Tensor


@dataclass(frozen=True, slots=True)
class Fading:
    """A momentum whose steps become smaller, by numbers that it keeps for all parameters that are stepped together."""

    reduces: bool = False
    cut: ClassVar[eb.Cut] = "element"

    def init(self, params: P) -> FadingState[P]:
        numbers = torch.ones(()), torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.bool)
        return FadingState(eb.tree.map(torch.zeros_like, params), *numbers)

    def update(self, updates: P, state: FadingState[P], params: P, ctx: eb.Context = ALONE) -> tuple[P, FadingState[P]]:
        def moved(total: Tensor) -> tuple[P, FadingState[P]]:
            momentum = eb.tree.map(lambda g, m: 0.5 * m + g, updates, state.momentum)
            sign = torch.where(state.odd, 1.0, 2.0) / (1 + total.float())
            steps = eb.tree.map(lambda m: -0.1 * state.factor * sign * m, momentum)
            return steps, FadingState(momentum, state.factor * 0.75, total, ~state.odd)

        if not self.reduces:
            return moved(state.total + 1)
        squares = [(g.double() ** 2).sum() for g in eb.tree.leaves(updates) if g is not None]
        return ctx.request(eb.Sum(torch.stack(squares).sum()), lambda found: moved(torch.maximum(state.total, found)))


def fading(
    path: Path | None, reduces: bool, strategy: Strategy, partly: bool, write: bool
) -> tuple[Weights, list[str]]:
    """Train, perhaps at first without some parameters, so that these have other numbers; save or load; train on."""
    model = network(torch.bfloat16, 0 if write else 3)
    stepper = FlatStepper(model, Fading(reduces), policy=eb.policies.KAHAN_BF16, strategy=strategy, units=[Block])
    if write:
        if partly:
            with stepper.microbatch(last=True):
                model.blocks[0](model.entry(data(0, 0, 0, torch.bfloat16))).float().square().mean().backward()
            stepper.step()
        steps(model, stepper, range(1, 3), torch.bfloat16)
        assert path is not None
        save_sharded(stepper, path)
    elif path is not None:
        load_sharded(stepper, path)
    steps(model, stepper, range(3, 5), torch.bfloat16)
    state = sharded_state_dict(stepper)
    numbers = {f"{x.dtype} {x.item()}" for x in state.values() if x.ndim == 0 and not isinstance(x, ShardTensor)}
    return weights_of(stepper), sorted(numbers)


@pytest.mark.parametrize("partly", [False, True])
@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.sampled(2)
def test_numbers_of_any_dtype_that_a_transform_keeps_go_on(tmp_path: Path, reduces: bool, partly: bool) -> None:
    saved = run(2, fading, tmp_path, reduces, "optim_grads", partly, True)
    kinds = {number.split()[0] for number in saved[0][1]}
    assert kinds == {"torch.int64", "torch.float32", "torch.float64", "torch.bool"}
    if partly:
        assert sum(number.startswith("torch.float32") for number in saved[0][1]) == 2
    for size, strategy in ((1, "no_shard"), (4, "optim_grads_params")):
        for weights, _ in run(size, fading, tmp_path, reduces, strategy, partly, False):
            assert equal(weights, saved[0][0])
    model = network(torch.bfloat16, 5)
    optimizer = TorchOptimizer(model.parameters(), lambda: Fading(reduces), policy=eb.policies.KAHAN_BF16)
    load_sharded_into(model, optimizer, tmp_path)
    for step in range(3, 5):
        optimizer.zero_grad()
        model(data(step, 0, 0, torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
    assert equal({n: p.detach() for n, p in model.named_parameters()}, saved[0][0])


@dataclass(frozen=True, slots=True)
class Histogram:
    """Keeps seven numbers for everything together, which no piece of it owns."""

    cut: ClassVar[eb.Cut] = "element"
    reduces: ClassVar[bool] = False

    def init(self, params: P) -> FadingState[P]:
        state = Fading().init(params)
        return FadingState(state.momentum, torch.zeros(7), state.total, state.odd)

    def update(self, updates: P, state: FadingState[P], params: P, ctx: eb.Context = ALONE) -> tuple[P, FadingState[P]]:
        return updates, state


def test_state_that_cannot_be_cut_is_refused_by_name() -> None:
    with pytest.raises(
        TypeError,
        match=r"Histogram\.init: state\.factor: got a tensor of shape \(7,\) outside of a slot, where no policy stores it",
    ):
        FlatStepper(network(), Histogram())


# -- hyperparameters -------------------------------------------------------------------------------------------------------------------


def labelled(*labels: str, rates: dict[str, float], **options: Any) -> tuple[nn.Linear, FlatStepper]:
    """A layer whose weight and bias are of these labels."""
    model = nn.Linear(2, 1)
    by_name = dict(zip(("weight", "bias"), labels, strict=True))
    transforms = {label: eb.sgd(rates[label], **options) for label in dict.fromkeys(labels)}
    return model, FlatStepper(model, transforms, labels=lambda name, p: by_name[name])


def rates_of(stepper: FlatStepper) -> dict[str, float]:
    return {group["label"].split(",")[0]: group["lr"] for group in stepper.as_optimizer().param_groups}


def test_hyperparameters_survive_another_labelling(tmp_path: Path) -> None:
    """They belong to parameters: labels that are called otherwise, or divide or join what was one, find them."""
    save_sharded(labelled("a", "b", rates={"a": 0.25, "b": 0.5})[1], tmp_path)
    _, renamed = labelled("matrices", "vectors", rates={"matrices": 1.0, "vectors": 1.0})
    load_sharded(renamed, tmp_path)
    assert rates_of(renamed) == {"matrices": 0.25, "vectors": 0.5}
    _, half = labelled("a", "vectors", rates={"a": 1.0, "vectors": 1.0})
    load_sharded(half, tmp_path)
    assert rates_of(half) == {"a": 0.25, "vectors": 0.5}
    save_sharded(labelled("all", "all", rates={"all": 0.125})[1], tmp_path)
    _, divided = labelled("a", "b", rates={"a": 1.0, "b": 1.0})
    load_sharded(divided, tmp_path)
    assert rates_of(divided) == {"a": 0.125, "b": 0.125}
    save_sharded(divided, tmp_path)
    _, joined = labelled("all", "all", rates={"all": 1.0})
    load_sharded(joined, tmp_path)
    assert rates_of(joined) == {"all": 0.125}


def test_hyperparameters_that_fit_nowhere_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    model, stepper = labelled("a", "b", rates={"a": 0.25, "b": 0.5})
    save_sharded(stepper, tmp_path)
    other, joined = labelled("all", "all", rates={"all": 1.0})
    before = [p.detach().clone() for p in other.parameters()]
    with pytest.raises(
        ValueError,
        match=r"param group 'all.*': there is no such label there, and bias and weight had different hyperparameters \(lr=0.5.*; lr=0.25",
    ):
        load_sharded(joined, tmp_path)
    assert all(map(torch.equal, before, (p.detach() for p in other.parameters())))
    load_sharded(joined, tmp_path, hyperparameters=False)
    assert rates_of(joined) == {"all": 1.0}
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def saved_with(path: Path, transform: eb.Transform[Any], **values: Any) -> None:
    stepper = FlatStepper(nn.Linear(2, 1), transform)
    stepper.as_optimizer().param_groups[0].update(values)
    save_sharded(stepper, path)


NO_CLIP = eb.chain(eb.identity(), eb.sgd(0.5))


@pytest.mark.parametrize(
    ("saved", "here", "message"),
    [
        (eb.chain(eb.clip(1.0), eb.sgd(0.5)), NO_CLIP, r"limit is there, and its transform has none"),
        (NO_CLIP, eb.chain(eb.clip(1.0), eb.sgd(0.5)), r"limit is not there"),
        (eb.sgd(lambda step: 0.1 / step), eb.sgd(0.5), r"lr is not there"),
    ],
)
def test_hyperparameters_that_one_of_the_two_has_not_are_refused(
    tmp_path: Path, saved: eb.Transform[Any], here: eb.Transform[Any], message: str
) -> None:
    saved_with(tmp_path, saved)
    stepper = FlatStepper(nn.Linear(2, 1), here)
    with pytest.raises(ValueError, match=message):
        load_sharded(stepper, tmp_path)
    load_sharded(stepper, tmp_path, hyperparameters=False)


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), -1.0])
def test_hyperparameters_are_judged_before_anything_is_taken_over(tmp_path: Path, lr: float) -> None:
    saved_with(tmp_path, eb.sgd(0.5), lr=lr)
    model = nn.Linear(2, 1)
    stepper = FlatStepper(model, eb.sgd(0.5))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"the checkpoint's hyperparameters do not fit: .*lr: got"):
        load_sharded(stepper, tmp_path)
    assert all(map(torch.equal, before, (p.detach() for p in model.parameters())))
    assert stepper.as_optimizer().param_groups[0]["lr"] == 0.5


def test_what_schedulers_keep_in_param_groups_goes_along(tmp_path: Path) -> None:
    stepper = FlatStepper(nn.Linear(2, 1), eb.adamw(0.5))
    scheduler = torch.optim.lr_scheduler.LinearLR(stepper.as_optimizer(), 0.5, total_iters=4)
    for _ in range(2):
        stepper.model(torch.ones(1, 2)).sum().backward()
        stepper.step()
        scheduler.step()
    stepper.as_optimizer().param_groups[0]["their/own"] = 7
    save_sharded(stepper, tmp_path)
    (saved,) = stepper.as_optimizer().param_groups
    rate = torch.tensor(9.0)
    other = FlatStepper(nn.Linear(2, 1), eb.adamw(rate))
    load_sharded(other, tmp_path)
    (group,) = other.as_optimizer().param_groups
    for name in ("initial_lr", "betas", "eps", "weight_decay", "their/own"):
        assert group[name] == saved[name]
    assert group["lr"] is rate  # a user's tensor stays that tensor
    assert float(rate) == pytest.approx(saved["lr"], rel=2**-24)


def test_folders_that_no_save_made_stay(tmp_path: Path) -> None:
    (tmp_path / "000000").mkdir()
    (tmp_path / "000000" / "mine").write_text("")
    stepper = FlatStepper(network(), eb.adamw(1e-2))
    for _ in range(3):
        save_sharded(stepper, tmp_path, keep=0)
    assert sorted(one.name for one in tmp_path.iterdir() if one.is_dir()) == ["000000", "000003"]


LAST_SAVE_FAILED = "the last asynchronous save failed, and the checkpoint before it is in place: division by zero"


def test_an_asynchronous_save_that_failed_is_told_of_by_what_comes_next(tmp_path: Path) -> None:
    stepper = FlatStepper(network(), eb.adamw(1e-2))

    def fails() -> Any:
        with mock.patch.object(checkpoint, "save", side_effect=ZeroDivisionError("division by zero")):
            pending = save_sharded(stepper, tmp_path, asynchronous=True)
            concurrent.futures.wait([pending])
            assert not pending.cancel()
            return pending

    save_sharded(stepper, tmp_path)
    with pytest.raises(ZeroDivisionError):
        fails().result(60)
    save_sharded(stepper, tmp_path)  # it was told already
    fails()
    with pytest.raises(RuntimeError, match=f"^{LAST_SAVE_FAILED}$"):
        save_sharded(stepper, tmp_path)
    assert latest_checkpoint(tmp_path).name == "000002"
    save_sharded(stepper, tmp_path, asynchronous=True).result(60)
    fails()
    with pytest.warns(UserWarning, match=f"^{LAST_SAVE_FAILED}$"):
        load_sharded(stepper, tmp_path)
    fails()
    with pytest.warns(UserWarning, match="^close: the last asynchronous save failed: division by zero$"):
        stepper.close()


def told_on_one_rank(path: Path) -> list[str]:
    _, stepper, _ = make("optim", "FP32")
    said = []
    with mock.patch.object(checkpoint, "save", side_effect=ZeroDivisionError("division by zero")):
        pending = save_sharded(stepper, path, asynchronous=True)
        concurrent.futures.wait([pending])
    if dist.get_rank() == 0:
        pending.exception()
    for _ in range(2):
        try:
            said.append(str(save_sharded(stepper, path).result()))
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_a_failed_save_is_raised_on_all_ranks_if_one_has_not_asked(tmp_path: Path) -> None:
    first, second = run(2, told_on_one_rank, tmp_path, timeout=30)
    assert first == [f"on rank 1: {LAST_SAVE_FAILED}", str(tmp_path / "000001")]
    assert second == [LAST_SAVE_FAILED, str(tmp_path / "000001")]


def test_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return 7

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError(state)

    with pytest.raises(TypeError, match=r"_extra_state: the model's state has a int here"):
        save_sharded(FlatStepper(Extra(2, 2), eb.sgd(0.1)), tmp_path)


def test_a_parameter_without_elements_goes_through(tmp_path: Path) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        one = nn.Linear(3, 2)
        one.register_parameter("empty", nn.Parameter(torch.zeros(0, 4)))
        return one

    stepper = FlatStepper(first := model(), eb.adamw(1e-2))
    (first(torch.ones(1, 3)).sum() + first.get_parameter("empty").sum()).backward()
    stepper.step()
    save_sharded(stepper, tmp_path)
    optimizer = AdamW((other := model()).parameters(), lr=1e-2)
    load_sharded_into(other, optimizer, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def by_columns(path: Path) -> list[Tensor]:
    """As tensor parallelism cuts a weight: parts that are no rows."""
    model = nn.Linear(4, 6, bias=False)
    weight = distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (2,)), [Shard(1)])
    model.weight = nn.Parameter(weight)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    load_sharded_into(model, optimizer, path)
    state: Any = optimizer.state[model.weight]
    return [weight.full_tensor(), *(state[name].full_tensor() for name in ("momentum", "variance"))]


def test_parts_that_are_no_rows_are_read(tmp_path: Path) -> None:
    stepper = FlatStepper(model := nn.Linear(4, 6, bias=False), eb.adamw(1e-2))
    model(torch.arange(8.0).view(2, 4)).square().sum().backward()
    stepper.step()
    save_sharded(stepper, tmp_path)
    expected = sharded_state_dict(stepper)
    names = ("model.weight", "optimizer.state.weight.momentum", "optimizer.state.weight.variance")
    parts: list[Any] = [expected[name] for name in names]
    for found in run(2, by_columns, tmp_path):
        assert all(torch.equal(part.local.view(6, 4), whole) for part, whole in zip(parts, found, strict=True))


def test_full_precision_weights_go_back_into_an_optimizer_that_clips() -> None:
    model = network()
    optimizer = TorchOptimizer(
        model.parameters(),
        lambda learning_rate: eb.chain(eb.clip_by_global_norm(1.0), eb.adamw(learning_rate)),
        lr=1e-2,
    )
    weights = [[2 * w for w in group] for group in optimizer.export_fp32()]
    optimizer.import_fp32(weights)
    assert all(torch.equal(p.detach(), w) for p, w in zip(model.parameters(), weights[0], strict=True))


def partly_frozen(seed: int) -> tuple[nn.Sequential, AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 5), nn.Linear(5, 4)).to(torch.bfloat16)
    model[0].requires_grad_(False)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return model, AdamW(trained, lr=1e-2, policy="FLOOR_BF16")


def test_an_optimizer_of_the_trained_parameters_alone_saved_by_dcp_goes_on_with_its_random_bits(tmp_path: Path) -> None:
    """A stepper numbers the elements of all parameters, and such an optimizer those of its own."""

    def train(model: nn.Sequential, optimizer: AdamW, numbers: range) -> list[Tensor]:
        for number in numbers:
            model(
                torch.randn(3, 5, generator=torch.Generator().manual_seed(number)).bfloat16()
            ).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    model, optimizer = partly_frozen(0)
    train(model, optimizer, range(3))
    flat = {f"model.{name}": x for name, x in model.state_dict().items()}
    for name, p in model.named_parameters():
        flat |= {f"optimizer.state.{name}.{key}": x for key, x in optimizer.state.get(p, {}).items()}
    with warnings.catch_warnings(action="ignore"):  # torch warns that it takes the process for the only one
        dcp_save(flat, checkpoint_id=tmp_path, no_dist=True)
    expected = train(model, optimizer, range(3, 6))
    other, resumed = partly_frozen(1)
    with pytest.warns(UserWarning, match="has no checksums"):
        load_sharded_into(other, resumed, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(expected, train(other, resumed, range(3, 6)), strict=True))


def test_a_plain_models_optimizer_takes_over_the_hyperparameters_of_its_parameters(tmp_path: Path) -> None:
    """One rule for both loaders. A factory that sets another value by itself is told of, and so is a group that mixes two labels."""

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    transform = eb.chain(eb.clip_by_global_norm(1.0), eb.adamw(1e-2, weight_decay=0.1))
    policy = eb.by_label(
        lambda path, _: "a" if "weight" in path else "b", {"a": eb.policies.FP32, "b": eb.policies.FP32}
    )
    stepper = FlatStepper(model, transform, policy=policy)
    model(torch.ones(2, 4)).square().sum().backward()
    for group in stepper.as_optimizer().param_groups:
        group["lr"] = 3e-3 if group["label"].startswith("a") else 4e-3
    stepper.step()
    save_sharded(stepper, tmp_path)

    def factory(learning_rate: float, weight_decay: float = 0.5) -> eb.Transform[Any]:
        return eb.chain(eb.clip_by_global_norm(2.0), eb.adamw(learning_rate, weight_decay=weight_decay))

    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    several = [{"params": [m.weight for m in other]}, {"params": [m.bias for m in other]}]
    optimizer = TorchOptimizer(several, factory, lr=1.0, weight_decay=0.5)
    with pytest.warns(UserWarning, match=r"param group 0: limit is \(1\.0,\) there, and \(2\.0,\) here"):
        load_sharded_into(other, optimizer, tmp_path)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(3e-3, 0.1), (4e-3, 0.1)]
    kept = TorchOptimizer(several, factory, lr=1.0, weight_decay=0.5)
    load_sharded_into(other, kept, tmp_path, hyperparameters=False)
    assert [group["lr"] for group in kept.param_groups] == [1.0, 1.0]
    mixed = TorchOptimizer(other.parameters(), factory, lr=1.0, weight_decay=0.5)
    with pytest.warns(
        UserWarning, match=r"param group 0: lr is \(0\.003,\) and \(0\.004,\) there, and \(1\.0,\) here; .*limit is"
    ):
        load_sharded_into(other, mixed, tmp_path)
    assert [(group["lr"], group["weight_decay"]) for group in mixed.param_groups] == [(1.0, 0.1)]
