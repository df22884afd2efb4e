"""State is loaded by the names of parameters where both sides have them, whatever their order, and by position otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everybit_torch import AdamW

Named = list[tuple[str, nn.Parameter]]
SAVED: dict[str, tuple[Callable[[Any], Any], Callable[..., Any]]] = {
    "as stored": (lambda o: o.state_dict(), lambda o, saved, **how: o.load_state_dict(saved, **how)),
    "in full": (lambda o: o.full_state_dict(), lambda o, saved, **how: o.load_full_state_dict(saved, **how)),
    "torch's": (lambda o: o.torch_state_dict(), lambda o, saved, **how: o.load_torch_state_dict(saved, **how)),
}


def model() -> Named:
    """Two of the same shape, which nothing but names tells apart."""
    torch.manual_seed(0)
    return [(name, nn.Parameter(torch.randn(3))) for name in ("a", "b", "c")]


def trained(params: Any, kind: Callable[..., Any] = AdamW, **options: Any) -> Any:
    optimizer = kind(params, lr=0.1, **options)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = p.detach().cos()
    optimizer.step()
    return optimizer


def momenta(optimizer: Any, named: Named) -> dict[str, Tensor]:
    return {name: optimizer.state[p]["exp_avg"].clone() for name, p in named if p in optimizer.state}


@pytest.mark.parametrize("form", SAVED)
@pytest.mark.parametrize("groups", [1, 2])
def test_another_order_is_matched(form: str, groups: int) -> None:
    save, load = SAVED[form]
    here, there = model(), model()
    optimizer = trained(here)
    params: Any = there[::-1] if groups == 1 else [{"params": there[2:]}, {"params": there[1::-1]}]
    source = optimizer if groups == 1 else trained([{"params": here[:1]}, {"params": here[1:]}])
    other = AdamW(params, lr=0.1, compile=False)
    report = load(other, save(source))
    assert (report.missing_keys, report.unexpected_keys) == ([], [])
    found, expected = momenta(other, there), momenta(source, here)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    order = [name for group in other.param_groups for name in group["param_names"]]
    assert order == ["c", "b", "a"]


def test_a_checkpoint_of_torchs_in_another_order_is_matched() -> None:
    here, there = model(), model()
    theirs = trained(here[::-1], torch.optim.AdamW)
    ours = AdamW(there, lr=0.1, compile=False)
    ours.load_torch_state_dict(theirs.state_dict())
    found, expected = momenta(ours, there), momenta(theirs, here)
    assert all(torch.allclose(found[name], expected[name], rtol=2**-23, atol=0.0) for name in "abc")


@pytest.mark.parametrize("form", SAVED)
def test_other_names_are_refused_or_left_out_and_returned(form: str) -> None:
    save, load = SAVED[form]
    here, there = model(), model()
    source = trained([here[1], here[0], ("x", here[2][1])])
    other = trained(there)
    before, weights = momenta(other, there), [p.detach().clone() for _, p in there]
    with pytest.raises(
        ValueError, match=r"has no \['c'\] and has \['x'\], which the optimizer has not; accepted are .* in any order"
    ):
        load(other, save(source))
    assert all(torch.equal(p, kept) for (_, p), kept in zip(there, weights, strict=True))
    report = load(other, save(source), strict=False)
    assert (report.missing_keys, report.unexpected_keys) == (["c"], ["x"])
    found, expected = momenta(other, there), momenta(source, here)
    assert torch.equal(found["a"], expected["a"])
    assert torch.equal(found["b"], expected["b"])
    assert torch.equal(found["c"], before["c"])


@pytest.mark.parametrize("named", ["saved", "loading", "neither"])
def test_without_names_on_both_sides_position_decides(named: str) -> None:
    here, there = model(), model()
    source = trained(here if named == "saved" else [p for _, p in here])
    other = AdamW(there[::-1] if named == "loading" else [p for _, p in there[::-1]], lr=0.1, compile=False)
    other.load_state_dict(source.state_dict())
    found, expected = momenta(other, there), momenta(source, here)
    assert all(torch.equal(found[name], expected[other]) for name, other in zip("abc", "cba", strict=True))


def test_a_state_dict_without_its_names_goes_by_position() -> None:
    here, there = model(), model()
    saved = trained(here).state_dict()
    for group in saved["param_groups"]:
        del group["param_names"]
    other = AdamW([*there[:2], ("another", there[2][1])], lr=0.1, compile=False)
    other.load_state_dict(saved)
    assert len(momenta(other, there)) == 3


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "module.", "module._orig_mod."])
def test_names_of_a_wrapped_model_are_those_of_the_model(wrapper: str) -> None:
    """A run that was compiled, or ran under DDP, goes on without; and the other way round."""
    here, there = model(), model()
    for source, other in (
        (trained([(wrapper + name, p) for name, p in here]), AdamW(there[::-1], lr=0.1, compile=False)),
        (trained(here), AdamW([(wrapper + name, p) for name, p in there[::-1]], lr=0.1, compile=False)),
    ):
        other.load_state_dict(source.state_dict())
        found, expected = momenta(other, there), momenta(source, here)
        assert all(torch.equal(found[name], expected[name]) for name in "abc")
