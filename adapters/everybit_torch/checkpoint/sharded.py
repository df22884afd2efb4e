"""Checkpoints of sharded training, through ``torch.distributed.checkpoint``: written by any number of ranks, read by any other.

Everything is stored under the names that a model and its :class:`~everybit_torch.TorchOptimizer` have in DCP's own state dicts, in the
parameters' shapes and in exactly the stored dtypes: ``model.<name>`` and ``optimizer.state.<name>.<entry>``, all of it tensors. So
a checkpoint of one strategy is read under another, by another number of ranks, or by a plain or FSDP2 model, residuals included.

A checkpoint's directory holds a directory for each save, and a file ``latest`` with the name of the complete save. That file is replaced
when every rank has written, so a rank that is killed while it saves leaves the previous checkpoint in place.

Every piece has a checksum, which is compared when it is read (see :mod:`~everybit_torch.checkpoint.storage`); reading runs no code
from a checkpoint. Loaded values are put aside first, in the host's memory, and taken over when all ranks have all of them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from everybit.stepping.entries import former_names
from everybit_torch import notices
from everybit_torch.ambient import in_plain_mode
from everybit_torch.checkpoint import hyperparameters as saved_hyperparameters
from everybit_torch.checkpoint.agreement import from_first, on_all, same_kind
from everybit_torch.checkpoint.compatibility import require_same, require_ties
from everybit_torch.checkpoint.entries import Flat, SavedParts
from everybit_torch.checkpoint.folders import (
    latest_checkpoint,
    make_folder,
    next_number,
    point_to,
    read_inventory_of,
    remove_old,
    remove_unless_named,
)
from everybit_torch.checkpoint.inventory import Inventory
from everybit_torch.checkpoint.pending import PendingSave
from everybit_torch.checkpoint.pieces import PieceParts
from everybit_torch.checkpoint.rows import RowParts
from everybit_torch.checkpoint.shard_tensor import ShardTensor
from everybit_torch.checkpoint.storage import CheckedReader, CheckedWriter, read_piece
from everybit_torch.collectives import Communicator, groups
from everybit_torch.flat import BufferStepper
from everybit_torch.optim import TorchOptimizer, as_count, load_all
from everybit_torch.sharded.stepper import FlatStepper

__all__ = ["latest_checkpoint", "load_sharded", "load_sharded_into", "save_sharded", "sharded_state_dict"]


def _parts(stepper: FlatStepper) -> SavedParts:
    """This rank's part of a checkpoint."""
    engine = stepper.engine
    return PieceParts(engine) if isinstance(engine, BufferStepper) else RowParts(engine)


def sharded_state_dict(stepper: FlatStepper, *, clone: bool = False) -> Flat:
    """Return this rank's part of weights and state by name, as ``dcp.save`` takes it.

    Args:
        stepper: Before its first step, too.
        clone: Copy the tensors, so that training may go on while they are written.

    Raises:
        TypeError: The model's state, or the transform's, has something that a checkpoint cannot hold; the message names it.
    """
    copied: Callable[[Tensor], Tensor] = torch.clone if clone else (lambda x: x)
    parts = _parts(stepper)
    found = {
        key: value.holding(copied(value.local)) if isinstance(value, ShardTensor) else copied(value)
        for key, value in (parts.model() | parts.state()).items()
    }
    return found | saved_hyperparameters.tensors(stepper.as_optimizer(), parts.labels)


def _staged(stepper: FlatStepper) -> tuple[Flat, Any]:
    """This rank's part of weights and state, on its way to the staging memory; and what to wait for before it is read."""
    parts = _parts(stepper)
    found, copied = stepper.staging.copy(
        parts.model() | parts.state(), is_shown=lambda name, _: name.startswith("model.")
    )
    return found | saved_hyperparameters.tensors(stepper.as_optimizer(), parts.labels), copied


@in_plain_mode
def save_sharded(
    stepper: FlatStepper, path: str | os.PathLike[str], *, asynchronous: bool = False, keep: int = 1
) -> Future[Path]:
    """Save a stepper's model and optimizer. Every rank has to call it.

    Args:
        stepper: Outside a backward pass; gradients are not saved.
        path: A directory that all ranks can access, the same on every rank; created if it does not exist.
        asynchronous: Copy to the host's memory, and write in the background. Training goes on at once: its next step waits for the copies,
            on the device. The memory is kept for the next asynchronous save; ``stepper.staging.free()`` and ``stepper.close()`` give it
            back. The next save waits for this save, and raises its error unless its ``result()`` was read.
        keep: The number of earlier checkpoints to keep.

    Returns:
        A handle that is done when every rank has written, and has the directory of this checkpoint; without ``asynchronous`` it is done.
        If the save failed, its ``result()`` raises the error; the previous checkpoint is then in place, and no file of this one is left.

    Raises:
        OSError: Some rank cannot write (the disk is full), or could not in the background; the message names the rank and the file, and
            says why.
        RuntimeError: Weights and state do not belong together.
        TypeError: The model's state, or the transform's, has something that a checkpoint cannot hold; the message names it.
        ValueError: ``keep`` below 0.
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        raise ValueError(f"keep: got {keep!r}; accepted is 0 or more.")
    stepper.engine.completeness.require("save_sharded")
    directory, group = Path(path), _group(stepper, "saving")

    def begin() -> tuple[Flat, Any]:
        _raise_pending(stepper)
        return _staged(stepper) if asynchronous else (sharded_state_dict(stepper), None)

    state, copied = on_all(begin, group)

    def write() -> Path:
        if copied is not None:
            copied.synchronize()  # the copies may be on their way
        name = from_first(lambda: make_folder(directory, next_number(directory)), group)
        place = directory / name

        def write_part() -> None:
            with _in_plain_words(f"{place}: saving failed", "the previous checkpoint is in place", group):
                save(state, storage_writer=CheckedWriter(place), process_group=group, no_dist=group is None)

        try:
            write_part()
            from_first(lambda: point_to(directory, name), group)
        except BaseException:
            if _is_first(group):
                remove_unless_named(place)
            raise
        from_first(lambda: remove_old(directory, name, keep), group)
        return place

    if asynchronous:
        executor = ThreadPoolExecutor(1, thread_name_prefix="everybit-save")
        pending = stepper.saving = PendingSave()
        executor.submit(pending.carry_out, write)
        executor.shutdown(wait=False)
        return pending
    done: Future[Path] = Future()
    done.set_result(write())
    return done


@in_plain_mode
def load_sharded(stepper: FlatStepper, path: str | os.PathLike[str], *, hyperparameters: bool = True) -> None:
    """Continue from a checkpoint, whatever number of ranks and strategy wrote it. Every rank has to call it.

    It loads weights, residuals, state, counts of steps, and the hyperparameters of each parameter. Everything is read and verified by its
    checksums before anything is changed, on any rank; this needs memory for one more copy of this rank's part on the host.

    Args:
        stepper: A stepper of the same model, transform and policy.
        path: The directory of :func:`save_sharded`, or of ``dcp.save`` with the same names, which cannot be verified, as a
            warning says.
        hyperparameters: Load those that were saved under a param group's label, or for its parameters if there is no such label. False:
            keep the stepper's.

    Raises:
        FileNotFoundError: There is no checkpoint, or a file of it is missing.
        OSError: A file cannot be read.
        ValueError: It is damaged, or of another model, transform or policy; the message names the file, or what differs. In all cases
            no rank's state is changed.
    """
    stepper.engine.completeness.require_open("load_sharded")
    _warn_of_pending(stepper)
    group = _group(stepper, "loading")
    place = Path(from_first(lambda: str(latest_checkpoint(path)), group))
    found = on_all(lambda: read_inventory_of(place, is_judged=_is_first(group)), group)
    optimizer, parts = stepper.as_optimizer(), on_all(lambda: _parts(stepper), group)
    own = on_all(lambda: parts.model() | parts.state(), group)
    kept = parts.kept()
    found = found.renamed(
        {
            f"optimizer.state.{name}.{old}": f"optimizer.state.{name}.{new}"
            for name, entries in kept.items()
            for old, new in former_names(entries).items()
        }
    )
    expected = parts.names() | {f"optimizer.state.{name}.{entry.name}" for name, some in kept.items() for entry in some}
    require_same(own, found, expected, group)
    tables: Flat = on_all(lambda: saved_hyperparameters.empty(found, parts.labels), group) if hyperparameters else {}
    aside = on_all(lambda: {key: _room_for(value) for key, value in own.items()}, group)
    with torch.no_grad():
        _load(aside | tables, found, group)

        def judge() -> list[dict[str, Any]]:
            require_ties(own, aside, place)
            try:
                return saved_hyperparameters.restored(optimizer, tables, parts.labels) if tables else []
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None

        settings = on_all(judge, group)
        _verify_rest(found, aside | tables, group)
        # All ranks have everything. From here on no rank raises.
        stepper.staging.order()
        parts.take_over(own, aside)
        for param_group, values in zip(optimizer.param_groups, settings, strict=False):
            saved_hyperparameters.take(param_group, values)
        stepper.loaded()
    if hyperparameters and not tables and _is_first(group):
        notices.warn(f"{place}: holds no hyperparameters; the stepper's stay as they are.")
    _warn_if_unverified(found, group)


@in_plain_mode
def load_sharded_into(model: nn.Module, optimizer: TorchOptimizer, path: str | os.PathLike[str]) -> None:
    """Continue from a stepper's checkpoint with a plain or FSDP2 model and its optimizer. Every rank has to call it.

    As in :func:`load_sharded`, everything is read and compared with its checksums before anything is changed, on any rank. The copies
    lie where the model and the state do.

    Args:
        model: The model, with its parameters in place.
        optimizer: Over all of them, with the transform and the policy that the checkpoint was written under. Its hyperparameters stay.
        path: The directory, as for :func:`load_sharded`.

    Raises:
        FileNotFoundError: There is no checkpoint, or a file of it is missing.
        OSError: A file cannot be read.
        ValueError: It is damaged, or does not fit; the message names the file, or the difference. In all cases the model is unchanged.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    place = Path(from_first(lambda: str(latest_checkpoint(path)), group))
    found = on_all(lambda: read_inventory_of(place, is_judged=_is_first(group)), group)
    weights = get_model_state_dict(model)
    on_all(optimizer.place, group)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own: Flat = {f"model.{name}": value for name, value in weights.items() if isinstance(value, Tensor)}
    aside: Flat = {key: torch.empty_like(value) for key, value in own.items()}
    given: dict[int, dict[str, Tensor]] = {}
    former: dict[str, str] = {}
    for parameter, kept, values in optimizer.own.kept():
        if id(parameter) not in names:
            raise ValueError(
                "optimizer: has a parameter that is not the model's; accepted is an optimizer of this model."
            )
        if not parameter.numel():
            continue
        given[id(parameter)] = {}
        prefix = f"optimizer.state.{names[id(parameter)]}."
        factors = {entry.name for entry in kept if entry.cut == "tensor"}
        for name, value in values.items():
            if name in factors and not value.numel():
                continue  # of which a stepper saves nothing
            own[prefix + name] = value
            aside[prefix + name] = given[id(parameter)][name] = torch.empty_like(value)
        former |= {prefix + old: prefix + new for old, new in former_names(kept).items()}
    found = found.renamed(former)
    require_same(own, found, set(own), group)
    with torch.no_grad():
        _load(aside, found, group)

        def judge() -> None:
            require_ties(own, aside, place)
            _require_counts(optimizer, given)

        on_all(judge, group)
        _verify_rest(found, aside, group)
        # All ranks have everything. From here on the only refusal is of a transform that steps slices of the model apart.
        on_all(lambda: optimizer.own.number_elements(model.parameters()), group)
        set_model_state_dict(model, {name: aside.get(f"model.{name}", value) for name, value in weights.items()})
        load_all(optimizer.own, given)
    _warn_if_unverified(found, group)


def _require_counts(optimizer: TorchOptimizer, given: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Refuse values that are no counts.

    Raises:
        ValueError: A value is no count; the optimizer is unchanged.
    """
    groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for parameter, entries in given.items():
        for name, value in entries.items():
            if value.dtype is torch.int64 and not value.ndim:
                as_count(f"state_dict: param group {groups[parameter]}, {name!r}", value)


# -- reading ------------------------------------------------------------------------------------------------------------------------


def _warn_if_unverified(found: Inventory, group: dist.ProcessGroup | None) -> None:
    if not found.checked and _is_first(group):
        notices.warn(
            f"{found.folder}: has no checksums (it was written by dcp.save, or by a version before them), so that nothing could be"
            " verified: bits that have changed since it was written were loaded as they are. Save it again to have them."
        )


def _load(into: Flat, found: Inventory, group: dist.ProcessGroup | None) -> None:
    with _in_plain_words(f"{found.folder}: cannot be loaded", "nothing was changed", group):
        load(into, storage_reader=CheckedReader(found), process_group=group, no_dist=group is None)


def _verify_rest(found: Inventory, read: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Compare the checksums of what no rank had a use for, too: a file with a flipped bit is not to be trusted."""

    def verify() -> None:
        # Other ranks have the same parameters and state, so that the names on one rank are enough.
        for name in found.tensors if _is_first(group) else ():
            if name not in read and not name.startswith(("model.", "optimizer.state.")):
                for piece in found.tensors[name].pieces:
                    read_piece(found, name, piece)

    on_all(verify, group)


def _room_for(value: Tensor) -> Tensor:
    """Allocate as much memory on the host, to load into."""
    if isinstance(value, ShardTensor):
        return value.holding(torch.empty_like(value.local, device="cpu"))
    return torch.empty(value.shape, dtype=value.dtype)


def _group(stepper: FlatStepper, purpose: str) -> dist.ProcessGroup | None:
    """The ranks that save and load together, with an order of collectives of their own: a save may go on while others train.

    gloo: it sends Python objects.

    Args:
        stepper: One of theirs.
        purpose: Each has a group.
    """
    if stepper.inner.group is None:
        return None
    if purpose not in stepper.groups:
        stepper.groups[purpose] = groups.take(stepper.ranks, "gloo", stepper.inner.timeout)
    return stepper.groups[purpose]


def _raise_pending(stepper: FlatStepper) -> None:
    """Wait for a save that is under way.

    Raises:
        Exception: It failed, and its error was not read.
    """
    error = _unseen(stepper)
    if error is not None:
        raise same_kind(
            error, f"the last asynchronous save failed, and the checkpoint before it is in place: {error}"
        ) from error


def _warn_of_pending(stepper: FlatStepper) -> None:
    """Wait for a save that is under way, and warn if it failed and its error was not read. The checkpoint before it is then loaded."""
    if (error := _unseen(stepper)) is not None:
        notices.warn(f"the last asynchronous save failed, and the checkpoint before it is in place: {error}")


def _unseen(stepper: FlatStepper) -> BaseException | None:
    pending, stepper.saving = stepper.saving, None
    return None if pending is None else pending.unseen()


def _is_first(group: dist.ProcessGroup | None) -> bool:
    return group is None or not dist.is_initialized() or dist.get_rank(group) == 0


@contextmanager
def _without_word_of_one_process(group: dist.ProcessGroup | None) -> Iterator[None]:
    """DCP warns that it takes a process without a group for the only one, which it is."""
    if group is not None:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextmanager
def _in_plain_words(what: str, then: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Say what went wrong on the first rank on which something did, without the tracebacks of all of them."""
    try:
        with (
            _without_word_of_one_process(group),
            nullcontext() if group is None else Communicator(group).explained(f"{what}: what ranks tell each other"),
        ):
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda one: one[0])
        where = "" if group is None else f" on rank {rank}"
        raise same_kind(cause, f"{what}{where}: {cause} {then[0].upper()}{then[1:]}.") from cause
