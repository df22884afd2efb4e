"""Trees of tensors, optimizer states above all, as flat dicts by name and back: what files hold.

A dict of tensors is what ``torch.save``, ``torch.load(weights_only=True)``, safetensors and ``everybit_torch.save_checkpoint`` take. Names
are the places of the leaves, written as Python would: ``inner.states[0].momentum['w']``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

from everybit.base import tree

P = TypeVar("P")

_SHOWN = 5


def state_dict(state: object) -> dict[str, Tensor]:
    """Return the tensors of a state, or of any tree, by name; they are not copied.

    Examples:
        >>> import torch, everybit as eb
        >>> opt = eb.with_policy(eb.sgd(0.1, momentum=0.9), eb.policies.LEAN_BF16)
        >>> state = opt.init({"w": torch.ones(3, dtype=torch.bfloat16)})
        >>> list(eb.state_dict(state))
        ['step', "extra['w'][0]", 'inner.step', "inner.states[1].momentum['w']"]
    """
    return dict(zip(_names(state), tree.leaves(state), strict=True))


def load_state_dict(state: P, saved: Mapping[str, Tensor]) -> P:
    """Return ``saved`` in the structure of ``state``: the run continues bit for bit from where :func:`state_dict` was called.

    Args:
        state: A state made by ``init`` for the same transform, policy and parameters. Its values do not matter, and it is not changed.
        saved: From :func:`state_dict`, maybe by way of a file. Tensors are copied, to the devices of those in ``state``.

    Returns:
        A new state.

    Raises:
        TypeError: ``saved`` is no mapping of names to dense tensors.
        ValueError: Names, shapes or dtypes differ: it was saved for another transform, policy or other parameters, and is not cast. The
            message names the first entries that differ.

    Examples:
        >>> import torch, everybit as eb
        >>> opt = eb.with_policy(eb.lion(1e-4), eb.policies.FP32)
        >>> params = torch.ones(3)
        >>> params, state = opt.step(params, params, opt.init(params))
        >>> int(eb.load_state_dict(opt.init(params), eb.state_dict(state)).step)
        1
    """
    if not isinstance(saved, Mapping):
        raise TypeError(
            f"saved: got a {type(saved).__name__}; accepted is a dict of tensors by name, as state_dict gives it."
        )
    expected = state_dict(state)
    problems = [f"{name!r} is missing" for name in expected if name not in saved]
    problems += [f"{name!r} is not in the state" for name in saved if name not in expected]
    if problems:
        raise ValueError(_unfit(problems))
    for name, own in expected.items():
        value: object = saved[name]
        if not isinstance(value, Tensor) or value.layout is not own.layout or (value.is_meta and not own.is_meta):
            kind = (
                f"a {value.layout} tensor on {value.device}"
                if isinstance(value, Tensor)
                else f"a {type(value).__name__}"
            )
            raise TypeError(f"saved[{name!r}]: got {kind}; accepted are dense tensors with values.")
        if value.shape != own.shape or value.dtype is not own.dtype:
            problems.append(
                f"{name!r}: got {value.dtype} of shape {tuple(value.shape)}; accepted is {own.dtype} of shape {tuple(own.shape)}"
            )
    if problems:
        raise ValueError(_unfit(problems))
    return tree.replace(state, [saved[name].detach().clone().to(own.device) for name, own in expected.items()])


def _names(state: object) -> list[str]:
    return [path.removeprefix(".") for path in tree.paths(state)]


def _unfit(problems: list[str]) -> str:
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return (
        f"saved: does not fit the state: {'; '.join(problems[:_SHOWN])}{more}. It was saved for another transform, policy or"
        " other parameters; nothing is cast, because that would lose bits."
    )
