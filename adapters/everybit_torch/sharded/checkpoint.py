"""Checkpoints of sharded training, through ``torch.distributed.checkpoint``: written by any number of ranks, read by any other.

Everything is stored under the names that a model and its :class:`~everybit_torch.TorchOptimizer` have in DCP's own state dicts, in the
parameters' shapes and in exactly the stored dtypes: ``model.<name>`` and ``optimizer.state.<name>.<entry>``, all of it tensors. So
what a stepper saved under one strategy is read under another, by another number of ranks, or by a plain or FSDP2 model, residuals included.

A checkpoint's directory holds a directory for each save, and a file ``latest`` that names the one that is whole. That file is replaced
when every rank has written, so a rank that is killed while it saves leaves the previous checkpoint in place.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

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
from everybit_torch.sharded import groups
from everybit_torch.sharded.shard_tensor import ShardTensor
from everybit_torch.sharded.stepper import FlatStepper

LATEST = "latest"
"""The file that names the checkpoint that is whole."""

MARK = ".everybit"
"""In every folder that a save made."""

T = TypeVar("T")
Flat = dict[str, Tensor]

_HYPERPARAMETERS = "hyperparameters."
_BETWEEN = "/"


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
    for name, tensor in stepper.own_state_dict().items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name}: the model's state has a {type(tensor).__name__} here (get_extra_state?), and checkpoints hold tensors only. Save"
                " it beside them."
            )
        if name not in laid_out:
            found[f"model.{name}"] = copied(tensor.detach())
    for shard in stepper._shards:
        for s, parameter in zip(shard.slices, shard.parameters, strict=True):
            for entry, value in optimizer.state[parameter].items():
                key = f"optimizer.state.{s.placement.spec.name}.{entry}"
                whole = value.dtype is torch.int64 and value.ndim == 0
                found[key] = copied(value) if whole else ShardTensor(copied(value), s.placement.spec.shape, s.low)
    for group in optimizer.param_groups:
        for name, value in group.items():
            numbers = value if isinstance(value, (tuple, list)) else (value,)
            if (
                all(isinstance(one, (int, float, Tensor)) and not isinstance(one, bool) for one in numbers)
                and name != "params"
            ):
                key = f"{_HYPERPARAMETERS}{group['label']}{_BETWEEN}{name}"
                found[key] = torch.as_tensor([float(one) for one in numbers], dtype=torch.float64)
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
    _require_outside(stepper, "save_sharded")
    stepper.require_complete("save_sharded")
    directory = Path(path)
    state = sharded_state_dict(stepper, clone=asynchronous)
    group = _group(stepper, "saving")
    _finish_pending(stepper)

    def write() -> Path:
        name: str = _from_first(lambda: _next_name(directory), group)
        place = directory / name
        with _without_word_of_one_process(group):
            save(state, checkpoint_id=place, process_group=group, no_dist=group is None)
        _require_group(group)

        def finish() -> None:
            replace_file(directory / LATEST, lambda partial: _write_text(partial, name))
            _remove_old(directory, name, keep)

        _from_first(finish, group)
        return place

    if asynchronous:
        executor = ThreadPoolExecutor(1, thread_name_prefix="everybit-save")
        pending = executor.submit(write)
        executor.shutdown(wait=False)
        stepper.saving = pending
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
    _require_outside(stepper, "load_sharded")
    _finish_pending(stepper)
    group = _group(stepper, "loading")
    place = Path(_from_first(lambda: str(latest_checkpoint(path)), group))
    into = sharded_state_dict(stepper)
    metadata = FileSystemReader(place).read_metadata()
    hyperparameters = {key: into.pop(key) for key in list(into) if key.startswith(_HYPERPARAMETERS)}
    _require_same(into, metadata, place, _expected(stepper, into), group)
    into |= {key: torch.empty_like(value) for key, value in hyperparameters.items() if _has(metadata, key, value)}
    # Counts are shared by parameters here, and need not be there.
    counts = {key: value for key, value in into.items() if value.dtype is torch.int64 and value.ndim == 0}
    into |= {key: torch.empty_like(value) for key, value in counts.items() if key.startswith("optimizer.")}
    with torch.no_grad():
        with _without_word_of_one_process(group):
            load(into, checkpoint_id=place, process_group=group, no_dist=group is None)
        optimizer = stepper.as_optimizer()
        optimizer._adopt_counts({
            id(parameter): {
                entry: into[f"optimizer.state.{s.placement.spec.name}.{entry}"]
                for entry, value in optimizer.state[parameter].items()
                if f"optimizer.state.{s.placement.spec.name}.{entry}" in counts
            }
            for shard in stepper._shards
            for s, parameter in zip(shard.slices, shard.parameters, strict=True)
        })  # fmt: skip
        for param_group in optimizer.param_groups:
            for name, value in list(param_group.items()):
                key = f"{_HYPERPARAMETERS}{param_group['label']}{_BETWEEN}{name}"
                if key in hyperparameters and key in into:
                    param_group[name] = _restored(value, into[key])
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
    group = dist.group.WORLD if dist.is_initialized() else None
    place = Path(_from_first(lambda: str(latest_checkpoint(path)), group))
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
        if parameter.numel():
            state[parameter] = {entry: torch.empty_like(value) for entry, value in entries.items()}
            into |= {f"optimizer.state.{names[id(parameter)]}.{entry}": x for entry, x in state[parameter].items()}
    _require_same(into, FileSystemReader(place).read_metadata(), place, set(into), group)
    optimizer._number_elements(model)
    with torch.no_grad():
        with _without_word_of_one_process(group):
            load(into, checkpoint_id=place, process_group=group, no_dist=group is None)
        given = {id(parameter): entries for parameter, entries in state.items()}
        optimizer._require_one_count(given)
        set_model_state_dict(model, weights)
        optimizer._take_state(given)


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


def _group(stepper: FlatStepper, purpose: str) -> dist.ProcessGroup | None:
    """A stepper's ranks, with an order of collectives of their own: a save may go on while others train. gloo: it sends Python objects."""
    if stepper.inner.group is None:
        return None
    if purpose not in stepper.groups:
        stepper.groups[purpose] = groups.take(stepper.all_ranks, "gloo", stepper.inner.timeout)
    return stepper.groups[purpose]


def _finish_pending(stepper: FlatStepper) -> None:
    """Wait for a save that is under way, and say if it failed."""
    pending, stepper.saving = stepper.saving, None
    if pending is not None and (error := pending.exception()) is not None:
        warnings.warn(
            f"the last asynchronous save failed, and the checkpoint before it is in place: {error}", stacklevel=3
        )


def _require_outside(stepper: FlatStepper, name: str) -> None:
    if stepper.in_full_parameters:
        raise RuntimeError(
            f"{name}: inside full_parameters(), where weights may have been written to that are not kept yet; accepted is after it."
        )


def _require_group(group: dist.ProcessGroup | None) -> None:
    if group is not None and not dist.is_initialized():
        raise RuntimeError(
            "save_sharded: the process group was destroyed while a checkpoint was written, which is not whole; wait for the save (result())"
            " before destroy_process_group()."
        )


def _from_first(function: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """What ``function`` gives on the first rank, on all of them; what it raises there is raised everywhere."""
    if group is None:
        return function()
    _require_group(group)
    outcome: list[Any] = [None]
    error: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            outcome = [(function(), None)]
        except Exception as raised:
            error, outcome = raised, [(None, f"{type(raised).__name__}: {raised}")]
    dist.broadcast_object_list(outcome, group=group, group_src=0)
    value, message = outcome[0]
    if error is not None:
        raise error
    if message is not None:
        kind = FileNotFoundError if message.startswith("FileNotFoundError") else RuntimeError
        raise kind(f"on the first rank: {message}")
    return value  # type: ignore[no-any-return]


def _expected(stepper: FlatStepper, into: Mapping[str, Tensor]) -> set[str]:
    """What a checkpoint of this model, transform and policy holds, on whatever rank."""
    optimizer = stepper.as_optimizer()
    entries: dict[str, list[str]] = {}
    for unit in optimizer._units:
        label = optimizer.param_groups[unit.group]["label"]
        entries.setdefault(label, list(optimizer._entries(unit)))
    names = {key for key in into if key.startswith("model.")}
    for group in stepper.layout.groups:
        for placement in group.placements:
            names |= {f"model.{name}" for name in placement.spec.names}
            if group.requires_grad and placement.spec.numel:
                names |= {f"optimizer.state.{placement.spec.name}.{entry}" for entry in entries.get(group.label, [])}
    return names


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
    name = f"{max((int(one.name) for one in _saves(directory)), default=0) + 1:06d}"
    (directory / name).mkdir()
    (directory / name / MARK).touch()
    return name


def _saves(directory: Path) -> list[Path]:
    """The folders that saves made, oldest first."""
    found = [one for one in directory.iterdir() if re.fullmatch(r"\d{6,}", one.name) and (one / MARK).is_file()]
    return sorted(found, key=lambda one: int(one.name))


def _remove_old(directory: Path, latest: str, keep: int) -> None:
    """What is older than the ``keep`` before the latest; what a killed rank left half-written is among the first to go."""
    older = [one for one in _saves(directory) if int(one.name) < int(latest)]
    whole = [one for one in older if (one / ".metadata").is_file()]
    kept = whole[len(whole) - keep :] if keep else []
    for one in older:
        if one not in kept:
            shutil.rmtree(one, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    with open(path, "r+", encoding="utf-8") as file:
        file.write(text)


def _require_same(
    into: Mapping[str, Tensor], metadata: Metadata, place: Path, expected: set[str], group: dist.ProcessGroup | None
) -> None:
    """Refuse, on every rank, a checkpoint that holds more, less or something else than what is here."""
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
        elif sum(math.prod(chunk.sizes) for chunk in there.chunks) != math.prod(there.size):
            problems.append(f"{key} is not whole there")
    known = expected | set(into)
    problems += [
        f"{key} is there, and not here"
        for key, there in saved.items()
        if key not in known and key.startswith(("model.", "optimizer.state.")) and _elements(there)
    ]
    if group is not None:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, problems, group=group)
        problems = list(dict.fromkeys(problem for one in gathered for problem in one))
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            f"{place}: does not fit: {'; '.join(problems[:5])}{more}. It was written for another model, transform or policy; nothing is"
            " cast, and nothing was changed."
        )


def _elements(there: object) -> int:
    return math.prod(there.size) if isinstance(there, TensorStorageMetadata) else 1


def _has(metadata: Metadata, key: str, value: Tensor) -> bool:
    there = metadata.state_dict_metadata.get(key)
    return isinstance(there, TensorStorageMetadata) and there.size == value.shape


def _restored(value: Any, saved: Tensor) -> Any:
    """A hyperparameter as it was saved, of the kind that it is; a user's tensor stays the same object."""
    if isinstance(value, Tensor):
        return value.fill_(float(saved[0]))
    if isinstance(value, (tuple, list)):
        return type(value)(saved.tolist())
    return type(value)(saved.tolist()[0])
