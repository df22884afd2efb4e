"""The places of a model's elements, by which random bits are drawn: counted through all parts of the model, a stage after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import torch

from everybit_torch.sharded.agreement import Everyone
from everybit_torch.sharded.layout import Layout, ParameterSpec
from everybit_torch.sharded.model_parallel import ModelParallel


def number_elements(layout: Layout, beside: ModelParallel, copies: Collection[str]) -> Layout:
    """Count a layout's elements after those of the parts of the model that come before it. Every rank has to call it.

    So the bits are those of one process with the parameters of all parts, in the order of the ranks. What is a copy of another part's
    parameter has the places of that one, so that the two stay equal.

    Args:
        layout: Of this rank's part, counted from zero.
        beside: The ranks that hold other parts of the model.
        copies: Of parameters that another part counts: their names; a mapping has the name of each in that part.

    Raises:
        ValueError: No other part has a parameter of that name, shape and dtype; on every rank.
    """
    if beside.part is None:
        return layout
    counts: Counter[torch.dtype] = Counter()
    for spec in layout.specs:
        counts[spec.dtype] += 0 if spec.name in copies else spec.whole_numel
    before = beside.elements_before(counts)
    layout = layout.numbered(lambda spec: spec.index + before.get(spec.dtype, 0))
    ranks = Everyone(*reversed(beside.given))
    wanted = dict(copies) if isinstance(copies, Mapping) else {}
    if not any(ranks.gather(bool(wanted))):
        return layout
    own = {name: _described(spec) for spec in layout.specs for name in spec.names if name not in copies}
    theirs = {name: known for part in ranks.gather(own) for name, known in part.items()}
    first: dict[str, int] = {}
    problems: list[str] = []
    for spec in layout.specs:
        other = wanted.get(spec.name)
        if other is None:
            continue
        dtype, shape, place = theirs.get(other, ("", [], 0))
        if [dtype, shape] != _described(spec)[:2]:
            there = f"is {dtype} {tuple(shape)} there" if dtype else "is not there"
            problems.append(f"copies: {spec.name} is {spec.dtype} {spec.whole_shape}, and {other!r} {there}")
        first[spec.name] = place + _within(spec)
    found = list(dict.fromkeys(problem for part in ranks.gather(problems) for problem in part))
    if found:
        raise ValueError(
            f"{'; '.join(found)}. Accepted is the name of a parameter of the same shape and dtype in another part of the model."
        )
    return layout.numbered(lambda spec: first.get(spec.name, spec.index))


def _described(spec: ParameterSpec) -> list[object]:
    """A parameter on another rank: its dtype, its shape, and the place of its first element."""
    return [str(spec.dtype), list(spec.whole_shape), spec.index - _within(spec)]


def _within(spec: ParameterSpec) -> int:
    """The place of a part's first element in the parameter; 0 if its elements are not consecutive there, and no bits are drawn by them."""
    return 0 if spec.part is None else spec.part.first or 0
