"""Convert state dicts from and to ``torch.optim``; :mod:`everybit_torch.optim.state_dicts.loading` checks them before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from everybit.stepping.entries import STEP, WEIGHTS
from everybit_torch.optim.interfaces import Front, TorchNames
from everybit_torch.optim.state_dicts.saved_structure import Saved, names, read, shown
from everybit_torch.shared_memory import has_memory


def to_torch(front: Front, full: Mapping[str, Any]) -> dict[str, Any]:
    """A full state dict in the words of ``torch.optim``."""
    torchs = _names_of(front)
    groups = []
    for number, group in enumerate(full["param_groups"]):
        for option, agrees in torchs.ours.items():
            if group.get(option, agrees) != agrees:
                raise ValueError(
                    f"param group {number}, {option!r}: got {group[option]!r}, which torch.optim.{type(front).__name__} does not have;"
                    f" accepted for torch is {agrees!r}."
                )
        groups.append(dict(torchs.options) | {name: value for name, value in group.items() if name not in torchs.ours})
    own = {WEIGHTS}.union(*(getattr(entries, "own", {}) for entries in front.state.values()))
    state: dict[Any, Any] = {}
    for number, entry in full["state"].items():
        if not isinstance(entry, Mapping) or STEP not in entry:
            state[number] = entry
            continue
        kept = {name: value for name, value in entry.items() if name not in own}
        if int(entry[STEP]) == 0 and not torchs.eager:
            state[number] = kept
            continue
        state[number] = {"step": entry[STEP].to(torch.float32)} if torchs.counts else {}
        state[number] |= {theirs: entry[ours] for ours, theirs in torchs.slots.items() if ours in entry}
        state[number] |= kept
    return {"state": {number: entry for number, entry in state.items() if entry != {}}, "param_groups": groups}


def from_torch(front: Front, state_dict: object, *, strict: bool = True) -> Saved:
    """A checkpoint of ``torch.optim`` as a full state dict without weights.

    Raises:
        TypeError: torch has no such optimizer.
        ValueError: The checkpoint is another optimizer's, or has options that this optimizer does not have.
    """
    torchs = _names_of(front)
    kind = type(front).__name__
    saved = read(state_dict, front.own_groups, strict=strict)
    for number, group in enumerate(saved.groups):
        for option, agrees in torchs.options.items():
            # Which implementation torch ran (foreach, fused, capturable) does not change the state.
            if not isinstance(agrees, bool) or option in _IMPLEMENTATIONS:
                continue
            given = group.get(option, agrees)
            if not isinstance(given, (bool, int)) or given != agrees:
                raise ValueError(
                    f"state_dict: param group {number}, {option!r}: got {shown(group[option])}; accepted by {kind} is {agrees!r}."
                )
    known = torchs.kept | ({STEP} if torchs.counts else set())
    entries: dict[int, dict[Any, Any]] = {}
    for position, given in saved.entries.items():
        entry = {name: value for name, value in given.items() if value is not None}
        strange = [name for name in entry if isinstance(name, str) and name in _TORCHS_NAMES and name not in known]
        if strange:
            raise ValueError(
                f"state_dict: parameter {position} has state {names(entry)}; of these {kind} has no {names(strange)}."
                f" Accepted is what torch.optim.{kind} saves."
            )
        if not known & entry.keys():
            entries[position] = entry
            continue
        if torchs.counts and STEP not in entry:
            raise ValueError(
                f"state_dict: parameter {position} has state {names(entry)}; accepted is what torch.optim.{kind} saves, which has a 'step'."
            )
        found = {STEP: entry[STEP] if torchs.counts else 1}
        for ours, theirs in torchs.slots.items():
            if theirs in entry:
                found[ours] = _widened(entry[theirs])
        entries[position] = found | {name: value for name, value in entry.items() if name not in known}
    groups = [{key: value for key, value in group.items() if key not in torchs.options} for group in saved.groups]
    return replace(saved, groups=groups, entries=entries)


def _widened(value: Any) -> Any:
    """Widen a tensor to at least float32, which is exact. Other values are returned unchanged, and refused when they are judged."""
    plain = isinstance(value, Tensor) and not value.is_nested and value.layout is torch.strided
    if not plain or value.device.type == "meta" or not value.is_floating_point() or not has_memory(value):
        return value
    return value.to(torch.promote_types(value.dtype, torch.float32))


_IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")

_TORCHS_NAMES = frozenset({
    "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum", "exp_inf", "eta",
    "mu", "mu_product", "ax", "prev", "step_size", "row_var", "col_var",
})  # fmt: skip
"""The names of state in torch's optimizers; anything else in it was added by other code, and is kept."""


def _names_of(front: Front) -> TorchNames:
    found = front.torch_names
    if found is None:
        raise TypeError(
            f"{type(front).__name__}: torch.optim has no optimizer that keeps the same state; accepted are everybit_torch's"
            " optimizers that torch.optim has under the same name, such as AdamW."
        )
    return found
