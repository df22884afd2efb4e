from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from everybit_cli.compare.corpus import Corpus, is_held_out, load_corpus
from everybit_cli.compare.results import Point, Probe, Record

MakeRecord = Callable[..., Record]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These models are so small that a second thread only waits, and other tests run beside these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """A small library: 40 modules of about 600 bytes."""
    root = tmp_path / "library"
    root.mkdir()
    for number in range(40):
        body = "\n".join(f"def function_{number}_{line}(x):\n    return x + {line}" for line in range(15))
        (root / f"module_{number}.py").write_text(body)
    assert any(is_held_out(f"module_{number}.py") for number in range(40))
    return load_corpus(root)


@pytest.fixture
def make_record() -> MakeRecord:
    """A record of a run that ended at ``final``, told in few numbers."""

    def make(policy: str, seed: int = 0, *, final: float = 2.0, steps: int = 40, seconds: float = 1e-3) -> Record:
        return Record(
            policy=policy,
            seed=seed,
            losses=tuple(final + 3.0 * (1 - step / steps) for step in range(1, steps + 1)),
            validation=(Point(steps // 2, final + 1.5), Point(steps, final)),
            probes=(Probe(steps // 2, 0.9, 0.1, 1.0, 1.0), Probe(steps, 0.25, 0.75, 1.0, 1.0)),
            optimizer_seconds=(seconds, seconds, 100 * seconds),
            training_seconds=(4 * seconds, 4 * seconds, 100 * seconds),
            bytes_measured={"parameter": 2.0, "gradient": 2.0, "momentum": 2.0, "variance": 4.0},
            bytes_predicted={"parameter": 2.0, "gradient": 2.0, "momentum": 2.0, "variance": 4.0},
        )

    return make
