"""Exports a sharded model to safetensors: the first rank writes one unit after the other, and never holds more."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everybit_torch.checkpoint_file import replace_file
from everybit_torch.sharded.agreement import Everyone
from everybit_torch.sharded.main_values import MainValues
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
    main: MainValues | None = None,
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
    tensors, values, tied = ranks.on_all(lambda: _described(state, dtype, {} if main is None else main.dtypes))
    head = {"format": "pt"} | dict(metadata or {}) | ({TIED: json.dumps(tied)} if tied else {})
    if most is None:
        _write(state, target, tensors, values, head, ranks, main)
        return
    files = split(tensors, most)
    names = (
        [SINGLE] if len(files) == 1 else [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
    )
    # Nobody takes files of two exports for one model: the old index goes first, and the new one comes last.
    ranks.on_first(lambda: _prepare(target))
    for name, here in zip(names, files, strict=True):
        _write(state, target / name, here, values, head, ranks, main)
    ranks.on_first(partial(_finish, target, dict(zip(names, files, strict=True)), {TIED: head[TIED]} if tied else {}))


def _described(
    state: ModelState, dtype: torch.dtype | None, main: Mapping[str, torch.dtype]
) -> tuple[list[Stored], dict[str, Tensor], dict[str, str]]:
    """The tensors to store, unit after unit; the model's tensors by the same names; and further names of them.

    Args:
        state: Of the model.
        dtype: Of what is floating-point; None: each has its own.
        main: The dtypes of parameters of which other values are stored than the model's, by name.

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
    wide = {id(state.parameters[name]): found for name, found in main.items()}

    def dtype_of(value: Tensor) -> torch.dtype:
        return dtype if dtype is not None and value.is_floating_point() else wide.get(id(value), value.dtype)

    stored = [Stored(name, dtype_of(values[name]), tuple(values[name].shape)) for name in ordered]
    return stored, values, tied


def _write(
    state: ModelState,
    target: Path,
    tensors: Sequence[Stored],
    values: Mapping[str, Tensor],
    head: Mapping[str, str],
    ranks: Everyone,
    main: MainValues | None,
) -> None:
    """Write one file, with the units that have something in it; what goes wrong on the first rank is raised on all of them."""
    here = {id(values[one.name]): one for one in tensors}
    visited = False

    def visit(take: Callable[[Tensor, Tensor], None] | None) -> None:
        nonlocal visited
        visited = True
        state.visit(
            take or (lambda tensor, values: None),  # noqa: ARG005
            set(here),
            here=take is not None,
            main=main,
        )

    def write(path: Path) -> None:
        with open(path, "r+b") as file:
            header = Header(tensors, head)
            header.begin(file)
            visit(lambda tensor, given: header.write(file, here[id(tensor)], given))
            for one in _plain_others(state, tensors, values):
                header.write(file, one, values[one.name])

    def on_the_first() -> None:
        try:
            replace_file(target, write)
        finally:
            if not visited:  # the other ranks wait for this one in every unit
                with suppress(Exception):
                    visit(None)

    ranks.on_all(on_the_first if ranks.is_first else lambda: visit(None))


def _plain_others(state: ModelState, tensors: Sequence[Stored], values: Mapping[str, Tensor]) -> Iterable[Stored]:
    """Those that are in no unit, and whole on this rank: buffers, and parameters that are ignored."""
    shown = {id(one) for one in (*state.parameters.values(), *state.left_alone())}
    return [one for one in tensors if id(values[one.name]) not in shown]


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
