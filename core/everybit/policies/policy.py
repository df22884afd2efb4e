"""Policies: where each bit is spent.

A policy is plain, frozen, typed data. It says in which format the parameters and every slot of the optimizer's state are stored, and
in which dtypes gradients are kept and sent. Fields that a policy leaves open (``None``) are filled in by one function, :func:`resolve`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch

from everybit.base import (
    COMPUTE_DTYPES,
    DTYPES,
    FLOAT_DTYPES,
    ComputeDType,
    FloatDType,
    dtype_name,
    itemsize,
    once,
    settle_dtype,
)
from everybit.formats import BUILT_IN, SLOT_KINDS, Format, Nearest, ParamFormat, PartSpec, SlotKind, StateFormat

ADAM_SLOTS = ("momentum", "variance")

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grads:
    """The dtypes in which gradients are kept and sent.

    Args:
        main: dtype in which gradients are accumulated and passed to the optimizer. None: the model's own dtype.
        comm: dtype in which they are sent between processes. None: as ``main``.
        reduce: How gradients are summed: by the communication library (``"native"``), or at the receiver, rounded once (``"float32"``).
    """

    main: FloatDType | None = None
    comm: FloatDType | None = None
    reduce: Literal["native", "float32"] = "native"

    def __post_init__(self) -> None:
        for name in ("main", "comm"):
            if getattr(self, name) is not None:
                settle_dtype(self, name, FLOAT_DTYPES, field=f"Grads.{name}")
        settle_dtype(self, "reduce", ("native", "float32"), field="Grads.reduce")


class FrozenMapping(Mapping[K, V]):
    """An immutable mapping, which can be hashed, copied and pickled."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[K, V]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: K) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenMapping, (self._items,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The formats of an optimizer's parameters, state and gradients.

    Args:
        compute: dtype in which updates are computed, whatever they are stored in.
        params: Format of the parameters.
        momentum: Format of first moments.
        variance: Format of second moments, the running means of squares.
        state: Format of every other slot.
        slots: Formats by slot name, which take precedence over the three above.
        grads: The dtypes of gradients.

    Raises:
        TypeError: A field has a value of another type than its annotation.
        ValueError: Fields that contradict each other.
    """

    compute: ComputeDType = "float32"
    params: ParamFormat = Nearest()
    momentum: StateFormat = Nearest("float32")
    variance: StateFormat = Nearest("float32")
    state: StateFormat = Nearest("float32")
    slots: Mapping[str, StateFormat] = field(default_factory=dict)
    grads: Grads = Grads()

    def __post_init__(self) -> None:
        settle_dtype(self, "compute", COMPUTE_DTYPES, field="Policy.compute")
        _require_format("Policy.params", self.params, "for_params")
        for name in ("momentum", "variance", "state"):
            _require_format(f"Policy.{name}", getattr(self, name), "for_slot")
        if not isinstance(self.slots, Mapping):
            raise TypeError(f"Policy.slots: got {self.slots!r}; accepted is a mapping from slot names to formats.")
        object.__setattr__(self, "slots", FrozenMapping(self.slots))
        for name, slot in self.slots.items():
            _require_format(f"Policy.slots[{name!r}]", slot, "for_slot")
        if not isinstance(self.grads, Grads):
            raise TypeError(f"Policy.grads: got {self.grads!r}; accepted is a Grads, e.g. Grads(main='float32').")
        for name, format in [("params", self.params), *self._state_formats()]:
            if (objection := format.objection(self.compute)) is not None:
                raise ValueError(f"Policy.{name}: got {format} with compute={self.compute!r}; {objection}")
        for name, format in self._state_formats():
            kinds = [format.for_slot(kind, self.compute).parts() for kind in SLOT_KINDS]
            for parts in kinds:
                _require_parts(f"Policy.{name}", format, parts)
            if len({tuple((part.name, part.block) for part in parts) for parts in kinds}) > 1:
                raise ValueError(
                    f"Policy.{name}: {format} has parts of other names or blocks for slots of another kind; accepted is a format whose"
                    " parts differ in their dtypes at most."
                )

    def slot(self, name: str) -> StateFormat:
        """The format of the slot called ``name``."""
        if name in self.slots:
            return self.slots[name]
        by_kind = {"momentum": self.momentum, "variance": self.variance}
        return by_kind.get(name, self.state)

    def resolved_slot(self, name: str, kind: SlotKind = "signed") -> Format:
        """Return the format of the slot called ``name``, for numbers of this kind, with every dtype named."""
        return self.slot(name).for_slot(kind, self.compute)

    @property
    def block(self) -> int:
        """Return the least number of elements that is a multiple of the block of every format that is named here; 1 without blocks.

        The stored tensors of a parameter may be cut at multiples of it, counted from the parameter's first element.
        """
        return math.lcm(*self.blocks)

    @property
    def blocks(self) -> frozenset[int]:
        """The numbers of elements for which some format that is named here stores one number."""
        slots = [format.for_slot("signed", self.compute) for _, format in self._state_formats()]
        formats = [self.params.for_params(self.model_dtype), *slots]
        return frozenset(part.block for format in formats for part in format.parts())

    @property
    def packs(self) -> bool:
        """Whether some state format stores several elements in one number, such as two of 4 bits in a byte."""
        return any(format.for_slot("signed", self.compute).parts()[0].block > 1 for _, format in self._state_formats())

    def field_of(self, slot: str) -> str:
        """The field that decides the format of a slot, for messages: ``Policy.variance``."""
        if slot in self.slots:
            return f"Policy.slots[{slot!r}]"
        return f"Policy.{slot}" if slot in ("momentum", "variance") else "Policy.state"

    @property
    def model_dtype(self) -> FloatDType:
        """Return the dtype of the model's tensors that this policy is meant for: the dtype it names, or bfloat16."""
        refusal: ValueError | None = None
        for model in ("bfloat16", *FLOAT_DTYPES):
            try:
                return dtype_name(self.params.for_params(model).parts()[0].dtype, field="Policy.params")
            except ValueError as error:
                refusal = refusal or error
        raise ValueError(f"Policy.params: {refusal}")

    def bytes_table(self, *, model: FloatDType | None = None, slots: tuple[str, ...] = ADAM_SLOTS) -> dict[str, float]:
        """Bytes per parameter, by use: parameter, its compensation (or main copy), gradient, and each slot.

        Args:
            model: dtype of the model's tensors; None: :attr:`model_dtype`.
            slots: Names of the optimizer's slots; by default Adam's.
        """
        dtype = self.model_dtype if model is None else model
        formats = resolve(self, dtype)
        value, *rest = formats.params.parts()
        table: dict[str, float] = {"parameter": value.bytes_per_element}
        if rest:
            table["compensation"] = sum(part.bytes_per_element for part in rest)
        table["gradient"] = itemsize(formats.grads_main)
        for name in slots:
            table[name] = sum(part.bytes_per_element for part in formats.slot(name).parts())
        return table

    def bytes_per_param(self, *, model: FloatDType | None = None, slots: tuple[str, ...] = ADAM_SLOTS) -> float:
        """Bytes per parameter that persist between steps, gradient included: the sum of :meth:`bytes_table`."""
        return sum(self.bytes_table(model=model, slots=slots).values())

    def _state_formats(self) -> list[tuple[str, StateFormat]]:
        named: list[tuple[str, StateFormat]] = [
            (name, getattr(self, name)) for name in ("momentum", "variance", "state")
        ]
        return named + [(f"slots[{name!r}]", format) for name, format in self.slots.items()]

    @property
    def draws_bits(self) -> bool:
        """Whether any format rounds stochastically."""
        return self.params.draws_bits or any(format.draws_bits for _, format in self._state_formats())


@dataclass(frozen=True, slots=True)
class Resolved:
    """A policy for tensors of one dtype, with every field filled in.

    Attributes:
        policy: It.
        model: dtype of the model's tensors.
        params: Format of the parameters.
        grads_main: dtype in which gradients are accumulated.
        grads_comm: dtype in which they are sent.
        reduce: The way in which sent gradients are summed.
        squares: The names of slots with numbers that are never negative.
        wide: The dtype in which updates are computed.
    """

    policy: Policy
    model: FloatDType
    params: Format
    grads_main: FloatDType
    grads_comm: FloatDType
    reduce: Literal["native", "float32"]
    squares: frozenset[str] = frozenset()
    wide: torch.dtype = field(init=False, compare=False, repr=False)
    found: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Results of :func:`~everybit.base.memo.once`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "wide", DTYPES[self.policy.compute])

    @property
    def block(self) -> int:
        """Return the least number of elements at multiples of which all stored tensors may be cut; see :attr:`Policy.block`."""
        return once(self, "block of all slots", lambda: self.policy.block)

    def slot(self, name: str) -> Format:
        """The format of the slot called ``name``, every dtype named."""
        kind: SlotKind = "non-negative" if name in self.squares else "signed"
        return once(self, name, lambda: self.policy.resolved_slot(name, kind))


def resolve(policy: Policy, model: FloatDType, squares: frozenset[str] = frozenset()) -> Resolved:
    """Fill in what ``policy`` leaves open, for parameters stored as ``model``. The only place where None means something.

    Args:
        policy: The policy to fill in.
        model: dtype of the model's tensors.
        squares: The names of slots with numbers that are never negative.

    Raises:
        ValueError: The policy cannot be applied to parameters of this dtype; the message says why and what is accepted.
    """
    try:
        params = policy.params.for_params(model)
    except ValueError as error:
        hint = (
            _advice(model)
            if model == "float32"
            else "Give those parameters a policy of their own: by_label, or a param group's."
        )
        raise ValueError(f"Policy.params: {error} {hint}") from None
    _require_parts("Policy.params", policy.params, params.parts())
    own, *_ = params.parts()
    if own.block > 1:
        raise ValueError(
            f"Policy.params: got {policy.params}, whose first part has one number for {own.block} elements; accepted is a format"
            " whose first part is the model's own tensor, with block=1."
        )
    if own.dtype != (torch_name := getattr(torch, model)):
        raise ValueError(
            f"Policy.params: {policy.params} stores parameters as {own.dtype}, but the parameter is {torch_name}. "
            + _advice(model)
        )
    if model == "float64" and policy.compute != "float64":
        raise ValueError(
            "Policy.compute: got 'float32' for float64 parameters; computing in less than the parameters hold would lose digits."
            " Accepted is compute='float64', e.g. policies.FP64."
        )
    main = policy.grads.main or model
    if main == "float64" and policy.compute != "float64":
        raise ValueError(
            f"Grads.main: got 'float64' with Policy.compute={policy.compute!r}, in which a step would have to round them first. Accepted"
            " are Grads(main='float32'), or Policy(compute='float64')."
        )
    return Resolved(policy, model, params, main, policy.grads.comm or main, policy.grads.reduce, squares)


_METHODS = ("parts", "encode", "decode", "resolution", "objection", "draws_bits", "loses_small_numbers")


def _require_format(name: str, value: object, method: Literal["for_params", "for_slot"]) -> None:
    """Refuse what cannot store a parameter (``for_params``) or a slot of the state (``for_slot``)."""
    listed = ", ".join(kind.__name__ for kind in BUILT_IN if hasattr(kind, method))
    base = "ParamFormat" if method == "for_params" else "StateFormat"
    refusal = f"{name}: got {value!r}; accepted are {listed}, and formats of your own, which subclass everybit.{base}."
    if isinstance(value, type) or not (hasattr(value, "encode") and hasattr(value, "decode")):
        hint = f" Did you mean Nearest({value!r})?" if isinstance(value, str) and value in FLOAT_DTYPES else ""
        hint = f" Did you mean {value.__name__}()?" if isinstance(value, type) and hasattr(value, "parts") else hint
        raise TypeError(refusal + hint)
    if missing := [one for one in _METHODS if not hasattr(value, one)]:
        raise TypeError(f"{refusal} It has no {', '.join(missing)}.")
    if not hasattr(value, method):
        other = "for slots of the state" if method == "for_params" else "for parameters"
        raise TypeError(f"{refusal} It has no {method}: it is {other} only.")
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(f"{refusal} It cannot be hashed ({error}); a format is a frozen dataclass.") from None


def _require_parts(name: str, format: object, parts: object) -> None:
    """Refuse parts of a format that are not :class:`PartSpec` with distinct names."""
    fits = isinstance(parts, tuple) and len(parts) > 0 and all(isinstance(part, PartSpec) for part in parts)
    if not fits or len({part.name for part in parts}) < len(parts):  # type: ignore[attr-defined, arg-type]
        raise ValueError(
            f"{name}: {format}.parts() returned {parts!r}; accepted is a tuple of one PartSpec or more, each of a name of its own."
        )


def _advice(model: FloatDType) -> str:
    if model == "float64":
        return "Accepted for float64 parameters: policies.FP64."
    if model == "float32":
        return (
            "Accepted for float32 parameters: policies.FP32, or cast the model to bfloat16 first. Only beside 16-bit"
            " parameters are they kept in float32, and here are none; for adapters of a 16-bit model, whose other parameters"
            " are not given, by_dtype says what each dtype gets."
        )
    return (
        f"Accepted for {model} parameters: LEAN_BF16, EXACT_BF16, TIGHT_BF16, FLOOR_BF16, MIXED_BF16, KAHAN_BF16 (less exact than"
        " LEAN_BF16 at the same bytes) or PURE_BF16 in everybit.policies."
    )
