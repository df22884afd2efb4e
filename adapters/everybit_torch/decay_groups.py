"""Param groups for the usual recipe: no weight decay on norms and biases."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

import everybit as eb

# Their weights are vectors as a rule, and of more dimensions for a LayerNorm over several.
_NORMS = (
    nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d,
    nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip


def weight_decay_groups(
    model: nn.Module, weight_decay: float = 1e-2, *, no_decay: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Return two param groups: parameters that weight decay applies to, and norms and biases, with a ``weight_decay`` of 0.

    Not decayed are parameters with fewer than two dimensions, all parameters of torch's normalization layers, parameters that are called a
    bias, and those that ``no_decay`` names. The groups hold names beside the parameters, so that policies and masks can go by them, and fit
    optimizers of ``torch.optim`` as well. Each parameter comes once, frozen parameters included; an empty group is left out.

    Args:
        model: A model; the values of its parameters are not read.
        weight_decay: The weight decay of the first group, at least zero.
        no_decay: Patterns of further names that are not decayed, as of :mod:`fnmatch`: ``"*embedding*"``, ``"head.weight"``.

    Raises:
        TypeError: ``no_decay`` is a string, and not several.
        ValueError: A negative weight decay; a pattern that no parameter's name matches; a lazy parameter, which has no shape yet.

    Examples:
        >>> from torch import nn
        >>> from everybit_torch import AdamW, weight_decay_groups
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        >>> groups = weight_decay_groups(model, 0.1)
        >>> [(group["weight_decay"], [name for name, _ in group["params"]]) for group in groups]
        [(0.1, ['0.weight']), (0.0, ['0.bias', '1.weight', '1.bias'])]
        >>> optimizer = AdamW(groups, lr=3e-4)
    """
    if isinstance(no_decay, str):
        raise TypeError(f"no_decay: got {no_decay!r}; accepted are several patterns: [{no_decay!r}].")
    if isinstance(weight_decay, bool) or not weight_decay >= 0:
        raise ValueError(f"weight_decay: got {weight_decay!r}; accepted is a number of at least zero.")
    patterns = list(no_decay)
    of_norms = {
        id(one) for module in model.modules() if isinstance(module, _NORMS) for one in module.parameters(recurse=False)
    }
    unused = set(patterns)
    decayed: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"{name}: got a lazy parameter, of which nobody knows yet how many dimensions it has; accepted is a model that has seen an"
                " input."
            )
        matching = {pattern for pattern in patterns if fnmatchcase(name, pattern)}
        unused -= matching
        decays = eb.not_norm_or_bias(name, parameter) and id(parameter) not in of_norms and not matching
        (decayed if decays else others).append((name, parameter))
    if unused:
        raise ValueError(
            f"no_decay: got {', '.join(map(repr, sorted(unused)))}, which matches no name; the model's parameters are"
            f" {', '.join(repr(name) for name, _ in (decayed + others)[:8])}{', ...' if len(decayed + others) > 8 else ''}."
        )
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
