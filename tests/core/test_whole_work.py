"""Work of whole tensors for who holds rows of them: what may be rounded on the way, and what is left to who has the rows."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from typing import Any

import pytest
import torch

import everybit as eb
import everybit.transforms
from everybit.linalg import MatrixView
from everybit.protocol import AtOwner, WholeWork, transforms_in, why_not_elsewhere
from everybit.testing import REGISTRY


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
    work = WholeWork((transform,))
    out, back = work.sent_as(x.dtype), work.returned_as(x.dtype)
    assert out is back is (torch.bfloat16 if arithmetic == "bfloat16" else torch.float32)
    result, _ = work.run(x.to(out).to(x.dtype), work.init([x]), eb.Context())
    assert torch.equal(work.on_rows(result.to(back).to(x.dtype), x.shape, 0), expected[0])


def test_a_wire_is_as_wide_as_what_is_not_rounded() -> None:
    rows, orthogonal = eb.equalize(None, "rows", 1e-8), eb.orthogonalize()
    before, after = WholeWork((rows, orthogonal)), WholeWork((orthogonal, rows))
    assert (before.sent_as(torch.float32), before.returned_as(torch.float32)) == (torch.float32, torch.bfloat16)
    assert (after.sent_as(torch.float32), after.returned_as(torch.float32)) == (torch.bfloat16, torch.float32)
    assert WholeWork((eb.orthogonalize(arithmetic="float32"),)).sent_as(torch.float64) is torch.float32


def test_a_driver_that_gathers_no_rows_is_told() -> None:
    at_owner, rows = AtOwner(WholeWork((eb.orthogonalize(),))), torch.ones(1, 12)
    pending: Any = at_owner.update(rows, at_owner.init(rows), rows, eb.Context(joint=True))
    with pytest.raises(RuntimeError, match=r"Orthogonalize: got \(1, 12\), a part of a tensor"):
        pending.request.here()


@pytest.mark.parametrize(
    ("transform", "why"),
    [
        (eb.orthogonalize(), None),
        (eb.equalize(None, "rows", 1e-8), None),
        (eb.scale_by_normuon(), None),
        (eb.clip_by_unit_norm(0.1), None),
        (eb.low_rank(eb.scale_by_adam(), basis="random", rank=2), None),
        (eb.scale_by_novograd(), None),
        (eb.cautious(eb.orthogonalize()), None),
        (eb.scale_by_trust_ratio(), None),
        (eb.cautious(eb.chain(eb.orthogonalize(), eb.average_weights(0.9))), "it has other weights for evaluation"),
        (eb.clip_by_global_norm(0.1), "it reduces over parameters"),
        (eb.cautious(eb.chain(eb.clip_by_global_norm(0.1), eb.orthogonalize())), "it reduces over parameters"),
    ],
)
def test_why_work_cannot_be_done_elsewhere(transform: Any, why: str | None) -> None:
    assert why_not_elsewhere(transform, (3, 4)) == why


def silent() -> list[Any]:
    """A transform of each class that promises to look at no weights, as the registered optimizers and the defaults have them."""
    found: dict[type[Any], Any] = {}
    for build in REGISTRY.values():
        for node in transforms_in(build(0.1)):
            if getattr(node, "reads_weights", True) is False:
                found.setdefault(type(node), node)
    for module in pkgutil.iter_modules(everybit.transforms.__path__):
        for kind in vars(importlib.import_module(f"everybit.transforms.{module.name}")).values():
            promises = (
                isinstance(kind, type) and hasattr(kind, "update") and kind.__dict__.get("reads_weights") is False
            )
            if promises and kind not in found:
                found[kind] = kind()
    return [found[kind] for kind in sorted(found, key=lambda kind: kind.__name__)]


@pytest.mark.parametrize("transform", silent(), ids=lambda one: type(one).__name__)
def test_what_promises_to_look_at_no_weights_needs_none(transform: Any) -> None:
    """Weights without memory give the updates and the state that others give."""
    transform = replace(transform, view=None) if getattr(transform, "view", None) is not None else transform
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(6, 4, generator=generator)
    found = []
    for params in (weights, torch.empty(6, 4, device="meta")):
        state, updates = transform.init([weights]), []
        for step in (1, 2, 3):
            ctx = eb.Context(step=torch.tensor(step), seed=3)
            gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
            update, state = transform.update([gradient], state, [params], ctx)
            updates += update
        found.append([*updates, *eb.tree.leaves(state)])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


CHAINS: dict[str, tuple[Any, ...]] = {
    "one": (eb.scale_by_soap(period=2),),
    "several": (eb.centralize(), eb.scale_by_soap(period=2), eb.scale_by_dion(), eb.scale_by_came()),
    "a split one": (eb.orthogonalize(scale="match_rms_adamw"), eb.scale_by_normuon(), eb.scale_by_shape(None, 0.3)),
    "numbers": (eb.scale_by_novograd(),),
    "looks at all": (eb.cautious(eb.chain(eb.trace(0.9), eb.orthogonalize())), eb.scale(2.0)),
    "counts and draws": (eb.low_rank(eb.chain(eb.scale_by_nadam(), eb.add_noise()), rank=2, basis="random"),),
}
