"""Checkpoints of sharded training, through ``torch.distributed.checkpoint``: written by any number of ranks, read by any other.

Everything is stored under the names that a model and its :class:`~everybit_torch.TorchOptimizer` have in DCP's own state dicts, in the
parameters' shapes and in exactly the stored dtypes: ``model.<name>`` and ``optimizer.state.<name>.<entry>``, all of it tensors. So
a checkpoint of one strategy is read under another, by another number of ranks, or by a plain or FSDP2 model, residuals included.

A checkpoint's directory holds a directory for each save, and a file ``latest`` with the name of the complete save. That file is replaced
when every rank has written, so a rank that is killed while it saves leaves the previous checkpoint in place.

Every piece has a checksum, which is compared when it is read (see :mod:`~everybit_torch.checkpoint.reading`); reading runs no code
from a checkpoint. Loaded values are put aside first, in the host's memory, and taken over when all ranks have all of them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from everybit.stepping.entries import STEP
from everybit_torch import notices
from everybit_torch.ambient import in_plain_mode
from everybit_torch.checkpoint import saved_hyperparameters
from everybit_torch.checkpoint.agreement import from_first, on_all, same_kind
from everybit_torch.checkpoint.background import PendingSave
from everybit_torch.checkpoint.compatibility import COMPARED, require_same, require_values
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
from everybit_torch.checkpoint.parts import MODEL, STATE, CheckpointParts, Flat, Room, parts_of, parts_of_model
from everybit_torch.checkpoint.reading import read_into, read_piece
from everybit_torch.checkpoint.writing import CheckedWriter
from everybit_torch.collectives import Communicator, own_groups
from everybit_torch.optim import TorchOptimizer
from everybit_torch.sharded.stepper import FlatStepper

__all__ = ["latest_checkpoint", "load_sharded", "load_sharded_into", "save_sharded", "sharded_state_dict"]


def sharded_state_dict(stepper: FlatStepper, *, clone: bool = False) -> Flat:
    """Return this rank's part of weights and state by name, as ``dcp.save`` takes it.

    Args:
        stepper: Before its first step, too.
        clone: Copy the tensors, so that training may go on while they are written.

    Raises:
        RuntimeError: Weights and state do not belong together.
        TypeError: The model's state, or the transform's, has something that a checkpoint cannot hold; the message names it.
    """
    stepper.engine.completeness.require("sharded_state_dict")
    parts = parts_of(stepper.engine)
    found = {key: value.clone() if clone else value for key, value in parts.tensors().items()}
    return found | saved_hyperparameters.tensors(stepper.as_optimizer(), parts.labels)


def _staged(stepper: FlatStepper) -> tuple[Flat, Any]:
    """This rank's part of weights and state, on its way to the staging memory; and what to wait for before it is read."""
    parts = parts_of(stepper.engine)
    found, copied = stepper.staging.copy(parts.tensors(), is_shown=lambda name, _: name.startswith(MODEL))
    return found | saved_hyperparameters.tensors(stepper.as_optimizer(), parts.labels), copied


@in_plain_mode
def save_sharded(
    stepper: FlatStepper, path: str | os.PathLike[str], *, asynchronous: bool = False, keep: int | None = None
) -> Future[Path]:
    """Save a stepper's model and optimizer. Every rank has to call it.

    Args:
        stepper: Outside a backward pass; gradients are not saved.
        path: A directory that all ranks can access, the same on every rank; created if it does not exist.
        asynchronous: Copy to the host's memory, and write in the background. Training goes on at once: its next step waits for the copies,
            on the device. The memory is kept for the next asynchronous save; ``stepper.staging.free()`` and ``stepper.close()`` give it
            back. The next save waits for this save, and raises its error unless its ``result()`` was read.
        keep: The number of earlier checkpoints to keep; older ones, and those that a killed rank left half-written, are deleted. None:
            nothing is deleted.

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
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 0):
        raise ValueError(f"keep: got {keep!r}; accepted are None, which deletes nothing, and 0 or more.")
    stepper.engine.completeness.require("save_sharded")
    directory, ranks = Path(path), _ranks(stepper, "saving")

    def begin() -> tuple[Flat, Any]:
        _raise_pending(stepper)
        return _staged(stepper) if asynchronous else (sharded_state_dict(stepper), None)

    state, copied = on_all(begin, ranks)

    def write() -> Path:
        if copied is not None:
            copied.synchronize()  # the copies may be on their way
        name = from_first(lambda: make_folder(directory, next_number(directory)), ranks)
        place = directory / name

        def write_part() -> None:
            with _in_plain_words(f"{place}: saving failed", "the previous checkpoint is in place", ranks):
                writer, alone = CheckedWriter(place), ranks.group is None
                save(state, storage_writer=writer, process_group=ranks.group, no_dist=alone)

        try:
            write_part()
            from_first(lambda: point_to(directory, name), ranks)
        except BaseException:
            if ranks.rank == 0:
                remove_unless_named(place)
            raise
        if keep is not None:
            from_first(partial(remove_old, directory, name, keep), ranks)
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
        RuntimeError: The stepper is closed, or the model has its weights for evaluation.
        ValueError: It is damaged, or of another model, transform or policy; the message names the file, or what differs. In all cases
            no rank's state is changed.
    """
    stepper.engine.completeness.require_open("load_sharded")
    stepper.as_optimizer().require_trained("load_sharded")
    _warn_of_pending(stepper)
    optimizer, ranks = stepper.as_optimizer(), _ranks(stepper, "loading")
    found, parts, aside = _read(path, lambda: parts_of(stepper.engine), ranks, hyperparameters=hyperparameters)
    tables = {name: x for name, x in aside.items() if not name.startswith(COMPARED)}

    def judge() -> list[dict[str, Any]]:
        try:
            return saved_hyperparameters.restored(optimizer, tables, parts.labels) if tables else []
        except ValueError as error:
            raise ValueError(f"{found.folder}: {error}") from None

    settings = on_all(judge, ranks)
    # All ranks have everything. From here on no rank raises.
    stepper.staging.order()
    parts.take_over(aside)
    for param_group, values in zip(optimizer.param_groups, settings, strict=False):
        saved_hyperparameters.take(param_group, values)
    stepper.loaded()
    if hyperparameters and not tables and ranks.rank == 0:
        notices.warn(f"{found.folder}: holds no hyperparameters; the stepper's stay as they are.")
    _warn_if_unverified(found, ranks)


@in_plain_mode
def load_sharded_into(
    model: nn.Module, optimizer: TorchOptimizer, path: str | os.PathLike[str], *, hyperparameters: bool = True
) -> None:
    """Continue from a stepper's checkpoint with a plain or FSDP2 model and its optimizer. Every rank has to call it.

    As in :func:`load_sharded`, everything is read and compared with its checksums before anything is changed, on any rank.

    Args:
        model: The model, with its parameters in place.
        optimizer: Over all of them, with the transform and the policy that the checkpoint was written under.
        path: The directory, as for :func:`load_sharded`.
        hyperparameters: Load those that were saved for the parameters of each param group, as far as it has them; what a factory sets by
            itself to another value is named in a warning. False: keep the optimizer's.

    Raises:
        FileNotFoundError: There is no checkpoint, or a file of it is missing.
        OSError: A file cannot be read.
        RuntimeError: The model has its weights for evaluation.
        ValueError: It is damaged, or does not fit; the message names the file, or the difference. In all cases the model is unchanged.
    """
    optimizer.require_trained("load_sharded_into")
    ranks = Communicator(dist.group.WORLD if dist.is_initialized() else None)
    found, parts, aside = _read(path, lambda: parts_of_model(model, optimizer), ranks, hyperparameters=hyperparameters)
    is_of_stepper = any(name.startswith(saved_hyperparameters.GROUPS) for name in found.tensors)
    tables = {name: x for name, x in aside.items() if not name.startswith(COMPARED)}
    names = {id(p): name for name, p in model.named_parameters()}
    trained = [name for name in names.values() if f"{STATE}{name}.{STEP}" in found.tensors]

    def judge() -> saved_hyperparameters.Unlabelled | None:
        try:
            return saved_hyperparameters.restored_without_labels(optimizer, tables, names, trained) if tables else None
        except ValueError as error:
            raise ValueError(f"{found.folder}: {error}") from None

    settings = on_all(judge, ranks)
    # All ranks have everything. From here on the only refusal is of a transform that steps slices of the model apart.
    if is_of_stepper:  # of others the elements have the numbers that the optimizer gives them
        on_all(lambda: optimizer.own.number_elements(model.parameters()), ranks)
    parts.take_over(aside)
    if settings is not None:
        for param_group, values in zip(optimizer.param_groups, settings.groups, strict=True):
            saved_hyperparameters.take(param_group, values)
        if settings.left and ranks.rank == 0:
            notices.warn(
                f"{found.folder}: the optimizer's factory sets other hyperparameters: {'; '.join(settings.left[:5])}."
            )
    _warn_if_unverified(found, ranks)


@torch.no_grad()
def _read(
    path: str | os.PathLike[str],
    own_parts: Callable[[], CheckpointParts],
    ranks: Communicator,
    *,
    hyperparameters: bool,
) -> tuple[Inventory, CheckpointParts, Flat]:
    """Read a checkpoint into memory of its own, on the host, and verify all of it, on all ranks or on none.

    Args:
        path: The directory.
        own_parts: This rank's parts, which are not changed.
        ranks: All ranks that load.
        hyperparameters: Read the tensors of :mod:`~everybit_torch.checkpoint.saved_hyperparameters`, too.
    """
    place = Path(from_first(lambda: str(latest_checkpoint(path)), ranks))
    found = on_all(lambda: read_inventory_of(place, is_judged=ranks.rank == 0), ranks)
    parts = on_all(own_parts, ranks)
    require_same(parts.table, found, ranks)

    def read() -> Flat:
        aside, rooms = parts.rooms()
        tables = saved_hyperparameters.empty(found, parts.labels or None) if hyperparameters else {}
        rooms += [Room(name, (0,) * x.ndim, x) for name, x in tables.items()]
        try:
            read_into(found, rooms)
        except (OSError, ValueError) as error:
            raise same_kind(error, f"{error} Nothing was changed.") from error
        require_values(parts.table, aside, place)
        aside |= tables
        # Other ranks have the same parameters and state, so that the names on one rank are enough.
        for name in found.tensors if ranks.rank == 0 else ():
            # What no rank has a use for, too: a file with a flipped bit is not to be trusted.
            for piece in () if name in aside or name.startswith(COMPARED) else found.tensors[name].pieces:
                read_piece(found, name, piece)
        return aside

    return found, parts, on_all(read, ranks)


def _warn_if_unverified(found: Inventory, ranks: Communicator) -> None:
    if not found.checked and ranks.rank == 0:
        notices.warn(
            f"{found.folder}: has no checksums (it was written by dcp.save, or by a version before them), so that nothing could be"
            " verified: bits that have changed since it was written were loaded as they are. Save it again to have them."
        )


# -- the ranks ----------------------------------------------------------------------------------------------------------------------


def _ranks(stepper: FlatStepper, purpose: str) -> Communicator:
    """The ranks that save and load together, with an order of collectives of their own: a save may go on while others train.

    gloo: no device is needed.

    Args:
        stepper: One of theirs.
        purpose: Each has a group.
    """
    if stepper.inner.group is None:
        return Communicator(None)
    if purpose not in stepper.others:
        group = own_groups.take(stepper.ranks, "gloo", stepper.inner.timeout)
        stepper.others[purpose] = Communicator(group, owned=True)
    return stepper.others[purpose]


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


@contextmanager
def _in_plain_words(what: str, then: str, ranks: Communicator) -> Iterator[None]:
    """Say what went wrong on the first rank on which something did, without the tracebacks of all of them."""
    try:
        quiet: AbstractContextManager[Any] = nullcontext() if ranks.group is not None else warnings.catch_warnings()
        with quiet, ranks.explained(f"{what}: what ranks tell each other"):
            if ranks.group is None:  # DCP warns that it takes a process without a group for the only one, which it is
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda one: one[0])
        where = "" if ranks.group is None else f" on rank {rank}"
        raise same_kind(cause, f"{what}{where}: {cause} {then[0].upper()}{then[1:]}.") from cause
