"""The demo model beside other packages is trained as ``everybit compare`` trains it."""

from __future__ import annotations

import pytest
import torch

import everybit as eb
from eight_bit_loss import BATCH, CONTEXT, SUBJECTS, Arguments, main, train
from everybit_cli.compare.corpus import Batches, even_windows, load_corpus
from everybit_cli.compare.model import SIZES
from everybit_cli.compare.options import CompareOptions
from everybit_cli.compare.training import VALIDATION_BYTES, Trainee

STEPS = 4


@pytest.mark.slow
def test_torchs_adamw_ends_where_the_comparisons_float32_does() -> None:
    options = CompareOptions(steps=STEPS)
    assert (options.batch, options.context) == (BATCH, CONTEXT)
    corpus = load_corpus()
    trainee = Trainee("FP32", eb.policies.FP32, size=SIZES["mini"], seed=1, options=options, device=torch.device("cpu"))
    batches = Batches(corpus.training, batch=BATCH, context=CONTEXT, seed=1)
    for _ in range(STEPS):
        trainee.train(batches.next())
    held_out = even_windows(corpus.held_out, count=VALIDATION_BYTES // CONTEXT, context=CONTEXT)
    # Two implementations of one formula in float32: losses of 5.6 differ in their last bits.
    assert train(SUBJECTS["torch AdamW"], 1, STEPS) == pytest.approx(trainee.validate(held_out, 4 * BATCH), abs=1e-5)


def test_an_unknown_subject_is_named() -> None:
    with pytest.raises(SystemExit, match=r"--subjects: got adam; accepted are torch AdamW, bitsandbytes AdamW8bit"):
        main(Arguments(("adam",)))
