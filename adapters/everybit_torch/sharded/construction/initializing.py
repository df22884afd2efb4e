"""Calls initializers: what they may not use is refused by name, and what they did not write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from everybit_torch.dtensors import local
from everybit_torch.sharded.construction.initializers import Initializer
from everybit_torch.sharded.construction.tensors import ModelTensor
from everybit_torch.sharded.planning.construction import LOOKED_AT


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations on tensors of the model that have no memory now."""

    def __init__(self, absent: Callable[[Tensor], str | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._absent = absent

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, Tensor) and (name := self._absent(given)) is not None:
                raise _AbsentError(name)
        return function(*args, **(kwargs or {}))


class _AbsentError(Exception):
    """An operation on a tensor without memory."""


def initialize(initializer: Initializer, absent: Mapping[int, str], advice: str) -> None:
    """Call an initializer.

    Args:
        initializer: What is called.
        absent: The names of tensors whose values are not there any more, by address.
        advice: What is accepted if it uses one of them, or one that has no memory yet.

    Raises:
        RuntimeError: It does.
    """

    def name_of(given: Tensor) -> str | None:
        if given.device.type == "meta":
            return f"a tensor of shape {tuple(given.shape)} on the meta device"
        memory = local(given)
        return absent.get(memory.untyped_storage().data_ptr()) if memory.numel() else None

    try:
        with torch.no_grad(), _Watch(name_of):
            initializer.call()
    except _AbsentError as error:
        raise RuntimeError(
            f"values: {initializer} uses {error}, which has no memory at that moment; {advice}"
        ) from None


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's generators begin at ``seed`` inside, and go on as before afterwards."""
    others = [] if device.type in ("cpu", "meta") else [device]
    with torch.random.fork_rng(others, device_type=device.type if others else "cuda"):
        torch.manual_seed(seed)
        yield


def spoil(tensor: Tensor) -> None:
    """Write what no initializer writes, to see afterwards whether one did."""
    if (mark := _mark(tensor.dtype)) is not None:
        tensor.fill_(mark)


def require_written(one: ModelTensor, values: Tensor, last: Initializer) -> None:
    """Refuse a tensor that its initializers did not write; of floating-point ones, a part that they did not write.

    Args:
        one: The tensor.
        values: What they wrote to.
        last: The last that may have written.

    Raises:
        RuntimeError: They did not.
    """
    flat = values.detach().reshape(-1)
    mark = _mark(flat.dtype)
    if mark is None or not flat.numel():
        return
    left = 0
    for part in _parts(flat):
        unwritten = part.isnan() if mark != mark else part == mark
        left += int(unwritten.sum()) if bool(unwritten.any()) else 0  # counting takes much longer than looking
    if left == flat.numel() or (left and mark != mark):
        raise RuntimeError(
            f"values: {one.name}: {left} of its {flat.numel()} elements were not written, or are NaN, after {last}, the last call that may"
            " use it; accepted are initializers that write all of a module's parameters and buffers."
        )


def _parts(flat: Tensor) -> Iterator[Tensor]:
    for start in range(0, flat.numel(), LOOKED_AT):
        yield flat[start : start + LOOKED_AT]


def _mark(dtype: torch.dtype) -> float | None:
    """A value that shows that nothing else was written; None for dtypes without one."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan if dtype.itemsize > 1 else None
    if dtype is torch.bool:
        return None
    limits = torch.iinfo(dtype)
    return limits.min if limits.min < 0 else limits.max


def fingerprint(tensor: Tensor) -> str:
    """A number that differs, almost certainly, between tensors that were drawn differently."""
    flat = tensor.detach().reshape(-1)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(flat.dtype.itemsize)
    total, weighted = 0, 0
    for number, part in enumerate(_parts(flat)):
        whole = part.view(torch.int64) if bits is None else part.view(bits)
        found = int(whole.sum(dtype=torch.int64))
        total, weighted = total + found, weighted + (number + 1) * found
    return f"{total & (1 << 64) - 1:x}.{weighted & (1 << 64) - 1:x}"
