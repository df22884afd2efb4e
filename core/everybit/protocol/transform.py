"""The one protocol that every optimizer is built from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal, Protocol, TypeVar, get_args, runtime_checkable

from everybit.base import Hyperparameter, Ranged
from everybit.protocol.context import ALONE, Context

P = TypeVar("P")
S = TypeVar("S")

Cut = Literal["element", "tensor"]
"""How finely the parameters of a transform may be cut: anywhere, or not at all."""


PARTS = ("cut", "reduces", "init", "update")
"""The attributes that a transform has to have."""


class Transform(Protocol[S]):
    """A pure function from gradients to updates, with explicit state.

    ``init`` and ``update`` mutate nothing, draw no hidden random numbers and never wait for the device: ``torch.func`` differentiates
    and batches them, ``torch.compile(fullgraph=True)`` traces them. They compute in the dtype of their inputs, which a policy makes
    float32 or better. Updates are *added* to the parameters.

    Two declarations say how an engine may run it. ``cut``: ``"element"`` if parameters may be cut into any flat slices, because the
    update of an element depends only on that element and on reduced totals; ``"tensor"`` if it needs whole tensors with their shapes.
    ``reduces``: whether ``update`` makes requests (``ctx.request``): sums or maxima over all parameters of the step, or over each of them.

    A transform may have more: ``per_tensor``, True if ``update`` uses ``ctx.per_tensor`` (it has to say that it reduces, too);
    ``draws``, True if ``update`` draws random bits by ``ctx.keys``; ``decays()``, see :class:`SlotDecay`;
    ``periods()``, the periods of the work that it gives to ``ctx.every``; ``eval_params(params, state)``, see :class:`HasEvalParams`;
    ``reads_weights``, False if ``update`` reads no values of ``params``, so that weights need not be brought together for a transform
    with cut ``"tensor"``; ``common``, the names of the state's numbers that all
    parameters of one optimizer share, such as Prodigy's estimate, with ``common_by``, the hyperparameters that these depend on.
    """

    @property
    def cut(self) -> Cut:
        """How finely parameters, gradients and slots may be cut."""
        ...

    @property
    def reduces(self) -> bool:
        """Whether ``update`` makes requests."""
        ...

    def init(self, params: P) -> S:
        """Return the state before the first update, for parameters of these shapes, dtypes and devices."""
        ...

    def update(self, updates: P, state: S, params: P, ctx: Context = ALONE) -> tuple[P, S]:
        """Return new updates and new state; updates have the structure of the gradients."""
        ...


class Elementwise(Ranged):
    """Base class of transforms that work element by element and reduce nothing.

    One that reduces has the class variable ``reduces = True``.
    """

    __slots__ = ()

    cut: Cut = "element"
    reduces: bool = False


class WholeTensors(Ranged):
    """Base class of transforms that need each parameter as a whole, without reductions over several.

    One that reduces has the class variable ``reduces = True``.
    """

    __slots__ = ()

    cut: Cut = "tensor"
    reduces: bool = False


@dataclass(frozen=True, slots=True)
class SlotDecay:
    """How slowly a slot of a transform's state moves.

    A step multiplies the slot by ``rate``, and changes it by about ``1 - rate`` of itself. A format that rounds to nearest undoes changes
    below half a unit in the last place, at every step, so that a slow slot would stop moving. A policy uses this declaration to refuse
    such formats.

    Attributes:
        slot: Name of the state's field.
        rate: The share that is kept, in [0, 1]: ``beta`` of a running mean, 1 for a sum, 0 for a value that is replaced at each step.
        squares: Whether the slot holds squares of gradients, so that a step divides by its root: a format must not lose small ones to zero.
    """

    slot: str
    rate: Hyperparameter
    squares: bool = False


@runtime_checkable
class DeclaresDecays(Protocol):
    """A transform that says how slowly its slots move, and those of the transforms inside it."""

    def decays(self) -> tuple[SlotDecay, ...]:
        """One entry for each slot; a slot that is named twice has to be followed at both rates."""
        ...


def decays(*transforms: object) -> tuple[SlotDecay, ...]:
    """List what transforms, and the transforms inside them, declare about their slots."""
    # Not `isinstance(transform, DeclaresDecays)`: it takes ten times as long, and this runs at every step.
    declared: list[Any] = [transform for transform in transforms if hasattr(transform, "decays")]
    return tuple(one for transform in declared for one in transform.decays())


def squares(*transforms: object) -> frozenset[str]:
    """The names of the slots of which all declarations say that they hold squares, which are never negative."""
    declared = decays(*transforms)
    return frozenset(one.slot for one in declared if one.squares) - {one.slot for one in declared if not one.squares}


def coarsest(transforms: Iterable[Transform[Any]]) -> Cut:
    """Return how finely the parameters of several transforms applied together may be cut."""
    return "tensor" if any(transform.cut == "tensor" for transform in transforms) else "element"


def any_reduces(transforms: Iterable[Transform[Any]]) -> bool:
    """Whether several transforms applied together reduce."""
    return any(transform.reduces for transform in transforms)


def any_draws(transforms: Iterable[object]) -> bool:
    """Whether any of several transforms draws random bits. A transform that does not declare it does not."""
    return any(getattr(transform, "draws", False) for transform in transforms)


def any_per_tensor(transforms: Iterable[object]) -> bool:
    """Whether any of several transforms reduces over each parameter. A transform that does not declare it does not."""
    return any(getattr(transform, "per_tensor", False) for transform in transforms)


def common(*transforms: object) -> tuple[str, ...]:
    """List the numbers in the state of transforms, and of those inside them, that all parameters of one optimizer share."""
    return tuple(dict.fromkeys(name for transform in transforms for name in getattr(transform, "common", ())))


def periods(*transforms: object) -> tuple[int, ...]:
    """List the periods of the work that transforms, and those inside them, give to ``ctx.every``: each once, in ascending order."""
    declared: list[Any] = [transform for transform in transforms if hasattr(transform, "periods")]
    return tuple(sorted({one for transform in declared for one in transform.periods()}))


@runtime_checkable
class HasEvalParams(Protocol):
    """A transform that evaluates other weights than those it trains: an average of them, or a point between others."""

    def eval_params(self, params: P, state: Any) -> P:
        """Return the weights for evaluation.

        Args:
            params: The weights after the last update, in the compute dtype.
            state: The transform's state after it.
        """
        ...


def eval_params(transform: object, params: P, state: Any) -> P:
    """Return the weights for evaluation of a transform, which are ``params`` unless it defines others."""
    return transform.eval_params(params, state) if isinstance(transform, HasEvalParams) else params


_SHOWN = 100
"""The longest representation of a value that an error prints, in characters."""


def _instead(value: object) -> str | None:
    """What to write in the place of a value that stands for a transform; None for other values."""
    if isinstance(value, str):
        name = value if value.isidentifier() else "adamw"
        return (
            f"call the function of that name, everybit.{name}(...). Got {value!r}; accepted are transforms, and everybit.optimizers()"
            " lists the names."
        )
    if isinstance(value, (list, tuple)):
        return (
            f"write each transform as an argument, chain(a, b) or chain(*transforms). Got a {type(value).__name__} of {len(value)};"
            " accepted are transforms."
        )
    if isinstance(value, FunctionType):
        return f"call it, {value.__name__}(...). Got the function {value.__name__}; accepted are transforms."
    return None


def require_transform(value: object, *, who: str) -> None:
    """Refuse a value that is not a transform, such as an optimizer made by ``with_policy``.

    Raises:
        TypeError: The message names ``who``, the value and the accepted types.
    """
    if isinstance(value, type):
        raise TypeError(
            f"{who}: got the class {value.__name__}; accepted are transforms: call it, {value.__name__}(...)."
        )
    missing = [name for name in PARTS if not hasattr(value, name)]
    if missing and (instead := _instead(value)) is not None:
        raise TypeError(f"{who}: {instead}")
    if missing:
        hint = (
            " An Optimizer is the last word: build it around the whole chain, with_policy(chain(...), policy)."
            if hasattr(value, "step")
            else " For scope write cut and reduces: 'element' is cut='element', reduces=False; 'tree' is reduces=True."
            if hasattr(value, "scope")
            else ""
        )
        shown = repr(value)
        shown = shown if len(shown) <= _SHOWN and "\n" not in shown else f"a {type(value).__name__}"
        raise TypeError(f"{who}: got {shown}, which has no {', '.join(missing)}; accepted are transforms.{hint}")
    promised: Any = value
    if promised.cut not in get_args(Cut):
        accepted = ", ".join(map(repr, get_args(Cut)))
        raise TypeError(f"{who}: {type(value).__name__}.cut: got {promised.cut!r}; accepted are {accepted}.")
    if getattr(promised, "per_tensor", False) and promised.reduces is not True:
        raise TypeError(
            f"{who}: {type(value).__name__}.reduces: got {promised.reduces!r} with per_tensor=True; accepted is True, since pieces of a"
            " parameter are added up."
        )
    if not isinstance(promised.reduces, bool):
        raise TypeError(
            f"{who}: {type(value).__name__}.reduces: got {promised.reduces!r}; accepted are True and False."
        )
