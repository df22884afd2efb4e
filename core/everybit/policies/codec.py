"""Encodes and decodes the leaves of a tree together, each with its format and its random bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from everybit.base import (
    FLOAT_DTYPES,
    Blocks,
    ComputeDType,
    FirstElement,
    FloatDType,
    Key,
    Lane,
    Numbering,
    first_of_whole,
    is_parameter,
    rounding,
    stream,
    torch_dtype,
    tree,
)
from everybit.formats import BUILT_IN, Format, Parts, PartSpec
from everybit.formats.protocol import parts_of
from everybit.policies.policy import Resolved

P = TypeVar("P")
S = TypeVar("S")

_ACCEPTED: dict[ComputeDType, dict[torch.dtype, FloatDType]] = {
    "float64": {torch_dtype(one): one for one in FLOAT_DTYPES},
    "float32": {torch_dtype(one): one for one in FLOAT_DTYPES[1:]},
}
"""The dtypes of gradients, by that in which they are computed with."""

# The two moments of one optimizer and its weights are rounded with the three numbers of one word.
_LANES: dict[str, Literal[0, 1, 2]] = {"momentum": 0, "variance": 1, "params": 2}


@dataclass(frozen=True, slots=True)
class Codec:
    """The layout of one step: the stored parts and the random bits of each leaf."""

    params: Any
    formats: list[Resolved]
    seed: int | Tensor
    step: Tensor
    numbering: tuple[Numbering, ...]
    drawn: list[list[Tensor]]
    first: FirstElement

    @staticmethod
    def of(params: object, formats: list[Resolved], seed: int | Tensor, step: Tensor, first: FirstElement) -> Codec:
        """No random bits drawn yet. Each dtype is numbered by itself, because elements of two dtypes may have one number in two buffers."""
        numbering = Numbering.through(tree.leaves(params), first, [one.model for one in formats])
        return Codec(params, formats, seed, step, numbering, [[] for _ in formats], first)

    def keys(self, name: str) -> list[Key]:
        """A key per leaf. Each dtype has streams of its own."""
        index = _LANES.get(name)
        # Once for each dtype and not for each leaf: names are hashed in Python, which a compiler traces letter by letter.
        models: dict[str, None] = dict.fromkeys(one.model for one in self.formats)
        streams = {model: stream(f"{name}:{model}") for model in models}
        shared = {} if index is None else {model: stream(f"moments:{model}") for model in models}
        return [
            Key(self.seed, self.step, streams[kind], first, None if index is None else Lane(shared[kind], index, drawn))
            for (first, kind), drawn in zip(self.numbering, self.drawn, strict=True)
        ]

    def decode_params(self, extra: object) -> list[Tensor]:
        """Decode the weights, in the compute dtype.

        Raises:
            ValueError: ``extra`` does not belong to the parameters under their formats; the message names the path.
        """
        leaves = tree.leaves(self.params)
        try:
            extras = tree.flatten_up_to(self.params, extra)
        except ValueError as error:
            raise ValueError(f"state.extra: structure differs from params: {error}") from None
        values = []
        for index, (leaf, rest, one) in enumerate(zip(leaves, extras, self.formats, strict=True)):
            parts = (leaf, *rest) if isinstance(rest, tuple) else (leaf, rest)
            _require_parts(parts, one.params, leaf, lambda index=index: f"params{tree.paths(self.params)[index]}")  # type: ignore[misc]
            values.append(one.params.decode(parts, leaf.shape, one.policy.compute))
        return values

    def encode_params(self, values: Sequence[Tensor]) -> list[Parts]:
        """Encode weights: for each the tuple of its parts, of which the first is the model's own tensor."""
        return [
            _encoded(one.params, self._kept(x), key, lambda index=index: f"params{tree.paths(self.params)[index]}")  # type: ignore[misc]
            for index, (x, one, key) in enumerate(zip(values, self.formats, self.keys("params"), strict=True))
        ]

    def _kept(self, x: Tensor) -> Tensor:
        """Return the value to store: zeros in gaps, where a step may have computed anything, and which scales of blocks must not see."""
        return self.first.filled(x) if isinstance(self.first, Blocks) else x

    def decode_state(self, inner: S) -> S:
        """Decode the slots of a transform's state.

        Raises:
            ValueError: A slot that does not belong to the parameters under their formats; the message names the path.
        """

        def decode(leaf: Tensor, name: str, one: Resolved, _key: None, stored: Any, where: Callable[[], str]) -> Any:
            if isinstance(stored, dict):
                return {
                    factor: decode_one(None, name, one, parts, lambda factor=factor: f"{where()}[{factor!r}]")  # type: ignore[misc]
                    for factor, parts in stored.items()
                }
            return decode_one(leaf, name, one, stored, where)

        def decode_one(leaf: Tensor | None, name: str, one: Resolved, stored: Any, where: Callable[[], str]) -> Tensor:
            format = one.slot(name)
            parts: Parts = stored if isinstance(stored, tuple) else (stored,)
            # A factor has the shape of its first part, which no parameter tells.
            like = parts[0] if leaf is None else leaf
            _require_parts(parts, format, like, where)
            return format.decode(parts, like.shape, one.policy.compute)

        return self._map_slots(decode, inner, keys=lambda _name: [None] * len(self.formats))

    def encode_state(self, inner: S) -> S:
        """Encode the slots of a transform's state; other entries stay as they are.

        Raises:
            ValueError: A slot with other shapes than the parameters', or in another dtype than the compute dtype; the message names the
                path.
        """

        def encode(leaf: Tensor, name: str, one: Resolved, key: Key, value: Any, where: Callable[[], str]) -> Any:
            if isinstance(value, dict):
                return {
                    factor: encode_one(
                        x,
                        name,
                        one,
                        _of_factor(key, f"{name}.{factor}", one),
                        x,
                        lambda factor=factor: f"{where()}[{factor!r}]",  # type: ignore[misc]
                    )
                    for factor, x in _factors(value, one.slot(name), where).items()
                }
            return encode_one(leaf, name, one, key, value, where)

        def encode_one(
            leaf: Tensor, name: str, one: Resolved, key: Key, value: Tensor, where: Callable[[], str]
        ) -> Any:
            if value.shape != leaf.shape:
                raise ValueError(
                    f"{where()}: got the shape {tuple(value.shape)}; accepted is that of its parameter, {tuple(leaf.shape)}."
                )
            if value.dtype is not one.wide:
                raise ValueError(f"{where()}: got {value.dtype}; accepted before encoding is {one.policy.compute}.")
            first, *rest = parts = _encoded(one.slot(name), self._kept(value), key, where)
            return parts if rest else first

        return self._map_slots(encode, inner, keys=self.keys)

    def _map_slots(self, function: Callable[..., Any], inner: S, *, keys: Callable[[str], Sequence[Key | None]]) -> S:
        seen: dict[str, list[int]] = {}
        leaves = tree.leaves(self.params)

        def one_slot(name: str, found: list[Any]) -> list[Any]:
            # A name that a parameter has twice draws two streams. Slots in which it has a hole do not count: an engine that steps it
            # without the transforms of other labels would draw other bits.
            counts = seen[name] = [
                count + (value is not None)
                for count, value in zip(seen.get(name, [0] * len(leaves)), found, strict=True)
            ]
            by_count = {count: keys(name if count < 2 else f"{name}#{count}") for count in dict.fromkeys(counts)}
            own_keys = [by_count[count][index] for index, count in enumerate(counts)]
            return [
                value
                if value is None
                else function(
                    leaf, name, one, key, value, lambda index=index: f"state.{name}{tree.paths(self.params)[index]}"
                )
                for index, (leaf, value, one, key) in enumerate(zip(leaves, found, self.formats, own_keys, strict=True))
            ]

        return tree.map_values(one_slot, inner, self.params)


def _factors(value: dict[Any, Any], format: Format, where: Callable[[], str]) -> dict[str, Tensor]:
    """Refuse factors without names, factors that are not tensors, or a format that does not keep their shape."""
    for factor, x in value.items():
        if not isinstance(factor, str) or not factor.isidentifier():
            raise ValueError(f"{where()}: got a factor called {factor!r}; accepted are identifiers, such as 'rows'.")
        if not isinstance(x, Tensor):
            raise TypeError(f"{where()}[{factor!r}]: got {x!r}; accepted are tensors.")
    if format.parts()[0].block != 1:
        raise ValueError(
            f"{where()}: got {format} for factors of other shapes than the parameter's, whose first part has one number for"
            f" {format.parts()[0].block} elements; accepted are formats whose first part has the value's shape, such as those of 8 bits."
        )
    return value


def _of_factor(key: Key, name: str, one: Resolved) -> Key:
    """Name the random bits of a factor, which has more elements than its parameter at times, in a stream of its own.

    The indices of the next parameter's factor lie 2**24 times as far as that parameter, and a factor of a matrix has at most the square of
    one of the parameter's sides.
    """
    first = first_of_whole(key.first) << 24
    return replace(key, stream=stream(f"{name}:{one.model}"), first=first, lane=None)


def widened_param(leaf: Tensor, one: Resolved) -> Tensor:
    """A parameter as stored, in the compute dtype; never the parameter itself, which a transform might keep in its state.

    A module's parameter is detached, or the state would keep a graph; a plain tensor is not: a start may be differentiated by.
    """
    plain = leaf.detach() if is_parameter(leaf) else leaf
    value = plain.to(one.wide)
    return value.clone() if value.dtype is leaf.dtype else value


def widened(grads: P, params: P, formats: list[Resolved], *, name: str = "grads") -> P:
    """``grads`` in the compute dtype, after a look at each."""
    tree.require_same_structure(grads, params, name=name, reference_name="params")
    wide = []
    # By the parameters' order: the keys of a dict may come in another.
    for index, (grad, one) in enumerate(zip(tree.flatten_up_to(params, grads), formats, strict=True)):
        compute = one.policy.compute
        accepted = _ACCEPTED[compute]
        if grad.layout is not torch.strided or grad.dtype not in accepted:
            path = f"{name}{tree.paths(params)[index]}"
            kind = f"a {grad.layout} tensor" if grad.layout is not torch.strided else str(grad.dtype)
            raise TypeError(
                f"{path}: got {kind} with Policy.compute={compute!r}; accepted are dense, real floating-point tensors:"
                f" {', '.join(accepted.values())}."
            )
        wide.append(_as_stored(grad).to(one.wide))
    return tree.replace(params, wide)


def _as_stored(grad: Tensor) -> Tensor:
    """``grad`` in at least float32, with the rounding that its dtype stands for.

    A user's compiled function may round a gradient to 16 bits and step in one graph; the compiler would then fold the two casts and hand
    on the number as it was before the rounding. In eager code a cast is a cast, and can be differentiated.
    """
    if torch.compiler.is_compiling() and grad.dtype is torch.bfloat16:
        return (grad.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
    if torch.compiler.is_compiling() and grad.dtype is torch.float16:
        return rounding.nearest(grad.float(), "float16")
    return grad if grad.dtype.itemsize >= 4 else grad.float()


def _encoded(format: Format, x: Tensor, key: Key, where: Callable[[], str]) -> Parts:
    """Return the parts that a format made; those of a user's format are compared with its description."""
    parts = format.encode(x, key)
    if type(format) in BUILT_IN:
        return parts
    specs = parts_of(format)
    if not isinstance(parts, tuple) or not _fits(parts, specs, x.shape):
        raise ValueError(
            f"{where()}: {format}.encode returned [{_listed(parts)}] for a value of shape {tuple(x.shape)}; accepted is what its parts()"
            f" say, [{_named(specs, x.shape)}]."
        )
    return parts


def _fits(parts: Sequence[object], specs: Sequence[PartSpec], shape: torch.Size) -> bool:
    return len(parts) == len(specs) and all(
        isinstance(part, Tensor)
        and part.dtype is spec.dtype
        and part.shape == (shape if spec.block == 1 else spec.shape(shape))
        for part, spec in zip(parts, specs, strict=True)
    )


def _listed(parts: object) -> str:
    listed = parts if isinstance(parts, tuple) else (parts,)
    return ", ".join(f"{p.dtype} {tuple(p.shape)}" if isinstance(p, Tensor) else repr(p) for p in listed)


def _named(specs: Sequence[PartSpec], shape: torch.Size) -> str:
    return ", ".join(f"{spec.name} ({spec.dtype} {spec.shape(shape)})" for spec in specs)


def _require_parts(parts: Parts, format: Format, leaf: Tensor, where: Callable[[], str]) -> None:
    """Refuse stored parts that another format made, or that belong to a tensor of another shape."""
    specs = parts_of(format)
    if not _fits(parts, specs, leaf.shape):
        raise ValueError(
            f"{where()}: stored as [{_listed(parts)}], but {format} stores {_named(specs, leaf.shape)}: this state was made under another"
            " policy, or for other parameters. export_fp32 and import_fp32 carry weights from one policy to another."
        )
