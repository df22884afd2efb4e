"""A load that is refused changes nothing, says where, and one that is accepted goes on: one judge stands in front of every loader."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import everybit as eb
from everybit_torch import SGD, AdamW, Lion
from everybit_torch.drop_ins.creating import CLASSES
from tests.support import mutations
from tests.support.mutations import LOADERS, fingerprint, load, make, same, saved_by
from tests.support.small_models import Awkward, same_bits, train, values

Damage = Callable[[dict[str, Any]], Any]


def put(*path: Any) -> Callable[[Any], Damage]:
    """Something else at a place."""

    def value(new: Any) -> Damage:
        def damage(saved: dict[str, Any]) -> None:
            place: Any = saved
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = new

        return damage

    return value


def without(*path: Any) -> Damage:
    def damage(saved: dict[str, Any]) -> None:
        place: Any = saved
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return damage


group, entry = ("param_groups", 0), ("state", 2)
freed = torch.zeros(())
freed.untyped_storage().resize_(0)

REFUSED: dict[str, tuple[Damage, str]] = {
    # Structure.
    "no state": (without("state"), r"state_dict: has no 'state'; accepted is what state_dict\(\) returns"),
    "state no mapping": (put("state")([1]), r"state_dict\['state'\]: got a list of 1; accepted is a mapping"),
    "groups no list": (put("param_groups")({}), r"state_dict\['param_groups'\]: got a dict of 0; accepted is a list"),
    "a group no mapping": (put(*group)(None), r"state_dict\['param_groups'\]\[0\]: got None; accepted is a mapping"),
    "no params": (without(*group, "params"), r"state_dict\['param_groups'\]\[0\]\['params'\]: got None; accepted is a list"),
    "another size": (put(*group, "params")([0, 1]), r"got param groups of \[2\] parameters; accepted are \[4\]"),
    "unhashable numbers": (put(*group, "params")([[0], 1, 2, 3]), r"\['params'\]: got a list of 1; accepted are numbers"),
    "a number twice": (put(*group, "params")([0, 1, 2, 2]), r"parameter 2 is in them twice"),
    "entries no mapping": (put(*entry)(torch.zeros(2)), r"state_dict: parameter 2 has state a tensor, .*; accepted is a mapping"),
    "an entry missing": (without(*entry, "momentum"), r"state_dict: parameter 2 has state \['inner.step', 'step', 'variance'\]; accepted"),
    "an entry of another optimizer": (put(*entry, "mean")(torch.zeros(())), r"parameter 2 has state .*'mean'.*; accepted under"),
    "keys of several types": (put(*entry)({1: 2, "step": 3, None: 4}), r"parameter 2 has state \['step', 1, None\]; accepted"),
    "state of no parameter": (
        lambda saved: saved["state"].update({99: saved["state"].pop(2)}),
        r"state_dict\['state'\]\[99\]: has \['inner.step', .*\], which is the state of a parameter",
    ),
    "names of another number": (put(*group, "param_names")(["a"]), r"\['param_names'\]: got a list of 1; accepted is a list of 4 names"),
    # Tensors.
    "dtype": (put(*entry, "momentum")(torch.zeros((), dtype=torch.float64)), r"parameter 2, 'momentum': got .* torch.float64"),
    "shape": (put(*entry, "momentum")(torch.zeros(1)), r"parameter 2, 'momentum': got .* of shape \(1,\); accepted is"),
    "sparse": (put("state", 0, "momentum")(torch.zeros(2, 3).to_sparse()), r"parameter 0, 'momentum': got a torch.sparse_coo tensor"),
    "meta": (put(*entry, "variance")(torch.zeros((), device="meta")), r"parameter 2, 'variance': got a tensor, .* on meta; accepted"),
    "freed": (put(*entry, "variance")(freed), r"parameter 2, 'variance': got a tensor"),
    "no tensor": (put(*entry, "variance")(0.5), r"parameter 2, 'variance': got 0.5; accepted is torch.float32 of shape \(\)"),
    "negative squares": (put(*entry, "variance")(torch.tensor(-1.0)), r"parameter 2, 'variance': holds negative numbers; accepted are"),
    # Counts.
    "a negative count": (put(*entry, "step")(torch.tensor(-1)), r"parameter 2, 'step': got -1; accepted is .* \[0, 2\*\*53\)"),
    "another one": (put(*entry, "inner.step")(-5), r"parameter 2, 'inner.step': got -5; accepted is a count"),
    "an absurd count": (put(*entry, "step")(2**53), r"parameter 2, 'step': got 9007199254740992; accepted is a count"),
    "a broken count": (put(*entry, "step")(2.5), r"parameter 2, 'step': got 2.5; accepted is a count"),
    "a count that is none": (put(*entry, "step")(float("nan")), r"parameter 2, 'step': got nan; accepted is a count"),
    "a count of several": (put(*entry, "step")(torch.tensor([1, 2])), r"parameter 2, 'step': got a tensor, torch.int64 of shape \(2,\)"),
    # Hyperparameters.
    "lr nan": (put(*group, "lr")(float("nan")), r"state_dict\['param_groups'\]\[0\]: AdamW, param group 0: lr: got nan; accepted"),
    "lr nan in a tensor": (put(*group, "lr")(torch.tensor(float("nan"))), r"state_dict.*: lr: got nan; accepted"),
    "lr a string": (put(*group, "lr")("0.1"), r"state_dict.*: lr: got '0.1'; accepted are a number"),
    "lr a list": (put(*group, "lr")([0.1]), r"state_dict\['param_groups'\]\[0\]\['lr'\]: got a list of 1; accepted is a number"),
    "betas out of range": (put(*group, "betas")((1.5, 2)), r"state_dict.*: betas\[0\]: got 1.5; accepted is a finite number in \[0, 1\)"),
    "betas a number": (put(*group, "betas")(0.9), r"state_dict.*\['betas'\]: got 0.9; accepted is 2 numbers"),
    "eps none": (put(*group, "eps")(None), r"state_dict.*: eps: got None; accepted are a number"),
    "negative decay": (put(*group, "weight_decay")(-1), r"state_dict.*: weight_decay: got -1; accepted"),
    "a schedule of no number": (put(*group, "eps")(lambda step: 4), r"state_dict.*: eps: its schedule gave 4; accepted is a 0-d float32"),
    "a flag that is none": (put(*group, "maximize")("yes"), r"state_dict.*: maximize: got 'yes'; accepted are True and False"),
    "betas the policy refuses": (put(*group, "betas")((0.9, 0.999)), r"state_dict.*Policy.variance: .*0.999"),
    "a lr on meta": (put(*group, "lr")(torch.zeros((), device="meta")), r"state_dict.*\['lr'\]: got a tensor, .* on meta"),
    # What others keep.
    "too deep": (put(*entry, "mine")(mutations.deep(5000)), r"state_dict\['state'\]\[2\]\['mine'\].*: is nested more than 32 deep"),
    "cyclic": (put(*group, "mine")(mutations.cyclic()), r"state_dict\['param_groups'\]\[0\]\['mine'\]\[1\]: contains itself"),
    "not to be copied": (put(*entry, "mine")(mutations.nothing()), r"state_dict\['state'\]\[2\]\['mine'\]: got a generator, which cannot"),
    "kept on meta": (put(*entry, "slow_buffer")(torch.zeros(2, device="meta")), r"\['slow_buffer'\]: got a tensor, .* on meta; accepted"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("alone", [False, True], indirect=True)
@pytest.mark.sampled(3)
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(name: str, steps: int, alone: bool) -> None:
    """Also where parameters have no place yet: they get none, and a frozen one gets no state."""
    damage, message = REFUSED[name]
    policy = "PURE_BF16" if name == "betas the policy refuses" else "FP32"
    source = make("AdamW", policy, steps=4, seed=1)
    saved = copy.deepcopy(source[1].state_dict())
    damage(saved)
    model, optimizer = make("AdamW", policy, steps=steps, seed=2)
    before = fingerprint(model, optimizer)
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer.load_state_dict(saved)
    assert same(before, fingerprint(model, optimizer))
    twin, other = make("AdamW", policy, steps=steps, seed=2)
    for network, one in ((model, optimizer), (twin, other)):
        mutations.take_step(network, one, 9)
    assert same_bits([*model.parameters()], [*twin.parameters()])


def test_an_entry_of_other_code_does_not_take_the_place_of_the_optimizers() -> None:
    """``kept.step`` is how a state dict calls other code's ``step``, of an optimizer that has none."""
    model, optimizer = make("AdamW", "FP32", steps=2, seed=1)
    saved = optimizer.state_dict()
    saved["state"][0]["kept.step"] = 7.5
    optimizer.load_state_dict(saved)
    mutations.take_step(model, optimizer, 9)
    entries = optimizer.state[next(model.parameters())]
    assert (int(entries["step"]), entries["kept.step"]) == (3, 7.5)


@pytest.mark.parametrize("what", [None, [], "state", 3, torch.zeros(2)])
def test_what_is_no_state_dict_is_refused(what: Any) -> None:
    _, optimizer = make("AdamW", "FP32", steps=0, seed=1)
    for loader in ("load_state_dict", "load_full_state_dict", "load_torch_state_dict"):
        with pytest.raises(ValueError, match=r"state_dict: got .*; accepted is what state_dict\(\) returns"):
            getattr(optimizer, loader)(what)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("broken", ["meta", "sparse", "float64", "int32", "shape", "no tensor"])
def test_the_last_tensor_is_judged_before_the_first_is_written(loader: str, steps: int, broken: str) -> None:
    values: dict[str, Callable[[Tensor], Any]] = {
        "meta": lambda x: x.to("meta"), "sparse": lambda x: x.to_sparse(), "float64": lambda x: x.double(),
        "int32": lambda x: x.int(), "shape": lambda x: torch.zeros(9), "no tensor": lambda x: x.tolist(),
    }  # fmt: skip
    saved = saved_by(loader, *make("Adam", "FP32", steps=4, seed=1))
    if loader == "import_fp32":
        saved[1][1] = values[broken](saved[1][1])
    elif loader == "import_weights":
        saved["running"] = values[broken](saved["running"])
    else:
        name = {"load_state_dict": "variance", "load_full_state_dict": "param", "load_torch_state_dict": "exp_avg_sq"}[
            loader
        ]
        saved["state"][2] = dict(saved["state"][2]) | {name: values[broken](torch.ones(()))}
        saved["param_groups"][0]["lr"] = 0.125
    model, optimizer = make("Adam", "FP32", steps=steps, seed=2)
    before = fingerprint(model, optimizer)
    with pytest.raises((ValueError, TypeError)):
        load(loader, model, optimizer, saved)
    assert same(before, fingerprint(model, optimizer))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 12))])
@pytest.mark.slow
def test_damaged_at_random_it_is_refused_and_unchanged_or_accepted_and_goes_on(seed: int) -> None:
    """``mutations.run`` says what is asserted; by hand it was run for many more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes = mutations.run(seed, 250)
    for loader in LOADERS:
        assert outcomes[f"{loader} refused"] > 0
    assert sum(count for name, count in outcomes.items() if name.endswith("accepted")) > 25


def test_two_optimizers_never_share_a_tensor() -> None:
    rate = torch.tensor(1e-2)
    model, other = Awkward(), Awkward()
    optimizer = AdamW(model.parameters(), lr=rate)
    train(model, optimizer, 2)
    optimizer.param_groups[0]["mine"] = [torch.ones(2)]
    resumed = AdamW(other.parameters())
    carried: list[Callable[[], object]] = [
        lambda: resumed.load_state_dict(optimizer.state_dict()),
        lambda: resumed.load_full_state_dict(optimizer.full_state_dict()),
        lambda: resumed.load_torch_state_dict(optimizer.torch_state_dict()),
    ]
    for carry in carried:
        carry()
        assert torch.equal(resumed.param_groups[0]["lr"], rate)
        addresses = [
            {x.data_ptr() for entries in one.state.values() for x in entries.values() if x.numel()}
            | {one.param_groups[0]["lr"].data_ptr(), one.param_groups[0]["mine"][0].data_ptr()}
            for one in (optimizer, resumed)
        ]
        assert not addresses[0] & addresses[1]


def test_what_torchs_checkpoints_hold_of_others_is_kept() -> None:
    model, other = Awkward(), Awkward()
    theirs = torch.optim.AdamW(model.parameters())
    train(model, theirs, 2)
    theirs.state[model.matrix]["slow_buffer"] = torch.full((7, 5), 3.0)
    theirs.state["everybody"] = {"k": 1}  # type: ignore[index]
    mine = AdamW(other.parameters())
    mine.load_torch_state_dict(theirs.state_dict())
    assert torch.equal(mine.state[other.matrix]["slow_buffer"], theirs.state[model.matrix]["slow_buffer"])
    back = mine.torch_state_dict()["state"]
    assert set(back[0]) == {"step", "exp_avg", "exp_avg_sq", "slow_buffer"}
    assert back["everybody"] == {"k": 1}


@pytest.mark.parametrize("kind", [one for one in CLASSES.values() if one.torch_names is not None])
def test_a_checkpoint_of_torchs_is_told_which_method_takes_it(kind: Any) -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    options = {"lr": 1e-3} | ({"momentum": 0.9} if kind is SGD else {})  # without it torch's keeps nothing
    theirs, mine = (
        getattr(torch.optim, kind.__name__)(model.parameters(), **options),
        kind(other.parameters(), **options),
    )
    model(torch.ones(1, 3)).sum().backward()
    theirs.step()
    with pytest.raises(ValueError, match=r"a checkpoint of torch\.optim: load_torch_state_dict\(\) takes it\."):
        mine.load_state_dict(theirs.state_dict())
    mine.load_torch_state_dict(theirs.state_dict())
    assert mine.torch_state_dict()["state"].keys() == theirs.state_dict()["state"].keys()


@pytest.mark.parametrize("loader", ["load_state_dict", "load_full_state_dict", "load_torch_state_dict"])
def test_a_first_step_without_gradients_warns_after_state_was_loaded(loader: str) -> None:
    """As a model whose parameters were replaced between the two: it would train with a fresh optimizer's silence."""
    model, other = Awkward(), Awkward()
    optimizer, resumed = AdamW(model.parameters()), AdamW(other.parameters())
    train(model, optimizer, 2)
    load(loader, model, resumed, saved_by(loader, model, optimizer))
    with pytest.warns(UserWarning, match=r"AdamW.step\(\): no parameter has a gradient any more"):
        resumed.step()
    resumed.step()  # once is enough


def test_nothing_is_said_of_a_first_step_without_gradients_when_nothing_was_loaded() -> None:
    optimizer = AdamW(Awkward().parameters())
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()


def test_hyperparameters_are_taken_as_numpy_has_them() -> None:
    model, other = Awkward(), Awkward()
    optimizer, resumed = SGD(model.parameters(), lr=0.5), SGD(other.parameters(), lr=0.1)
    saved = optimizer.state_dict()
    saved["param_groups"][0] |= {"lr": np.float32(0.5), "momentum": np.float64(0.25), "maximize": np.bool_(False)}
    resumed.load_state_dict(saved)
    assert {name: type(resumed.param_groups[0][name]) for name in ("lr", "momentum", "maximize")} == {
        "lr": float, "momentum": float, "maximize": bool,
    }  # fmt: skip


def test_a_parameter_that_cannot_be_placed_refuses_the_load_before_anything_changes() -> None:
    saved = make("Lion", "FP32", steps=3, seed=1)[1].state_dict()
    model, _ = make("Lion", "FP32", steps=0, seed=2)
    model.matrix.data = torch.zeros(1).expand(2, 3)
    optimizer = Lion(model.parameters(), lr=torch.tensor(1e-2))
    before = fingerprint(model, optimizer)
    with pytest.raises(ValueError, match=r"param group 0, parameter 0: .* are one place in memory"):
        optimizer.load_state_dict(saved)
    assert same(before, fingerprint(model, optimizer))


def test_weights_that_are_no_lists_are_refused() -> None:
    model, optimizer = make("AdamW", "KAHAN_BF16", steps=1, seed=1)
    before = values(model)
    accepted = r"accepted are \[4\], each of its parameter's shape"
    for weights, message in (
        (None, rf"weights: got None; {accepted}"),
        ([torch.zeros(4)], rf"weights\[0\]: got a tensor, .*; {accepted}"),
        ([[]], rf"weights: got \[0\] tensors by param group; {accepted}"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.import_fp32(weights)  # type: ignore[arg-type]
    assert same_bits(before, values(model))


def test_a_policy_is_never_part_of_a_checkpoint() -> None:
    model = Awkward()
    optimizer = AdamW([{"params": list(model.parameters()), "policy": eb.policies.FP32}])
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    assert "policy" not in saved["param_groups"][0]
    optimizer.load_state_dict(saved | {"param_groups": [saved["param_groups"][0] | {"policy": eb.policies.FP64}]})
    assert "policy" not in optimizer.param_groups[0]
