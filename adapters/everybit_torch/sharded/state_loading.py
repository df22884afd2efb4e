"""Loads a state dict into a model while it is sharded: judged as a whole on all ranks, and then written, a parameter at a time."""

from __future__ import annotations

import base64
import pickle
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import everybit as eb
from everybit_torch.dtensors import is_dtensor, local
from everybit_torch.engine import Engine
from everybit_torch.full_precision import begin_again
from everybit_torch.sharded.agreement import Everyone
from everybit_torch.sharded.host_bytes import bytes_of, same_bits
from everybit_torch.sharded.layout import Part
from everybit_torch.sharded.model_state import ModelState
from everybit_torch.sharded.shard_tensor import ShardTensor
from everybit_torch.sharded.tensor_parallel import part_of
from everybit_torch.sharded.whole_tensors import cut, view_of
from everybit_torch.units import Unit

LISTED = 10
"""The most problems that one message lists."""

EXTRA = "_extra_state"


class IncompatibleKeys(NamedTuple):
    """Names that do not match, as ``torch.nn.Module.load_state_dict`` returns them.

    Attributes:
        missing_keys: The model has them, and the state dict has not.
        unexpected_keys: The state dict has them, and the model has not.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


class _Judged(NamedTuple):
    problems: list[str]
    keys: IncompatibleKeys
    given: dict[str, str]  # by the first name of each of the model's values: the name that it is given under
    extra: dict[str, Any]


def load_state(
    state: ModelState,
    engine: Engine,
    given: Mapping[str, Any] | None,
    ranks: Everyone,
    *,
    strict: bool,
    broadcast: bool,
    begin: Callable[[], None],
) -> IncompatibleKeys:
    """Judge a state dict, and copy it to this rank's own weights. Every rank has to call it.

    Args:
        state: Of the model.
        engine: Of its optimizer, whose main weights and residuals follow.
        given: By name: tensors of the whole, or this rank's shards.
        ranks: All that hold something of the same parameters.
        strict: Refuse names that do not match.
        broadcast: The first rank alone has it.
        begin: Called when nothing is refused any more, before anything is changed.

    Raises:
        ValueError: It does not fit, with the same message on every rank. Nothing is changed.
    """
    named, firsts = state.named(), _first_names(state.named())
    own = state.own()
    if ranks.is_first or not broadcast:
        judged = _judge(state, named, firsts, own, given, strict=strict)
        if broadcast:
            sharded = [n for n, value in (given or {}).items() if isinstance(value, ShardTensor) or is_dtensor(value)]
            judged.problems.extend(
                f"{name}: is a part of a tensor, and broadcast_from_rank0 takes whole ones" for name in sharded
            )
    else:
        extra = [f"{len(given)} entries on another rank than the first, with broadcast_from_rank0"] if given else []
        judged = _Judged(extra, IncompatibleKeys([], []), {}, {})
    problems = _of_all_ranks(judged.problems, ranks)
    if not problems and not broadcast:
        problems = _differences(given or {}, judged.given, ranks)
    if problems:
        more = f"\n  and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
        raise ValueError(
            "load_model_state_dict: does not fit the model, and nothing was changed:\n  "
            + "\n  ".join(problems[:LISTED])
            + more
        )
    if broadcast:
        judged = _of_first_rank(judged, ranks)
    begin()
    laid_out = {id(parameter): name for name, parameter in state.parameters.items()}
    wanted = {name: value for name, value in firsts.items() if name in judged.given}
    # One for all that the first rank sends: a backend may hold on to what it sent for a moment.
    most = max((value.numel() * value.element_size() for value in wanted.values()), default=0)
    room = torch.empty(most if broadcast else 0, dtype=torch.uint8, device=state.device)
    with torch.no_grad():
        for name, value in wanted.items():
            source = (given or {}).get(judged.given[name])
            if broadcast:
                source = _from_first_rank(source, value, name, ranks, room)
            _copy(source, value, own.get(laid_out.get(id(value), "")), state.part(value))
        loaded = {id(firsts[name]) for name in judged.given}
        written = {name for name, parameter in state.parameters.items() if id(parameter) in loaded}
        for unit, _ in engine.stepped():
            _follow(unit, engine, written)
    for name, value in judged.extra.items():
        module, _, _ = name.rpartition(EXTRA)
        state.model.get_submodule(module.rstrip(".")).set_extra_state(value)
    return judged.keys


# -- judging ------------------------------------------------------------------------------------------------------------------------------


def _first_names(named: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a model, each under the first of its names."""
    names: dict[int, str] = {}
    for name, value in named.items():
        if isinstance(value, Tensor):
            names.setdefault(id(value), name)
    return {name: named[name] for name in names.values()}


def _judge(
    state: ModelState,
    named: Mapping[str, Any],
    firsts: Mapping[str, Tensor],
    own: Mapping[str, Any],
    given: Mapping[str, Any] | None,
    *,
    strict: bool,
) -> _Judged:
    if not isinstance(given, Mapping):
        accepted = "a mapping from the model's names to tensors"
        return _Judged(
            [f"state_dict: got {type(given).__name__}; accepted is {accepted}"], IncompatibleKeys([], []), {}, {}
        )
    problems: list[str] = []
    first_of = {id(value): name for name, value in firsts.items()}
    laid_out = {id(parameter): name for name, parameter in state.parameters.items()}
    found: dict[str, str] = {}
    extra: dict[str, Any] = {}
    for name, value in named.items():
        if name not in given:
            continue
        if not isinstance(value, Tensor):
            extra[name] = given[name]
            continue
        problem = _misfit(name, given[name], value, own.get(laid_out.get(id(value), "")), state.part(value))
        first = first_of[id(value)]
        if problem is not None:
            problems.append(problem)
        elif first not in found:
            found[first] = name
        elif not _equal(given[found[first]], given[name]):
            problems.append(f"{name}: is tied to {found[first]} in the model, and their values differ")
    missing = [
        name
        for name, value in named.items()
        if name not in given and not (isinstance(value, Tensor) and first_of[id(value)] in found)
    ]
    unexpected = [str(name) for name in given if name not in named]
    if strict:
        problems = [
            *(f"{name}: is missing" for name in missing if not _fits_another_name(named, given, name)),
            *(f"{name}: is not in the model" for name in unexpected),
            *problems,
        ]
    return _Judged(problems, IncompatibleKeys(missing, unexpected), found, extra)


def _fits_another_name(named: Mapping[str, Any], given: Mapping[str, Any], name: str) -> bool:
    """Whether a missing value is given under another of its names, where what is wrong with it is said."""
    return isinstance(named[name], Tensor) and any(x is named[name] and other in given for other, x in named.items())


def _misfit(name: str, given: Any, value: Tensor, own: Any, part: Part | None) -> str | None:
    if not isinstance(given, Tensor):
        return f"{name}: got a {type(given).__name__}; accepted is a tensor"
    if is_dtensor(given) and not is_dtensor(value):
        return f"{name}: got a DTensor; accepted is a plain tensor, or the ShardTensor of model_state_dict('sharded')"
    if tuple(given.shape) != tuple(value.shape):
        return f"{name}: got shape {tuple(given.shape)}; accepted is {tuple(value.shape)}"
    if given.dtype is not value.dtype:
        return f"{name}: got {given.dtype}; accepted is {value.dtype}"
    if given.device.type == "meta":
        return f"{name}: got a tensor on the meta device, without values; accepted is one with values"
    if is_dtensor(given):
        assert is_dtensor(value)
        if (given.device_mesh, given.placements) != (value.device_mesh, value.placements):
            return (
                f"{name}: got a DTensor placed as {list(given.placements)} on {given.device_mesh}; accepted is a plain tensor of the whole,"
                f" or a DTensor placed as the model's: {list(value.placements)} on {value.device_mesh}"
            )
    elif isinstance(given, ShardTensor):
        if own is None and not is_dtensor(value):
            return f"{name}: got a part of a tensor that is not sharded here; accepted is the whole of it"
        low, high = _range(value, own)
        there = given.low, given.low + given.local.numel()
        cuts = None if given.part is None else given.part.sizes, None if part is None else part.sizes
        if (there != (low, high) and high - low + given.local.numel()) or (high > low and cuts[0] != cuts[1]):
            of, of_theirs = (f" of a part {one.sizes}" if one is not None else "" for one in (part, given.part))
            return (
                f"{name}: got elements {there[0]} to {there[1]}{of_theirs}; accepted on this rank are {low} to {high}{of}"
                " (torch.distributed.checkpoint brings shards into another cut)"
            )
    elif given.layout is not torch.strided:
        return f"{name}: got a {given.layout} tensor; accepted are dense ones"
    return None


def _range(value: Tensor, own: Any) -> tuple[int, int]:
    """The elements of a value that this rank has, counted through its part of it."""
    if own is None:
        return 0, local(value).numel()
    s, part = own
    return (0, part.numel()) if s is None else (s.low, s.high)


def _equal(one: Tensor, other: Tensor) -> bool:
    if isinstance(one, ShardTensor) and isinstance(other, ShardTensor):
        one, other = one.local, other.local
    elif is_dtensor(one) and is_dtensor(other):
        one, other = local(one), local(other)
    return type(one) is type(other) and (one is other or same_bits(one, other))


def _of_all_ranks(problems: list[str], ranks: Everyone) -> list[str]:
    """The problems of all ranks, each with the first rank that has it; the same list everywhere."""
    found = ranks.gather(problems)
    merged: dict[str, int] = {}
    for rank, one in enumerate(found):
        for problem in one:
            merged.setdefault(problem, rank)
    everywhere = {problem for problem in merged if all(problem in one for one in found)}
    return [problem if problem in everywhere else f"{problem} (on rank {rank})" for problem, rank in merged.items()]


def _differences(given: Mapping[str, Any], names: Mapping[str, str], ranks: Everyone) -> list[str]:
    """Tensors that are not the same on all ranks: ranks that hold copies would go their own ways."""
    found = ranks.gather(
        {
            name: [_place(given[source]), zlib.crc32(bytes_of(local(given[source]).detach().cpu().contiguous()))]
            for name, source in names.items()
            if not isinstance(given[source], ShardTensor)
        }
    )
    problems: list[str] = []
    first: dict[tuple[str, str], tuple[int, int]] = {}  # the first rank with a tensor, or with this part of it
    for name in dict.fromkeys(name for one in found for name in one):
        for rank, one in enumerate(found):
            place, checksum = one.get(name, ["", None])
            other, known = first.setdefault((name, place), (rank, checksum))
            if known != checksum:
                problems.append(
                    f"{name}: differs between rank {other} and rank {rank}; accepted are the same values on every rank"
                )
    return problems


def _place(given: Tensor) -> str:
    """Which part of a tensor it is; empty: all of it."""
    return str(part_of(given).offsets) if is_dtensor(given) else ""


def _of_first_rank(judged: _Judged, ranks: Everyone) -> _Judged:
    """Send the first rank's result. The values of ``get_extra_state`` may be any objects, and are pickled, as torch does."""
    extra = base64.b64encode(pickle.dumps(judged.extra)).decode()
    (missing, unexpected), given, pickled = ranks.gather(
        (judged.keys, judged.given, extra) if ranks.is_first else None
    )[0]
    return _Judged([], IncompatibleKeys(missing, unexpected), given, pickle.loads(base64.b64decode(pickled)))


# -- writing ------------------------------------------------------------------------------------------------------------------------------


def _from_first_rank(given: Tensor | None, value: Tensor, name: str, ranks: Everyone, room: Tensor) -> Tensor:
    whole = room[: value.numel() * value.element_size()].view(value.dtype).view(value.shape)
    if ranks.is_first:
        assert given is not None
        whole.copy_(given)
    ranks.broadcast(whole, name)
    return whole


def _copy(given: Any, value: Tensor, own: Any, part: Part | None) -> None:
    """Copy what this rank has of a value; ``own`` is its part in this rank's buffers, if it lies in some."""
    if own is None:
        here = local(value).detach()
        if isinstance(given, ShardTensor):
            here.copy_(given.local.view(here.shape))
        elif is_dtensor(given):
            here.copy_(local(given))
        elif part is None:
            here.copy_(given)
        elif part.numel:
            (box,) = part.boxes(0, part.numel)
            here.copy_(view_of(given.detach(), box))
        return
    s, into = own
    if isinstance(given, ShardTensor):
        into.copy_(given.local)
    elif s is not None and is_dtensor(given):
        into.copy_(local(given).detach().reshape(-1)[s.low : s.high])
    elif s is not None:
        cut(given.detach(), part, s.low, s.high, into)


def _follow(unit: Unit, engine: Engine, written: set[str]) -> None:
    """Have main weights and residuals be those of the weights that were written; the state of the others stays as it is."""
    if not any(member.name in written for member in unit.members):
        return
    kept = [
        (value, value.clone())
        for member in unit.members
        if member.name not in written
        for value in unit.named_state(member).values()
    ]
    optimizer = engine.optimizer_of(unit)
    # Where state lies, which is the host's memory if it is offloaded.
    places = [x.device for x in eb.tree.leaves(unit.state.extra)]
    tensor = unit.tensor if not places else unit.tensor.to(places[0])
    begin_again(optimizer, tensor, unit.state, unit.first_on(tensor.device))
    for value, before in kept:
        value.copy_(before)
