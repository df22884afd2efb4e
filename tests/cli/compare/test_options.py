"""A bad option is refused before any work, in one line: which, what was got, what would do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import everybit as eb
from everybit_cli.compare.corpus import Corpus
from everybit_cli.compare.options import CompareOptions, check, check_context
from everybit_cli.errors import OptionError
from everybit_cli.files import check_out
from everybit_torch.config import save_policy


@pytest.mark.parametrize(
    ("changes", "option", "got", "accepted"),
    [
        ({"steps": 0}, "--steps", "0", "at least 1"),
        ({"batch": -1}, "--batch", "-1", "at least 1"),
        ({"context": 0}, "--context", "0", "at least 1"),
        ({"threads": -1}, "--threads", "-1", "torch's choice"),
        ({"lr": float("nan")}, "--lr", "nan", "finite number above 0"),
        ({"lr": 0.0}, "--lr", "0.0", "finite number above 0"),
        ({"clip": -1.0}, "--clip", "-1.0", "at least 0"),
        ({"seeds": 0}, "--seeds", "0", "at least 1"),
        ({"seed_list": (3, 3)}, "--seed-list", "3 3", "different whole numbers"),
        ({"seed_list": (3, -1)}, "--seed-list", "3 -1", "at least 0"),
        ({"seeds": 2, "seed_list": (3,)}, "--seeds", "2", "nothing, with --seed-list"),
        ({"device": "gpu"}, "--device", "gpu", "cpu"),
        ({"device": "cuda:99"}, "--device", "cuda:99", "cpu"),
        ({"policies": ("FP32", "fp32")}, "--policies", "FP32 twice", "names that differ"),
        ({"policies": ("KAHAN_BF61",)}, "--policies", "did you mean KAHAN_BF16?", "LEAN_BF16"),
        ({"policies": ("absent.toml",)}, "--policies", "absent.toml (no such file", "can be read"),
        # bfloat16's second moment does not fall at this rate; the optimizer knows, and its reason is passed on.
        ({"policies": ("PURE_BF16",), "optimizer": "adamw,betas=0.9:0.999"}, "--policies", ": adamw refuses PURE_BF16: Pol", "Split(8)"),
        ({"optimizer": "adamww"}, "--optimizer", "did you mean adamw?", "lion"),
        ({"optimizer": "lamb,lr=1", "lr": 1.0}, "--lr", "lr with --optimizer lamb,lr=1", "each hyperparameter once"),
        ({"optimizer": "schedule_free_sgd,b1=2"}, "--optimizer", " schedule_free_sgd.b1: got 2.0", "a finite number in [0, 1]"),
        ({"optimizer": "lion", "policies": ("FP32", "PURE_BF16")}, "--policies", ": lion refuses PURE_BF16: Policy.mom", "Split(8)"),
    ],
)  # fmt: skip
def test_a_bad_option_is_named_with_what_would_do(
    changes: dict[str, Any], option: str, got: str, accepted: str
) -> None:
    with pytest.raises(OptionError) as caught:
        check(replace(CompareOptions(), **changes))
    message = str(caught.value)
    assert message.startswith((f"{option}: got ", f"{option}{got}"))
    assert "\n" not in message
    before, _, after = message.partition("ccepted")
    assert got in before
    assert accepted in after
    assert "accepted" not in after  # once is enough


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_is_refused_where_there_is_none() -> None:
    with pytest.raises(OptionError, match=r"--device: got cuda; accepted: cpu \(torch finds no CUDA device here\)"):
        check(CompareOptions(device="cuda"))


def test_the_defaults_are_fine() -> None:
    plan = check(CompareOptions())
    assert list(plan.policies) == ["FP32", "MIXED_BF16", "PURE_BF16", "KAHAN_BF16", "LEAN_BF16", "FLOOR_BF16"]
    assert plan.policies["LEAN_BF16"] is eb.policies.LEAN_BF16
    assert plan.reference == "FP32"
    assert plan.seeds == (0,)


def test_an_optimizer_has_its_own_defaults_and_the_policies_that_it_accepts() -> None:
    adamw = check(CompareOptions())
    assert adamw.optimizer.given == {"betas": (0.9, 0.95), "weight_decay": 0.1}
    assert adamw.options.lr == 1e-3
    lion = check(CompareOptions(optimizer="lion,weight_decay=0.3"))
    assert lion.optimizer.given == {"weight_decay": 0.3}
    assert lion.options.lr == 1e-4
    assert list(lion.policies) == ["FP32", "MIXED_BF16", "KAHAN_BF16", "LEAN_BF16", "FLOOR_BF16"]
    given = check(CompareOptions(optimizer="adamw,betas=0.9:0.9,eps=1e-6", lr=3e-3)).optimizer
    assert given.given == {"betas": (0.9, 0.9), "lr": 3e-3, "eps": 1e-6, "weight_decay": 0.1}


def test_seeds_are_counted_or_listed() -> None:
    assert check(CompareOptions(seeds=3)).seeds == (0, 1, 2)
    assert check(CompareOptions(seed_list=(7, 3))).seeds == (7, 3)
    assert check(CompareOptions(seed_list=(7,))).seeds == (7,)


def test_policies_come_from_files_too(tmp_path: Path) -> None:
    mine = eb.Policy(params=eb.Kahan("float16", "stochastic"))
    save_policy(mine, tmp_path / "mine.json")
    (tmp_path / "other.toml").write_text('params = "Split"\n')
    plan = check(CompareOptions(policies=(str(tmp_path / "mine.json"), str(tmp_path / "other.toml"), "lean_bf16")))
    assert plan.policies == {
        "mine": mine,
        "other": eb.Policy(params=eb.Split()),
        "LEAN_BF16": eb.policies.LEAN_BF16,
    }
    assert plan.reference == "mine"


def test_a_policy_file_with_a_mistake_is_named_with_it(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('parameters = "Split"\n')
    with pytest.raises(OptionError, match=r"--policies: .*bad\.toml: Policy.parameters: there is no such field"):
        check(CompareOptions(policies=(str(path),)))


def test_a_context_longer_than_the_text_is_refused(corpus: Corpus) -> None:
    longest = len(corpus.held_out) - 1
    check_context(CompareOptions(context=longest), corpus)
    with pytest.raises(OptionError, match=f"--context: got {longest + 1}; accepted: at most {longest}"):
        check_context(CompareOptions(context=longest + 1), corpus)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    check_out(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "below"):
        with pytest.raises(OptionError, match=r"--out: got .*file.*; accepted: a folder that can be made"):
            check_out(path)
