"""Models with 16-bit and float32 parameters side by side: bfloat16 matrices and float32 norms, or a frozen base and its adapters."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit.policies import for_dtype, resolve_tree
from everybit.policies.presets import PRESETS
from everybit_torch import AdamW, FlatStepper
from everybit_torch.planning.plan import plan

LOW = [name for name, policy in PRESETS.items() if policy.model_dtype == "bfloat16"]
LEAN = eb.policies.LEAN_BF16


class Mixed(nn.Module):
    """Matrices in bfloat16 around a norm in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 4, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x).float()).bfloat16())
        return out


def fill(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def float32_adamw(initial: Tensor, gradients: list[Tensor]) -> Tensor:
    """What torch.optim makes of a float32 parameter."""
    parameter = nn.Parameter(initial.clone())
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach()


def rounding_errors(momentum: eb.Format, variance: eb.Format, gradients: list[Tensor]) -> Tensor:
    """The largest difference that stored moments make to a second step of AdamW, for each element.

    Levels of 8 bits are fourth powers of 127ths of a block's greatest momentum, and eighth powers of 255ths of its greatest variance.
    A variance in 4 bits lies between two powers of two.
    """
    rate, b1, b2 = 1e-2, 0.9, 0.95
    first, second = (gradient.double() for gradient in gradients)
    m, v = (1 - b1) * first, (1 - b2) * first.square()
    m_error = torch.zeros_like(m)
    if isinstance(momentum, eb.Blockwise):
        m_error = torch.full_like(m, (1 - (126 / 127) ** 4) * m.abs().max().item())
    elif momentum != eb.Nearest("float32"):
        m_error = 2.0**-7 * m.abs()
    factor = torch.ones_like(v)
    if variance == eb.Blockwise("float", 4, 128):
        factor = torch.full_like(v, 2.0)
    elif isinstance(variance, eb.Blockwise):
        factor = (1 + 1 / (255 * (v / v.max()) ** (1 / 8)).floor()) ** 8
    elif variance != eb.Nearest("float32"):
        factor = torch.full_like(v, 1 + 2.0**-7)
    m_now = ((b1 * m + (1 - b1) * second).abs(), b1 * m_error)
    corrected = (1 - b2**2) ** 0.5 / (1 - b1**2)
    root, least_root = ((b2 * stored + (1 - b2) * second.square()).sqrt() for stored in (v, v / factor))
    difference: Tensor = rate * corrected * (m_now[1] / least_root + m_now[0] * (1 / least_root - 1 / root))
    return difference


@pytest.mark.parametrize("name", LOW)
def test_float32_parameters_stay_float32_under_every_policy_for_16_bits(name: str) -> None:
    """Two steps are torch's, but for the rounding of the state between them."""
    policy = PRESETS[name]
    model = Mixed()
    norm = model.norm.weight
    start, gradients = norm.detach().clone(), []
    optimizer = AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, policy=policy)
    for seed in range(2):
        fill(model, seed)
        assert norm.grad is not None
        gradients.append(norm.grad.clone())
        optimizer.step()
    assert norm.dtype is torch.float32
    expected = float32_adamw(start, gradients)
    bound = rounding_errors(policy.momentum, policy.variance, gradients)
    # Near 1 a float32 is off by 2**-24 at most, and a step has about ten operations.
    assert ((norm.detach() - expected).abs() <= bound + 2.0**-20).all()
    assert bound.max() < 1e-2  # of 2e-2 that an element moves
    assert not torch.equal(norm.detach(), norm.detach().bfloat16().float())  # bits that bfloat16 does not have
    for slot in ("momentum", "variance"):
        of_norm, of_matrix = optimizer.state[norm][slot], optimizer.state[model.first.weight][slot]
        assert of_norm.dtype is of_matrix.dtype


def test_the_same_bits_come_from_the_tree_the_optimizer_and_the_stepper() -> None:
    models = [Mixed() for _ in range(3)]
    optimizer = AdamW(models[0].parameters(), lr=1e-2, policy=LEAN)
    stepper = FlatStepper(models[1], eb.adamw(1e-2, weight_decay=1e-2), policy=LEAN)
    pure = eb.with_policy(eb.adamw(1e-2, weight_decay=1e-2), LEAN)
    params: dict[str, Tensor] = {name: p.detach() for name, p in models[2].named_parameters()}
    state = pure.init(params)
    for seed in range(3):
        fill(models[0], seed)
        fill(models[2], seed)
        optimizer.step()
        with stepper.microbatch(last=True):
            loss = torch.zeros(())
            for one, two in zip(models[1].parameters(), models[2].parameters(), strict=True):
                assert two.grad is not None
                loss = loss + (one.float() * two.grad.float()).sum()
            loss.backward()  # type: ignore[no-untyped-call]
        stepper.step()
        grads = {name: p.grad for name, p in models[2].named_parameters() if p.grad is not None}
        params, state = pure.step(params, grads, state)
    for (name, one), two in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert one.dtype is two.dtype is params[name].dtype
        # Bits are drawn by number within a dtype; a tree's leaves are numbered by themselves.
        assert torch.equal(one, two), name
    assert torch.equal(
        params["norm.weight"], pure.decode(params, state)[0]["norm.weight"]
    )  # whole: nothing is kept beside it
    stepper.close()


def test_what_is_kept_is_shown() -> None:
    model = Mixed()
    optimizer = AdamW(model.parameters(), policy=eb.policies.EXACT_BF16)
    text = repr(optimizer)
    assert "bfloat16: EXACT_BF16" in text
    assert "float32: FP32" in text
    table = optimizer.bytes_table()
    wide = sum(p.numel() for p in model.parameters() if p.dtype is torch.float32)
    low = sum(p.numel() for p in model.parameters() if p.dtype is torch.bfloat16)
    assert table["parameter"] == 4 * wide + 2 * low
    assert table["compensation"] == 2 * low
    planned = plan(Mixed(), eb.adamw(1e-3), policy=eb.policies.EXACT_BF16)
    assert planned.weights == {"Split(value='bfloat16')": low, "Nearest('float32')": wide}
    assert planned.persistent["parameters"] == table["parameter"]
    assert all(name in str(planned) for name in planned.weights)


def test_groups_of_one_dtype_each_are_one_model_in_any_order() -> None:
    for order in (1, -1):
        model = Mixed()
        float32: dict[str, Any] = {
            "params": (p for p in model.parameters() if p.dtype is torch.float32),
            "weight_decay": 0.0,
        }
        bfloat16: dict[str, Any] = {"params": [p for p in model.parameters() if p.dtype is torch.bfloat16]}
        groups = [float32, bfloat16][::order]
        optimizer = AdamW(groups, policy=LEAN)
        fill(model, 0)
        optimizer.step()
        for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert again.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        optimizer.step()


def test_a_model_without_16_bit_parameters_is_refused_and_told_what_to_do() -> None:
    model = Mixed().float()
    with pytest.raises(ValueError, match=r"policies\.FP32, or cast the model to bfloat16.*by_dtype"):
        AdamW(model.parameters(), policy=LEAN)
    with pytest.raises(ValueError, match=r"policies\.FP32, or cast the model to bfloat16.*by_dtype"):
        FlatStepper(model, eb.adamw(1e-3), policy=LEAN)
    with pytest.raises(ValueError, match=r"policies\.FP32, or cast the model to bfloat16.*by_dtype"):
        eb.with_policy(eb.adamw(1e-3), LEAN).init(dict(model.named_parameters()))
    with pytest.raises(ValueError, match="got a float64 tensor"):
        AdamW([*Mixed().parameters(), nn.Parameter(torch.ones(2, dtype=torch.float64))], policy=LEAN)


def test_adapters_of_a_frozen_16_bit_model() -> None:
    """A stepper sees the base; an optimizer that is given the adapters alone is told what each dtype gets."""
    model = Mixed()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("norm."))
    stepper = FlatStepper(copy.deepcopy(model), eb.adamw(1e-2, weight_decay=1e-2), policy=LEAN)
    policy = eb.by_dtype({"bfloat16": LEAN, "float32": for_float32()})
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, policy=policy)
    x = torch.randn(5, 6).bfloat16()

    def loss(network: nn.Module) -> Tensor:
        out: Tensor = network(x).float().square().mean()
        return out

    for _ in range(3):
        optimizer.zero_grad()
        loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with stepper.microbatch(last=True):
            loss(stepper.model).backward()  # type: ignore[no-untyped-call]
        stepper.step()
    for one, two in zip(model.parameters(), stepper.model.parameters(), strict=True):
        assert torch.equal(one, two)
    stepper.close()


def for_float32() -> eb.Policy:
    policy = for_dtype(LEAN, "float32", mixed=True)
    assert isinstance(policy, eb.Policy)
    return policy


def test_a_policy_for_each_dtype() -> None:
    policy = eb.by_dtype({"bfloat16": LEAN, "float32": eb.policies.FP32})
    model = Mixed()
    optimizer = AdamW(model.parameters(), lr=1e-2, policy=policy)
    plain = AdamW([model.norm.weight, model.norm.bias], lr=1e-2, policy=eb.policies.FP32)
    fill(model, 1)
    before = model.norm.weight.detach().clone()
    optimizer.step()
    assert optimizer.state[model.norm.weight]["variance"].dtype is torch.float32
    assert optimizer.state[model.first.weight]["variance"].dtype is torch.bfloat16
    assert "6 parameters, 6 of them in 2 vectors" in repr(optimizer)  # dtypes need no labels
    after = model.norm.weight.detach().clone()
    with torch.no_grad():
        model.norm.weight.copy_(before)
    plain.step()
    assert torch.equal(model.norm.weight, after)
    assert pickle.loads(pickle.dumps(policy)) == policy
    formats = resolve_tree(policy, dict(model.named_parameters()))
    assert {str(one.params) for one in formats} == {str(eb.Nearest("float32")), str(eb.Split(16, value="bfloat16"))}


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ({"bf16": LEAN}, r"by_dtype: policies: got 'bf16'; accepted are .*'bfloat16'"),
        ({"float32": LEAN}, r"by_dtype: policies\['float32'\]: .*policies\.FP32"),
        ({"float64": eb.policies.FP32}, r"by_dtype: policies\['float64'\]: "),
    ],
)
def test_policies_of_dtypes_are_judged_when_they_are_given(policies: dict[str, eb.Policy], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eb.by_dtype(policies)
