"""Stepping during the backward pass gives the bits of stepping after it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import everybit as eb
from everybit_torch import AdamW, GradientRelease, Lion, TorchOptimizer, enable_gradient_release
from tests.support.small_models import same_bits, values

NAMES = ["FP32", "MIXED_BF16", "EXACT_BF16", "LEAN_BF16", "KAHAN_BF16", "FLOOR_BF16"]
BLOCKS = {
    "LEAN_8BIT": eb.policies.LEAN_8BIT,
    "LEAN_4BIT": eb.policies.LEAN_4BIT,
    "blocks of 32": eb.Policy(
        params=eb.Split(8, rounding="stochastic"),
        momentum=eb.Blockwise("dynamic", block=32),
        variance=eb.Blockwise("float", 4, 32, scale="bfloat16"),
    ),
}
"""Parameters of 64 elements lie in one buffer with their neighbours; those of others end inside a block, and are stepped alone."""


class Network(nn.Module):
    """Three layers, one of which may be left out of a pass, and a tied weight."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 6, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        self.last.weight = nn.Parameter(self.first.weight.detach().t().contiguous())
        self.to(dtype)

    def forward(self, x: Tensor, without_middle: bool = False) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if not without_middle:
            hidden = torch.tanh(self.middle(hidden)) * self.scale
        # `last` is used twice: its gradient is ready only when both have been added.
        out: Tensor = self.last(torch.tanh(self.first(self.last(hidden))))
        return out


def loss_of(model: Network, step: int, part: int = 0, *, without_middle: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    dtype = model.first.weight.dtype
    x, target = torch.randn(2, 4, 6, generator=generator).to(dtype)
    out: Tensor = model(x, without_middle)
    loss: Tensor = (out.float() - target.float()).square().mean()
    return loss


def make(name: str, **arguments: Any) -> tuple[Network, AdamW]:
    model = Network(torch.float32 if name == "FP32" else torch.bfloat16)
    policy = BLOCKS.get(name) or eb.policies.PRESETS[name]
    return model, AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), policy=policy, **arguments)


def everything(model: nn.Module, optimizer: TorchOptimizer) -> list[Tensor]:
    return [*values(model), *(x.clone() for p in model.parameters() for x in optimizer.state[p].values())]


# -- the law: a released run has the bits of the plain run -----------------------------------------------------------------------

Program = Callable[[bool], list[Tensor]]
"""Trains with gradient release, or without; returns weights, state, and what else must be the same."""


def begin(name: str, released: bool, **arguments: Any) -> tuple[Network, AdamW, GradientRelease | None]:
    model, optimizer = make(name, **arguments)
    return model, optimizer, enable_gradient_release(model, optimizer) if released else None


def stepped(loss: Tensor, optimizer: TorchOptimizer) -> None:
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def plainly(name: str, **arguments: Any) -> Program:
    def program(released: bool) -> list[Tensor]:
        model, optimizer, _ = begin(name, released, **arguments)
        for step in range(5):
            loss_of(model, step).backward()  # type: ignore[no-untyped-call]
            assert all((p.grad is None) == released for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        return everything(model, optimizer)

    return program


def accumulated(released: bool) -> list[Tensor]:
    """The last of three passes steps."""
    model, optimizer, release = begin("LEAN_BF16", released)
    for step in range(4):
        with nullcontext() if release is None else release.accumulate():
            for part in range(2):
                loss_of(model, step, part).backward()  # type: ignore[no-untyped-call]
            if release is not None:
                with pytest.raises(RuntimeError, match=r"optimizer.step\(\) was called within accumulate\(\)"):
                    optimizer.step()
        stepped(loss_of(model, step, 2), optimizer)
    return everything(model, optimizer)


def partly(released: bool) -> list[Tensor]:
    """Parameters that receive nothing are skipped, and those beside them in a bucket are not."""
    model, optimizer, _ = begin("FLOOR_BF16", released)
    for step in range(6):
        stepped(loss_of(model, step, without_middle=step in (1, 4)), optimizer)
    for step in range(5):
        loss = model.middle.weight.float().square().sum() * (step + 1)
        if step % 2:
            loss = loss + model.last.weight.float().square().sum() + model.first.bias.float().sum()
        stepped(loss, optimizer)
    return everything(model, optimizer)


def scheduled_and_measured(released: bool) -> list[Tensor]:
    model, optimizer, _ = begin("PURE_BF16", released, metrics=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(4):
        stepped(loss_of(model, step), optimizer)
        schedule.step()
    assert optimizer.metrics().lost_share > 0
    return [*everything(model, optimizer), optimizer.metrics().lost_share]  # a share of counts, which are exact


def resumed_and_frozen(released: bool) -> list[Tensor]:
    model, optimizer = make("LEAN_BF16")
    for first in (0, 3):
        model.middle.weight.requires_grad_(False)
        if released:
            enable_gradient_release(model, optimizer)
        for step in range(first, first + 3):
            stepped(loss_of(model, step), optimizer)
        if not first:
            (other, resumed), weights, state = make("LEAN_BF16"), model.state_dict(), optimizer.state_dict()
            other.load_state_dict(weights)
            resumed.load_state_dict(state)
            model, optimizer = other, resumed
    return everything(model, optimizer)


def removed(released: bool) -> list[Tensor]:
    model, optimizer, release = begin("KAHAN_BF16", released)
    for step in range(4):
        if release is not None and step == 2:
            release.remove()
        loss_of(model, step).backward()  # type: ignore[no-untyped-call]
        assert (model.scale.grad is None) == (released and step < 2)
        optimizer.step()
        optimizer.zero_grad()
    return everything(model, optimizer)


def of_lion(released: bool) -> list[Tensor]:
    model = Network()
    optimizer = Lion(model.parameters(), lr=1e-3, weight_decay=0.1)
    if released:
        enable_gradient_release(model, optimizer)
    for step in range(3):
        stepped(loss_of(model, step), optimizer)
    return everything(model, optimizer)


def growing(name: str) -> Program:
    """Parameters are unfrozen, frozen and added between steps."""

    def program(released: bool) -> list[Tensor]:
        model = Network(torch.float32 if name == "FP32" else torch.bfloat16)
        own = [p for part in (model.first, model.middle) for p in part.parameters()]
        optimizer = AdamW(own, lr=1e-2, betas=(0.9, 0.95), policy=eb.policies.PRESETS[name])
        model.middle.weight.requires_grad_(False)
        if released:
            enable_gradient_release(model, optimizer)
        for step in range(8):
            if step == 2:
                model.middle.weight.requires_grad_(True)
            if step == 3:
                optimizer.add_param_group({"params": [model.last.weight], "lr": 5e-3})
            if step == 4:
                optimizer.param_groups[0]["params"].append(model.scale)
            if step == 5:
                model.first.bias.requires_grad_(False)
            if step == 6:
                model.first.bias.requires_grad_(True)
                model.first.weight.requires_grad_(False)
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                parameter.grad = None
            loss_of(model, step, without_middle=step == 7).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if released:
                assert all(p.grad is None for group in optimizer.param_groups for p in group["params"])
        return everything(model, optimizer)

    return program


def checkpointed(reentrant: bool) -> Program:
    """Passes within the pass."""

    def program(released: bool) -> list[Tensor]:
        model, optimizer, _ = begin("KAHAN_BF16", released)
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).bfloat16().requires_grad_()
            hidden = checkpoint(
                lambda x: torch.tanh(model.middle(torch.tanh(model.first(x)))), x, use_reentrant=reentrant
            )
            stepped(model.last(hidden).float().square().mean(), optimizer)
        return everything(model, optimizer)

    return program


PROGRAMS: dict[str, Program] = {
    **{name: plainly(name) for name in (*NAMES, *BLOCKS)},
    "compiled": plainly("KAHAN_BF16", compile=True),
    "accumulated": accumulated,
    "partly": partly,
    "scheduled and measured": scheduled_and_measured,
    "resumed and frozen": resumed_and_frozen,
    "removed": removed,
    "lion": of_lion,
    "growing": growing("FP32"),
    "growing, in 16 bits": growing("FLOOR_BF16"),
    "checkpointed": checkpointed(False),
    "checkpointed, reentrant": checkpointed(True),
}
EXHAUSTIVE = ("LEAN_8BIT", "LEAN_4BIT", "compiled")


@pytest.mark.parametrize("alone", [False, True], indirect=True)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name in EXHAUSTIVE else ()) for name in PROGRAMS]
)
@pytest.mark.sampled(2)
def test_a_released_run_has_the_bits_of_the_plain_run(name: str, alone: bool) -> None:
    assert same_bits(*(PROGRAMS[name](released) for released in (False, True)))


@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_clipping_by_the_previous_steps_norm(alone: bool) -> None:
    """Against torch: the same clipping done by hand on a float64 run of torch.optim.AdamW."""
    max_norm = 0.05
    model, reference = Network(torch.float64), Network(torch.float64)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    release = enable_gradient_release(model, optimizer, max_norm=max_norm)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    assert release.norm is None
    previous: Tensor | None = None
    norms: list[float] = []
    for step in range(6):
        loss_of(model, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss_of(reference, step).backward()  # type: ignore[no-untyped-call]
        grads = [p.grad for p in reference.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        if previous is not None:
            nn.utils.clip_grads_with_norm_(reference.parameters(), max_norm, previous)
        theirs.step()
        theirs.zero_grad()
        assert release.norm is not None
        # Both in float64, in another order of addition.
        torch.testing.assert_close(release.norm, norm, rtol=1e-12, atol=0)
        previous = norm
        norms.append(float(norm))
        for a, b in zip(values(model), values(reference), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert max(norms) > max_norm


@pytest.mark.parametrize("alone", [True], indirect=True)
def test_gradients_of_long_parameters_never_exist_all_at_once(alone: bool) -> None:
    """Seen at each parameter's arrival: the others' gradients are gone."""
    model, optimizer = make("FP32")
    enable_gradient_release(model, optimizer)
    present: list[int] = []

    def count(parameter: Tensor) -> None:
        present.append(sum(p.grad is not None for p in model.parameters()))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)  # type: ignore[no-untyped-call]
    loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
    assert len(present) == 6
    # Ours ran first and freed what it stepped.
    assert max(present) <= 1


def test_what_cannot_be_is_refused() -> None:
    model, optimizer = make("FP32")
    with pytest.raises(TypeError, match=r"optimizer: got a AdamW; accepted are everybit_torch's optimizers"):
        enable_gradient_release(model, torch.optim.AdamW(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"max_norm: got nan"):
        enable_gradient_release(model, optimizer, max_norm=float("nan"))
    with pytest.raises(ValueError, match=r"param group 0, parameter 0.* is no parameter of the model"):
        enable_gradient_release(nn.Linear(2, 2), optimizer)

    def clipped(learning_rate: float) -> eb.Transform[Any]:
        return eb.chain(eb.clip_by_global_norm(1.0), eb.scale_by_learning_rate(learning_rate))

    with pytest.raises(ValueError, match=r"reduces over all gradients .* max_norm clips by the previous"):
        enable_gradient_release(model, TorchOptimizer(model.parameters(), clipped, lr=0.1))
    enable_gradient_release(model, optimizer)
    with pytest.raises(ValueError, match=r"its gradients are released already; call remove\(\)"):
        enable_gradient_release(model, optimizer)
    with pytest.raises(RuntimeError, match=r"an optimizer that steps by hooks cannot be copied"):
        copy.deepcopy(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(closure\) would run the backward pass again"):
        optimizer.step(lambda: 0.0)
    held, other = make("FP32")
    loss_of(held, 0).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match=r"model: holds gradients already; call optimizer.zero_grad\(\) first"):
        enable_gradient_release(held, other)


def test_a_clip_that_a_hyperparameter_begins_is_refused_before_a_weight_changes() -> None:
    def clipped(learning_rate: eb.Hyperparameter, clip: bool = False) -> eb.Transform[Any]:
        return eb.chain(*([eb.clip_by_global_norm(1.0)] if clip else []), eb.scale_by_learning_rate(learning_rate))

    model = Network()
    optimizer = TorchOptimizer(model.parameters(), clipped, lr=0.1, clip=False, compile=False)
    enable_gradient_release(model, optimizer)
    optimizer.param_groups[0]["clip"] = True
    before = values(model)
    with pytest.raises(ValueError, match="reduces over all gradients"):
        loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
    optimizer.zero_grad()
    assert same_bits(before, values(model))
    optimizer.param_groups[0]["clip"] = False
    loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert not same_bits(before, values(model))


def test_a_second_backward_pass_without_a_step_is_an_error_and_changes_nothing_more() -> None:
    model, optimizer = make("FP32")
    enable_gradient_release(model, optimizer)
    loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
    after = values(model)
    with pytest.raises(RuntimeError, match=r"a second backward pass reached parameters that were stepped already"):
        loss_of(model, 1).backward()  # type: ignore[no-untyped-call]
    assert same_bits(after, values(model))


def test_grad_scaler_is_refused_by_name() -> None:
    model, optimizer = make("FP32")
    enable_gradient_release(model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match=r"gradient release: got a GradScaler"):
        scaler.step(optimizer)


# -- parameters that come, and passes that do not end -----------------------------------------------------------------------------


def test_when_all_that_is_trained_is_new_it_is_trained() -> None:
    model, optimizer = make("FP32")
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is model.scale)
    enable_gradient_release(model, optimizer)
    model.scale.requires_grad_(False)
    model.last.weight.requires_grad_(True)
    before = model.last.weight.detach().clone()
    loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert not torch.equal(before, model.last.weight)


def test_a_parameter_that_is_no_part_of_the_model_is_refused_when_it_is_added_later() -> None:
    model, optimizer = make("FP32")
    enable_gradient_release(model, optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match=r"param group 1, parameter 0 is no parameter of the model"):
        loss_of(model, 0).backward()  # type: ignore[no-untyped-call]


class BrokenError(RuntimeError):
    pass


def break_at(parameter: Tensor) -> Any:
    def fail(gradient: Tensor) -> None:
        raise BrokenError

    return parameter.register_hook(fail)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("alone", [True], indirect=True)
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_after_an_exception_in_the_backward_pass_zero_grad_begins_a_new_step(
    alone: bool, max_norm: float | None
) -> None:
    """What was stepped before it stays stepped: the run goes on as one that was given these weights and this state."""
    model, optimizer = make("LEAN_BF16")
    release = enable_gradient_release(model, optimizer, max_norm=max_norm)
    for step in range(2):
        loss_of(model, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    before = values(model)
    hook = break_at(model.first.weight)
    with pytest.raises(BrokenError):
        loss_of(model, 2).backward()  # type: ignore[no-untyped-call]
    hook.remove()
    assert not same_bits(before, values(model))  # the last layers were stepped
    stepped = values(model)
    with pytest.raises(
        RuntimeError, match=r"the backward pass before this one ended in an exception.*call optimizer.zero_grad\(\)"
    ):
        loss_of(model, 3).backward()  # type: ignore[no-untyped-call]
    assert same_bits(stepped, values(model))
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    release.remove()
    twin_model, twin = copy.deepcopy((model, optimizer))
    enable_gradient_release(model, optimizer)
    enable_gradient_release(twin_model, twin)
    for step in range(3, 5):
        for network, one in ((model, optimizer), (twin_model, twin)):
            loss_of(network, step).backward()  # type: ignore[no-untyped-call]
            one.step()
    assert same_bits(everything(model, optimizer), everything(twin_model, twin))


def test_zero_grad_between_a_pass_and_its_step_does_not_hide_that_the_step_was_forgotten() -> None:
    model, optimizer = make("FP32")
    enable_gradient_release(model, optimizer)
    loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"a second backward pass reached parameters that were stepped already"):
        loss_of(model, 1).backward()  # type: ignore[no-untyped-call]


def test_removing_twice_is_removing_once() -> None:
    model, optimizer = make("FP32")
    release = enable_gradient_release(model, optimizer)
    release.remove()
    release.remove()
    again = enable_gradient_release(model, optimizer)
    release.remove()  # not the one that is in force
    loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    again.remove()


@pytest.mark.slow
def test_a_model_that_nobody_has_is_freed_with_its_optimizer() -> None:
    def trained() -> weakref.ref[nn.Module]:
        model = nn.Linear(3, 3)
        optimizer = AdamW(model.parameters())
        enable_gradient_release(model, optimizer)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return weakref.ref(model)

    reference = trained()
    gc.collect()
    assert reference() is None
