"""A run is carried from one policy to another, and from and to ``torch.optim``; what that loses is said."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import everybit as eb
from everybit_torch import SGD, Adam, AdamW, Lion, RMSprop, RoundingLoss, TorchOptimizer
from tests.support.closed_optim import CLOSED, lacks_gradient
from tests.support.files import through_a_file
from tests.support.small_models import Awkward, give_gradients, same_bits, train, values

LOW = ["MIXED_BF16", "EXACT_BF16", "LEAN_BF16", "KAHAN_BF16", "TIGHT_BF16", "FLOOR_BF16"]

PAIRS: list[tuple[type[TorchOptimizer], type[torch.optim.Optimizer], dict[str, Any]]] = [
    (AdamW, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    (Adam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    (SGD, torch.optim.SGD, {"lr": 1e-2}),
    (SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    (SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "maximize": True}),
    (RMSprop, torch.optim.RMSprop, {"lr": 1e-3}),
    (RMSprop, torch.optim.RMSprop, {"lr": 1e-3, "centered": True, "momentum": 0.5, "weight_decay": 0.1}),
    *CLOSED,
]


def skip(step: int, name: str) -> bool:
    """One parameter falls behind, one never has a gradient in the first part."""
    return (name == "vector" and step == 1) or (name == "other" and step < 4)


def skip_for(kind: type[object]) -> Callable[[int, str], bool]:
    """The same, and no gradient where torch's optimizer cannot take one."""
    return lambda step, name: skip(step, name) or lacks_gradient(kind, name)


def goes_on_for(kind: type[object]) -> Callable[[int, str], bool]:
    """Gradients everywhere but where torch's optimizer cannot take one."""
    return lambda _step, name: lacks_gradient(kind, name)


# -- torch.optim --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "theirs", "arguments"), PAIRS)
@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_a_run_of_torch_goes_on_here(
    ours: type[TorchOptimizer], theirs: type[torch.optim.Optimizer], arguments: dict[str, Any], alone: bool
) -> None:
    model, other = Awkward(), Awkward()
    reference = theirs(model.parameters(), **arguments)
    train(model, reference, 4, without=skip_for(ours))
    saved = through_a_file({"model": model.state_dict(), "optimizer": reference.state_dict()})
    other.load_state_dict(saved["model"])
    mine = ours(other.parameters(), **(arguments | {"lr": 0.5}))
    losses = mine.load_torch_state_dict(saved["optimizer"])
    assert mine.param_groups[0]["lr"] == arguments["lr"]
    assert all(str(loss) == "exact" and loss.relative == 0.0 for loss in losses.values())
    # Nothing was lost, so what follows differs only as one float32 step of ours and torch's does: a few units in the last place each.
    after = goes_on_for(ours)
    got = train(other, mine, 4, start=4, without=after)
    expected = train(model, reference, 4, start=4, without=after)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=4 * 4 * 2**-23, atol=4e-7)


@pytest.mark.parametrize(("ours", "theirs", "arguments"), PAIRS)
def test_a_run_of_ours_goes_on_in_torch(
    ours: type[TorchOptimizer], theirs: type[torch.optim.Optimizer], arguments: dict[str, Any]
) -> None:
    model, other = Awkward(), Awkward()
    mine = ours(model.parameters(), **arguments)
    train(model, mine, 4, without=skip_for(ours))
    saved = through_a_file({"model": model.state_dict(), "optimizer": mine.torch_state_dict()})
    other.load_state_dict(saved["model"])
    reference = theirs(other.parameters(), **(arguments | {"lr": 0.5}))
    reference.load_state_dict(saved["optimizer"])
    assert reference.param_groups[0]["lr"] == arguments["lr"]
    after = goes_on_for(ours)
    got = train(model, mine, 4, start=4, without=after)
    expected = train(other, reference, 4, start=4, without=after)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=4 * 4 * 2**-23, atol=4e-7)


@pytest.mark.parametrize(("ours", "theirs", "arguments"), PAIRS)
def test_there_and_back_is_the_same_checkpoint(
    ours: type[TorchOptimizer], theirs: type[torch.optim.Optimizer], arguments: dict[str, Any]
) -> None:
    model = Awkward()
    reference = theirs(model.parameters(), **arguments)
    train(model, reference, 4, without=skip_for(ours))
    saved = reference.state_dict()
    mine = ours(model.parameters(), **arguments)
    mine.load_torch_state_dict(copy.deepcopy(saved))
    back = mine.torch_state_dict()
    held = {n: e for n, e in saved["state"].items() if any(v is not None for v in e.values())}
    assert back["state"].keys() == held.keys()
    for number, entry in held.items():
        assert back["state"][number].keys() == entry.keys()
        for name, value in entry.items():
            assert torch.equal(back["state"][number][name], value), (number, name)
            assert back["state"][number][name].dtype is value.dtype
    # Every option of torch's group is there, with its value; those that pick an implementation may be left to torch.
    for key, value in saved["param_groups"][0].items():
        if key in ("params", "foreach", "fused", "capturable", "differentiable"):
            continue
        assert back["param_groups"][0][key] == value, key


@pytest.mark.parametrize("name", LOW)
def test_a_float32_run_of_torch_goes_on_in_any_policy_and_what_it_loses_is_measured(name: str) -> None:
    """The stated loss is the difference between what is stored and what was given, computed here in float64."""
    model = Awkward()
    reference = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, reference, 5)
    other = Awkward(torch.bfloat16)
    other.load_state_dict(model.state_dict())
    mine = AdamW(other.parameters(), lr=1e-3, policy=eb.policies.PRESETS[name])
    losses = mine.load_torch_state_dict(reference.state_dict())
    assert losses.keys() == {"momentum", "variance"}
    full = mine.full_state_dict()["state"]
    for ours, theirs in (("momentum", "exp_avg"), ("variance", "exp_avg_sq")):
        given = torch.cat([reference.state[p][theirs].double().flatten() for p in model.parameters()])
        stored = torch.cat([full[i][ours].double().flatten() for i in range(5)])
        error = (stored - given).square().sum()
        assert losses[ours].largest == (stored - given).abs().max()
        # Sums over units, each in float64, in another order.
        assert losses[ours].relative == pytest.approx(float((error / given.square().sum()).sqrt()), rel=1e-12)
        exact = eb.policies.PRESETS[name].bytes_table()[ours] == 4
        assert (str(losses[ours]) == "exact") == exact
        # Rounding once: half a unit in the last place to nearest, a whole one at random; bfloat16 keeps 8 bits.
        assert losses[ours].relative <= 2**-7
    assert [int(full[i]["step"]) for i in range(5)] == [5] * 5
    train(other, mine, 2)


def test_another_optimizers_state_is_refused_by_name() -> None:
    model = Awkward()
    mine = AdamW(Awkward().parameters())
    adam = torch.optim.Adam(model.parameters())
    train(model, adam, 1)
    with pytest.raises(ValueError, match=r"'decoupled_weight_decay': got False; accepted by AdamW is True"):
        mine.load_torch_state_dict(adam.state_dict())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, sgd, 1)
    with pytest.raises(ValueError, match=r"parameter 0 has state \['momentum_buffer'\]; of these AdamW has no"):
        mine.load_torch_state_dict(sgd.state_dict())
    with pytest.raises(TypeError, match=r"Lion: torch.optim has no optimizer that keeps the same state"):
        Lion(Awkward().parameters()).torch_state_dict()


def test_a_torch_checkpoint_given_to_load_state_dict_says_where_it_belongs() -> None:
    model = Awkward()
    reference = torch.optim.AdamW(model.parameters())
    train(model, reference, 1)
    with pytest.raises(ValueError, match=r"This is a checkpoint of torch.optim: load_torch_state_dict\(\) takes it"):
        AdamW(Awkward().parameters()).load_state_dict(reference.state_dict())


def test_moments_of_a_float64_run_are_not_cast_into_a_float32_one() -> None:
    model = Awkward(torch.float64)
    reference = torch.optim.AdamW(model.parameters())
    train(model, reference, 1)
    mine = AdamW(Awkward().parameters())
    with pytest.raises(ValueError, match=r"parameter 0, 'momentum': got .*float64.*; accepted is .*float32"):
        mine.load_torch_state_dict(reference.state_dict())


# -- from one policy to another -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOW)
def test_a_float32_run_goes_on_in_16_bits_and_back(name: str) -> None:
    model = Awkward()
    wide = AdamW(model.parameters(), lr=1e-3)
    train(model, wide, 4, without=skip)
    narrow_model = Awkward(torch.bfloat16)
    narrow = AdamW(narrow_model.parameters(), lr=1e-3, policy=eb.policies.PRESETS[name])
    losses = narrow.load_full_state_dict(through_a_file(wide.full_state_dict()))
    assert losses.keys() == {"param", "momentum", "variance"}
    # The weights: what each format promises, relative to the largest weight of this model, which is below 4.
    bound = {
        "MIXED_BF16": 0.0,
        "EXACT_BF16": 0.0,
        "LEAN_BF16": 0.0,
        "TIGHT_BF16": 2**-16,
        "KAHAN_BF16": 2**-16,
        "FLOOR_BF16": 2**-7,
    }
    assert max(float(p.detach().abs().max()) for p in model.parameters() if p.numel()) < 4
    assert losses["param"].largest <= 4 * bound[name]
    for ours, theirs in zip(narrow.export_fp32()[0], model.parameters(), strict=True):
        assert float((ours - theirs.detach()).abs().sum()) <= 4 * bound[name] * ours.numel()
    train(narrow_model, narrow, 2, start=4)

    # And back: a float32 run holds everything that a narrow one does.
    again = Awkward()
    resumed = AdamW(again.parameters(), lr=1e-3)
    back = resumed.load_full_state_dict(through_a_file(narrow.full_state_dict()))
    assert {str(loss) for loss in back.values()} == {"exact"}
    assert same_bits(values(again), narrow.export_fp32()[0])


def test_exact_formats_go_there_and_back_as_if_nothing_had_happened() -> None:
    policy = eb.policies.EXACT_BF16
    model, reference = Awkward(), Awkward()
    optimizer, theirs = AdamW(model.parameters(), lr=1e-3), AdamW(reference.parameters(), lr=1e-3)
    train(model, optimizer, 3, without=skip)
    train(reference, theirs, 3, without=skip)
    between = AdamW(Awkward(torch.bfloat16).parameters(), lr=1e-3, policy=policy)
    between.load_full_state_dict(optimizer.full_state_dict())
    again = Awkward()
    resumed = AdamW(again.parameters(), lr=1e-3)
    resumed.load_full_state_dict(between.full_state_dict())
    assert same_bits(train(again, resumed, 3, start=3), train(reference, theirs, 3, start=3))


@pytest.mark.parametrize("name", LOW)
def test_the_same_policy_loses_nothing(name: str) -> None:
    """Through full precision and back into the same formats nothing is lost: every stored number is representable."""
    policy = eb.policies.PRESETS[name]
    model, other = Awkward(torch.bfloat16), Awkward(torch.bfloat16)
    optimizer = AdamW(model.parameters(), policy=policy)
    train(model, optimizer, 3, without=skip)
    resumed = AdamW(other.parameters(), policy=policy)
    losses = resumed.load_full_state_dict(optimizer.full_state_dict())
    assert {str(loss) for loss in losses.values()} == {"exact"}
    for mine, theirs in zip(optimizer.export_fp32()[0], resumed.export_fp32()[0], strict=True):
        assert torch.equal(mine, theirs)


def test_a_full_state_dict_is_a_copy() -> None:
    model = Awkward()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 2)
    full = optimizer.full_state_dict()
    before = copy.deepcopy(full["state"])
    train(model, optimizer, 2, start=2)
    assert all(torch.equal(full["state"][n][k], before[n][k]) for n in before for k in before[n])


def test_a_full_state_dict_of_another_optimizer_is_refused_and_changes_nothing() -> None:
    model = Awkward()
    lion = Lion(model.parameters())
    train(model, lion, 1)
    other = Awkward()
    target = AdamW(other.parameters(), lr=0.7)
    train(other, target, 1)
    before = values(other)
    with pytest.raises(ValueError, match=r"parameter 0 has state .*; accepted in full precision is"):
        target.load_full_state_dict(lion.full_state_dict())
    assert same_bits(before, values(other))
    assert target.param_groups[0]["lr"] == 0.7


def test_infinities_and_nan_in_a_checkpoint_are_carried_and_no_loss() -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = AdamW(model.parameters())
    model.weight.grad = torch.tensor([[float("inf"), float("nan"), 1.0]])
    optimizer.step()
    other = nn.Linear(3, 1, bias=False, dtype=torch.bfloat16)
    narrow = AdamW(other.parameters(), policy=eb.policies.EXACT_BF16)
    losses = narrow.load_full_state_dict(optimizer.full_state_dict())
    assert {str(loss) for loss in losses.values()} == {"exact"}
    full = narrow.full_state_dict()["state"][0]
    assert full["momentum"].isinf().tolist() == [[True, False, False]]
    assert full["momentum"].isnan().tolist() == [[False, True, False]]


def test_losses_add_up() -> None:
    total = RoundingLoss(0.5, 3.0, 100.0) + RoundingLoss(0.25, 1.0, 300.0)
    assert (total.largest, total.relative) == (0.5, 0.1)
    assert str(total) == "largest 0.5, relative 0.1"
    assert str(RoundingLoss(0.0, 0.0, 5.0)) == "exact"


# -- hooks --------------------------------------------------------------------------------------------------------------------


def test_hooks_run_as_torch_runs_them() -> None:
    """The same hooks on torch's optimizer and on ours see the same calls, and may replace what is saved and loaded."""

    def run(kind: type[torch.optim.Optimizer]) -> tuple[list[str], float]:
        model = nn.Linear(2, 2)
        optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
        seen: list[str] = []

        def replace(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            seen.append("before loading")
            groups = [group | {"lr": 0.25} for group in state_dict["param_groups"]]
            return state_dict | {"param_groups": groups}

        def note(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            seen.append("after saving")

        optimizer.register_step_pre_hook(lambda *_: seen.append("before step"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after step"))
        optimizer.register_state_dict_pre_hook(lambda *_: seen.append("before saving"))
        optimizer.register_state_dict_post_hook(note)
        optimizer.register_load_state_dict_pre_hook(replace)
        optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("after loading"))
        give_gradients(model, 0)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        return seen, float(optimizer.param_groups[0]["lr"])

    ours, theirs = run(AdamW), run(torch.optim.AdamW)
    assert ours == theirs
    assert ours[1] == 0.25


def test_named_parameters_keep_their_names_in_checkpoints() -> None:
    model, reference = nn.Linear(2, 2), nn.Linear(2, 2)
    mine, theirs = AdamW(model.named_parameters()), torch.optim.AdamW(reference.named_parameters())
    for network, optimizer in ((model, mine), (reference, theirs)):
        train(network, optimizer, 1)
    (group,) = mine.state_dict()["param_groups"]
    assert group["param_names"] == theirs.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    assert mine.torch_state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


@pytest.mark.parametrize("policy", ["LEAN_BF16", "EXACT_BF16"])
def test_state_that_is_read_before_the_first_step_changes_no_bit_after_prepare(policy: Any) -> None:
    """Otherwise torch takes a step with zero gradients, so that the first update is smaller."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    trained = []
    for reads in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3).bfloat16()
        optimizer = AdamW(model.parameters(), lr=0.1, policy=policy)
        if reads:
            optimizer.prepare()
            found: Any = get_optimizer_state_dict(model, optimizer)
            assert all(int(state["step"]) == 0 for state in found["state"].values())
        for _ in range(2):
            model(torch.ones(2, 5).bfloat16()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))
