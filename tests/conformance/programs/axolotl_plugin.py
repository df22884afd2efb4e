"""axolotl's ``plugins:``, loaded by its own manager; the names then are Trainer's, to which axolotl hands its ``optimizer:``."""

import tempfile

from absent import stand_in

stand_in("peft", "posthog", "evaluate", "numba", "datasets", "addict")

import small  # noqa: E402
from axolotl.integrations.base import PluginManager  # noqa: E402  # after the stand-ins
from transformers import Trainer, TrainingArguments  # noqa: E402

PluginManager.get_instance().register("everybit_torch.names.axolotl.EverybitPlugin")
with tempfile.TemporaryDirectory() as folder:
    # As HFCausalTrainerBuilder makes them of `optimizer: everybit_adamw` and `optim_args: {policy: LEAN_BF16}`.
    arguments = TrainingArguments(
        folder, optim="everybit_adamw", optim_args="policy=LEAN_BF16", use_cpu=True, report_to=[]
    )
    model = small.model()
    optimizer = Trainer(model, arguments).create_optimizer()
small.require_policy(optimizer)
small.train(model, optimizer)
