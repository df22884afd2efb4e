"""Exports a sharded model to safetensors: the first rank writes one unit after the other, and never holds more."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from everybit_torch.checkpoint_file import replace_file
from everybit_torch.sharded.agreement import Everyone
from everybit_torch.sharded.model_state import ModelState
from everybit_torch.sharded.safetensors_files import (
    DTYPES,
    INDEX,
    NUMBERED,
    SINGLE,
    Header,
    Stored,
    index,
    parse_size,
    split,
)
from everybit_torch.weights import TIED


def export(
    state: ModelState,
    path: str | os.PathLike[str],
    ranks: Everyone,
    *,
    max_shard_size: int | str | None,
    dtype: torch.dtype | None,
    metadata: Mapping[str, str] | None,
) -> None:
    """Write a model; see :meth:`everybit_torch.FlatStepper.export_safetensors`. Every rank has to call it."""
    target = Path(path)
    most = None if max_shard_size is None else parse_size(max_shard_size)
    if dtype is not None and (dtype not in DTYPES or not dtype.is_floating_point):
        raise ValueError(
            f"dtype: got {dtype}; accepted is a floating-point dtype of the format, or None for the model's own."
        )
    for key, value in (metadata or {}).items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise TypeError(f"metadata: got {key!r}: {value!r}; accepted are strings.")
    tensors, values, tied = ranks.on_all(lambda: _described(state, dtype))
    head = {"format": "pt"} | dict(metadata or {}) | ({TIED: json.dumps(tied)} if tied else {})
    if most is None:
        _write(state, target, tensors, values, head, ranks)
        return
    files = split(tensors, most)
    names = (
        [SINGLE] if len(files) == 1 else [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
    )
    # Nobody takes files of two exports for one model: the old index goes first, and the new one comes last.
    ranks.on_first(lambda: _prepare(target))
    for name, here in zip(names, files, strict=True):
        _write(state, target / name, here, values, head, ranks)
    ranks.on_first(partial(_finish, target, dict(zip(names, files, strict=True)), {TIED: head[TIED]} if tied else {}))


def _described(state: ModelState, dtype: torch.dtype | None) -> tuple[list[Stored], dict[str, Tensor], dict[str, str]]:
    """What is stored, unit after unit; the model's tensors by the same names; and further names of theirs.

    Raises:
        TypeError: Something that the format does not store.
    """
    names: dict[int, str] = {}
    tied: dict[str, str] = {}
    values: dict[str, Tensor] = {}
    for name, value in state.named().items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name}: the model's state has a {type(value).__name__} here (get_extra_state?), and safetensors holds tensors only."
            )
        if value.dtype not in DTYPES or value.layout is not torch.strided:
            raise TypeError(
                f"{name}: got {value.dtype}, {value.layout}; accepted are dense tensors of {', '.join(map(str, DTYPES))}."
            )
        if id(value) in names:
            tied[name] = names[id(value)]
        else:
            names[id(value)] = name
            values[name] = value
    ordered: list[str] = []
    for members in state.members:
        ordered += [names[id(state.parameters[member])] for member in members if id(state.parameters[member]) in names]
    ordered += [name for name in values if name not in set(ordered)]
    stored = [
        Stored(
            name,
            dtype if dtype is not None and values[name].is_floating_point() else values[name].dtype,
            tuple(values[name].shape),
        )
        for name in ordered
    ]
    return stored, values, tied


def _write(
    state: ModelState,
    target: Path,
    tensors: Sequence[Stored],
    values: Mapping[str, Tensor],
    head: Mapping[str, str],
    ranks: Everyone,
) -> None:
    """Write one file, with the units that have something in it; what goes wrong on the first rank is raised on all of them."""
    here = {id(values[one.name]): one for one in tensors}
    units = [
        n for n, members in enumerate(state.members) if any(id(state.parameters[name]) in here for name in members)
    ]
    failed: list[BaseException] = []
    visited = False

    def visit(take: Callable[[Sequence[tuple[str, nn.Parameter]]], None]) -> None:
        nonlocal visited
        visited = True
        state.visit(take, units)

    def write(path: Path) -> None:
        with open(path, "r+b") as file:
            header = Header(tensors, head)
            try:
                header.begin(file)
            except BaseException as error:
                failed.append(error)
            visit(lambda members: _put(file, header, [p for _, p in members], here, failed))
            _put(file, header, [values[one.name] for one in _others(state, tensors, values)], here, failed)
            if failed:
                raise failed[0]

    def on_the_first() -> None:
        try:
            replace_file(target, write)
        finally:
            if not visited:  # the other ranks wait for this one in every unit
                with suppress(Exception):
                    visit(lambda members: None)  # noqa: ARG005

    ranks.on_all(on_the_first if ranks.is_first else lambda: visit(lambda members: None))  # noqa: ARG005


def _others(state: ModelState, tensors: Sequence[Stored], values: Mapping[str, Tensor]) -> Iterable[Stored]:
    """Those that are in no unit: buffers, and parameters that are ignored."""
    laid_out = {id(parameter) for parameter in state.parameters.values()}
    return [one for one in tensors if id(values[one.name]) not in laid_out]


def _put(
    file: BinaryIO, header: Header, given: Iterable[Tensor], here: Mapping[int, Stored], failed: list[BaseException]
) -> None:
    for value in given:
        if id(value) in here and not failed:
            try:
                header.write(file, here[id(value)], value)
            except BaseException as error:
                failed.append(error)


def _prepare(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / INDEX).unlink(missing_ok=True)


def _finish(directory: Path, files: Mapping[str, Sequence[Stored]], metadata: Mapping[str, Any]) -> None:
    if len(files) > 1:
        text = index(files, metadata)
        replace_file(directory / INDEX, lambda path: _overwrite(path, text))
    for old in directory.iterdir():
        if old.name not in files and (NUMBERED.fullmatch(old.name) or old.name == SINGLE):
            old.unlink()


def _overwrite(path: Path, text: str) -> None:
    with open(path, "r+", encoding="utf-8") as file:
        file.write(text)
