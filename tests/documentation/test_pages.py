"""Every block of code in the documentation runs, and comes to what its page says.

A page stands alone: its blocks are pasted one after the other. Where one begins with what its reader has already (a model, a loss),
``PAGES`` says what that is.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import everybit as eb
from everybit_torch.config import OptimizerConfig, load_config
from everybit_torch.config.algorithms import ALGORITHMS as NAMES_OF_ALGORITHMS
from tests.support.pages import ROOT, Page, launch_by_torchrun, pages_with_blocks, run_page, without_what_is_taken_away


def check_readme(names: dict[str, Any], printed: str, folder: Path) -> None:
    """What each block prints is compared in test_first_page.py."""
    assert names["loss"].item() < 0.1
    assert (folder / "checkpoints").is_dir()
    assert "'compensation': 33794" in printed  # 2 bytes for each of 16,897 parameters


def check_swapped_line(names: dict[str, Any], printed: str, folder: Path) -> None:
    """Most updates are lost, and the policy is nearer to float32 than plain bfloat16 is."""
    last = names["audits"][0].layers[-8:]
    elements = sum(layer.elements for layer in last)
    assert sum(layer.lost_share * layer.elements for layer in last) > 0.5 * elements
    assert abs(names["lean_loss"] - names["float32_loss"]) < abs(names["plain_loss"] - names["float32_loss"]) / 4
    assert "LEAN_BF16" in printed


def check_muon(names: dict[str, Any], printed: str, folder: Path) -> None:
    """The tables that the page shows are printed, and the model learns."""
    tables = re.findall(r"```text\n(.*?)```", (ROOT / "docs/how-to/train_with_muon.md").read_text(), re.DOTALL)
    assert len(tables) == 2
    assert all(table in printed for table in tables)
    assert names["last"] < names["first"] - 1


def check_eight_bits(names: dict[str, Any], printed: str, folder: Path) -> None:
    """The model learns in the bytes that the page says, and what is printed is on it."""
    (listed,) = re.findall(
        r"```text\n(.*?)```", (ROOT / "docs/how-to/train_with_8_bit_state.md").read_text(), re.DOTALL
    )
    assert listed in printed
    assert names["last"] < names["first"] - 1
    # The two vectors of 64 elements take a block of 256 each: 5 bytes for each element, and two scales.
    gaps = 2 * (256 - 64) * (5 + 2 * 4 / 256) / names["elements"]
    counters = names["optimizer"].bytes_table()["counters"] / names["elements"]
    assert 7.0 < names["per_parameter"] <= 7.03125 + gaps + counters


def check_checkpoints(names: dict[str, Any], printed: str, folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"run.pt", "model.safetensors", "checkpoints"}


def check_transforms(names: dict[str, Any], printed: str, folder: Path) -> None:
    """The transform of the guide takes schedules, as its annotations say. (The checks that it passes are on the page.)"""
    scheduled = eb.chain(names["ScaleBySignum"](eb.linear_schedule(0.0, 0.9, 2)), eb.scale_by_learning_rate(1.0))
    params = {"w": torch.zeros(2)}
    state = scheduled.init(params)
    for gradient in (1.0, -1.0, -1.0):  # decay rates of 0, 0.45 and 0.9: the momentum is 1, -0.55 and -1.495
        _, state = scheduled.update({"w": torch.full((2,), gradient)}, state, params)
    assert state.states[0].momentum["w"].tolist() == pytest.approx([-1.495] * 2, rel=1e-6)
    assert names["opt"].cut == "element"


def check_own_optimizer(names: dict[str, Any], printed: str, folder: Path) -> None:
    """The tables that the page shows are printed, what freezes is refused, and the policy trains as float32 does, on two ranks, too."""
    shown = re.findall(r"```text\n(.*?)```", (ROOT / "docs/tutorials/write_an_optimizer.md").read_text(), re.DOTALL)
    (checked,) = (text for text in shown if text.startswith("ademamix: keeps"))
    assert checked in printed
    (broken,) = (text for text in shown if text.startswith("Normalized"))
    assert all(line.removesuffix(" ...") in printed for line in broken.splitlines() if line != "...")
    assert (folder / "checkpoint").is_dir()
    assert (
        "{'parameter': 2.0, 'compensation': 2.0, 'gradient': 2, 'momentum': 2.0, 'slow': 4.0, 'variance': 2.0}"
        in printed
    )
    assert "\n12.0\n" in printed
    assert "Policy.slots['slow']: got Nearest(dtype='bfloat16'); 'slow' has a decay rate of 0.9999" in printed
    assert abs(names["lean_loss"] - names["float32_loss"]) < 0.05 * names["float32_loss"]


def check_matrices(names: dict[str, Any], printed: str, folder: Path) -> None:
    """The table that the page shows is printed, and the parameter is named. (The script on two ranks compares weights itself.)"""
    shown = re.findall(
        r"```text\n(.*?)```", (ROOT / "docs/tutorials/write_a_matrix_optimizer.md").read_text(), re.DOTALL
    )
    (checked,) = (text for text in shown if text.startswith("ScaleBySpectralNorm"))
    assert checked in printed
    assert "for a parameter of shape (3, 2, 3), ['layers'][0]['w'] of everybit.testing.example_params()" in printed
    assert "matrices_only=True" in printed
    assert names["losses"][-1] < 0.7 * names["losses"][0]


def check_choice(names: dict[str, Any], printed: str, folder: Path) -> None:
    """Half of the updates are lost, as the page's table says of another model, and the commands leave what it says."""
    assert sum(layer.lost_share for layer in names["audit"].layers) > 0.4 * len(names["audit"].layers)
    assert {path.name for path in (folder / "runs").rglob("*.png")} == {"compare.png", "audit.png"}
    assert "LEAN_BF16 under no_shard" in printed
    assert "LEAN_BF16 would mend it" in " ".join(printed.split())


def check_sharded(names: dict[str, Any], printed: str, folder: Path) -> None:
    """The run went on where it was, and what one process reads of it is what was exported."""
    assert sorted(path.name for path in (folder / "checkpoints").iterdir() if path.is_dir()) == ["000001", "000002"]
    assert int(names["model"].steps) in (4, 40)
    exported = torch.load(folder / "model.pt", weights_only=True)
    assert exported.keys() == names["weights"].keys()
    lost = 0.0
    for name, value in exported.items():
        distance = (names["weights"][name] - value.to(names["weights"][name].dtype)).abs()
        assert (distance <= value.abs() * 2**-8).all(), name  # half a unit in the last place of bfloat16
        lost += float(distance.sum())
    assert lost > 0


def check_hypergradients(names: dict[str, Any], printed: str, folder: Path) -> None:
    """100 steps have the first three digits of the derivative at the optimum. (The implicit ones are compared on the page.)"""
    assert float(names["unrolled"]) == pytest.approx(float(names["exact"]), rel=1e-3)
    assert int(names["losses"].argmin()) not in (0, 31)


def check_adapters(names: dict[str, Any], printed: str, folder: Path) -> None:
    """Plain bfloat16 adapters lose most updates of `A`, and compensated ones end where float32 ends."""
    lost = [layer.lost_share for layer in names["audit"].layers if layer.name.endswith(".a") and layer.step > 100]
    assert sum(lost) > 0.5 * len(lost)
    assert names["metrics"]["lost_share"] < 0.01
    assert names["plain_loss"] - names["float32_loss"] > 0.05
    assert abs(names["lean_loss"] - names["float32_loss"]) < 0.01


def check_configuration(names: dict[str, Any], printed: str, folder: Path) -> None:
    """Weights decay apart from biases, and the page's files are configurations; the name that it registers is free again."""
    NAMES_OF_ALGORITHMS.pop("sign")
    assert len(names["optimizer"].param_groups) == 2
    page = (Path(__file__).parents[2] / "docs/configuration.md").read_text(encoding="utf-8")
    files = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert len(files) > 1
    for number, text in enumerate(files):
        (folder / f"{number}.toml").write_text(text)
        load_config(OptimizerConfig, folder / f"{number}.toml")


# TensorBoard and Weights & Biases are not installed for the tests: these keep what they are given.
LOGGERS = """
import sys, types

logged = {}

class SummaryWriter:
    def __init__(self, log_dir): pass
    def add_scalar(self, name, value, step): logged.setdefault(name, {})[step] = value
    def close(self): pass

class Run:
    def log(self, values, step): logged["wandb"] = values
    def finish(self): pass

tensorboard, wandb = types.ModuleType("torch.utils.tensorboard"), types.ModuleType("wandb")
tensorboard.SummaryWriter, wandb.init = SummaryWriter, lambda project, mode: Run()
sys.modules |= {"torch.utils.tensorboard": tensorboard, "wandb": wandb}
"""


def check_logged(names: dict[str, Any], printed: str, folder: Path) -> None:
    """Steps 0 and 10 are logged, and the policy loses nothing in them."""
    logged = names["logged"]
    assert list(logged["optimizer/edq"]) == [0, 10]
    assert all(value == pytest.approx(1.0, abs=1e-3) for value in logged["optimizer/edq"].values())
    assert logged["wandb"]["optimizer/moved"] > 0
    for name in ("torch.utils.tensorboard", "wandb"):
        del sys.modules[name]


def check_groups(names: dict[str, Any], printed: str, folder: Path) -> None:
    assert "0.1 ['0.weight', '2.weight']\n0.0 ['1.weight', '1.bias', '2.bias']\n" in printed


def check_policies_in_turn(names: dict[str, Any], printed: str, folder: Path) -> None:
    assert "{'momentum': 'exact', 'variance': 'exact', 'param': 'exact'}" in printed


# What a page's reader has already: a model, its parameters, gradients of them, a loss, data.
MODEL = """
import torch
from torch import nn

import everybit as eb
from everybit_torch import *

def new_model():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).to(torch.bfloat16)

def loss(model, batch):
    return model(batch).float().square().mean()

model, batches = new_model(), [torch.ones(2, 4, dtype=torch.bfloat16)] * 2
"""
PURE = (
    MODEL
    + """
tx = eb.adamw(1e-3)
params = {name: p.detach() for name, p in model.named_parameters()}
grads = {name: torch.ones_like(p) for name, p in params.items()}
"""
)
SHARDED = (
    MODEL
    + """
Block = Head = nn.Linear
mesh, optimizer, micro_batches = None, eb.adamw(3e-4), [(batches[0], None)] * 2

def loss(outputs, _):
    return outputs.float().square().mean()
"""
)
TWO_DIMENSIONS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

model, mesh = model.bfloat16(), init_device_mesh("cpu", (1, 1), mesh_dim_names=("outer", "inner"))
model.blocks = [model[0], model[2]]
"""
TRAINED = """
class Trained(nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()

model, x, steps, Block = Trained(4, 2), torch.ones(2, 4), 1, Trained
"""
NEW_STEPPER = """
for one in [value for value in globals().values() if isinstance(value, FlatStepper)]:
    one.close()
model = new_model().float()
"""
PLAIN = """
stepper, model = FlatStepper(model, eb.adamw(1e-3)), new_model().float()
optimizer = AdamW(model.parameters())
"""
FORMAT = """
import torch

import everybit as eb

format, x, key = eb.Kahan().for_slot("signed", "float32"), torch.randn(4, 4), None
"""

PAGES = {
    "docs/index.md": Page(setup={1: MODEL}),
    "docs/torch.md": Page(setup={1: MODEL}),
    "docs/policies.md": Page(setup={1: PURE, 6: "state = eb.with_metrics(eb.with_policy(tx, policy)).init(params)"}),
    "docs/formats.md": Page(setup={1: FORMAT}),
    "docs/commands.md": Page(setup={1: MODEL + "optimizer = torch.optim.AdamW(model.parameters())"}),
    # Only parsed: what needs a CUDA device; programs of other libraries, which `make conformance` runs.
    "docs/gpu.md": Page(setup={1: "training_step = abs"}, parsed=(2,)),
    "docs/programs.md": Page(parsed=(1,)),
    "docs/sharded.md": Page(
        setup={
            1: SHARDED,
            2: NEW_STEPPER + "model = model.bfloat16()",
            3: NEW_STEPPER + TWO_DIMENSIONS,
            4: NEW_STEPPER,
            5: NEW_STEPPER,
            6: NEW_STEPPER + PLAIN,
            8: "model = new_model().float()",
        },
        group=True,
    ),
    "docs/coming-from/index.md": Page(),
    "docs/configuration.md": Page(check=check_configuration),
    "docs/how-to/log_metrics.md": Page(setup={1: LOGGERS}, check=check_logged, parsed=(5,)),
    "docs/tutorials/transformers_in_bf16.md": Page(parsed=(1, 2, 3, 4, 5)),
    "docs/how-to/train_with_muon.md": Page(check=check_muon),
    "docs/how-to/train_with_8_bit_state.md": Page(check=check_eight_bits),
    "docs/how-to/weight_decay.md": Page(check=check_groups),
    "docs/how-to/change_policy.md": Page(check=check_policies_in_turn),
    "README.md": Page(check=check_readme),
    "docs/tutorials/swap_one_line.md": Page(check=check_swapped_line),
    "docs/tutorials/choose_a_policy.md": Page(
        smaller={
            "--memory": "--policies LEAN_BF16 --memory",
            "llama-3-8b --ranks 8": "tiny --ranks 1",
            "my_model:build --units Block --ranks 2": "my_model:build --units Block --ranks 1",
            "--steps 200": "--steps 2 --model tiny",
        },
        check=check_choice,
    ),
    "docs/how-to/differentiate_training.md": Page(check=check_hypergradients),
    "docs/tutorials/lora_in_bf16.md": Page(check=check_adapters),
    "docs/tutorials/shard_a_model.md": Page(
        smaller={"--steps 20": "--steps 2", "--steps 40": "--steps 4"}, check=check_sharded
    ),
    "docs/tutorials/write_an_optimizer.md": Page(check=check_own_optimizer),
    "docs/tutorials/write_a_matrix_optimizer.md": Page(check=check_matrices),
    "docs/checkpoints.md": Page(check=check_checkpoints),
    "docs/transforms.md": Page(check=check_transforms),
}


def of_folder(page: str) -> Page:
    """How a page is run that ``PAGES`` does not name: those about other libraries are differences of the program on their first page."""
    if page.startswith("docs/coming-from/"):
        return Page(first="docs/coming-from/index.md", diffs=True, group=True)
    return Page()


def test_of_a_difference_the_lines_that_are_added_and_kept_are_run() -> None:
    assert without_what_is_taken_away("-one\n+two\n three\n\n") == "\ntwo\nthree\n\n"


def test_set_up_is_for_pages_that_there_are() -> None:
    assert PAGES.keys() <= set(pages_with_blocks())


SLOW = (
    "docs/tutorials/choose_a_policy.md", "docs/tutorials/write_an_optimizer.md", "docs/tutorials/swap_one_line.md",
    "docs/tutorials/lora_in_bf16.md", "docs/tutorials/write_a_matrix_optimizer.md", "docs/how-to/local_steps.md",
    "docs/how-to/offload_to_the_host.md", "docs/transforms.md", "docs/tutorials/shard_a_model.md", "docs/coming-from/flashoptim.md",
    "docs/how-to/differentiate_training.md",
)  # fmt: skip


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow if page in SLOW else ()) for page in pages_with_blocks()]
)
def test_the_blocks_of_a_page_run_one_after_the_other(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    how = PAGES.get(page) or of_folder(page)
    monkeypatch.chdir(tmp_path)
    names = run_page(page, how, tmp_path)
    if how.check is not None:
        how.check(names, capsys.readouterr().out, tmp_path)


@pytest.mark.exhaustive
def test_what_takes_long_on_a_page_comes_to_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled step of the tutorial has the bits of the uncompiled one."""
    monkeypatch.chdir(tmp_path)
    page = "docs/tutorials/write_an_optimizer.md"
    assert "compiled_loss" in run_page(page, Page(), tmp_path, slow=True)


@pytest.mark.exhaustive
def test_an_optimizer_of_ones_own_runs_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """``torchrun`` itself, with two processes."""
    monkeypatch.chdir(tmp_path)
    page = "docs/tutorials/write_an_optimizer.md"
    names = run_page(page, Page(launcher=launch_by_torchrun), tmp_path)
    check_own_optimizer(names, capfd.readouterr().out, tmp_path)


@pytest.mark.exhaustive
def test_the_script_of_the_tutorial_runs_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As above, and with the number of steps that the page has, started by ``torchrun`` itself."""
    monkeypatch.chdir(tmp_path)
    names = run_page("docs/tutorials/shard_a_model.md", Page(launcher=launch_by_torchrun), tmp_path)
    check_sharded(names, capsys.readouterr().out, tmp_path)
