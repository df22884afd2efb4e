"""An optimizer of torch's is taken over with its param groups, hyperparameters and state; what cannot be is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from everybit_torch import SGD, Adam, AdamW, Lion, RMSprop, TorchOptimizer
from everybit_torch.drop_ins.drop_in import DropIn
from tests.support.closed_optim import CLOSED, lacks_gradient
from tests.support.small_models import Awkward, same_bits, train

PAIRS: list[tuple[type[DropIn], type[torch.optim.Optimizer], dict[str, Any]]] = [
    (AdamW, torch.optim.AdamW, {"foreach": True, "weight_decay": 0.1}),
    (Adam, torch.optim.Adam, {"capturable": False, "betas": (0.8, 0.95)}),
    (SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (RMSprop, torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    *((ours, theirs, options) for ours, theirs, options in CLOSED),
]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [{"params": named[:2], "lr": 3e-3, "initial_lr": 7e-3}, {"params": named[2:], "weight_decay": 0.2}]


@pytest.mark.parametrize(("ours", "theirs", "options"), PAIRS)
def test_it_steps_as_if_the_state_dict_had_been_loaded(
    ours: type[DropIn], theirs: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    model = Awkward()
    old = theirs(two_groups(model), **{"lr": 1e-2, **options})

    def without(_step: int, name: str) -> bool:
        return lacks_gradient(ours, name)

    train(model, old, 3, without=without)
    other = copy.deepcopy(model)
    taken = ours.from_torch(old, seed=5)
    expected: TorchOptimizer = ours(two_groups(other), lr=1e-2)  # type: ignore[call-arg]
    expected.load_torch_state_dict(old.state_dict())
    assert type(taken) is ours
    assert ours.torch_names is not None
    keys = {"params", *ours.torch_names.options}
    for mine, group in zip(taken.param_groups, old.param_groups, strict=True):
        assert mine["params"] == group["params"]
        assert {key: mine[key] for key in group if key not in keys} == {
            key: value for key, value in group.items() if key not in keys
        }
    assert taken.param_groups[0]["initial_lr"] == 7e-3
    assert same_bits(
        train(model, taken, 3, start=3, without=without), train(other, expected, 3, start=3, without=without)
    )


def test_a_group_added_later_has_the_defaults_of_the_old_optimizer() -> None:
    model = Awkward()
    taken = AdamW.from_torch(torch.optim.AdamW(model.parameters(), lr=0.25, betas=(0.5, 0.75)))
    taken.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert (taken.param_groups[1]["lr"], taken.param_groups[1]["betas"]) == (0.25, (0.5, 0.75))


def test_a_tensor_among_the_hyperparameters_is_copied() -> None:
    old = torch.optim.AdamW(Awkward().parameters(), lr=torch.tensor(0.5))
    taken = AdamW.from_torch(old)
    old.param_groups[0]["lr"].fill_(0.25)
    assert float(taken.param_groups[0]["lr"]) == 0.5


def test_float32_state_is_stored_under_the_policy() -> None:
    model = Awkward(torch.bfloat16)
    old = torch.optim.AdamW(model.parameters())
    train(model, old, 2)
    taken = AdamW.from_torch(old, policy="EXACT_BF16")
    for parameter, entry in old.state.items():
        assert torch.equal(taken.state[parameter]["exp_avg"], entry["exp_avg"].float())
        assert taken.state[parameter]["variance"].dtype is torch.float32


class Subclass(torch.optim.AdamW):
    """Steps as AdamW does, and nobody can know."""


@pytest.mark.parametrize(
    ("cls", "make", "message"),
    [
        (AdamW, torch.optim.Adam, r"AdamW.from_torch: got torch.optim.adam.Adam; .* Adam.from_torch takes this one"),
        (Adam, torch.optim.AdamW, r"accepted is torch.optim.Adam itself; AdamW.from_torch takes this one"),
        (AdamW, Subclass, r"got .*Subclass; accepted is torch.optim.AdamW itself; a subclass may step in another way"),
        (AdamW, AdamW, r"full_state_dict\(\) and load_full_state_dict\(\) carry the state"),
        (AdamW, lambda _: None, r"got builtins.NoneType"),
    ],
)  # fmt: skip
def test_another_class_is_refused(cls: type[DropIn], make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        cls.from_torch(make(Awkward().parameters()))


def test_an_option_that_changes_the_step_is_refused() -> None:
    option = "differentiable"
    groups: list[dict[str, Any]] = [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)]
    groups[1][option] = True
    with pytest.raises(ValueError, match=rf"AdamW.from_torch: param group 1, '{option}': got True; accepted is False"):
        AdamW.from_torch(torch.optim.AdamW(groups))


def test_hooks_are_refused_by_the_name_of_their_registration_and_may_be_removed() -> None:
    old = torch.optim.SGD(Awkward().parameters())
    handles = [
        old.register_step_post_hook(lambda *_: None),
        old.register_load_state_dict_pre_hook(lambda *_: None),
    ]
    with pytest.raises(ValueError, match=r"hooks of register_step_post_hook, register_load_state_dict_pre_hook;"):
        SGD.from_torch(old)
    for handle in handles:
        handle.remove()
    SGD.from_torch(old)


def test_what_torch_does_not_have_cannot_be_taken_from_it() -> None:
    assert not hasattr(Lion, "from_torch")
