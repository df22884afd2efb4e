"""Notice clips that have another effect than they say.

``torch.nn.utils.clip_grad_norm_`` on parameters with gradients elsewhere returns 0 and clips no gradient. A clip by the norm of all
parameters beside Muon makes updates too small.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping
from typing import TypeVar

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from everybit.optimizers import clip_beside_matrices
from everybit_torch import notices
from everybit_torch.torch_internals import scaled_gradients

Owner = TypeVar("Owner")

_advice: MutableMapping[Tensor, Callable[[], str | None]] = (
    WeakIdKeyDictionary()
)  # by parameter: a function that returns the function to call, or None


def advise(parameters: Iterable[Tensor], owner: Owner, advice: Callable[[Owner], str | None]) -> None:
    """Let calls of torch's function on these parameters warn once, if no parameter has a gradient.

    Args:
        parameters: Their gradients are elsewhere.
        owner: Has the gradients; parameters may outlive it.
        advice: Returns the call that clips, or None once the parameters have gradients of their own.
    """
    scaled_gradients.watch(_look)
    reference = weakref.ref(owner)

    def current() -> str | None:
        present = reference()
        return None if present is None else advice(present)

    for parameter in parameters:
        _advice[parameter] = current


def look_at(transform: object) -> None:
    """Warn of a clip by the norm of all parameters beside Muon, which divides orthogonal updates, or the others by the matrices' norm."""
    text = clip_beside_matrices(transform)
    if text is not None:
        notices.warn(text)


def _look(parameters: list[Tensor]) -> None:
    if any(parameter.grad is not None for parameter in parameters):
        return
    for parameter in parameters:
        current = _advice.get(parameter)
        if current is not None and (call := current()) is not None:
            for one in parameters:
                _advice.pop(one, None)
            notices.warn(
                f"clip_grad_norm_: call {call}. It got parameters of which none has a gradient, and clipped nothing."
            )
            return
