"""Names for Lightning's command line: ``import everybit_torch.names.lightning`` before ``LightningCLI`` is made.

    python train.py fit --optimizer EverybitAdamW --optimizer.lr 3e-4 --optimizer.policy LEAN_BF16

``LightningCLI`` knows every optimizer that is imported by the name of its class: ``EverybitMuon``, ``EverybitSoap`` and so on.
"""

from everybit_torch.names.optimizers import OPTIMIZERS as OPTIMIZERS
