"""NeMo Automodel's ``_target_`` of an optimizer, resolved and built by its own functions."""

import small
from nemo_automodel.components.optim.optimizer import build_optimizer

model = small.model()
(optimizer,) = build_optimizer(
    model, ("everybit_torch.AdamW", {"lr": 1e-2, "policy": "LEAN_BF16", "betas": [0.9, 0.95]})
)
small.require_policy(optimizer)
small.train(model, optimizer)
