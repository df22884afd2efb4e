"""Parameters that are frozen for a while, by their names."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn


def freeze(model: nn.Module, *patterns: str) -> list[str]:
    """Freeze parameters between two steps: they need no gradient any more, and lose their present gradient.

    An optimizer leaves a parameter alone that has no gradient: it keeps its bits, is not decayed, and keeps its state and its count of
    steps, for :func:`unfreeze`. ``requires_grad_(False)`` alone does not take a gradient away: a gradient that is left over, even of
    zeros, still moves the parameter, by momentum and weight decay, and counts in clipping.

    This is so for optimizers of everybit and of torch, and for a :class:`~everybit_torch.FlatStepper`, if the parameters were trained when
    it was made; ``step()`` names them in ``report.untouched``. Call it on every rank, after a step and before the next backward pass.

    Args:
        model: The parameters' model.
        *patterns: Patterns of names, as in :mod:`fnmatch`: ``"body.*"``, ``"*.bias"``. Without patterns: all parameters.

    Returns:
        The names of the parameters.

    Raises:
        ValueError: A pattern that no name matches.

    Examples:
        >>> from torch import nn
        >>> from everybit_torch import freeze, unfreeze
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        >>> freeze(model, "0.*")
        ['0.weight', '0.bias']
        >>> unfreeze(model, "*.bias")
        ['0.bias', '1.bias']
    """
    chosen = _named(model, patterns)
    for parameter in chosen.values():
        parameter.requires_grad_(False)
        parameter.grad = None
    return [*chosen]


def unfreeze(model: nn.Module, *patterns: str) -> list[str]:
    """Train parameters again: they need gradients from the next forward pass on. Their state is unchanged; see :func:`freeze`."""
    chosen = _named(model, patterns)
    for parameter in chosen.values():
        parameter.requires_grad_(True)
    return [*chosen]


def _named(model: nn.Module, patterns: tuple[str, ...]) -> dict[str, nn.Parameter]:
    named = dict(model.named_parameters())
    unused = [one for one in patterns if not any(fnmatchcase(name, one) for name in named)]
    if unused:
        raise ValueError(
            f"patterns: got {', '.join(map(repr, unused))}, which matches no name; the model's parameters are"
            f" {', '.join(map(repr, [*named][:8]))}{', ...' if len(named) > 8 else ''}."
        )
    return {
        name: parameter
        for name, parameter in named.items()
        if not patterns or any(fnmatchcase(name, one) for one in patterns)
    }
