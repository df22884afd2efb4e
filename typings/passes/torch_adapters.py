"""Drop-ins where torch's optimizers stand."""

from __future__ import annotations

from typing import Any, assert_type

import torch

import everybit as eb
from everybit_torch import SGD, AdamW, AnyPrecisionAdamW, Lion, Muon, TorchOptimizer, create, weight_decay_groups

model = torch.nn.Linear(2, 2)
optimizer: torch.optim.Optimizer = AdamW(model.parameters(), lr=3e-4, policy=eb.policies.KAHAN_BF16, compile=True)
groups: list[dict[str, Any]] = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias]}]
grouped = SGD(groups, lr=0.2, momentum=0.9)
named = Lion(model.named_parameters(), lr=torch.tensor(1e-4))
old = AnyPrecisionAdamW(model.parameters(), 1e-3, (0.9, 0.95), 1e-8, 0.1, True, torch.bfloat16)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def clipped(learning_rate: float, weight_decay: float) -> eb.Transform[Any]:
    return eb.chain(eb.clip_by_global_norm(1.0), eb.adamw(learning_rate, weight_decay=weight_decay))


composed = TorchOptimizer(model.parameters(), clipped, lr=1e-3, weight_decay=0.1)
loss: float = composed.step(lambda: 1.0)

AdamW(weight_decay_groups(model, 0.1, no_decay=["*embedding*"]), lr=3e-4, policy="LEAN_BF16")
assert_type(AdamW.from_torch(torch.optim.AdamW(model.parameters()), policy="LEAN_BF16", compile=False), AdamW)
assert_type(grouped.metrics().asdict(), dict[str, float])
chosen: eb.PolicyName = "EXACT_BF16"
assert_type(eb.with_policy(eb.adamw(mask=eb.not_norm_or_bias), chosen).policy, eb.Policy | eb.ByLabel)
assert_type(create("ademamix", model, policy="LEAN_BF16", lr=1e-3, betas=(0.9, 0.95), b3=0.999), TorchOptimizer)
wanted: eb.OptimizerName = "lamb"
create(wanted, groups, lr=torch.tensor(1e-3), max_grad_norm=None, always_adapt=False)
assert_type(eb.optimizers()["sgd"].state_bytes("FP32", momentum=0.9), dict[str, float])


def embeds(path: str, _: torch.Tensor) -> str:
    return "others" if "embed" in path else "matrix"


AdamW(model.parameters(), lr=3e-4, unsafe="warn")
assert_type(AdamW.from_torch(torch.optim.AdamW(model.parameters()), unsafe="allow"), AdamW)
create(
    "muon",
    groups,
    model=model,
    scale="match_rms_adamw",
    matrices=eb.Matrices(views={"qkv": eb.heads(4)}, labels=embeds),
    others=eb.adamw,
)
Muon(model.parameters(), 0.02, momentum=0.9, adjust_lr_fn="match_rms_adamw", policy="LEAN_BF16")
