"""No weight decay on norms and biases: as param groups of a module, and as a mask of a tree."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import everybit as eb
from everybit_torch import AdamW, FlatStepper, TorchOptimizer, weight_decay_groups


class Model(nn.Module):
    """Layers whose parameters the number of dimensions alone does not tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.norm = nn.LayerNorm((3, 4))  # a weight and a bias of two dimensions
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)  # bias_k has three
        self.batch = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 8)
        self.head.weight = self.embedding.weight
        self.temperature = nn.Parameter(torch.ones(()))


def names(group: dict[str, Any]) -> list[str]:
    return [name for name, _ in group["params"]]


def test_norms_and_biases_are_not_decayed_and_every_parameter_comes_once() -> None:
    model = Model()
    decayed, others = weight_decay_groups(model, 0.25)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.25, 0.0)
    assert names(decayed) == ["embedding.weight", "attention.in_proj_weight", "attention.out_proj.weight"]
    everything = [parameter for _, parameter in decayed["params"] + others["params"]]
    assert {id(one) for one in everything} == {id(one) for one in model.parameters()}
    assert len(everything) == len(list(model.parameters()))


def test_further_names_are_left_out_by_pattern() -> None:
    decayed, others = weight_decay_groups(Model(), 0.25, no_decay=["*embedding*", "attention.out_proj.weight"])
    assert names(decayed) == ["attention.in_proj_weight"]
    assert "embedding.weight" in names(others)


def test_a_group_without_parameters_is_left_out() -> None:
    assert [group["weight_decay"] for group in weight_decay_groups(nn.LayerNorm(3), 0.1)] == [0.0]


@pytest.mark.parametrize("make", [AdamW, torch.optim.AdamW])
def test_the_groups_fit_optimizers_of_everybit_and_torch(make: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = make(weight_decay_groups(model, 0.5), lr=0.125)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # Without a gradient decay is all there is: 1 - 0.125 * 0.5 is a float32 number.
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name] * (1 - 0.0625 if name == "0.weight" else 1.0)), name
    assert optimizer.param_groups[1]["param_names"] == ["0.bias", "1.weight", "1.bias"]


def test_the_mask_is_the_same_choice_in_every_front_end() -> None:
    """Decay alone, as above: which parameters move is what the mask decides."""
    factory = functools.partial(eb.adamw, weight_decay=0.5, mask=eb.not_norm_or_bias)
    moved: list[dict[str, bool]] = []
    for front in ("pure", "torch", "stepper"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        zeros = {name: torch.zeros_like(one) for name, one in before.items()}
        if front == "pure":
            opt = eb.with_policy(factory(0.125), "FP32")
            after, _ = opt.step(before, zeros, opt.init(before))
        else:
            optimizer: Any
            if front == "torch":
                optimizer = TorchOptimizer(model.named_parameters(), factory, lr=0.125)
                for name, parameter in model.named_parameters():
                    parameter.grad = zeros[name]
            else:
                optimizer = FlatStepper(model, factory(0.125))
                with optimizer.microbatch(last=True):
                    (model(torch.ones(1, 4)) * 0.0).sum().backward()
            optimizer.step()
            after = {name: parameter.detach() for name, parameter in model.named_parameters()}
        moved.append({name: not torch.equal(after[name], before[name]) for name in before})
    assert moved == [{"0.weight": True, "0.bias": False, "1.weight": False, "1.bias": False}] * 3


@pytest.mark.parametrize(
    ("path", "decays"),
    [("['w']", True), ("['layer']['bias']", False), ("['layer.bias']", False), (".in_proj_bias", False), ("[0]", True), ("", True),
     ("['biases_of_heads']", True), ("['bias'].weight", True)],
)  # fmt: skip
def test_the_last_name_of_a_path_decides(path: str, decays: bool) -> None:
    assert eb.not_norm_or_bias(path, torch.ones(2, 2)) is decays
    assert not eb.not_norm_or_bias(path, torch.ones(4))


def test_arguments_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight_decay: got -1; accepted is a number of at least zero"):
        weight_decay_groups(Model(), -1)
    with pytest.raises(
        ValueError, match=r"no_decay: got 'embed', which matches no name; .* 'attention.in_proj_weight'"
    ):
        weight_decay_groups(Model(), 0.1, no_decay=["emb*", "embed"])
    with pytest.raises(TypeError, match=r"no_decay: got '\*bed\*'; accepted are several patterns"):
        weight_decay_groups(Model(), 0.1, no_decay="*bed*")
    with pytest.raises(ValueError, match=r"weight: got a lazy parameter"):
        weight_decay_groups(nn.LazyLinear(3))
