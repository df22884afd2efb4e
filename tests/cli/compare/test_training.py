"""A model trained here is trained as torch would; what is recorded about it is what happened."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import everybit as eb
from everybit_cli.compare.corpus import Batches, Corpus
from everybit_cli.compare.model import SIZES, loss_of
from everybit_cli.compare.options import DEFAULT_POLICIES, CompareOptions, check
from everybit_cli.compare.results import Record
from everybit_cli.compare.training import UNTIMED_STEPS, Trainee, learning_rate_share, new_model, run, validation_steps
from everybit_cli.optimizers import named_optimizer
from everybit_torch import TorchOptimizer, evaluation_weights
from everybit_torch.drop_ins.creating import CLASSES

CPU = torch.device("cpu")


def trainee(policy: eb.Policy, **changes: float) -> Trainee:
    options = CompareOptions(model="tiny", steps=12, lr=1e-2, **changes)  # type: ignore[arg-type]
    return Trainee("one", policy, size=SIZES["tiny"], seed=0, options=options, device=CPU)


class Silence:
    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def trained(self, policy: str, loss: float) -> None:
        self.heard.append(("trained", policy))

    def validated(self, policy: str, loss: float) -> None:
        self.heard.append(("validated", policy))


def test_fp32_training_is_torchs(corpus: Corpus) -> None:
    ours = trainee(eb.policies.FP32)
    theirs = new_model(SIZES["tiny"], 0)
    decayed = [p for p in theirs.parameters() if p.ndim == 2]
    gains = [p for p in theirs.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.95)
    )
    batches = Batches(corpus.training, batch=4, context=16, seed=0)
    for step in range(12):
        windows = batches.next()
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * learning_rate_share(step, 12)
        optimizer.zero_grad()
        loss = loss_of(theirs, windows)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        # The two round differently in the last place, and training spreads that.
        assert ours.train(windows) == pytest.approx(float(loss.detach()), rel=1e-4)


def test_amp_is_torchs_autocast_over_float32_weights(corpus: Corpus) -> None:
    options = CompareOptions(model="tiny", steps=12, lr=1e-2, policies=("amp", "FP32"))
    plan = check(options)
    assert plan.policies["AMP"] == eb.policies.FP32
    ours = Trainee("AMP", plan.policies["AMP"], size=SIZES["tiny"], seed=0, options=options, device=CPU, autocast=True)
    plain = trainee(eb.policies.FP32)
    theirs = new_model(SIZES["tiny"], 0)
    windows = Batches(corpus.training, batch=4, context=16, seed=0).next()
    with torch.autocast("cpu", torch.bfloat16):
        expected = float(loss_of(theirs, windows).detach())
    assert ours.train(windows) == expected
    assert plain.train(windows) != expected
    assert all(p.dtype is torch.float32 for p in ours.model.parameters())
    silence = Silence()
    named = {record.policy: record.losses for record in run(plan, corpus, silence)[0]}
    assert named["AMP"] != named["FP32"]


@pytest.mark.parametrize("name", DEFAULT_POLICIES)
def test_a_policys_bytes_are_predicted_to_the_byte_but_for_step_counters(name: str, corpus: Corpus) -> None:
    subject = trainee(eb.policies.PRESETS[name])
    subject.train(Batches(corpus.training, batch=2, context=8, seed=0).next())
    record = subject.record()
    measured = {use: size for use, size in record.bytes_measured.items() if use != "counters"}
    assert measured == pytest.approx(record.bytes_predicted, rel=1e-12)
    assert record.bytes_measured.get("counters", 0.0) < 0.01


@pytest.mark.parametrize("name", ["lamb", "torch_adafactor", "prodigy", "rprop"])
def test_every_optimizer_is_trained_and_its_bytes_are_predicted(name: str, corpus: Corpus) -> None:
    options = CompareOptions(model="tiny", steps=3, optimizer=name)
    subject = Trainee("one", eb.policies.LEAN_BF16, size=SIZES["tiny"], seed=0, options=options, device=CPU)
    assert type(subject.optimizer) is CLASSES.get(named_optimizer(name).entry.name, TorchOptimizer)
    subject.train(Batches(corpus.training, batch=2, context=8, seed=0).next())
    record = subject.record()
    measured = {use: size for use, size in record.bytes_measured.items() if use != "counters"}
    assert measured == pytest.approx(record.bytes_predicted, rel=1e-12)
    decays = [group.get("weight_decay") for group in subject.optimizer.param_groups]
    assert decays[1] == (None if name == "rprop" else 0.0)


def test_what_is_validated_are_the_weights_for_evaluation(corpus: Corpus) -> None:
    options = CompareOptions(model="tiny", steps=5, optimizer="schedule_free_sgd", lr=0.5)
    subject = Trainee("one", eb.policies.FP32, size=SIZES["tiny"], seed=0, options=options, device=CPU)
    batches, windows = (
        Batches(corpus.training, batch=2, context=16, seed=0),
        Batches(corpus.held_out, batch=4, context=16, seed=0).next(),
    )
    for _ in range(5):
        subject.train(batches.next())
    with torch.no_grad():
        trained = float(loss_of(subject.model, windows))
    with torch.no_grad(), evaluation_weights(subject.optimizer):
        evaluated = float(loss_of(subject.model, windows))
    assert trained != evaluated
    assert subject.validate(windows, 4) == pytest.approx(evaluated, rel=1e-6)
    with torch.no_grad():
        assert float(loss_of(subject.model, windows)) == trained


def test_a_measured_step_is_not_timed_nor_are_the_first(corpus: Corpus) -> None:
    subject = trainee(eb.policies.LEAN_BF16)
    batches = Batches(corpus.training, batch=2, context=8, seed=0)
    for _ in range(12):
        subject.train(batches.next())
    record = subject.record()
    assert [probe.step for probe in record.probes] == [10, 12]
    assert len(record.optimizer_seconds) == 12 - UNTIMED_STEPS - 2
    assert all(second > 0 for second in record.optimizer_seconds)


def test_rounding_to_nearest_loses_updates_that_a_remainder_keeps(corpus: Corpus) -> None:
    lost = {}
    for name in ("FP32", "PURE_BF16", "LEAN_BF16"):
        subject = trainee(eb.policies.PRESETS[name])
        batches = Batches(corpus.training, batch=2, context=8, seed=0)
        for _ in range(12):
            subject.train(batches.next())
        lost[name] = subject.record().probes[-1]
    assert lost["PURE_BF16"].lost_share > 0.1
    assert lost["PURE_BF16"].edq < 0.99
    for name in ("FP32", "LEAN_BF16"):
        assert lost[name].lost_share < 0.01
        assert lost[name].edq == pytest.approx(1.0, abs=1e-3)


def test_validation_changes_nothing_and_does_not_depend_on_how_it_is_cut(corpus: Corpus) -> None:
    subject = trainee(eb.policies.FP32)
    windows = Batches(corpus.held_out, batch=10, context=16, seed=0).next()
    whole, cut = subject.validate(windows, 10), subject.validate(windows, 3)
    assert whole == pytest.approx(cut, rel=1e-6)
    assert whole == pytest.approx(float(loss_of(new_model(SIZES["tiny"], 0), windows).detach()), rel=1e-6)
    assert all(p.grad is None for p in subject.model.parameters())


def test_the_learning_rate_climbs_for_a_tenth_and_falls_to_a_tenth() -> None:
    shares = [learning_rate_share(step, 400) for step in range(400)]
    assert shares[0] == 1 / 40
    assert shares[39] == shares[40] == 1.0
    assert all(a < b for a, b in pairwise(shares[:40]))
    assert all(a > b for a, b in pairwise(shares[40:]))
    assert shares[-1] == pytest.approx(0.1, abs=1e-4)
    assert learning_rate_share(0, 1) == 1.0


@pytest.mark.parametrize(
    ("steps", "expected"), [(1, {1}), (4, {1, 2, 3, 4}), (25, {3, 5, 8, 10, 13, 15, 18, 20, 23, 25})]
)
def test_models_are_validated_evenly_and_at_the_end(steps: int, expected: set[int]) -> None:
    assert validation_steps(steps) == expected


def test_policies_start_alike_see_the_same_batches_and_repeat_exactly(corpus: Corpus) -> None:
    plan = check(
        CompareOptions(
            model="tiny", steps=3, batch=2, context=16, seed_list=(4, 9), policies=("FP32", "MIXED_BF16", "FLOOR_BF16")
        )
    )
    watcher = Silence()
    records, interrupted = run(plan, corpus, watcher)
    assert not interrupted
    assert [(r.policy, r.seed) for r in records] == [(p, s) for s in (4, 9) for p in plan.policies]
    first = {(r.policy, r.seed): r.losses[0] for r in records}
    # Nothing was stepped yet: the same rounded weights on the same windows.
    assert first["MIXED_BF16", 4] == first["FLOOR_BF16", 4]
    assert first["MIXED_BF16", 4] == pytest.approx(first["FP32", 4], rel=1e-2)
    assert first["FP32", 4] != first["FP32", 9]
    assert watcher.heard.count(("trained", "FLOOR_BF16")) == watcher.heard.count(("validated", "FLOOR_BF16")) == 6

    def outcome(record: Record) -> object:
        return record.losses, record.validation, record.probes

    assert [outcome(r) for r in run(plan, corpus, Silence())[0]] == [outcome(r) for r in records]


class Interruption(Silence):
    """Ctrl-C after so many reports."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def trained(self, policy: str, loss: float) -> None:
        super().trained(policy, loss)
        if len(self.heard) > self.after:
            raise KeyboardInterrupt


def test_an_interrupted_run_is_what_all_policies_had_done(corpus: Corpus) -> None:
    plan = check(CompareOptions(model="tiny", steps=10, batch=2, context=16, policies=("FP32", "LEAN_BF16")))
    whole, _ = run(plan, corpus, Silence())
    # Every step is trained and validated: four reports of both policies. The first policy has trained step 4 and is not validated after it.
    records, interrupted = run(plan, corpus, Interruption(after=12))
    assert interrupted
    for record, finished in zip(records, whole, strict=True):
        assert record.losses == finished.losses[:3]
        assert record.validation == finished.validation[:3]
    with pytest.raises(KeyboardInterrupt):
        run(plan, corpus, Interruption(after=0))


def test_seeds_that_were_finished_are_kept_without_the_one_that_was_interrupted(corpus: Corpus) -> None:
    plan = check(CompareOptions(model="tiny", steps=2, batch=2, context=16, policies=("FP32",), seeds=3))
    records, interrupted = run(plan, corpus, Interruption(after=6))
    assert interrupted
    assert [(record.seed, len(record.losses)) for record in records] == [(0, 2)]


def test_every_default_policy_learns(corpus: Corpus) -> None:
    plan = check(CompareOptions(model="tiny", steps=25, batch=4, context=32, lr=1e-2))
    for record in run(plan, corpus, Silence())[0]:
        assert record.losses[0] == pytest.approx(math.log(256), abs=0.1)
        assert record.validation[-1].loss < 4.0
