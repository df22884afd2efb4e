"""The names of these optimizers in Trainer, timm and Lightning's command line; and the patch of transformers' `adamw_anyprecision`."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
import everybit_torch
from everybit_torch.names.optimizers import OPTIMIZERS
from tests.support.byte_windows import ByteWindows

PATCH = Path(__file__).parents[2] / "docs/patches/transformers-adamw_anyprecision.patch"

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def trained(directory: Path, **arguments: Any) -> Any:
    """A Trainer after 12 steps in bfloat16."""
    transformers = pytest.importorskip("transformers")
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config).to(torch.bfloat16),
        args=transformers.TrainingArguments(
            output_dir=str(directory), max_steps=12, per_device_train_batch_size=8, save_strategy="no", logging_steps=1, report_to=[],
            use_cpu=True, disable_tqdm=True, seed=0, **arguments,
        ),
        train_dataset=ByteWindows(__file__),
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.1
    return trainer


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_trainer_knows_the_names(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import_module("everybit_torch.names.trainer").register()  # a second time, too
    rate = {"adamw": 1e-2, "lion": 3e-3, "sgd": 1.0}[name]
    given = "policy=LEAN_BF16, compile=false, seed=3"
    trainer = trained(tmp_path, optim=f"everybit_{name}", optim_args=given, learning_rate=rate, adam_beta2=0.95)
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    assert type(optimizer) is OPTIMIZERS[name]
    assert "LEAN_BF16" in repr(optimizer)
    if name == "adamw":
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    with pytest.raises(ValueError, match=r"optim_args: polcy: there is no such argument; accepted are .*policy"):
        trained(tmp_path, optim=f"everybit_{name}", optim_args="polcy=LEAN_BF16")
    with pytest.raises(ValueError, match=r"optim_args: metrics: got 'yes'; accepted is true or false"):
        trained(tmp_path, optim=f"everybit_{name}", optim_args="policy=LEAN_BF16, metrics=yes")


def test_trainer_knows_every_optimizer_of_the_list(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import_module("everybit_torch.names.trainer").register()
    given = "policy=LEAN_BF16, compile=false, betas=0.9:0.95, b3=0.99, alpha_warmup=none"
    trainer = trained(
        tmp_path, optim="everybit_ademamix", optim_args=given, learning_rate=1e-2, adam_beta2=0.5, weight_decay=0.1
    )
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    assert type(optimizer) is OPTIMIZERS["ademamix"]
    group = optimizer.param_groups[0]
    assert (group["betas"], group["b3"], group["alpha_warmup"], group["weight_decay"]) == ((0.9, 0.95), 0.99, None, 0.1)
    for name in eb.optimizers():
        assert (
            import_module("transformers.training_args").OptimizerNames(f"everybit_{name}").value == f"everybit_{name}"
        )
    with pytest.raises(
        ValueError, match=r"optim_args: betas: got '0.9'; accepted is as many numbers as the default has"
    ):
        trained(tmp_path, optim="everybit_lamb", optim_args="policy=LEAN_BF16, betas=0.9")
    with pytest.raises(ValueError, match=r"weight_decay: got 0.1 for everybit_rprop, which has none; accepted is 0"):
        trained(tmp_path, optim="everybit_rprop", optim_args="policy=LEAN_BF16", weight_decay=0.1)


@pytest.mark.parametrize("name", ["muon", "normuon"])
def test_trainer_gives_names_and_modules_to_optimizers_that_go_by_them(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import_module("everybit_torch.names.trainer").register()
    trainer = trained(
        tmp_path,
        optim=f"everybit_{name}",
        optim_args="policy=LEAN_BF16, compile=false",
        learning_rate=2e-2,
        weight_decay=0.1,
    )
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    assert type(optimizer) is OPTIMIZERS[name]
    # Trainer's own groups: biases and norms do not decay.
    decayed, others = (set(group["param_names"]) for group in optimizer.param_groups)
    assert decayed == set(trainer.get_decay_parameter_names(trainer.model)) - {"lm_head.weight"}  # which is tied
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all("bias" in one or "ln_" in one for one in others)
    table = everybit_torch.routing(optimizer)
    assert "  transformer.wte.weight (256, 16) by the type of its module\n" in table
    assert "matrix: 4 parameters, 3072 elements\n" in table


def test_the_patch_brings_adamw_anyprecision_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    installed: Any = import_module("transformers.trainer_optimizer")
    key = import_module("transformers.training_args").OptimizerNames.ADAMW_ANYPRECISION
    with pytest.raises(ValueError, match="torchdistx"):
        trained(tmp_path, optim="adamw_anyprecision", learning_rate=1e-2)
    file = tmp_path / "src/transformers/trainer_optimizer.py"
    file.parent.mkdir(parents=True)
    shutil.copy(installed.__file__, file)
    done = subprocess.run(["git", "apply", str(PATCH)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    spec = importlib.util.spec_from_file_location("transformers.patched_trainer_optimizer", file)
    assert spec is not None
    assert spec.loader is not None
    patched: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, patched)
    spec.loader.exec_module(patched)
    monkeypatch.setitem(installed._OPTIMIZER_HANDLERS, key, patched._get_adamw_anyprecision)
    arguments = "use_kahan_summation=true, momentum_dtype=bfloat16, variance_dtype=float32"
    trainer = trained(tmp_path, optim="adamw_anyprecision", optim_args=arguments, learning_rate=1e-2)
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    assert type(optimizer) is everybit_torch.AnyPrecisionAdamW
    assert "compensation" in optimizer.bytes_table()


@pytest.mark.parametrize("name", eb.optimizers())
def test_timm_knows_the_names(name: eb.OptimizerName) -> None:
    timm, kind = pytest.importorskip("timm"), OPTIMIZERS[name]
    import_module("everybit_torch.names.timm").register()  # a second time, too
    torch.manual_seed(0)
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, nn.LayerNorm(4)).bfloat16()
    given: dict[str, Any] = {
        "opt": f"everybit{name.replace('_', '')}",
        "lr": 0.5,
        "weight_decay": 0.0 if name == "rprop" else 0.25,
        "policy": "LEAN_BF16",
    }
    if name in ("muon", "normuon"):
        with pytest.raises(ValueError, match="has no name"):
            timm.optim.create_optimizer_v2(model, **given)
        given["names_from"] = model  # timm gives groups without names
    optimizer = timm.optim.create_optimizer_v2(model, **given)
    assert type(optimizer) is kind
    if name != "rprop":
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.25]
    before = first.weight.detach().clone()
    for _ in range(8):  # ADOPT moves nothing in its first step, schedule-free RAdam in its first five
        optimizer.zero_grad()
        model(torch.ones(2, 4, dtype=torch.bfloat16)).pow(3).sum().backward()
        optimizer.step()
    # In full precision: some first steps are smaller than bfloat16 shows.
    weights = {one.shape: one for group in optimizer.export_fp32() for one in group}
    assert not torch.equal(before.float(), weights[first.weight.shape])


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("EverybitAdamW", ["--optimizer.betas", "[0.9, 0.95]"], {"betas": (0.9, 0.95)}),
        ("EverybitSGD", ["--optimizer.nesterov", "true", "--optimizer.momentum", "0.9"], {"nesterov": True}),
        ("EverybitAdemamix", ["--optimizer.alpha_warmup", "100"], {"alpha_warmup": 100}),
    ],
)
def test_lightnings_command_line_knows_the_names(
    kind: str, given: list[str], expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jsonargparse")
    lightning = pytest.importorskip("lightning.pytorch")
    cli = import_module("lightning.pytorch.cli")
    import_module("everybit_torch.names.lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1, dtype=torch.bfloat16)

        def training_step(self, batch: Tensor) -> Tensor:
            out: Tensor = self.layer(batch.bfloat16()).square().sum()
            return out

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)  # type: ignore[arg-type]

    monkeypatch.chdir(tmp_path)
    optimizer = ["--optimizer", kind, "--optimizer.lr", "0.25", "--optimizer.policy", "LEAN_BF16", *given]
    trainer = [
        f"--trainer.{name}"
        for name in (
            "max_epochs=1",
            "accelerator=cpu",
            "logger=false",
            "enable_checkpointing=false",
            "enable_progress_bar=false",
        )
    ]
    made = cli.LightningCLI(Module, args=["fit", *optimizer, *trainer], save_config_callback=None)
    (found,) = made.trainer.optimizers
    assert type(found).__name__ == kind
    assert found.param_groups[0]["lr"] == 0.25
    for name, value in expected.items():
        assert found.param_groups[0][name] == value
    assert "LEAN_BF16" in repr(found)
