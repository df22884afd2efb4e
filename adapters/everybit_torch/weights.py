"""A model's weights in full precision, by name: out of an optimizer and into one, and to and from safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Set
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everybit_torch.checkpoint.atomic_files import replace_file, with_message
from everybit_torch.optim import FLOATS, RoundingLoss, TorchOptimizer, require_tensor, rounding_loss, shown

TIED = "everybit.tied"
"""Under which a safetensors file's metadata says which names stand for one tensor."""


def export_weights(model: nn.Module, optimizer: TorchOptimizer) -> dict[str, Tensor]:
    """The model's ``state_dict`` with all the precision that weights and optimizer hold together.

    Returns:
        By the names of ``model.state_dict()``, copies: float32 (float64 for float64 models) for parameters of the optimizer; all others
        and buffers in their dtypes. Tied names share one tensor.

    Raises:
        TypeError: Another optimizer.
        ValueError: The optimizer has parameters that are not the model's.
    """
    _require_own(optimizer)
    full = _by_id(optimizer, optimizer.export_fp32())
    named = _state(model, full.keys())
    for tensor in named.values():
        if id(tensor) not in full:
            full[id(tensor)] = tensor.detach().clone()
    return {name: full[id(tensor)] for name, tensor in named.items()}


def _require_own(optimizer: object) -> None:
    if not isinstance(optimizer, TorchOptimizer):
        raise TypeError(
            f"optimizer: got a {type(optimizer).__name__}; accepted are everybit's optimizers (TorchOptimizer). A FlatStepper's weights in"
            " full precision are in save_sharded(stepper, path)."
        )


def import_weights(
    model: nn.Module, optimizer: TorchOptimizer, weights: Mapping[str, Tensor]
) -> dict[str, RoundingLoss]:
    """Store full-precision weights: the model's tensors are rounded, residuals in the optimizer hold the rest.

    Moments and counts stay. A missing name is filled in if the model ties it to a given name.

    Args:
        model: The optimizer's model.
        optimizer: An optimizer of that model.
        weights: The result of :func:`export_weights`, or any ``state_dict`` of the model in another precision.

    Returns:
        The loss by rounding to the policy's format, by name, for the parameters of the optimizer.

    Raises:
        TypeError: Another optimizer.
        ValueError: Names, shapes or dtypes that do not fit; the message lists them, and the model is unchanged.
    """
    _require_own(optimizer)
    full = optimizer.export_dtypes()
    named = _state(model, full.keys())
    if not isinstance(weights, Mapping):
        raise ValueError(f"weights: got {shown(weights)}; accepted is a mapping from the model's names to tensors.")
    given = dict(weights)
    for name, tensor in named.items():
        if name not in given:
            tied = next((other for other, x in named.items() if x is tensor and other in given), None)
            if tied is not None:
                given[name] = given[tied]
    if problems := [*_problems(named, given, full)]:
        listed = "\n  ".join(problems[:10]) + (f"\n  and {len(problems) - 10} more" if len(problems) > 10 else "")
        raise ValueError(f"weights: do not fit the model, and nothing was changed:\n  {listed}")
    # The optimizer's own checks come before the first buffer is written, too.
    found = {id(tensor): given[name] for name, tensor in named.items()}
    optimizer.judge_weights([[found[id(p)] for p in group["params"]] for group in optimizer.param_groups])
    by_id = {id(tensor): given[name] for name, tensor in named.items()}
    with torch.no_grad():
        for name, tensor in named.items():
            if id(tensor) not in full:
                tensor.copy_(given[name])
        optimizer.import_fp32([[by_id[id(p)] for p in group["params"]] for group in optimizer.param_groups])
        after = _by_id(optimizer, optimizer.export_fp32())
    return {
        name: rounding_loss(given[name].to(tensor.device), after[id(tensor)])
        for name, tensor in named.items()
        if id(tensor) in after
    }


def save_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: TorchOptimizer,
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write :func:`export_weights` to a safetensors file, atomically; tied names are stored once.

    Args:
        path: The file; its directory has to exist.
        model: The optimizer's model.
        optimizer: An optimizer of that model.
        metadata: Strings to keep in the file's header.

    Raises:
        ModuleNotFoundError: safetensors is not installed.
        TypeError: The model's ``state_dict`` holds something that is no tensor.
        OSError: The file cannot be written; the previous file is unchanged.
    """
    safetensors = _safetensors()
    weights = export_weights(model, optimizer)
    stored: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in weights.items():
        if id(tensor) in names:
            tied[name] = names[id(tensor)]
        else:
            names[id(tensor)] = name
            # Tensors in the file share no memory.
            stored[name] = tensor.clone(memory_format=torch.contiguous_format)
    header = {"format": "pt"} | dict(metadata or {}) | ({TIED: json.dumps(tied)} if tied else {})

    def write(partial: Path) -> None:
        # Not `save_file`, which would replace the file that is locked and brought to the disk here.
        partial.write_bytes(safetensors.save(stored, metadata=header))

    replace_file(path, write)


def load_safetensors(
    path: str | os.PathLike[str], model: nn.Module, optimizer: TorchOptimizer
) -> dict[str, RoundingLoss]:
    """Store the weights of a safetensors file, as :func:`import_weights`.

    Raises:
        ModuleNotFoundError: safetensors is not installed.
        FileNotFoundError: There is no such file.
        OSError: It cannot be read.
        ValueError: It is no safetensors file, or does not fit the model; the model is unchanged.
    """
    safetensors = _safetensors()
    if not Path(path).is_file():
        raise FileNotFoundError(f"{os.fspath(path)}: does not exist; accepted is a safetensors file.")
    try:
        with open(path, "rb") as raw:
            raw.read(1)  # safetensors does not tell what cannot be read from what is damaged
        with safetensors.safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise with_message(error, f"{os.fspath(path)}: cannot be read: {os.strerror(error.errno)}.") from error
        raise ValueError(f"{os.fspath(path)}: is no safetensors file ({error}).") from error
    weights |= _tied(path, header, weights)
    return import_weights(model, optimizer, weights)


def _tied(path: str | os.PathLike[str], header: Mapping[str, str], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that a file's record of tied names adds to those in the file.

    Raises:
        ValueError: The record is no such record, or names a tensor that is not in the file.
    """
    written = header.get(TIED, "{}")
    try:
        record = json.loads(written)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not all(
        isinstance(stored, str) and stored in weights and name not in weights for name, stored in record.items()
    ):
        raise ValueError(
            f"{os.fspath(path)}: {TIED!r} in its metadata: got {written[:200]}; accepted are names, each with that of a tensor in the file"
            " and none of one itself."
        )
    return {name: weights[stored] for name, stored in record.items()}


def _by_id(optimizer: TorchOptimizer, groups: list[list[Tensor]]) -> dict[int, Tensor]:
    """Tensors in the order of the optimizer's parameters, by id of the parameter."""
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return {id(p): tensor for p, tensor in zip(parameters, chain.from_iterable(groups), strict=True)}


def _state(model: nn.Module, own: Set[int]) -> dict[str, Tensor]:
    """The model's own tensors by name.

    Raises:
        TypeError: There is something among them that is no tensor.
        ValueError: Some of the optimizer's parameters are not among them.
    """
    named: dict[str, Any] = model.state_dict(keep_vars=True)
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"model: {name!r} in its state_dict is a {type(value).__name__}; accepted are tensors.")
    if strange := len(own - {id(tensor) for tensor in named.values()}):
        raise ValueError(
            f"optimizer: {strange} of its parameters are not in the model's state_dict; accepted is the model's own optimizer."
        )
    return named


def _problems(named: Mapping[str, Tensor], given: Mapping[str, Any], full: Mapping[int, torch.dtype]) -> Iterator[str]:
    for name in sorted(named.keys() - given.keys()):
        yield f"{name!r} is missing"
    for key in sorted(map(shown, given.keys() - named.keys())):
        yield f"{key} is not in the model"
    seen: dict[int, str] = {}
    refused: set[str] = set()
    for name, tensor in named.items():
        if name not in given:
            continue
        value = given[name]
        first = seen.setdefault(id(tensor), name)
        wide = full.get(id(tensor))
        held = [tensor.dtype] if wide is None else [one for one in FLOATS if torch.promote_types(one, wide) is wide]
        what = tensor.dtype if wide is None else f"{wide}, or what it holds exactly,"
        accepted = f"{what} of shape {tuple(tensor.shape)}"
        try:
            require_tensor(repr(name), value, held, tuple(tensor.shape), tensor, accepted=accepted)
        except ValueError as error:
            refused.add(name)
            yield str(error)
            continue
        if first not in refused and given[first] is not value and not _same(given[first], value):
            yield f"{name!r} is tied to {first!r} in the model, and their values differ"


def _same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal, where NaN is equal to NaN."""
    return left.shape == right.shape and bool(((left == right) | ((left != left) & (right != right))).all())


class _Safetensors:
    """The functions that are used of ``safetensors``, an optional dependency."""

    def __init__(self) -> None:
        from safetensors import safe_open
        from safetensors.torch import save

        self.safe_open, self.save = safe_open, save


def _safetensors() -> _Safetensors:
    try:
        return _Safetensors()
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("safetensors: is not installed; pip install safetensors.") from error
