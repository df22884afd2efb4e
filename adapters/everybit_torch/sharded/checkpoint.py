"""Checkpoints of sharded training, through ``torch.distributed.checkpoint``: written by any number of ranks, read by any other.

Everything is stored under the names that a model and its :class:`~everybit_torch.TorchOptimizer` have in DCP's own state dicts, in the
parameters' shapes and in exactly the stored dtypes: ``model.<name>`` and ``optimizer.state.<name>.<entry>``, all of it tensors. So
what a stepper saved under one strategy is read under another, by another number of ranks, or by a plain or FSDP2 model, residuals included.

A checkpoint's directory holds a directory for each save, and a file ``latest`` that names the one that is whole. That file is replaced
when every rank has written, so a rank that is killed while it saves leaves the previous checkpoint in place.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from everybit_torch.checkpoint_file import replace_file
from everybit_torch.optimizer import TorchOptimizer
from everybit_torch.sharded.shard_tensor import ShardTensor
from everybit_torch.sharded.stepper import FlatStepper

LATEST = "latest"
"""The file that names the checkpoint that is whole."""

Flat = dict[str, Tensor]


def sharded_state_dict(stepper: FlatStepper, *, clone: bool = False) -> Flat:
    """This rank's part of everything, by name: what ``dcp.save`` takes. No collective is needed to make it.

    Args:
        stepper: Before its first step, too.
        clone: Copy the tensors, so that training may go on while they are written.
    """
    optimizer = stepper.as_optimizer()
    optimizer._place()
    found: Flat = {}
    laid_out: set[str] = set()
    copied: Callable[[Tensor], Tensor] = torch.clone if clone else (lambda x: x)
    for weights in stepper.weights:
        low, high = stepper._own_range(weights.group)
        laid_out.update(name for placement in weights.group.placements for name in placement.spec.names)
        for s in weights.group.slices(low, high):
            part = ShardTensor(copied(weights.own[s.offset : s.offset + s.high - s.low]), s.placement.spec.shape, s.low)
            found |= {f"model.{name}": part for name in s.placement.spec.names}
        for placement in weights.group.placements:
            if placement.start == placement.stop:
                empty = torch.empty(placement.spec.shape, dtype=placement.spec.dtype)
                found |= {f"model.{name}": empty for name in placement.spec.names}
    for name, tensor in stepper.model.state_dict().items():
        if name not in laid_out and isinstance(tensor, Tensor):
            found[f"model.{name}"] = copied(tensor.detach())
    for shard in stepper._shards:
        for s, parameter in zip(shard.slices, shard.parameters, strict=True):
            for entry, value in optimizer.state[parameter].items():
                key = f"optimizer.state.{s.placement.spec.name}.{entry}"
                whole = value.dtype is torch.int64 and value.ndim == 0
                found[key] = copied(value) if whole else ShardTensor(copied(value), s.placement.spec.shape, s.low)
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name not in ("params", "param_names", "label") and value is not None:
                found[f"hyperparameters.{number}.{name}"] = torch.as_tensor(value, dtype=torch.float64)
    return found


def save_sharded(
    stepper: FlatStepper, path: str | os.PathLike[str], *, asynchronous: bool = False, keep: int = 1
) -> Future[Path]:
    """Save a stepper's model and optimizer. Every rank has to call it.

    Args:
        stepper: Outside a backward pass; gradients are not saved.
        path: A directory, the same on every rank, which all of them see; made if need be.
        asynchronous: Copy, and write in the background. The next save waits for it.
        keep: How many earlier checkpoints stay.

    Returns:
        Done when every rank has written, with the directory of this checkpoint; if ``asynchronous`` is False, it is done. Its
        ``result()`` raises what went wrong: the previous checkpoint is in place then.

    Raises:
        ValueError: ``keep`` below 0.
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        raise ValueError(f"keep: got {keep!r}; accepted is 0 or more.")
    directory = Path(path)
    state = sharded_state_dict(stepper, clone=asynchronous)
    group = _saving_group(stepper)
    previous = _PENDING.pop(id(stepper), None)
    if previous is not None:
        previous.exception()

    def write() -> Path:
        rank = dist.get_rank(group) if group is not None else 0
        name: list[Any] = [_next_name(directory) if rank == 0 else None]
        if group is not None:
            dist.broadcast_object_list(name, group=group, group_src=0)
        place = directory / str(name[0])
        with _without_word_of_one_process(group):
            save(state, checkpoint_id=place, process_group=group, no_dist=group is None)
        if rank == 0:
            replace_file(directory / LATEST, lambda partial: _write_text(partial, name[0]))
            _remove_old(directory, name[0], keep)
        if group is not None:
            dist.barrier(group=group)
        return place

    if asynchronous:
        executor = ThreadPoolExecutor(1, thread_name_prefix="everybit-save")
        pending = executor.submit(write)
        executor.shutdown(wait=False)
        _PENDING[id(stepper)] = pending
        return pending
    done: Future[Path] = Future()
    done.set_result(write())
    return done


def load_sharded(stepper: FlatStepper, path: str | os.PathLike[str]) -> None:
    """Continue from a checkpoint, whatever number of ranks and strategy wrote it. Every rank has to call it.

    Weights, residuals, state, counts of steps, and hyperparameters if the checkpoint has them for the same groups.

    Args:
        stepper: For the same model, transform and policy.
        path: What :func:`save_sharded` was given; or a directory that ``dcp.save`` wrote with the same names.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: It is of another model, transform or policy; the message names what differs, and nothing is changed.
    """
    place = latest_checkpoint(path)
    into = sharded_state_dict(stepper)
    metadata = FileSystemReader(place).read_metadata()
    hyperparameters = {key: into.pop(key) for key in list(into) if key.startswith("hyperparameters.")}
    _require_same(into, metadata, place)
    into |= {key: torch.empty_like(value) for key, value in hyperparameters.items() if _has(metadata, key, value)}
    # Counts are shared by parameters here, and need not be there.
    counts = {key: value for key, value in into.items() if value.dtype is torch.int64 and value.ndim == 0}
    into |= {key: torch.empty_like(value) for key, value in counts.items() if key.startswith("optimizer.")}
    with torch.no_grad():
        with _without_word_of_one_process(_group(stepper)):
            load(into, checkpoint_id=place, process_group=_group(stepper), no_dist=_group(stepper) is None)
        optimizer = stepper.as_optimizer()
        optimizer._adopt_counts(
            {
                id(parameter): {
                    entry: into[f"optimizer.state.{s.placement.spec.name}.{entry}"]
                    for entry, value in optimizer.state[parameter].items()
                    if f"optimizer.state.{s.placement.spec.name}.{entry}" in counts
                }
                for shard in stepper._shards
                for s, parameter in zip(shard.slices, shard.parameters, strict=True)
            }
        )
        for key in hyperparameters:
            if key in into:
                _, number, name = key.split(".", 2)
                optimizer.param_groups[int(number)][name] = _plain(into[key])
        stepper.loaded()


def load_sharded_into(model: nn.Module, optimizer: TorchOptimizer, path: str | os.PathLike[str]) -> None:
    """Continue from a stepper's checkpoint with a plain or FSDP2 model and its optimizer. Every rank has to call it.

    Args:
        model: With its parameters in place.
        optimizer: Over all of them, with the transform and the policy that the checkpoint was written under. Its hyperparameters stay.
        path: As :func:`load_sharded`'s.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: It does not fit; the message names what differs, and nothing is changed.
    """
    place = latest_checkpoint(path)
    weights = get_model_state_dict(model)
    optimizer._place()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    into: Flat = {f"model.{name}": value for name, value in weights.items() if isinstance(value, Tensor)}
    state: dict[Tensor, dict[str, Tensor]] = {}
    for parameter, entries in optimizer.state.items():
        if id(parameter) not in names:
            raise ValueError(
                "optimizer: has a parameter that is not the model's; accepted is an optimizer of this model."
            )
        state[parameter] = {entry: torch.empty_like(value) for entry, value in entries.items()}
        into |= {f"optimizer.state.{names[id(parameter)]}.{entry}": value for entry, value in state[parameter].items()}
    _require_same(into, FileSystemReader(place).read_metadata(), place)
    group = dist.group.WORLD if dist.is_initialized() else None
    with torch.no_grad():
        with _without_word_of_one_process(group):
            load(into, checkpoint_id=place, process_group=group, no_dist=group is None)
        set_model_state_dict(model, weights)
        optimizer._take_state({id(parameter): entries for parameter, entries in state.items()})


def latest_checkpoint(path: str | os.PathLike[str]) -> Path:
    """The directory of the last whole checkpoint under ``path``, for DCP's own functions.

    Raises:
        FileNotFoundError: There is none.
    """
    directory = Path(path)
    if (directory / ".metadata").is_file():
        return directory
    pointer = directory / LATEST
    if not pointer.is_file():
        what = "has no whole checkpoint" if directory.is_dir() else "does not exist"
        raise FileNotFoundError(f"{directory}: {what}; accepted is a directory that save_sharded wrote to.")
    place = directory / pointer.read_text(encoding="utf-8").strip()
    if not (place / ".metadata").is_file():
        raise FileNotFoundError(f"{place}: is what {pointer} names, and is gone or not whole.")
    return place


_PENDING: dict[int, Future[Path]] = {}
_GROUPS: dict[int, dist.ProcessGroup] = {}


def _group(stepper: FlatStepper) -> dist.ProcessGroup | None:
    """All of a stepper's ranks."""
    return dist.group.WORLD if stepper.outer.group is not None else stepper.inner.group


def _saving_group(stepper: FlatStepper) -> dist.ProcessGroup | None:
    """The same ranks, with an order of collectives of their own: a save may go on while others train. gloo: it sends Python objects."""
    group = _group(stepper)
    if group is None:
        return None
    if id(stepper) not in _GROUPS:
        ranks = dist.get_process_group_ranks(group)
        _GROUPS[id(stepper)] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _GROUPS[id(stepper)]


@contextmanager
def _without_word_of_one_process(group: dist.ProcessGroup | None) -> Iterator[None]:
    """DCP warns that it takes a process without a group for the only one, which it is."""
    if group is not None:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _next_name(directory: Path) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    numbers = [int(one.name) for one in directory.iterdir() if one.is_dir() and one.name.isdigit()]
    return f"{max(numbers, default=0) + 1:06d}"


def _remove_old(directory: Path, latest: str, keep: int) -> None:
    """What is older than the ``keep`` before the latest; what a killed rank left half-written is among the first to go."""
    older = sorted(one for one in directory.iterdir() if one.is_dir() and one.name.isdigit() and one.name < latest)
    whole = [one for one in older if (one / ".metadata").is_file()]
    kept = whole[len(whole) - keep :] if keep else []
    for one in older:
        if one not in kept:
            shutil.rmtree(one, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    with open(path, "r+", encoding="utf-8") as file:
        file.write(text)


def _require_same(into: Mapping[str, Tensor], metadata: Metadata, place: Path) -> None:
    problems = []
    saved = metadata.state_dict_metadata
    for key, value in into.items():
        there = saved.get(key)
        if there is None:
            problems.append(f"{key} is not there")
        elif not isinstance(there, TensorStorageMetadata):
            problems.append(f"{key} is no tensor there")
        elif there.size != value.shape:
            problems.append(f"{key} is of shape {tuple(there.size)} there, and {tuple(value.shape)} here")
        elif there.properties.dtype is not value.dtype:
            problems.append(f"{key} is {there.properties.dtype} there, and {value.dtype} here")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            f"{place}: does not fit: {'; '.join(problems[:5])}{more}. It was written for another model, transform or policy; nothing is"
            " cast, and nothing was changed."
        )


def _has(metadata: Metadata, key: str, value: Tensor) -> bool:
    there = metadata.state_dict_metadata.get(key)
    return isinstance(there, TensorStorageMetadata) and there.size == value.shape


def _plain(value: Tensor) -> Any:
    return tuple(value.tolist()) if value.ndim else float(value)
