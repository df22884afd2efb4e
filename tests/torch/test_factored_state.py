"""State of other shapes than its parameter: named, stored as a policy says, saved, loaded, counted, and refused where tensors are cut."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import everybit as eb
from everybit.stepping.entries import Entry, entries
from everybit.stepping.layout import Layout
from everybit_torch import TorchOptimizer
from tests.support.small_models import Awkward, give_gradients, same_bits, train, values
from tests.support.transforms import ScaleByFactoredRms, factored

LEAN, FP32 = eb.policies.LEAN_BF16, eb.policies.FP32
STOCHASTIC = replace(LEAN, variance=eb.Stochastic("bfloat16"))
KAHAN = replace(LEAN, variance=eb.Kahan("bfloat16"))
POLICIES = {"FP32": FP32, "LEAN": LEAN, "STOCHASTIC": STOCHASTIC, "KAHAN": KAHAN}


def made(policy: eb.Policy, **arguments: Any) -> tuple[Awkward, TorchOptimizer]:
    model = Awkward(torch.float32 if policy is FP32 else torch.bfloat16)
    return model, TorchOptimizer(model.named_parameters(), factored, lr=1e-2, policy=policy, seed=3, **arguments)


def test_factors_go_by_their_own_names_and_those_of_their_parts() -> None:
    model, optimizer = made(KAHAN)
    train(model, optimizer, 1)
    state = optimizer.state[model.matrix]
    shapes = {name: tuple(x.shape) for name, x in state.items() if name.startswith("variance")}
    assert shapes == {
        "variance.rows": (7,), "variance.rows.residual": (7,), "variance.columns": (5,), "variance.columns.residual": (5,),
    }  # fmt: skip
    assert tuple(optimizer.state[model.vector]["variance"].shape) == (13,)
    assert tuple(optimizer.state[model.other]["variance.rows"].shape) == (3, 2)


def listed(optimizer: eb.Optimizer[Any], p: Tensor) -> list[tuple[Entry, Tensor]]:
    state = optimizer.init([p])
    return entries(Layout.of([p], optimizer.formats([p]), state.inner, state.extra), state)


def test_what_a_factor_is_cut_by_is_said() -> None:
    optimizer = eb.with_policy(factored(0.1), KAHAN)
    params = [torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(5, dtype=torch.bfloat16)]
    rules = [{entry.name: entry.cut for entry, _ in listed(optimizer, p)} for p in params]
    assert rules[0]["variance.rows"] == rules[0]["variance.columns.residual"] == "tensor"
    assert rules[1]["variance"] == rules[0]["momentum"] == "element"


@pytest.mark.parametrize("policy", POLICIES)
def test_the_torch_optimizer_gives_the_cores_bits_and_goes_on_from_a_checkpoint(policy: str) -> None:
    model, optimizer = made(POLICIES[policy])
    core = eb.with_policy(factored(1e-2), POLICIES[policy], seed=3)
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = core.init(params)
    for step in range(5):
        if step == 3:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            other, again = made(POLICIES[policy])
            other.load_state_dict(model.state_dict())
            again.load_state_dict(torch.load(file, weights_only=True))
            model, optimizer = other, again
        give_gradients(model, step)
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        params, state = core.step(params, grads, state)
        optimizer.step()
        assert same_bits(values(model), list(params.values()))


@pytest.mark.exhaustive
def test_compiled_steps_of_factors_give_the_bits_of_uncompiled_ones() -> None:
    found = []
    for compile in (False, True):
        model, optimizer = made(STOCHASTIC, compile=compile)
        found.append(train(model, optimizer, 3))
    assert same_bits(*found)


def test_factors_go_from_one_policy_to_another() -> None:
    """Float32 holds what bfloat16 values and residuals stand for, so that nothing is lost that way."""
    model, optimizer = made(KAHAN)
    train(model, optimizer, 2)
    full = optimizer.full_state_dict()
    wide, again = made(replace(LEAN, variance=eb.Nearest("float32")))
    again.load_full_state_dict(full)
    rows = again.state[wide.matrix]["variance.rows"]
    assert rows.dtype is torch.float32
    assert torch.equal(rows, full["state"][0]["variance.rows"])


def test_a_file_with_factors_of_another_shape_is_refused() -> None:
    model, optimizer = made(LEAN)
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    saved["state"][0]["variance.rows"] = torch.ones(6)
    before = values(model)
    with pytest.raises(ValueError, match=r"variance\.rows.*\(7,\)"):
        optimizer.load_state_dict(saved)
    assert same_bits(values(model), before)


def test_the_pure_core_saves_and_loads_factors() -> None:
    optimizer = eb.with_policy(factored(0.1), KAHAN)
    params = {"w": torch.ones(3, 4, dtype=torch.bfloat16)}
    grads = {"w": torch.linspace(-1, 1, 12).view(3, 4)}
    params, state = optimizer.step(params, grads, optimizer.init(params))
    saved = eb.state_dict(state)
    assert "inner.states[0].variance['w']['rows'][0]" in saved
    again = eb.load_state_dict(optimizer.init(params), saved)
    got, _ = optimizer.step(params, grads, again)
    assert torch.equal(got["w"], optimizer.step(params, grads, state)[0]["w"])


def test_bytes_of_factors_are_counted() -> None:
    optimizer = eb.with_policy(factored(0.1), STOCHASTIC)
    table = optimizer.bytes_table({"w": torch.empty(100, 200, dtype=torch.bfloat16, device="meta")})
    assert table["variance"] == (100 + 200) * 2
    model, torch_optimizer = made(LEAN)
    sizes = 7 + 5 + 13 + 1 + 0 + 6 + 9
    assert torch_optimizer.bytes_table()["variance"] == sizes * 2  # bfloat16
    assert model.empty.numel() == 0


def test_random_bits_of_factors_do_not_depend_on_their_neighbours() -> None:
    """A factor may have more elements than its parameter; those of two parameters draw different bits."""
    optimizer = eb.with_policy(factored(0.1), STOCHASTIC)
    params = [torch.ones(64, 1, dtype=torch.bfloat16), torch.ones(64, 1, dtype=torch.bfloat16)]
    grads = [torch.linspace(0.1, 1, 64).view(64, 1)] * 2
    _, state = optimizer.step(params, grads, optimizer.init(params))
    first, second = state.inner.states[0].variance
    assert not torch.equal(first["rows"], second["rows"])
    _, alone = optimizer.step(params[1:], grads[1:], optimizer.init(params[1:]), eb.Context(first_element=64))
    assert torch.equal(alone.inner.states[0].variance[0]["rows"], second["rows"])


@dataclass(frozen=True, slots=True)
class SaysElement(ScaleByFactoredRms):
    """Says that it may be cut anywhere."""

    cut: ClassVar[eb.Cut] = "element"


def test_factors_of_a_transform_that_may_be_cut_anywhere_are_refused() -> None:
    with pytest.raises(ValueError, match=r"SaysElement\.init: state\.variance: got factors.*cut = 'tensor'"):
        eb.with_policy(SaysElement(), FP32).init({"w": torch.ones(2, 3)})


class Bad(ScaleByFactoredRms):
    """Makes a factor that has no name, at the first step or later."""

    def init(self, params: Any) -> Any:
        state = super().init(params)
        return replace(state, variance={"w": {"rows.of": torch.ones(2)}}) if self.decay == 0.5 else state

    def update(self, updates: Any, state: Any, params: Any, ctx: eb.Context = eb.Context()) -> Any:  # noqa: B008
        return updates, replace(state, variance={"w": {"rows.of": torch.ones(2), "columns": torch.ones(3)}})


def test_factors_without_names_are_refused() -> None:
    params = {"w": torch.ones(2, 3)}
    with pytest.raises(
        ValueError, match=r"state\.variance\['w'\]: got a factor called 'rows\.of'; accepted are identifiers"
    ):
        eb.with_policy(Bad(0.5), FP32).init(params)
    optimizer = eb.with_policy(Bad(), FP32)
    with pytest.raises(ValueError, match=r"Bad\.update: returned a state of another structure: .*rows\.of"):
        optimizer.step(params, params, optimizer.init(params))


def test_factors_stay_factors_of_scalars_and_empty_tensors() -> None:
    tensors: list[Tensor] = [torch.ones(()), torch.ones(0, 3), torch.ones(1, 1)]
    optimizer = eb.with_policy(factored(0.1), FP32)
    new, state = optimizer.step(tensors, tensors, optimizer.init(tensors))
    assert [isinstance(v, dict) for v in state.inner.states[0].variance] == [False, False, True]
    assert all(torch.isfinite(x).all() for x in new)
