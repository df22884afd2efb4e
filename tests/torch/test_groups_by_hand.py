"""``param_groups`` as a list that users extend: state dicts and steps are those of ``torch.optim``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit_torch

MAKERS: list[Callable[..., Any]] = [torch.optim.AdamW, everybit_torch.AdamW]


def parameters() -> list[nn.Parameter]:
    found = [nn.Parameter(torch.linspace(-1.0, 1.0, size)) for size in (5, 3, 4)]
    for number, p in enumerate(found):
        p.grad = torch.cos(torch.arange(p.numel()) + number)
    return found


def run(make: Callable[..., Any], change: Callable[[Any, list[nn.Parameter]], None]) -> tuple[list[Tensor], list[Any]]:
    params = parameters()
    optimizer = make([{"params": params[:1], "lr": 0.1}, {"params": params[1:2], "lr": 0.01}])
    optimizer.step()
    change(optimizer, params)
    saved = optimizer.state_dict()
    for _ in range(2):
        optimizer.step()
    optimizer.param_groups[-1]["lr"] = 0.5
    optimizer.step()
    steps = [float(optimizer.state[p]["step"]) for p in params if p in optimizer.state]
    return [p.detach() for p in params], [[group["params"] for group in saved["param_groups"]], steps]


def new(optimizer: Any, params: list[nn.Parameter]) -> None:
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": params[2:]})


def test_a_group_that_is_put_into_the_list_is_stepped_as_torch_steps_it() -> None:
    (theirs, told), (ours, our_told) = (run(make, new) for make in MAKERS)
    assert our_told == told
    for a, b in zip(ours, theirs, strict=True):
        # Four to eight steps of AdamW in float32, each of which may round differently once by 2^-24 of numbers below 2.
        assert torch.allclose(a, b, rtol=0, atol=16 * 2.0**-23)


def test_a_group_that_cannot_be_added_is_refused_and_stays_in_the_list() -> None:
    params = parameters()
    optimizer = everybit_torch.AdamW(params[:2])
    optimizer.param_groups.append({"params": [params[0]]})
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(ValueError, match="more than one parameter group"):
            call()
    assert len(optimizer.param_groups) == 2
    optimizer.param_groups.pop()
    optimizer.step()


def test_a_group_that_is_in_the_list_twice_is_refused() -> None:
    """torch steps it twice."""
    params = parameters()
    optimizer = everybit_torch.AdamW(params[:2], lr=0.1)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    optimizer.param_groups.extend(optimizer.param_groups)
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match=r"^param_groups: got a group twice; accepted is each once"):
            use()
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))


def test_a_list_with_fewer_groups_says_what_to_write() -> None:
    params = parameters()
    optimizer = everybit_torch.AdamW([{"params": params[:1]}, {"params": params[1:2]}])
    optimizer.param_groups.pop()
    with pytest.raises(
        RuntimeError, match=r"has 1 groups and not the 2 that were added\. To step fewer parameters freeze"
    ):
        optimizer.step()


@pytest.mark.parametrize(
    "use",
    [
        lambda o: o.zero_grad(),
        lambda o: copy.deepcopy(o).step(),
        lambda o: o.export_fp32(),
        lambda o: o.eval_params(),
        lambda o: o.full_state_dict(),
        lambda o: o.torch_state_dict(),
        lambda o: o.bytes_table(),
        everybit_torch.routing,
    ],
)
def test_a_group_put_in_by_hand_is_there_for_everything(use: Callable[[Any], object]) -> None:
    params = parameters()
    optimizer = everybit_torch.AdamW(params[:1], lr=0.1, compile=False)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": params[1:]})
    use(optimizer)
    assert [len(group["params"]) for group in optimizer.state_dict()["param_groups"]] == [1, 2]
    assert list(map(len, optimizer.export_fp32())) == [1, 2]


def test_the_weights_of_a_group_put_in_by_hand_are_exported() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = everybit_torch.AdamW(model[0].parameters(), compile=False)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": list(model[1].parameters())})
    assert everybit_torch.export_weights(model, optimizer).keys() == model.state_dict().keys()


def test_a_parameter_of_another_dtype_put_into_a_group_is_refused_by_the_step() -> None:
    optimizer = everybit_torch.AdamW([nn.Parameter(torch.ones(3).bfloat16())], policy="LEAN_BF16", compile=False)
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))
    for one in (optimizer, copy.deepcopy(optimizer)):
        with pytest.raises(
            RuntimeError, match=r"is torch\.float32, and none was when the optimizer was made.* add_param"
        ):
            one.step()
