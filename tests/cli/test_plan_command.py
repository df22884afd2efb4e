"""``everybit plan``: a table, a file and a picture; and what is said about options that cannot be used."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everybit as eb
import everybit_cli as cli
from everybit_cli.compare.model import SIZES, Transformer
from everybit_cli.errors import BAD_OPTION
from everybit_cli.models import build
from everybit_torch import create


def small_model() -> nn.Module:
    """For --model: two layers, one of them frozen."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].requires_grad_(False)
    return model


def broken_model() -> nn.Module:
    """For --model: one that cannot be built."""
    raise RuntimeError("no\nweights today")


def test_a_plan_is_shown_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "plan",
        "--model",
        "mini",
        "--ranks",
        "4",
        "--policies",
        "MIXED_BF16",
        "KAHAN_BF16",
        "--main-grads",
        "fp32",
    ]
    assert cli.main([*arguments, "--grad-comm", "bf16", "--reduce", "fp32", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "mini: 459,392 parameters (bfloat16), adamw, 4 ranks" in shown
    held = json.loads((tmp_path / "plan.json").read_text())
    found = {(one["policy"], one["strategy"]): one for one in held["plans"]}
    assert len(found) == 8
    numel = found["MIXED_BF16", "no_shard"]["parameters"]
    for (policy, strategy), one in found.items():
        whole = {"MIXED_BF16": (2, 4, 4, 8), "KAHAN_BF16": (2, 2, 4, 4)}[policy]
        shared = {
            "no_shard": (1, 1, 1, 1),
            "optim": (1, 4, 1, 4),
            "optim_grads": (1, 4, 4, 4),
            "optim_grads_params": (4,) * 4,
        }[strategy]
        expected = sum(bytes_each * numel / parts for bytes_each, parts in zip(whole, shared, strict=True))
        small = one["persistent"]["counters"] + one["persistent"]["bookkeeping"]
        # Padding: at most three elements in each of the three units, of 18 bytes.
        assert 0 <= one["persistent_bytes"] - small - expected < 3 * 3 * 18
        assert "all_to_all" in one["wire"]
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_of_ranks_with_different_numbers_of_whole_tensors_the_fullest_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--optimizer", "adafactor,b1=0.9", "--ranks", "64", "--policies", "FP32", "--dtype", "fp32"]
    held, shown = planned(capsys, *arguments, "--strategies", "optim", "no_shard")
    even = held["plans"][0]["whole_tensors"]
    assert held["plans"][0]["persistent"]["momentum"] == 4 * max(even["elements"])
    idle = even["elements"].count(0)
    said = f"{even['tensors']:,} whole tensors on 64 ranks, {idle} of which have none;"
    assert shown.count(said) == 1
    assert held["plans"][1]["whole_tensors"] is None


def test_a_function_of_ones_own(tmp_path: Path) -> None:
    arguments = [
        "plan",
        "--model",
        f"{__name__}:small_model",
        "--dtype",
        "model",
        "--policies",
        "FP32",
        "--strategies",
        "optim",
    ]
    assert cli.main([*arguments, "--optimizer", "lion", "--out", str(tmp_path)]) == 0
    (one,) = json.loads((tmp_path / "plan.json").read_text())["plans"]
    assert one["persistent"]["parameters"] == 2 * 272 * 4
    assert one["persistent"]["momentum"] == 272 * 4 / 8
    assert "variance" not in one["persistent"]


def test_three_dtypes(tmp_path: Path) -> None:
    arguments = [
        "plan",
        "--model",
        "tiny",
        "--policies",
        "three-dtypes",
        "--main-params",
        "fp64",
        "--grad-comm",
        "fp16",
    ]
    assert (
        cli.main(
            [
                *arguments,
                "--strategies",
                "optim_grads_params",
                "--outer",
                "2",
                "--outer-strategy",
                "optim",
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    (one,) = json.loads((tmp_path / "plan.json").read_text())["plans"]
    numel = one["parameters"]
    assert one["persistent"]["main parameters"] == pytest.approx(8 * numel / 16, abs=200)
    assert one["persistent"]["gradients"] == pytest.approx(4 * numel / 8, abs=200)


@pytest.mark.slow
def test_a_hugging_face_configuration(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    config = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 100, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["plan", "--model", str(tmp_path), "--ranks", "2", "--out", str(tmp_path / "out")]) == 0
    held = json.loads((tmp_path / "out" / "plan.json").read_text())
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    assert held["plans"][0]["parameters"] == 2 * 100 * 32 + 32 + 2 * layer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt-9"], "--model: got gpt-9; accepted: llama-3.2-1b"),
        (["--model", "nowhere:model"], "--model: got nowhere:model (No module named 'nowhere')"),
        (["--model", "os:getcwd"], "which returned a str; accepted: a function that returns a torch.nn.Module"),
        (["--model", "json:loads"], "--model: got json:loads, which raised TypeError: loads() missing 1 required positional"),
        (["--model", f"{__name__}:broken_model"], "which raised RuntimeError: no weights today; accepted: a function that returns"),
        (["--model", f"{__name__}:BAD_OPTION"], "which raised TypeError: 'int' object is not callable"),
        (["--model", "json:"], "--model: got json: (module 'json' has no attribute '')"),
        (["--model", "mini", "--ranks", "0"], "--ranks: got 0; accepted: a whole number, at least 1"),
        (["--model", "mini", "--policies", "KAHAN"], "--policies: got KAHAN (did you mean KAHAN_BF16?)"),
        (["--model", "mini", "--dtype", "fp32"], "--policies: MIXED_BF16 does not go with the model: embedding.weight: Policy.params"),
        (["--model", "mini", "--units", "Layer"], "--units: got Layer; accepted: classes of the model's modules: Attention, Block, "),
        (
            ["--model", "mini", "--outer", "2", "--outer-strategy", "optim", "--strategies", "optim", "no_shard"],
            "--outer-strategy: got optim with --strategies optim no_shard; accepted: optim with --outer 2 or more, and with"
            " optim_grads_params among",
        ),
        (["--model", "mini", "--outer-strategy", "optim"], "--outer-strategy: got optim with --outer 1; accepted: optim with --outer 2"),
        (["--model", "mini", "--out", "/proc/nothing"], "--out: got /proc/nothing"),
        (
            ["--model", "mini", "--policies", "three-dtypes", "--main-params", "fp16"],
            "MixedPrecision.main_params: got 'float16' for bfloat16 parameters",
        ),
    ],
)  # fmt: skip
def test_options_that_cannot_be_used_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *arguments]) == BAD_OPTION
    assert message in capsys.readouterr().err


def test_nothing_is_allocated() -> None:
    """A model of 405 billion parameters, on this machine."""
    from everybit_torch.sharded.shapes import SHAPES

    model = SHAPES["llama-3-405b"].build()
    assert all(parameter.device == torch.device("meta") for parameter in model.parameters())
    assert 405e9 < sum(parameter.numel() for parameter in model.parameters()) < 407e9


def test_the_device_is_planned_for(tmp_path: Path) -> None:
    """A CPU is given smaller pieces to work on at a time; which of the two it is, was lost on the way once."""
    steps = {}
    for device in ("cpu", "cuda"):
        arguments = ["plan", "--model", "small", "--policies", "KAHAN_BF16", "--strategies", "optim", "--ranks", "1"]
        assert cli.main([*arguments, "--device", device, "--out", str(tmp_path / device)]) == 0
        (one,) = json.loads((tmp_path / device / "plan.json").read_text())["plans"]
        steps[device] = one["transient"]["step"]
    assert steps["cuda"] > 2 * steps["cpu"]


def test_a_model_is_found_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed command has its own folder in the path of modules, and not the one that it is run in."""
    (tmp_path / "model_of_this_folder.py").write_text(
        "from torch import nn\n\ndef make():\n    return nn.Linear(3, 5)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    model, blocks = build("model_of_this_folder:make", None)
    assert [tuple(p.shape) for p in model.parameters()] == [(5, 3), (5,)]
    assert blocks == []


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    """What a plan of the smallest model says as JSON, and what it shows."""
    assert cli.main(["plan", "--model", "tiny", "--json", *arguments]) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out), " ".join(printed.err.split())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("lion", "ademamix", "muon") else pytest.mark.exhaustive)
        for name in eb.optimizers()
    ],
)
def test_every_optimizers_bytes_are_those_of_its_state(
    name: eb.OptimizerName, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against the optimizer itself, on real tensors: what is kept of each use, without what is counted and kept beside it."""
    policies = ("LEAN_BF16", "FLOOR_BF16")
    arguments = ["--ranks", "1", "--strategies", "no_shard", "--policies", *policies, "--optimizer"]
    held, _ = planned(capsys, *arguments, name)
    assert held["optimizer"]["name"] == name
    for policy, one in zip(policies, held["plans"], strict=True):
        made = create(name, Transformer(SIZES["tiny"]).bfloat16(), policy=eb.policies.PRESETS[policy])
        table = made.bytes_table()
        expected = {{"parameter": "parameters", "gradient": "gradients"}.get(use, use): n for use, n in table.items()}
        beside = ("counters", "bookkeeping")
        assert {use: n for use, n in one["persistent"].items() if use not in beside} == {
            use: n for use, n in expected.items() if use not in beside
        }


def test_hyperparameters_that_change_what_is_kept_are_part_of_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--policies", "FP32", "--dtype", "fp32", "--strategies", "optim", "--optimizer"]
    kept = {}
    for optimizer in ("sgd", "sgd,momentum=0.9", "adamw,amsgrad=true"):
        held, shown = planned(capsys, *arguments, optimizer)
        kept[optimizer] = set(held["plans"][0]["persistent"]) & eb.tree.registered_slots()
        assert f"(float32), {optimizer}, 8 ranks" in shown
    assert kept == {
        "sgd": set(),
        "sgd,momentum=0.9": {"momentum"},
        "adamw,amsgrad=true": {"momentum", "variance", "max_variance"},
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer", "adammw"], "--optimizer: got adammw (did you mean adamw?); accepted: sgd, adam, adamw, lion, "),
        (["--optimizer", ""], "--optimizer: got ; accepted: sgd, adam, "),
        (["--optimizer", "lamb,b1=0.9"], "--optimizer lamb.b1: there is no such field (did you mean 'betas'?); fields are lr, "),
        (["--optimizer", "lamb,max_norm=1"], "lamb.max_norm: there is no such field (did you mean 'max_grad_norm'?); fields are"),
        (["--optimizer", "sgd,momentum"], "--optimizer: got sgd,momentum (momentum after a comma); accepted: NAME,hyperparameter=value"),
        (["--optimizer", "sgd,momentum=yes"], "--optimizer sgd.momentum: got 'yes'; accepted is a number"),
        (["--optimizer", "sgd,nesterov=1"], "--optimizer sgd.nesterov: got 1; accepted is true or false"),
        (["--optimizer", "ademamix,alpha_warmup=0.5"], "ademamix.alpha_warmup: got 0.5; accepted is a whole number"),
        (["--optimizer", "adamw,mask=none"], "--optimizer adamw.mask: there is no such field; fields are lr, "),
        (["--optimizer", "adamw,betas=1:0.9"], "--optimizer adamw.betas[0]: got 1.0; accepted is a finite number in [0, 1).\n"),
        (["--optimizer", "sgd,nesterov=true"], "--optimizer sgd.nesterov: got True without momentum"),
        (
            ["--optimizer", "ademamix", "--policies", "PURE_BF16"],
            "--policies: ademamix refuses PURE_BF16: Policy.state: got Nearest(dtype='bfloat16'); 'slow' has a decay rate",
        ),
    ],
)  # fmt: skip
def test_optimizers_that_cannot_be_planned_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "--model", "tiny", *arguments]) == BAD_OPTION
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama-3-8"], "--model: got llama-3-8 (did you mean llama-3-8b?); accepted: "),
        (
            ["--model", "models/config.json"],
            "--model: got models/config.json, and there is no such file or folder; accepted: ",
        ),
        (["--memory", "80"], "--memory: got 80 (did you mean 80GB?); accepted: a number with a unit"),
    ],
)
def test_the_most_likely_mistakes_are_told_what_was_meant(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_one_rank_has_nothing_to_shard_units_can_be_pasted_and_dtypes_go_by_short_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        "plan",
        "--model",
        "tiny",
        "--ranks",
        "1",
        "--policies",
        "LEAN_BF16",
        "--dtype",
        "bf16",
        "--main-grads=fp32",
    ]
    assert cli.main(arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("Planning tiny: up to half a minute")
    assert "(bfloat16)" in printed
    assert "units=[Block]" in printed
    assert "no_shard" in printed
    assert "optim_grads" not in printed.replace("(optim_grads_params: transient", "")
