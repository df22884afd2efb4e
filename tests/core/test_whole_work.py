"""Work of whole tensors for who holds rows of them: what may be rounded on the way, and what is left to who has the rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import everybit as eb
from everybit.matrix_views import MatrixView
from everybit.whole_work import Errand, WholeWork, why_not_elsewhere


@pytest.mark.parametrize("view", [eb.matrix(), eb.heads(3), eb.row_blocks(1, 8, 3), eb.flattened()])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw", 0.3, lambda rows, columns: rows + 0.1 * columns])
def test_factors_of_rows_are_those_of_the_whole(view: MatrixView, scale: Any) -> None:
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    transform = eb.scale_by_shape(view, scale)
    expected, _ = transform.update([x], transform.init([x]), [x])
    for first in range(13):
        for stop in range(first, 13):
            assert torch.equal(transform.of_rows(x[first:stop], x.shape, first), expected[0][first:stop])


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw", 0.3])
@pytest.mark.parametrize("arithmetic", ["bfloat16", "float32", "float64"])
def test_the_wire_loses_no_bit(arithmetic: Any, scale: Any) -> None:
    """Rounded before it is sent, and the result rounded before it is sent back; in 16 bits where the iteration is."""
    x = 3 * torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    transform = eb.orthogonalize(arithmetic=arithmetic, scale=scale)
    expected, _ = transform.update([x], transform.init([x]), [x])
    work = WholeWork.of([transform])
    out, back = work.sent_as(x.dtype), work.returned_as(x.dtype)
    assert out is back is (torch.bfloat16 if arithmetic == "bfloat16" else torch.float32)
    found = work.run(x.to(out).to(x.dtype), eb.Context()).to(back).to(x.dtype)
    assert torch.equal(work.on_rows(found, x.shape, 0), expected[0])


def test_a_wire_is_as_wide_as_what_is_not_rounded() -> None:
    rows, orthogonal = eb.equalize(None, "rows", 1e-8), eb.orthogonalize()
    before, after = WholeWork.of([rows, orthogonal]), WholeWork.of([orthogonal, rows])
    assert (before.sent_as(torch.float32), before.returned_as(torch.float32)) == (torch.float32, torch.bfloat16)
    assert (after.sent_as(torch.float32), after.returned_as(torch.float32)) == (torch.bfloat16, torch.float32)
    assert WholeWork.of([eb.orthogonalize(arithmetic="float32")]).sent_as(torch.float64) is torch.float32


def test_what_knows_of_no_parts_does_not_work_on_them() -> None:
    """Whoever answers a question for joint work by doing it, as for batched matrices, is told."""
    work = WholeWork.of([eb.orthogonalize()])
    with pytest.raises(RuntimeError, match=r"Orthogonalize: got \(1, 12\), a part of a tensor"):
        Errand(work, eb.Context())(torch.ones(1, 12))


@pytest.mark.parametrize(
    ("transform", "why"),
    [
        (eb.orthogonalize(), None),
        (eb.equalize(None, "rows", 1e-8), None),
        (eb.scale_by_normuon(), "it keeps state for whole tensors"),
        (eb.clip_by_unit_norm(0.1), "it does not say reads_weights = False"),
        (eb.clip_by_global_norm(0.1), "it reduces over parameters"),
        (eb.add_noise(), "it draws random bits"),
    ],
)
def test_why_work_cannot_be_done_elsewhere(transform: Any, why: str | None) -> None:
    assert why_not_elsewhere(transform, (3, 4)) == why
