"""Whether all ranks make the same stepper: compared before anything else is sent, and the first difference is named.

Ranks that differ would otherwise meet in collectives that do not belong together: a hang, a process that the library aborts, or, where
sizes happen to agree, numbers that belong to something else.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import zip_longest
from types import CellType, FunctionType, MethodType
from typing import TypeVar

import torch
from torch import Tensor, nn

from everybit_torch.collectives import Communicator
from everybit_torch.sharded.labelling import Labelled
from everybit_torch.sharded.options import StepperOptions

Facts = Sequence[tuple[str, str]]
"""Names and values that have to be the same on every rank, in the order in which they are compared."""

L = TypeVar("L")

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_DEPTH = 12


def describe(value: object, depth: int = _DEPTH) -> str:
    """Return a value as text that is the same in every process: without addresses, with functions by their names and closures."""
    if depth == 0:
        return "..."
    below = depth - 1
    if isinstance(value, Tensor):
        numbers = value.detach().cpu()
        small = numbers.numel() <= 16
        content = str(numbers.tolist()) if small else hashlib.sha256(str(numbers.double().sum()).encode()).hexdigest()
        return f"tensor({tuple(value.shape)}, {value.dtype}, {content})"
    if is_dataclass(value) and not isinstance(value, type):
        inside = ", ".join(
            f"{field.name}={describe(getattr(value, field.name), below)}" for field in fields(value) if field.repr
        )
        return f"{type(value).__qualname__}({inside})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{describe(k, below)}: {describe(v, below)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(describe(one, below) for one in value) + ")"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(describe(one, below) for one in value)) + "}"
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, functools.partial):
        return (
            f"partial({describe(value.func, below)}, {describe(value.args, below)}, {describe(value.keywords, below)})"
        )
    if isinstance(value, MethodType):
        return f"{describe(value.__func__, below)} of {describe(value.__self__, below)}"
    if isinstance(value, FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        given = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        inside = f" with {describe(given, below)}" if given else ""
        return f"{value.__module__}.{value.__qualname__}{inside}"
    return _ADDRESS.sub("", repr(value))


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def facts_of(
    model: nn.Module,
    options: StepperOptions,
    parameters: Mapping[str, nn.Parameter],
    homes: Mapping[str, str],
    labelled: Labelled,
    ranks: tuple[Communicator, Communicator],
) -> Facts:
    """List the facts that have to be the same on every rank of a stepper, by name.

    Args:
        model: The model, for its buffers.
        options: The stepper's.
        parameters: Those that are managed, by name.
        homes: The unit of each that is trained.
        labelled: What these are stepped with.
        ranks: The inner and the outer ranks.
    """
    inner, outer = ranks
    facts = [("strategy", repr(options.strategy)), ("outer", repr(options.outer))]
    facts.append(("mesh", f"{inner.size} ranks" + (f" x {outer.size} outer" if outer.size > 1 else "")))
    facts += [("number of units", str(len({*homes.values()}))), ("number of parameters", str(len(parameters)))]
    for name, p in parameters.items():
        trained = f"trained, unit {homes[name]!r}" if p.requires_grad else "frozen"
        facts.append((name, f"{p.dtype} {tuple(p.shape)}, {trained}, label {labelled.of.get(name, '')!r}"))
    facts += [(f"buffer {name}", f"{b.dtype} {tuple(b.shape)}") for name, b in model.named_buffers()]
    for label, one in labelled.meaning.items():
        facts.append((f"transform of {label or 'all parameters'}", describe(one.transform)))
        facts.append((f"policy of {label or 'all parameters'}", describe(one.policy)))
    facts.append(("divisor", repr(options.divisor_of(inner.size * outer.size))))
    return [*facts, *((name, repr(getattr(options, name))) for name in ("nan", "seed"))]


def looked_at(look: Callable[[], L], facts: Callable[[L], Facts], ranks: tuple[Communicator, Communicator]) -> L:
    """Return what ``look`` returns, once all ranks have looked, and found the same. Every rank has to call it.

    Raises:
        RuntimeError: Another rank refused.
        ValueError: Two ranks found different facts.
    """
    found: L | None = None
    refused: Exception | None = None
    try:
        found = look()
    except Exception as error:
        refused = error
    require_alike(refused or (() if found is None else facts(found)), *ranks)
    if refused is not None:
        raise refused
    assert found is not None
    return found


def require_alike(facts: Facts | Exception, inner: Communicator, outer: Communicator) -> None:
    """Compare this rank's facts with all others'. Collective, also for a rank that could not make its stepper.

    Args:
        facts: This rank's facts, or the reason why they are missing.
        inner: The inner ranks.
        outer: The outer ranks.

    Raises:
        ValueError: Two ranks differ; the message, the same on every rank, names the first difference and both values.
        RuntimeError: Another rank could not make its stepper; why.
    """
    if inner.size == outer.size == 1:
        return
    failed = isinstance(facts, Exception)
    payload = f"{type(facts).__name__}: {facts}" if failed else json.dumps(list(facts))  # type: ignore[arg-type]
    encoded = payload.encode()
    digest = torch.tensor([int(failed), *hashlib.sha256(encoded).digest()], dtype=torch.uint8, device=inner.device)
    row = digest.new_empty(inner.size * digest.numel())
    inner.all_gather(row, digest, "what ranks are made of").wait()
    table = row.new_empty(outer.size * row.numel())
    outer.all_gather(table, row, "what ranks are made of").wait()
    ranks = [tuple(one) for one in table.view(-1, digest.numel()).tolist()]
    broken = [rank for rank, (status, *_) in enumerate(ranks) if status]
    if broken:
        reason = fetch_text(encoded, broken[0], inner, outer)
        if not failed:
            raise RuntimeError(f"rank {broken[0]} could not make its stepper: {reason}")
        return
    others = [rank for rank, one in enumerate(ranks) if one != ranks[0]]
    if others:
        first, other = (json.loads(fetch_text(encoded, rank, inner, outer)) for rank in (0, others[0]))
        raise ValueError(
            f"{_difference(first, other, others[0])}; accepted are steppers of one model, made with the same arguments on every rank."
        )


def fetch_text(payload: bytes, rank: int, inner: Communicator, outer: Communicator) -> str:
    """Send one rank's text to every rank: through the outer ranks to its row, and through the inner ranks along it.

    Args:
        payload: The encoded text, on the rank that sends it.
        rank: That rank, counted row by row.
        inner: The inner ranks.
        outer: The outer ranks.
    """
    sources = ((outer, rank // inner.size), (inner, rank % inner.size))
    for communicator, source in sources:
        length = torch.tensor([len(payload)], dtype=torch.int64, device=communicator.device)
        communicator.broadcast(length, "what ranks differ in", source)
        text = torch.zeros(int(length), dtype=torch.uint8, device=communicator.device)
        if communicator.rank == source:
            text.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        communicator.broadcast(text, "what ranks differ in", source)
        payload = bytes(text.tolist())
    return payload.decode()


def _difference(first: Facts, other: Facts, rank: int) -> str:
    for here, there in zip_longest(first, other, fillvalue=("", "nothing")):
        if tuple(here) == tuple(there):
            continue
        if here[0] == there[0]:
            return f"{here[0]}: rank 0 has {here[1]}, and rank {rank} has {there[1]}"
        mine, others = (f"{name}: {value}" if name else value for name, value in (here, there))
        return f"model: where rank 0 has {mine}, rank {rank} has {others}"
    return "ranks: differ in nothing that can be named"
