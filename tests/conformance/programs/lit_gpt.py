"""LitGPT's ``--optimizer``, as its command line gives it to its function."""

import small
from litgpt.utils import instantiate_torch_optimizer

model = small.model()
chosen = {"class_path": "everybit_torch.AdamW", "init_args": {"lr": 1e-2, "policy": "LEAN_BF16"}}
optimizer = instantiate_torch_optimizer(chosen, model.parameters(), fused=True)
small.train(model, optimizer)
small.require_policy(optimizer)
