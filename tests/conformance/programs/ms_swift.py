"""ms-swift's ``--external_plugins`` and ``--optimizer``, over transformers' own Trainer."""

import subprocess
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

from absent import stand_in

stand_in(
    "cryptography",
    "oss2",
    "json_repair",
    "modelscope",
    "modelscope_hub",
    "binpacking",
    "attrdict",
    "addict",
    "peft",
    "datasets",
    "dacite",
    "requests",
    "urllib3",
)

import small  # noqa: E402
import transformers  # noqa: E402  # after the stand-ins
from swift.optimizers import optimizers_map  # noqa: E402
from swift.utils import import_external_file  # noqa: E402

command = [sys.executable, "-m", "everybit_torch.names.swift"]
path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
import_external_file(path)
with tempfile.TemporaryDirectory() as folder:
    arguments = transformers.TrainingArguments(
        folder, optim_args="policy=LEAN_BF16,compile=false", learning_rate=1e-2, use_cpu=True, report_to=[]
    )
    model = small.model()
    trainer: Any = transformers.Trainer(model, arguments)
    optimizer = optimizers_map["everybit_adamw"](arguments, trainer).create_optimizer()
    small.require_policy(optimizer)
    small.train(model, optimizer)
    with_names = optimizers_map["everybit_muon"](SimpleNamespace(), trainer)
    assert type(with_names).__mro__[1] is optimizers_map["default"]
