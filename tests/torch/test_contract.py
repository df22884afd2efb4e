"""What training loops rely on beyond the numbers: scalers, tensor learning rates, graphs that know their weights changed, no waiting."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import SGD, Adam, AdamW, Lion, RMSprop, TorchOptimizer
from tests.support.readbacks import ReadBackError, Readbacks
from tests.support.small_models import Awkward, same_bits, train, values


def test_a_grad_scaler_skips_the_step_that_overflowed_and_follows_torch_else() -> None:
    model, reference = nn.Linear(4, 3), nn.Linear(4, 3)
    reference.load_state_dict(model.state_dict())
    pairs: list[tuple[nn.Linear, torch.optim.Optimizer, Any]] = [
        (model, AdamW(model.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", init_scale=1024.0)),
        (reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", init_scale=1024.0)),
    ]
    for step in range(5):
        for network, optimizer, scaler in pairs:
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            scaler.scale(network(x).square().mean()).backward()
            if step == 2:
                assert network.weight.grad is not None
                network.weight.grad[0, 0] = float("inf")
            before = values(network)
            scaler.step(optimizer)
            scaler.update()
            assert same_bits(before, values(network)) == (step == 2)
            assert scaler.get_scale() == (1024.0 if step < 2 else 512.0)
    # Five steps of float32, each within a few units in the last place of torch's, on weights below 1.
    for a, b in zip(values(model), values(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5 * 4 * 2**-24)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("arguments", [{}, {"compile": True}])
def test_a_step_that_overflowed_leaves_every_bit_of_weights_and_state(arguments: dict[str, Any]) -> None:
    model = nn.Linear(4, 3, dtype=torch.bfloat16)
    # A step that draws no random bits is compiled in half the time.
    policy = eb.policies.EXACT_BF16 if "compile" in arguments else eb.policies.LEAN_BF16
    optimizer = AdamW(model.parameters(), lr=1e-2, policy=policy, **arguments)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    moved = []
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 4, dtype=torch.bfloat16)).float().sum()).backward()
        if step == 2:
            assert model.bias.grad is not None
            model.bias.grad[1] = float("nan")
        before = values(model) + [x.clone() for p in model.parameters() for x in optimizer.state[p].values()]
        scaler.step(optimizer)
        scaler.update()
        after = values(model) + [x for p in model.parameters() for x in optimizer.state[p].values()]
        moved.append(step == 0 or not same_bits(before, after))
    assert moved == [True, True, False, True]
    assert scaler.get_scale() == 512.0


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("compile", [False, True])
def test_a_learning_rate_may_be_a_tensor_and_is_read_at_every_step(compile: bool) -> None:
    if compile:
        torch._dynamo.reset()
    rate = torch.tensor(1e-2, dtype=torch.float64)
    model, reference = Awkward(torch.float64), Awkward(torch.float64)
    mine: TorchOptimizer = (
        SGD(model.parameters(), lr=rate, momentum=0.9, compile=True) if compile else AdamW(model.parameters(), lr=rate)
    )
    theirs: torch.optim.Optimizer = (
        torch.optim.SGD(reference.parameters(), lr=1e-2, momentum=0.9)
        if compile
        else torch.optim.AdamW(reference.parameters(), lr=1e-2)
    )
    for step in range(4):
        rate.fill_(1e-2 / (1 + step))
        theirs.param_groups[0]["lr"] = 1e-2 / (1 + step)
        train(model, mine, 1, start=step)
        train(reference, theirs, 1, start=step)
    assert mine.param_groups[0]["lr"] is rate
    for a, b in zip(values(model), values(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [AdamW, Adam, Lion, RMSprop, SGD])
@pytest.mark.parametrize("name", ["FP32", "LEAN_BF16", "KAHAN_BF16", "FLOOR_BF16"])
@pytest.mark.parametrize("arguments", [{}, {"metrics": True}])
def test_a_step_never_waits_for_the_device(kind: Any, name: str, arguments: dict[str, Any]) -> None:
    model = nn.Linear(5, 3, dtype=torch.float32 if name == "FP32" else torch.bfloat16)
    rate = torch.tensor(1e-3)
    optimizer = kind(model.parameters(), lr=rate, policy=eb.policies.PRESETS[name], **arguments)
    x = torch.ones(2, 5, dtype=model.weight.dtype)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).float().square().sum().backward()
        with Readbacks().watching():
            optimizer.step()
    with pytest.raises(ReadBackError, match="_local_scalar_dense"), Readbacks().watching():
        rate.item()


@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_a_graph_from_before_a_step_is_not_run_on_the_weights_after_it(alone: bool) -> None:
    """As in torch: the gradients would be wrong, so backward refuses."""
    for kind, arguments in ((AdamW, {}), (torch.optim.AdamW, {})):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        optimizer: torch.optim.Optimizer = kind(model.parameters(), **arguments)
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("kind", [AdamW, torch.optim.AdamW])
def test_one_parameter_in_two_groups_is_refused_as_torch_does(kind: Any) -> None:
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        kind([{"params": [weight]}, {"params": [weight]}])


def test_tied_weights_are_stepped_once_and_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            with torch.no_grad():
                self.embedding.weight.copy_(torch.arange(15.0).view(5, 3) / 15)
            self.head.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.embedding(x))
            return out

    model, reference = Tied().double(), Tied().double()
    mine, theirs = AdamW(model.parameters(), lr=0.1), torch.optim.AdamW(reference.parameters(), lr=0.1)
    for network, optimizer in ((model, mine), (reference, theirs)):
        for _ in range(3):
            optimizer.zero_grad()
            network(torch.tensor([0, 3])).square().sum().backward()
            optimizer.step()
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()
    torch.testing.assert_close(model.head.weight, reference.head.weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["labels", "groups"])
def test_a_model_of_several_dtypes(how: str) -> None:
    """Policies chosen by label or by param group."""
    model, reference = Awkward(), Awkward()
    for network in (model, reference):
        for parameter in (network.matrix, network.other):
            parameter.data = parameter.data.bfloat16().float()
    for parameter in (model.matrix, model.other):
        parameter.data = parameter.data.bfloat16()
    wide, narrow = eb.policies.FP32, eb.policies.EXACT_BF16
    if how == "labels":
        policy = eb.by_label(
            lambda path, p: "wide" if p.dtype is torch.float32 else "narrow", {"wide": wide, "narrow": narrow}
        )
        mine = AdamW(model.parameters(), policy=policy)
    else:
        groups = [
            {"params": [p for p in model.parameters() if p.dtype is dtype], "policy": policy}
            for dtype, policy in ((torch.float32, wide), (torch.bfloat16, narrow))
        ]
        mine = AdamW(groups)
    theirs = AdamW(reference.parameters())
    for step in range(4):
        for network, optimizer in ((model, mine), (reference, theirs)):
            generator = torch.Generator().manual_seed(step)
            for parameter in network.parameters():
                gradient = torch.randn(parameter.shape, generator=generator).bfloat16()
                parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()
    # EXACT_BF16 weights are the float32 run's, bit for bit.
    held = {
        id(p): w
        for group, weights in zip(mine.param_groups, mine.export_fp32(), strict=True)
        for p, w in zip(group["params"], weights, strict=True)
    }
    assert same_bits([held[id(p)] for p in model.parameters()], values(reference))


@pytest.mark.slow
def test_without_a_compiler_the_step_is_the_same_bits_and_says_so_once(tmp_path: Path) -> None:
    """In a process whose PATH has no C++ compiler."""
    program = textwrap.dedent(
        """
        import sys, warnings, torch, everybit as eb
        from everybit_torch import AdamW
        results, said = [], []
        for compile in (False, True):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(9, 7), torch.nn.Linear(7, 2)).bfloat16()
            optimizer = AdamW(model.parameters(), lr=1e-2, policy=eb.policies.EXACT_BF16, compile=compile)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for step in range(3):
                    optimizer.zero_grad()
                    model(torch.ones(2, 9, dtype=torch.bfloat16)).float().square().sum().backward()
                    optimizer.step()
            said.append([str(w.message) for w in caught if "compiler" in str(w.message)])
            results.append([w for group in optimizer.export_fp32() for w in group])
        assert all(torch.equal(a, b) for a, b in zip(*results)), "other bits"
        assert said[0] == [] and len(said[1]) == 1, said
        print(said[1][0])
        """
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("PATH", "CXX", "CC")}
    environment |= {"PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "C++ compiler" in done.stdout


def test_a_model_that_was_given_other_parameters_is_noticed() -> None:
    """In torch nothing says that the optimizer steps what the model no longer has."""
    model = nn.Linear(2, 2)
    optimizer = AdamW(model.parameters())
    optimizer.step()  # before any gradient, as schedulers want it: nothing to say
    for assign in (False, True):
        model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=assign)
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        if assign:
            with pytest.warns(UserWarning, match=r"no parameter has a gradient any more.*assign=True") as caught:
                optimizer.step()
            assert caught[0].filename == __file__
            optimizer.step()  # once is enough
        else:
            optimizer.step()


def test_parameters_swapped_in_place_by_the_module_are_refused() -> None:
    """``torch.__future__.set_swap_module_params_on_conversion`` gives the same objects other contents."""
    model = nn.Linear(2, 2)
    optimizer = AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    model(torch.ones(2, dtype=torch.float64)).sum().backward()
    with pytest.raises(RuntimeError, match=r"is torch.float64 on cpu now, but was torch.float32 on cpu"):
        optimizer.step()
