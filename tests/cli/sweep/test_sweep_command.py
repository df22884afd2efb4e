"""``everybit sweep``: each optimizer at factors of its own learning rate, the best of each again from other seeds, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import everybit as eb
from everybit_torch.cli import main
from everybit_torch.cli.compare import experiment
from everybit_torch.cli.compare.corpus import Batches, Corpus, is_held_out, load_corpus
from everybit_torch.cli.compare.model import SIZES
from everybit_torch.cli.compare.options import CompareOptions
from everybit_torch.cli.compare.results import Point, Record
from everybit_torch.cli.compare.training import Trainee
from everybit_torch.cli.device import parsed_device
from everybit_torch.cli.optimizers import named_optimizer
from everybit_torch.cli.sweep import command, finals, running
from everybit_torch.cli.sweep.finals import Final, steps_to
from everybit_torch.cli.sweep.options import DEFAULT_OPTIMIZERS, SweepOptions, checked
from everybit_torch.cli.sweep.running import Run, best_of_each, next_factor

TINY = ["sweep", "--model", "tiny", "--steps", "4", "--batch", "2", "--context", "16", "--threads", "1"]


@pytest.fixture(autouse=True)
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """A small library of 40 modules, in the place of Python's."""
    root = tmp_path / "library"
    root.mkdir()
    for number in range(40):
        (root / f"module_{number}.py").write_text(f"def function_{number}(x):\n    return x + {number}\n" * 12)
    assert any(is_held_out(f"module_{number}.py") for number in range(40))
    found = load_corpus(root)
    monkeypatch.setattr(command, "load_corpus", lambda: found)
    return found


def test_every_run_is_kept_and_the_best_of_each_is_shown(
    tmp_path: Path, corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--optimizers", "adamw", "sgd,momentum=0.9", "--factors", "1", "10", "--policy", "LEAN_BF16"]
    assert main([*TINY, *arguments, "--seeds", "2", "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["sweep.json", "sweep.png"]
    data: dict[str, Any] = json.loads((out / "sweep.json").read_text())
    assert not data["interrupted"]
    assert data["policy"]["name"] == "LEAN_BF16"
    assert data["optimizers"]["sgd,momentum=0.9"]["hyperparameters"]["momentum"] == 0.9
    assert [(run["optimizer"], run["learning_rate"]) for run in data["runs"]] == [
        ("adamw", 1e-3),
        ("adamw", 1e-2),
        ("sgd,momentum=0.9", 1e-3),
        ("sgd,momentum=0.9", 1e-2),
    ]
    for run in data["runs"]:
        assert [len(record["losses"]) for record in run["records"]] == [4, 4]
        assert [record["seed"] for record in run["records"]] == [0, 1]
        assert run["spread"] > 0
    assert [one["optimizer"] for one in data["best"]] == sorted(
        ("adamw", "sgd,momentum=0.9"),
        key=lambda name: min(run["loss"] for run in data["runs"] if run["optimizer"] == name),
    )
    shown = " ".join(capsys.readouterr().out.split())
    for one in data["best"]:
        assert f"{one['loss']:.4f} ±{one['spread']:.4f}" in shown
    assert "does not say which optimizer is best for a large model or a long run" in shown
    assert "the factors 1 10 of its default learning rate" in shown
    # The run of a sweep is that of the comparison with these hyperparameters: defaults, not those that are usual for this model.
    options = CompareOptions(model="tiny", steps=4, batch=2, context=16)
    alone = Trainee(
        "adamw", eb.policies.LEAN_BF16, size=SIZES["tiny"], seed=1, options=options, device=parsed_device("cpu"),
        optimizer=named_optimizer("adamw,learning_rate=0.01"),
    )  # fmt: skip
    batches = Batches(corpus.training, batch=2, context=16, seed=1)
    assert [alone.train(batches.next()) for _ in range(4)] == data["runs"][1]["records"][1]["losses"]


def run_of(optimizer: str, factor: float, *losses: float) -> Run:
    records = [
        Record(
            policy=optimizer, seed=seed, losses=(loss,), validation=(Point(1, loss),), probes=(), optimizer_seconds=(),
            training_seconds=(), bytes_measured={}, bytes_predicted={},
        )
        for seed, loss in enumerate(losses)
    ]  # fmt: skip
    return Run(optimizer, factor, factor, tuple(records))


def test_the_best_is_the_least_mean_and_divergence_is_counted() -> None:
    runs = [
        *(run_of("a", factor, loss) for factor, loss in ((0.1, 3.0), (1.0, 2.0), (10.0, math.nan))),
        *(
            run_of("b", factor, *losses)
            for factor, losses in ((10.0, (1.0, 2.0)), (1.0, (1.7, 1.7)), (0.1, (5.0, 9.0)))
        ),
        run_of("c", 1.0, 7.0),
        run_of("d", 1.0, 2.5),
    ]
    b, a, d, c = best_of_each(runs)
    assert (a.run.optimizer, a.run.factor, a.worst, a.diverged, a.at_edge) == ("a", 1.0, 3.0, 1, False)
    assert (b.run.optimizer, b.run.factor, b.run.loss, b.worst, b.diverged, b.at_edge) == ("b", 10.0, 1.5, 1.7, 1, True)
    assert b.run.spread == pytest.approx(2**-0.5)
    assert (c.run.loss, c.diverged, c.run.spread) == (math.inf, 1, None)
    assert not d.at_edge  # of one learning rate there is no edge


def test_a_row_of_factors_goes_on_where_the_best_is() -> None:
    def following(*losses: tuple[float, float]) -> float | None:
        return next_factor([run_of("a", factor, loss) for factor, loss in losses])

    assert following((1, 3.0), (3, 2.5), (10, 2.0)) == 30
    assert following((1, 3.0), (3, 2.5), (10, 2.0), (30, 1.9)) == 100
    assert following((1, 1.0), (3, 2.5), (10, 2.0)) == 0.3
    assert following((1, 1.0), (10, 2.0), (3, 2.5), (0.3, 0.9)) == 0.1
    assert following((1, 2.0), (4, 1.0)) == 16
    assert following((1, 1.0), (4, 2.0)) == 0.25
    assert following((1, 3.0), (3, 1.5), (10, 2.0)) is None
    assert following((1, math.nan), (3, math.nan)) is None
    assert following((1, 2.0), (3, 1.0), (10, math.nan)) is None


def test_a_sweep_goes_on_at_its_edge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--optimizers", "sgd", "--factors", "1", "10", "--extend", "2", "--out", str(tmp_path)]
    assert main([*TINY, *arguments]) == 0
    data = json.loads((tmp_path / "sweep.json").read_text())
    # Four steps of so small a learning rate: the loss falls with every factor.
    assert [run["factor"] for run in data["runs"]] == [1, 10, 100, 1000]
    losses = [run["loss"] for run in data["runs"]]
    assert losses == sorted(losses, reverse=True)
    assert "and up to 2 further where the best was the last" in " ".join(capsys.readouterr().out.split())
    assert data["finals"] == []


def test_the_best_of_each_is_trained_from_other_seeds(
    tmp_path: Path, corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--optimizers", "sgd", "adamw", "--factors", "1", "10", "--final-seeds", "2", "--steps", "7"]
    assert main([*TINY, *arguments, "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "sweep.json").read_text())
    finals = {final["optimizer"]: final for final in data["finals"]}
    assert list(finals) == [one["optimizer"] for one in data["best"]]
    for one in data["best"]:
        final = finals[one["optimizer"]]
        assert final["learning_rate"] == one["learning_rate"]
        assert [record["seed"] for record in final["records"]] == [1, 2]
        assert [len(record["training_seconds"]) for record in final["records"]] == [2, 2]  # after the first five
    # The target is what the optimizer that is named first reaches from its worst seed.
    assert data["target"] == max(record["validation"][-1]["loss"] for record in finals["sgd"]["records"])
    sgd = finals["sgd"]
    assert 0 < sgd["steps_to_target"] <= 7
    seconds = [second for record in sgd["records"] for second in record["training_seconds"]]
    assert sgd["seconds_to_target"] == pytest.approx(sgd["steps_to_target"] * sum(seconds) / len(seconds))
    shown = " ".join(capsys.readouterr().out.split())
    assert "from 2 seeds that the sweep did not use, side by side" in shown
    assert f"{sgd['loss']:.4f} ±{sgd['spread']:.4f} {sgd['steps_to_target']:.0f}" in shown
    # Side by side with others, each is trained as it is alone.
    alone = Trainee(
        "sgd", eb.policies.FP32, size=SIZES["tiny"], seed=2, options=CompareOptions(model="tiny", steps=7, batch=2, context=16),
        device=parsed_device("cpu"), optimizer=named_optimizer(f"sgd,learning_rate={sgd['learning_rate']}"),
    )  # fmt: skip
    batches = Batches(corpus.training, batch=2, context=16, seed=2)
    assert [alone.train(batches.next()) for _ in range(7)] == sgd["records"][1]["losses"]


def test_steps_are_counted_on_the_line_between_two_validations() -> None:
    def trained(*losses: float, seconds: float = 0.5) -> Record:
        return Record(
            policy="a", seed=0, losses=(), validation=tuple(Point(10 * n, loss) for n, loss in enumerate(losses, 1)), probes=(),
            optimizer_seconds=(), training_seconds=(seconds, seconds), bytes_measured={}, bytes_predicted={},
        )  # fmt: skip

    assert steps_to(trained(4.0, 3.0, 2.0), 2.5) == 25
    assert steps_to(trained(4.0, 3.0, 2.0), 3.0) == 20
    assert steps_to(trained(4.0, 3.0, 2.0), 5.0) == 10
    assert steps_to(trained(4.0, 3.0, 2.0), 1.9) is None
    assert steps_to(trained(4.0, 3.0, 3.5, 2.0), 3.0) == 20  # the first time
    assert steps_to(trained(4.0, math.nan), 3.0) is None
    both = Final("a", 1.0, (trained(4.0, 2.0), trained(4.0, 1.0, seconds=1.5)))
    assert both.steps_to(2.5) == (17.5 + 15) / 2
    assert both.seconds_to(2.5) == (17.5 + 15) / 2 * 1.0
    assert (both.loss, both.steps_to(1.5), both.seconds_to(1.5)) == (1.5, None, None)  # a seed does not get there
    assert Final("a", 1.0, (trained(4.0), trained(math.nan))).spread is None


def test_ctrl_c_in_the_finals_leaves_the_sweep_and_whole_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, count = experiment.train, [0]

    def interrupting(*arguments: Any, **options: Any) -> None:
        count[0] += 1
        if count[0] == 2:
            raise KeyboardInterrupt
        trained(*arguments, **options)

    monkeypatch.setattr(finals, "train", interrupting)
    arguments = ["--optimizers", "sgd", "--factors", "1", "--final-seeds", "3", "--out", str(tmp_path)]
    assert main([*TINY, *arguments]) == 130
    data = json.loads((tmp_path / "sweep-interrupted.json").read_text())
    assert [record["seed"] for record in data["finals"][0]["records"]] == [1]
    assert "and the seeds that were" in capsys.readouterr().out


def test_ctrl_c_leaves_whole_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, count = experiment.train, [0]

    def interrupting(*arguments: Any, **options: Any) -> None:
        count[0] += 1
        if count[0] == 4:
            raise KeyboardInterrupt
        trained(*arguments, **options)

    monkeypatch.setattr(running, "train", interrupting)
    arguments = [*TINY, "--optimizers", "lion", "sgd", "--factors", "1", "10", "--out", str(tmp_path / "out")]
    assert main(arguments) == 130
    data = json.loads((tmp_path / "out" / "sweep-interrupted.json").read_text())
    assert data["interrupted"]
    assert [(run["optimizer"], run["factor"]) for run in data["runs"]] == [("lion", 1), ("lion", 10)]
    assert "Interrupted" in capsys.readouterr().out
    count[0] = 3
    assert main(arguments) == 130
    assert "no file was left half-written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizers"], "--optimizers: got none; accepted: at least one"),
        (["--optimizers", "lien"], "--optimizers: got lien (did you mean lion?); accepted: sgd, "),
        (["--optimizers", "lion", "lion"], "--optimizers: got lion twice; accepted: each once"),
        (["--optimizers", "lion,learning_rate=1"], "--optimizers: got lion,learning_rate=1; accepted: optimizers without a learning rate"),
        (["--factors", "1", "-1"], "--factors: got 1 -1; accepted: different finite numbers above 0"),
        (["--factors", "1", "1"], "--factors: got 1 1; accepted: different finite numbers above 0"),
        (["--policy", "LEAN"], "--policy: got LEAN (did you mean LEAN_BF16?); accepted: FP64, FP32"),
        (["--optimizers", "sgd", "lion", "--policy", "PURE_BF16"], "--policy: lion refuses PURE_BF16: Policy.momentum: "),
        (["--factors", "1", "--extend", "1"], "--extend: got 1; accepted: 0 with a single factor"),
        (["--extend", "-1"], "--extend: got -1; accepted: a whole number, at least 0"),
        (["--final-seeds", "-1"], "--final-seeds: got -1; accepted: a whole number, at least 0"),
        (["--target", "2"], "--target: got 2 without --final-seeds; accepted: both"),
        (["--target", "0", "--final-seeds", "1"], "--target: got 0; accepted: a finite loss above 0"),
        (["--steps", "0"], "--steps: got 0; accepted: a whole number, at least 1"),
        (["--seeds", "0"], "--seeds: got 0; accepted: a whole number, at least 1"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_used_are_named(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "--out", str(tmp_path / "out"), *arguments]) == 2
    captured = capsys.readouterr()
    assert f"everybit sweep: {message}" in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_defaults_are_ten_optimizers_at_the_same_factors() -> None:
    plan = checked(SweepOptions())
    assert tuple(plan.optimizers) == DEFAULT_OPTIMIZERS
    assert len(plan.optimizers) == 10
    assert 1.0 in plan.options.factors
