"""Weights that are sharded are not there between passes, and nothing computes with them, saves them or copies them without a word."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import everybit as eb
from everybit_torch.sharded.checkpoint import load_sharded, save_sharded
from everybit_torch.sharded.reports import NanCheck
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import STRATEGIES, Strategy
from tests.support.programs import Block, Network, data, weights_of
from tests.support.ranks import run

SHARDED: Strategy = "optim_grads_params"
X = data(0, 0, 0, torch.float32)


class Generating(Network):
    """Has a method besides forward that computes with its own modules, as generate() of language models does."""

    def generate(self, x: Tensor) -> Tensor:
        first: Any = self.blocks[0]
        out: Tensor = self.exit(first(self.entry(x)))
        return out

    def functional(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.entry.weight, self.entry.bias)


def made(strategy: Strategy = SHARDED, **arguments: Any) -> tuple[Any, FlatStepper]:
    torch.manual_seed(0)
    model = Generating()
    return model, FlatStepper(model, eb.sgd(0.1), strategy=strategy, units=[Block], **arguments)


def saved(model: nn.Module) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state: dict[str, Tensor] = torch.load(file, weights_only=True)
    return state


Use = Callable[[Any], Any]
# What is done with a model, and what is said where it cannot be done.
USES: dict[str, tuple[Use, str]] = {
    "state_dict": (saved, r"state_dict: the weights of .* are sharded.*full_parameters\(\).*save_sharded"),
    "state_dict of a part": (lambda m: m.blocks[1].inner.state_dict(), r"state_dict: the weights of blocks\.1\.inner are sharded"),
    "load_state_dict": (
        lambda m: m.load_state_dict({k: torch.ones(v.shape) for k, v in Generating().state_dict().items()}),
        r"load_state_dict: the weights of .* are sharded.*full_parameters\(\).*load_sharded",
    ),
    "deepcopy": (copy.deepcopy, r"copy: the weights of .* are sharded, and a copy of the model would be of NaN.*full_parameters"),
    "deepcopy of a part": (lambda m: copy.deepcopy(m.blocks), r"copy: the weights of blocks\.0\.inner are sharded"),
    "pickle": (pickle.dumps, r"copy: the weights of"),
    "torch.save": (lambda m: torch.save(m, io.BytesIO()), r"copy: the weights of"),
    "an average": (AveragedModel, r"copy: the weights of"),
    "generate": (lambda m: m.generate(X), r"entry: was called while its weights are sharded: they belong to the model.*full_parameters"),
    "generate, no_grad": (torch.no_grad()(lambda m: m.generate(X)), r"entry: was called while its weights are sharded"),
    "a module of a unit": (
        lambda m: m.blocks[1].inner(torch.ones(1, 5)),
        r"blocks\.1\.inner: was called while its weights are sharded: they belong to blocks\.1, and are gathered when blocks\.1 is called",
    ),
    "a loss out of forward": (
        lambda m: m.functional(X).square().sum().backward(),
        r"entry\.\w+: was used out of the forward pass of the model, while its weights were sharded and NaN",
    ),
}  # fmt: skip


def attempts() -> tuple[dict[str, str], list[str], bool]:
    """What is said to each use; the uses that go wrong inside ``full_parameters()``; and whether training goes on."""
    model, stepper = made()
    messages = {}
    for name, (use, _) in USES.items():
        try:
            use(model)
            messages[name] = "nothing"
        except RuntimeError as error:
            messages[name] = str(error)
        stepper.zero_grad()
    wrong = []
    with stepper.full_parameters():
        for name, (use, _) in USES.items():
            before = {key: p.detach().clone() for key, p in model.named_parameters()}
            result = use(model)
            if isinstance(result, Tensor) and bool(result.isnan().any()):
                wrong.append(name)
            if isinstance(result, nn.Module):
                wrong += [name for p in result.parameters() if bool(p.isnan().any())]
            if name == "state_dict":
                wrong += [key for key, value in result.items() if not torch.equal(value, before[key])]
            stepper.zero_grad()
    with stepper.microbatch(last=True):
        model(X).square().mean().backward()
    return messages, wrong, not stepper.step().skipped


def test_what_would_use_weights_that_are_not_there_is_refused_by_name() -> None:
    for messages, wrong, goes_on in run(2, attempts):
        assert not wrong
        assert goes_on
        for name, (_, pattern) in USES.items():
            assert re.search(pattern, messages[name]), (name, messages[name])


def wrapped() -> list[str]:
    """What is said to wrappers around a model, a part of it, and a module that has it; and whether wrappers work elsewhere."""
    model, stepper = made()
    said = []
    for module in (model, model.blocks, nn.Sequential(model)):
        with pytest.raises(RuntimeError) as raised:
            DistributedDataParallel(module)
        said.append(str(raised.value))
    DistributedDataParallel(Generating())
    nn.Sequential(model)
    stepper.close()
    DistributedDataParallel(model)
    return said


def test_a_data_parallel_wrapper_around_a_sharded_model_is_told_to_leave_it_out() -> None:
    for said in run(1, wrapped):
        assert len(said) == 3
        assert all(
            one.startswith("DistributedDataParallel: call the model without it. A FlatStepper shards") for one in said
        )


def collected_late() -> int:
    held: list[Any] = []

    def collect(*_: Any) -> None:
        held.clear()
        gc.collect()

    handle = register_module_module_registration_hook(collect)
    held.append(made())
    try:
        return len(nn.Sequential(nn.Linear(1, 1)))
    finally:
        handle.remove()


def test_a_stepper_may_be_collected_while_a_module_is_made() -> None:
    assert run(1, collected_late) == [1]


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_where_weights_are_whole_nothing_is_refused(strategy: Strategy) -> None:
    model, stepper = made(strategy)
    for use, _ in USES.values():
        use(model)
    assert not stepper.closed


def generating() -> tuple[Tensor, Tensor]:
    model, stepper = made()
    model.blocks[1](model.blocks[0](torch.ones(2, 5)))  # units gather themselves
    with torch.no_grad():
        alone = model.blocks[1](torch.ones(2, 5))
    with stepper.full_parameters():
        inside = model.generate(X)
    return alone, inside


def test_units_called_alone_gather_themselves() -> None:
    torch.manual_seed(0)
    whole = Generating()
    for alone, inside in run(2, generating):
        assert torch.equal(alone, whole.blocks[1](torch.ones(2, 5)))
        assert torch.equal(inside, whole.generate(X))


def nan_in_a_method(nan: NanCheck) -> str:
    model, stepper = made(nan=nan)
    try:
        with stepper.microbatch(last=True):
            model.generate(X).square().mean().backward()
        return f"skipped: {stepper.step().skipped}"
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("nan", ["off", "step", "param"])
def test_no_step_is_skipped_for_weights_that_were_not_there(nan: NanCheck) -> None:
    for message in run(2, nan_in_a_method, nan):
        assert "was called while its weights are sharded" in message


def test_a_model_whose_stepper_is_gone_says_so() -> None:
    model, stepper = made()
    del stepper
    gc.collect()
    for use in (lambda: model(X), model.state_dict, lambda: copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match=r"its weights were sharded by a FlatStepper that is gone"):
            use()


def test_a_model_that_was_given_back_is_free() -> None:
    model, stepper = made()
    stepper.close()
    stepper.close()
    assert not any(p.isnan().any() for p in copy.deepcopy(model).state_dict().values())
    assert bool(torch.isfinite(model.generate(X)).all())


# -- inside full_parameters() -------------------------------------------------------------------------------------------------------------


def stepping_inside(strategy: Strategy, inside: bool) -> dict[str, Tensor]:
    model, stepper = made(strategy)
    for step in range(3):
        with stepper.full_parameters() if inside else contextlib.nullcontext():
            for number in range(2):
                with stepper.microbatch(last=number == 1):
                    model(data(step, dist.get_rank(), number, torch.float32)).square().mean().backward()
            stepper.step()
            if step == 1 and inside:
                with torch.no_grad():
                    model.entry.bias.add_(1.0)
        if step == 1 and not inside:
            with stepper.full_parameters(), torch.no_grad():
                model.entry.bias.add_(1.0)
    return weights_of(stepper)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_inside_full_parameters_is_a_step(strategy: Strategy) -> None:
    """It was lost where parameters are sharded: weights went back to those of before, and the state stayed stepped."""
    expected = run(2, stepping_inside, strategy, False)[0]
    for weights in run(2, stepping_inside, strategy, True):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def written_and_failed() -> bool:
    model, stepper = made()
    with contextlib.suppress(ZeroDivisionError), stepper.full_parameters(), torch.no_grad():
        model.entry.bias.fill_(3.0)
        _ = 1 / 0
    return weights_of(stepper)["entry.bias"].tolist() == [3.0] * 5


def test_what_was_written_inside_is_kept_also_if_an_error_ends_it() -> None:
    assert run(2, written_and_failed) == [True, True]


def replace(parameter: nn.Parameter) -> None:
    parameter.data = torch.full_like(parameter.data, 7.0)


def cast_there_and_back(model: nn.Module) -> None:
    model.to(torch.bfloat16)
    model.to(torch.float32)


MOVES: dict[str, Callable[[Any], Any]] = {
    "new memory": lambda model: replace(model.entry.weight),
    "new memory in a unit": lambda model: replace(model.blocks[1].inner.bias),
    "cast and cast back": cast_there_and_back,
    "another dtype": lambda model: model.to(torch.float64),
    "shared": lambda model: model.share_memory(),
}


def moving(strategy: Strategy, name: str, inside: bool) -> list[str]:
    """What is said after parameters were given other memory: at the next backward pass, and at the next step."""
    messages = []
    for stepping in (False, True):
        model, stepper = made(strategy)
        try:
            if stepping:
                with stepper.microbatch(last=True):
                    model(X).square().mean().backward()
            if inside:
                with stepper.full_parameters():
                    MOVES[name](model)
            else:
                MOVES[name](model)
            if not stepping:
                with stepper.microbatch(last=True):
                    model(X.to(model.entry.weight.dtype)).square().mean().backward()
            stepper.step()
            if stepping:  # where parameters are sharded a step does not look at them; the next pass does
                model(X.to(model.entry.weight.dtype))
            messages.append("nothing")
        except RuntimeError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_that_were_given_other_memory_are_told_of(strategy: Strategy) -> None:
    for name in MOVES:
        for inside in (False, True):
            if name == "shared" and inside and strategy == SHARDED:
                continue  # see below: the memory is left to whoever shares it
            (messages,) = run(1, moving, strategy, name, inside)
            for message in messages:
                assert "was moved, cast or given other memory since the stepper was made" in message, (name, inside)


def held(others: bool, keep: bool) -> tuple[dict[str, Tensor], float]:
    """Two steps, in which others hold on to memory of weights and gradients, or not."""
    model, stepper = made(keep_gradients=keep)
    arrays: list[Any] = []
    seen: list[Any] = []
    norm = 0.0
    if others:
        with stepper.full_parameters():
            arrays.append(model.entry.bias.detach().numpy())
            model.blocks[0].share_memory()
    for _ in range(2):
        with stepper.microbatch(last=True):
            loss = model(X).square().mean()
            if others:
                with stepper.full_parameters():
                    arrays.append(model.blocks[1].inner.bias.detach().numpy())
            loss.backward()
        if others:
            arrays += [p.grad.numpy() for p in stepper.as_optimizer().param_groups[0]["params"]]
        seen = [array.tolist() for array in arrays]
        norm = float(stepper.step().grad_norm)
    if others and not keep:
        assert seen == [array.tolist() for array in arrays]
    return weights_of(stepper), norm


@pytest.mark.parametrize("keep", [True, False])
def test_memory_that_others_hold_on_to_stays_theirs(keep: bool) -> None:
    """numpy() fixes a tensor's memory: it could not be given back any more, and training ended there."""
    expected, norm = run(1, held, False, keep)[0]
    weights, same = run(1, held, True, keep)[0]
    assert same == norm
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


# -- loads that fail ----------------------------------------------------------------------------------------------------------------------


def marked(path: Path) -> list[str]:
    """A loader that could not finish says so, and then only a load that does helps."""
    model, stepper = made()
    save_sharded(stepper, path)
    expected = weights_of(stepper)
    stepper.completeness.mark_incomplete("load_sharded ended in an error after some of the state was replaced")
    stepper.zero_grad()
    with pytest.raises(RuntimeError, match=r"microbatch: load_sharded ended in an error.*accepted is load_sharded"):
        stepper.microbatch(last=True).__enter__()
    load_sharded(stepper, path)
    with stepper.microbatch(last=True):
        model(X).sum().backward()
    same = all(torch.equal(value, expected[name]) for name, value in weights_of(stepper).items())
    return [str(same), str(stepper.step().skipped)]


def test_a_state_that_a_load_left_incomplete_is_not_trained_on(tmp_path: Path) -> None:
    for outcome in run(2, marked, tmp_path):
        assert outcome == ["True", "False"]
