"""Every mistake is named, before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import SGD, AdamW, RMSprop, TorchOptimizer
from tests.support.small_models import Awkward, give_gradients, same_bits, train, values


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": float("nan")}, r"AdamW, param group 0: lr: got nan; accepted is a finite number in \[0, inf\)"),
        ({"lr": float("inf")}, r"lr: got inf"),
        ({"lr": -1.0}, r"lr: got -1.0"),
        ({"eps": -1e-8}, r"eps: got -1e-08"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\]: got 1.0; accepted is a finite number in \[0, 1\)"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\]: got -0.1"),
        ({"betas": (0.9,)}, r"betas: got \(0.9,\); accepted are 2 numbers"),
        ({"weight_decay": -0.1}, r"weight_decay: got -0.1"),
        ({"policy": eb.policies.LEAN_BF16}, r"Split splits a number .* got a float32 tensor"),
        (
            {"policy": eb.policies.ANYPRECISION},
            r"Policy.variance: got Nearest\(dtype='bfloat16'\); 'variance' has a decay rate of 0.999",
        ),
    ],
)
def test_impossible_arguments_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamW(Awkward().parameters(), **arguments)


def test_things_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(TypeError, match=r"lr: got '0.1'; accepted are a number"):
        AdamW(Awkward().parameters(), lr="0.1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"lr: got a tensor of shape \(\) and torch.bfloat16"):
        AdamW(Awkward().parameters(), lr=torch.tensor(0.1, dtype=torch.bfloat16))
    with pytest.raises(
        TypeError, match=r"policy: got 16; accepted are a Policy, such as everybit.policies.LEAN_BF16, its name"
    ):
        AdamW(Awkward().parameters(), policy=16)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "hint"), [(torch.int32, ""), (torch.complex64, "view_as_real")])
def test_parameters_that_are_not_real_floating_point_are_refused(dtype: torch.dtype, hint: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)
    with pytest.raises(TypeError, match=rf"param group 0, parameter 0: got {dtype}; .*{hint}"):
        AdamW([parameter])


def test_a_module_in_the_place_of_its_parameters_is_told_what_to_write() -> None:
    class Net(torch.nn.Module):
        """No iterable, as most modules; nn.Sequential is one."""

    models: list[Any] = [Net(), torch.nn.Sequential(torch.nn.Linear(2, 2))]
    for model in models:
        message = (
            rf"write model\.parameters\(\), or model\.named_parameters\(\)\. Got a {type(model).__name__}, a module"
        )
        for make in (AdamW, lambda params: TorchOptimizer(params, eb.adamw, lr=1e-3)):
            with pytest.raises(TypeError, match=f"^params: {message}"):
                make(model)
        with pytest.raises(TypeError, match=f"^param group 1, 'params': {message}"):
            AdamW([{"params": Awkward().parameters()}, {"params": model}])


def test_a_dict_of_parameters_is_told_of_named_parameters() -> None:
    with pytest.raises(TypeError, match=r"got 'matrix'; accepted are tensors\. model\.named_parameters\(\)"):
        AdamW(dict(Awkward().named_parameters()))  # type: ignore[arg-type]


def test_a_16_bit_model_needs_a_choice() -> None:
    with pytest.raises(ValueError, match=r"policy: parameters are torch.bfloat16|policy: parameters are bfloat16"):
        AdamW(Awkward(torch.bfloat16).parameters())


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(ValueError, match=r"nesterov: got True without momentum"):
        SGD(Awkward().parameters(), nesterov=True)


def test_a_sparse_gradient_is_refused_before_anything_changes() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Embedding(3, 2, sparse=True))
    optimizer = AdamW(model.parameters())
    model[0](model[1](torch.tensor([1]))).sum().backward()
    before = values(model)
    with pytest.raises(
        TypeError, match=r"param group 0, parameter 2: got a torch.sparse_coo gradient; accepted are dense"
    ):
        optimizer.step()
    assert same_bits(before, values(model))


def test_a_learning_rate_that_becomes_nan_is_refused_before_anything_changes() -> None:
    model = Awkward()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 1)
    optimizer.param_groups[0]["lr"] = float("nan")
    give_gradients(model, 5)
    before = values(model)
    with pytest.raises(ValueError, match=r"AdamW, param group 0: lr: got nan"):
        optimizer.step()
    assert same_bits(before, values(model))


def test_a_beta_that_becomes_impossible_for_the_policy_is_refused() -> None:
    model = Awkward(torch.bfloat16)
    optimizer = AdamW(model.parameters(), betas=(0.9, 0.95), policy=eb.policies.PURE_BF16)
    train(model, optimizer, 1)
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    with pytest.raises(ValueError, match=r"decay rate of 0.999"):
        train(model, optimizer, 1)


def test_rmsprop_alpha_goes_by_torchs_name() -> None:
    with pytest.raises(ValueError, match=r"RMSprop, param group 0: alpha: got 1.5"):
        RMSprop(Awkward().parameters(), alpha=1.5)


def test_metrics_that_were_never_taken_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"no step was measured yet"):
        AdamW(Awkward().parameters()).metrics()


def test_a_parameter_that_is_given_twice_is_refused() -> None:
    """torch warns, and steps it twice."""
    model = Awkward()
    with pytest.raises(
        ValueError, match=r"param group 0: parameters 0 and 2 are the same tensor; accepted is each once"
    ):
        AdamW([model.matrix, model.vector, model.matrix])


def test_an_impossible_hyperparameter_at_the_first_step_moves_no_parameter() -> None:
    model = Awkward()
    optimizer = AdamW([{"params": [model.matrix]}, {"params": [model.vector]}])
    optimizer.param_groups[0]["maximize"] = True
    optimizer.param_groups[1]["lr"] = float("nan")
    before = [(p.data_ptr(), p.detach().clone()) for p in model.parameters()]
    give_gradients(model, 0)
    with pytest.raises(ValueError, match=r"AdamW, param group 1: lr: got nan"):
        optimizer.step()
    assert all(
        p.data_ptr() == address and torch.equal(p, old)
        for p, (address, old) in zip(model.parameters(), before, strict=True)
    )
    assert not optimizer.state


def cut(*, refused: bool) -> tuple[list[float], list[Tensor]]:
    """Counts of two parameters, of which one alone was stepped first, and their weights; with a step between that is refused."""
    a, b = (nn.Parameter(torch.ones(64)) for _ in range(2))
    b.grad_dtype = None
    optimizer = AdamW([a, b], lr=1e-2, compile=False)
    gradient = torch.full((64,), 0.5)
    a.grad, b.grad = gradient, None
    optimizer.step()
    if refused:
        a.grad, b.grad = None, gradient.double()
        with pytest.raises(TypeError, match="float64"):
            optimizer.step()
    for _ in range(2):
        a.grad, b.grad = gradient, gradient
        optimizer.step()
    return [float(optimizer.state[p]["step"]) for p in (a, b)], [a.detach(), b.detach()]


def test_a_step_that_is_refused_is_not_counted() -> None:
    (counts, weights), (expected, others) = cut(refused=True), cut(refused=False)
    assert counts == expected == [3.0, 2.0]
    assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))
