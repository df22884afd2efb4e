"""Finds which of a factory's numbers can be data of compiled code, and which have to be constants of it.

A number that compiled code reads from a tensor may change without new code. But a factory, or a transform, may branch on a number, count
with it or print it, and then there has to be a number. What happens to a tensor in its place is tried out on tensors of the meta device,
which have no values: whatever wants a value raises.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

import everybit as eb

T = TypeVar("T")
Factory = Callable[..., eb.Transform[Any]]


def is_number(value: object) -> bool:
    """Whether a hyperparameter is a number, which may be data; True and False choose code."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def fits(value: float) -> bool:
    """Whether a float64 tensor holds a number as it is; of whole numbers beyond 2^53 it does not hold every one."""
    try:
        return isinstance(value, float) or int(float(value)) == value
    except OverflowError:
        return False


def needed_as_numbers(
    factory: Factory,
    arguments: Mapping[str, Any],
    candidates: Collection[str],
    step: Callable[[eb.Transform[Any]], object],
) -> set[str]:
    """The arguments among ``candidates`` that a factory, or its transform, does not take as tensors.

    Args:
        factory: Called with all ``arguments``.
        arguments: Its keyword arguments.
        candidates: Names of arguments that are numbers.
        step: Takes a step of tensors on the meta device with the factory's transform.
    """

    def make(tensors: Collection[str]) -> eb.Transform[Any]:
        return factory(**{name: _without_value(value, name in tensors) for name, value in arguments.items()})

    def works(what: Callable[[Collection[str]], object], tensors: Collection[str]) -> bool:
        try:
            with _unnoticed():
                what(tensors)
        except Exception:
            return False
        return True

    def make_and_step(tensors: Collection[str]) -> object:
        return step(make(tensors))

    if works(make_and_step, candidates):
        return set()
    # A transform that does not work without values gives no information about the numbers; the factory may.
    for what in (make_and_step, make):
        if works(what, ()):
            found = {name for name in candidates if not works(what, (name,))}
            return found if works(what, set(candidates) - found) else set(candidates)
    return set()


def without_values(tree: T) -> T:
    """A tree of tensors on the meta device that are otherwise like these."""
    return eb.tree.map(_like, tree)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="meta")


def _without_value(value: Any, wanted: bool) -> Any:
    if isinstance(value, Tensor):
        return _like(value)
    return torch.empty((), dtype=torch.float64, device="meta") if wanted else value


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Run a trial without warnings, and restore the state of all random generators after it."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = [torch.cuda.current_device()] if used else []
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate()
    before_numpy = numpy.random.get_state() if numpy is not None else None
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=devices), torch.no_grad(), torch.device("meta"):
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(before_numpy)
