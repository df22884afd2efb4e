"""Hugging Face's Trainer: a run that is interrupted and resumed is the run that was not."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import everybit as eb
from everybit_torch import AdamW, TorchOptimizer
from tests.support.byte_windows import ByteWindows

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def trainer(
    directory: Path, policy: eb.Policy | None, kind: Any = AdamW, evaluates: bool = False, **arguments: Any
) -> Any:
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = transformers.GPT2LMHeadModel(config)
    if policy is not None:
        model = model.to(torch.bfloat16)
    optimizer = kind(model.parameters(), lr=1e-2, policy=policy, **arguments)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(directory), max_steps=8, per_device_train_batch_size=4, gradient_accumulation_steps=2, save_steps=4,
            max_grad_norm=1.0, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, seed=0,
            eval_strategy="steps" if evaluates else "no", eval_steps=2,
        ),
        train_dataset=ByteWindows(__file__),
        eval_dataset=ByteWindows(__file__) if evaluates else None,
        optimizers=(optimizer, schedule),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["FP32", "KAHAN_BF16", "LEAN_BF16"])
@pytest.mark.parametrize("arguments", [{}])
def test_resume_is_continue(tmp_path: Path, name: str, arguments: dict[str, Any]) -> None:
    policy = None if name == "FP32" else eb.policies.PRESETS[name]
    whole = trainer(tmp_path / "whole", policy, **arguments)
    whole.train()
    resumed = trainer(tmp_path / "resumed", policy, **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert resumed.state.global_step == 8
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    for (key, a), b in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b), key
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        first, second = _state(whole, a), _state(resumed, b)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[k], second[k]) and first[k].dtype is second[k].dtype for k in first)


@pytest.mark.parametrize("policy", [None, eb.policies.LEAN_BF16], ids=["FP32", "LEAN_BF16"])
def test_weights_for_evaluation_are_evaluated_and_saved_and_training_goes_on_from_its_own(
    tmp_path: Path, policy: eb.Policy | None
) -> None:
    """Trainer calls ``optimizer.eval()`` before an evaluation, saves after it, and calls ``train()`` before the next step."""
    kind = functools.partial(TorchOptimizer, factory=eb.schedule_free_adamw)
    plain = trainer(tmp_path / "plain", policy, kind)
    plain.train()
    whole = trainer(tmp_path / "whole", policy, kind, evaluates=True)
    whole.train()
    resumed = trainer(tmp_path / "resumed", policy, kind, evaluates=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    first, second = ([e["eval_loss"] for e in one.state.log_history if "eval_loss" in e] for one in (whole, resumed))
    assert first == second
    assert len(first) == 4
    for run in (whole, resumed):
        inside = [p.detach().clone() for p in run.model.parameters()]
        run.optimizer.train()
        assert not all(map(torch.equal, run.model.parameters(), inside))
        assert all(map(torch.equal, run.model.parameters(), plain.model.parameters()))


def test_float32_follows_torchs_adamw(tmp_path: Path) -> None:
    """Eight steps of a network amplify the last place of the first; the losses of a trained model show whether it is the same run."""
    ours = trainer(tmp_path / "ours", None)
    ours.train()
    theirs = trainer(tmp_path / "theirs", None)
    theirs.optimizer = torch.optim.AdamW(theirs.model.parameters(), lr=1e-2)
    theirs.lr_scheduler = torch.optim.lr_scheduler.LinearLR(theirs.optimizer, 1.0, 0.1, total_iters=8)
    theirs.train()
    # The trainer logs losses to four decimals; a wrong hyperparameter shows in the second.
    a, b = ([e["loss"] for e in t.state.log_history if "loss" in e] for t in (ours, theirs))
    assert a == pytest.approx(b, abs=2e-3)
    assert len(a) == 8


def _state(run: Any, parameter: Tensor) -> dict[str, Tensor]:
    optimizer = run.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    state: dict[str, Tensor] = optimizer.state[parameter]
    return state
