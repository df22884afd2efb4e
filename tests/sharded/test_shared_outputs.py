"""Units that return the same tensor, and parts of their weights, where parameters are sharded: the bits of weights that are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import everybit as eb
from everybit_torch import FlatStepper
from everybit_torch.sharded.reports import NanCheck
from tests.support.ranks import run

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.linear(self.norm(x)).tanh()
        return found


class ByARow(nn.Module):
    """Multiplies by a view of its weight, which the backward pass reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.randn(2, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x) * self.weight[0]
        return found


class Outer(nn.Module):
    """Returns the output of a unit inside as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(WIDTH, WIDTH), ByARow()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(self.before(x))
        return found


class Skipped(nn.Module):
    """A layer that drops out of the model in every second call."""

    def __init__(self, phase: int) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), phase

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls % 2 else x + self.linear(x)


class Positions(nn.Module):
    """Returns a part of its weights, whole, expanded or in a dict, beside a result."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.linear, self.how = nn.Parameter(torch.randn(5, WIDTH)), nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        part = {"rows": self.weight[:3], "expanded": self.weight[:1].expand(3, WIDTH), "all": self.weight}[self.how]
        return {"x": self.linear(x), "positions": part}


class WithPositions(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.positions, self.block = Positions(how), Block()

    def forward(self, x: Tensor) -> Tensor:
        found = self.positions(x)
        result: Tensor = self.block(found["x"] + found["positions"][:3])
        return result


class Recomputed(nn.Module):
    """Passes an inner output on from within a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.block = Outer(), Block()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.block(checkpoint(self.outer, x, use_reentrant=False))
        return found


UNITS = (Block, ByARow, Outer, Skipped, Positions)


def units_of(model: nn.Module) -> list[type[nn.Module]]:
    return [kind for kind in UNITS if any(isinstance(module, kind) for module in model.modules())]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "the model returns its last unit's output": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block()),
    "nested, first": lambda: nn.Sequential(Outer(), nn.Linear(WIDTH, WIDTH)),
    "nested, last": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Outer()),
    "three deep": lambda: nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Outer()))),
    "layers drop out": lambda: nn.Sequential(Block(), Skipped(0), Block(), Skipped(1)),
    "all after the first drop out": lambda: nn.Sequential(Block(), Skipped(0), Skipped(0), Skipped(0)),
    "recomputed": Recomputed,
    "rows of a weight": lambda: WithPositions("rows"),
    "an expanded row": lambda: WithPositions("expanded"),
    "a whole weight": lambda: WithPositions("all"),
}
TRANSFORMS: dict[str, Callable[[], Any]] = {"adamw": lambda: eb.adamw(1e-2, eps=1.0), "muon": lambda: eb.muon(1e-2)}


def train(model: nn.Module, transform: str, strategy: Any, **options: Any) -> list[Tensor]:
    stepper = FlatStepper(model, TRANSFORMS[transform](), strategy=strategy, units=units_of(model), **options)
    x = torch.linspace(-1.0, 2.0, 3 * WIDTH).view(3, WIDTH)
    for step in range(3):
        for last in (False, True):
            with stepper.microbatch(last=last):
                model(x + step).square().sum().backward()
        stepper.step()
    with torch.no_grad():
        seen = model(x)
    stepper.close()
    return [seen, *(p.detach().clone() for p in model.parameters())]


def compared(name: str, transform: str) -> bool:
    torch.manual_seed(3)
    model = MODELS[name]()
    other = copy.deepcopy(model)
    # A mean over ranks that have the same data, whose number is a power of two, is exact.
    sharded, whole = train(model, transform, "optim_grads_params"), train(other, transform, "no_shard")
    return all(torch.equal(a, b) for a, b in zip(sharded, whole, strict=True))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", MODELS)
def test_weights_have_the_bits_of_weights_that_are_not_sharded(name: str, transform: str) -> None:
    assert compared(name, transform)


@pytest.mark.parametrize(
    "name", ["the model returns its last unit's output", "nested, last", "layers drop out", "rows of a weight"]
)
def test_so_they_do_on_two_ranks(name: str) -> None:
    assert run(2, compared, name, "muon") == [True, True]


def test_what_a_unit_returned_stays_when_its_weights_are_freed() -> None:
    model = WithPositions("rows")
    expected = model.positions.weight.detach().clone()
    stepper = FlatStepper(model, eb.sgd(0.1), strategy="optim_grads_params", units=units_of(model))
    with torch.no_grad():
        found = model.positions(torch.zeros(3, WIDTH))["positions"]
    assert bool(model.positions.weight.isnan().all())
    assert torch.equal(found, expected[:3])
    stepper.close()


class Hiding(nn.Module):
    """Keeps a tensor, of which the graph has saved a view of a weight, in an attribute, and does not return it."""

    def __init__(self, operation: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.full((3 * WIDTH,), 0.25)), nn.Linear(WIDTH, WIDTH)
        self.operation, self.kept = operation, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.operation(x, self.weight)
        found: Tensor = self.linear(x)
        return found


def of_a_hidden_output(operation: Callable[[Tensor, Tensor], Tensor]) -> str:
    hiding = Hiding(operation)
    model = nn.Sequential(nn.Linear(3, WIDTH), Hiding(operation), hiding)
    stepper = FlatStepper(model, eb.sgd(0.1), strategy="optim_grads_params", units=[Hiding])

    def cycle() -> None:
        with stepper.microbatch(last=True):
            model(torch.ones(2, 3))
            hiding.kept.sum().backward()  # type: ignore[no-untyped-call]

    with pytest.raises(RuntimeError) as raised:
        cycle()
    stepper.zero_grad()
    # And from here on it is a stepper like any other.
    with stepper.microbatch(last=True):
        model(torch.ones(2, 3)).sum().backward()
    assert bool(stepper.step().grad_norm.isfinite())
    return str(raised.value)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "prelu, a view at the start": lambda x, w: functional.prelu(x, w[:1]),
    "prelu, a view": lambda x, w: functional.prelu(x, w[3:4]),
    "a product with a view": lambda x, w: x * w[2 : 2 + WIDTH],
    "a product with rows": lambda x, w: x * w.view(3, WIDTH)[1],
    "a matrix of strides": lambda x, w: x @ w.as_strided((WIDTH, WIDTH), (1, 1)),
    "a detached view": lambda x, w: x * w.detach()[WIDTH : 2 * WIDTH],
    "in float64": lambda x, w: x.double() * w[:WIDTH],
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_hidden_output_is_an_error_by_name_whatever_view_the_graph_has_saved(operation: str) -> None:
    """In a process of its own: reading freed memory ended in SIGSEGV."""
    (message,) = run(1, of_a_hidden_output_of, operation)
    assert message.startswith("2: the backward pass needed weights of this unit")


def of_a_hidden_output_of(name: str) -> str:
    return of_a_hidden_output(OPERATIONS[name])


# -- parameters outside of their unit ------------------------------------------------------------------------------------------------------


PENALTIES: dict[str, Callable[[nn.Module], Tensor]] = {
    "a sum of squares": lambda m: torch.stack([p.square().sum() for p in m.parameters()]).sum(),
    "a norm": lambda m: torch.stack([torch.linalg.vector_norm(p) for p in m.parameters()]).sum(),
    "foreach": lambda m: torch.stack(torch._foreach_norm(list(m.parameters()))).sum(),
    "a vector of all": lambda m: nn.utils.parameters_to_vector(m.parameters()).abs().sum(),
    "a product": lambda m: torch.einsum("ij,ij->", *[next(p for p in m.parameters() if p.ndim == 2)] * 2),
    "with another tensor": lambda m: torch.dot(torch.ones(WIDTH), next(p for p in m.parameters() if p.ndim == 1)),
}


@pytest.mark.parametrize("nan", ["off", "step", "param"])
@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_outside_of_the_units_is_an_error_by_name(name: str, nan: NanCheck) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(Block(), Block())
    whole = copy.deepcopy(model)
    stepper = FlatStepper(model, eb.sgd(0.1), strategy="optim_grads_params", units=[Block], nan=nan)

    def microbatch() -> None:
        with stepper.microbatch(last=True):
            (model(torch.ones(3, WIDTH)).sum() + PENALTIES[name](model)).backward()

    with pytest.raises(RuntimeError, match=r"^0\.(linear|norm)\.\w+: was used out of the forward pass of 0, while"):
        microbatch()
    stepper.zero_grad()
    # What it says instead has the bits of weights that are not sharded.
    with stepper.full_parameters():
        microbatch()
    stepper.step()
    stepper.close()
    (whole(torch.ones(3, WIDTH)).sum() + PENALTIES[name](whole)).backward()
    with torch.no_grad():
        for p in whole.parameters():
            if p.grad is not None:
                p.sub_(p.grad * 0.1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))


def weight_of(model: nn.Sequential) -> nn.Parameter:
    """Of the last block."""
    (*_, block) = model
    return block.get_parameter("linear.weight")


FROZEN: dict[str, Callable[[Tensor, nn.Parameter], Tensor]] = {
    "a linear map": functional.linear,
    "a factor": lambda x, w: x * w.norm(),
    "a product in place": lambda x, w: (x * 1).mul_(w[0]),
    "in float64": lambda x, w: x.double() @ w.double(),
}


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_weight_outside_of_its_unit_is_an_error_by_name(name: str) -> None:
    """It has no gradient itself; NaN were in the loss, and in the gradients of all others."""
    torch.manual_seed(3)
    model = nn.Sequential(Block(), Block())
    model[1].requires_grad_(False)
    stepper = FlatStepper(model, eb.sgd(0.1), strategy="optim_grads_params", units=[Block])

    def microbatch() -> None:
        with stepper.microbatch(last=True):
            FROZEN[name](model(torch.ones(3, WIDTH)), weight_of(model)).sum().backward()  # type: ignore[no-untyped-call]

    with pytest.raises(RuntimeError, match=r"^1\.linear\.weight: was used out of the forward pass of 1, while"):
        microbatch()
    stepper.zero_grad()
    with stepper.full_parameters():
        microbatch()
    stepper.step()
    stepper.close()
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_sharded_parameter_tells_dtype_device_and_shape() -> None:
    model = nn.Sequential(Block(), Block())
    FlatStepper(model, eb.sgd(0.1), strategy="optim_grads_params", units=[Block])
    weight, x = weight_of(model), torch.ones(WIDTH, WIDTH, requires_grad=True) * 1
    for found in (
        x.to(weight),
        x.type_as(weight),
        x.reshape_as(weight),
        x.view_as(weight),
        torch.ones_like(weight) * x,
    ):
        assert torch.equal(found, x)
    with pytest.raises(RuntimeError, match=r"^1\.linear\.weight: was used"):
        weight.to(torch.float64)


def test_what_computes_nothing_with_a_sharded_parameter_is_allowed() -> None:
    block = Block()
    model = nn.Sequential(block, Block())
    stepper = FlatStepper(model, eb.sgd(0.1), strategy="optim_grads_params", units=[Block])
    p = block.linear.weight
    assert isinstance(p, nn.Parameter)
    assert (p.shape, p.dtype, p.ndim, p.numel()) == ((WIDTH, WIDTH), torch.float32, 2, WIDTH**2)
    assert p.is_leaf
    assert p.requires_grad
    assert p.grad is None
    assert torch.autograd.graph.get_gradient_edge(p).node is not None
    p.register_hook(lambda gradient: gradient).remove()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        assert bool(p.square().sum().isnan())
    assert bool(p.detach().isnan().all())
    assert type(copy.deepcopy(p)) is nn.Parameter
    assert "Parameter" in repr(p)
    p.requires_grad_(False).requires_grad_(True)
    stepper.close()
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


# -- writes in a pass ---------------------------------------------------------------------------------------------------------------------


class Renormed(nn.Module):
    """Writes to its weight in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.rows(x)
        return found


class Clamped(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", [Renormed, Clamped])
def test_a_write_in_a_pass_is_an_error_by_name(kind: type[nn.Module], grad: bool) -> None:
    """The write was lost: the next pass gathers the shards."""
    model = nn.Sequential(kind())
    stepper = FlatStepper(model, eb.sgd(0.1), strategy="optim_grads_params", units=[kind])
    x = torch.arange(4) if kind is Renormed else torch.ones(3, WIDTH)
    message = r"^0\.(rows|linear)\.weight: was written to during a pass, in a copy that is freed after it\. Accepted is"

    def used() -> None:
        if not grad:
            with torch.no_grad():
                model(x)
            return
        with stepper.microbatch(last=True):
            model(x).sum().backward()

    with pytest.raises(RuntimeError, match=message):
        used()


class Passing(Block):
    """Returns its input, or its weight."""

    def __init__(self, weight: bool) -> None:
        super().__init__()
        self.returns_weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.linear.weight if self.returns_weight else x


class UnderNoGrad(nn.Module):
    """Calls a unit under no_grad, which returns a tensor of before."""

    def __init__(self, weight: bool) -> None:
        super().__init__()
        self.first, self.dropped, self.last = nn.Linear(WIDTH, WIDTH), Passing(False), Passing(weight)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.dropped(self.first(x))
        with torch.no_grad():
            kept: Tensor = self.last(h)
        return x @ kept if self.last.returns_weight else kept


def test_a_tensor_that_a_unit_returns_under_no_grad_keeps_its_gradient() -> None:
    found = []
    for strategy in ("optim", "optim_grads_params"):
        torch.manual_seed(0)
        model = UnderNoGrad(weight=False)
        stepper = FlatStepper(model, eb.sgd(0.1), strategy=strategy, units=[Passing])
        with stepper.microbatch(last=True):
            model(torch.ones(3, WIDTH)).square().sum().backward()
        stepper.step()
        stepper.close()
        found.append(model.first.weight.detach().clone())
    assert torch.equal(*found)
    torch.manual_seed(0)
    assert not torch.equal(found[0], UnderNoGrad(weight=False).first.weight)


def test_a_weight_that_a_unit_returns_under_no_grad_is_an_error_by_name() -> None:
    """It has its gradient from outside of the unit's pass; that was dropped."""
    model = UnderNoGrad(weight=True)
    stepper = FlatStepper(model, eb.sgd(0.1), strategy="optim_grads_params", units=[Passing])

    def microbatch() -> None:
        with stepper.microbatch(last=True):
            model(torch.ones(3, WIDTH)).square().sum().backward()

    with pytest.raises(
        RuntimeError, match=r"^last\.linear\.weight: its gradient came before that of what its unit, last, returned"
    ):
        microbatch()
