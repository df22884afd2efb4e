"""The compiled variants of a param group's step, and the ways of a step that is not compiled after all.

A variant is made for the constants of the code: flags, strings, and numbers that cannot be data. A compiled step never fails where an
uncompiled one would not: what cannot be compiled, and what would be compiled without end, steps uncompiled, with the same bits, and a
warning says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

import everybit as eb
from everybit.base import Blocks, Scattered
from everybit.policies import AnyPolicy
from everybit.protocol import Due
from everybit.stepping import OptimizerState
from everybit.stepping.layout import Layout
from everybit_torch import notices
from everybit_torch.compiled.compilation import (
    DeclinedError,
    cause,
    compile_step,
    know_whole_lines,
    let_length_vary,
    reached_limit,
)
from everybit_torch.compiled.dependencies import Variable, variables
from everybit_torch.compiled.direct_calls import DirectCalls
from everybit_torch.compiled.traceable_numbers import Factory, fits, is_number, needed_as_numbers, without_values
from everybit_torch.label_resolution import Decision, applied
from everybit_torch.streams import is_capturing

_LOGGER = logging.getLogger("everybit_torch")

LIMIT = 8
"""Variants of one step that differ in constants, or in the answers to which periodic work is due."""

FirstOnDevice = Tensor | Blocks | Scattered
"""Global index of the first element, int64, 0-d; or those of a vector whose elements are no neighbours."""

R = TypeVar("R")
Body = Callable[..., R]
# What tells apart the steps of a group: dtype of the parameters, what masks and labels said, how many totals there are, which work is due,
# and the choices of the body.
_StepKind = tuple[torch.dtype, Decision | None, int, Due, tuple[tuple[str, Any], ...]]
# What tells variants apart: the constants of the code, and which arguments are numbers.
_VariantKey = tuple[dict[str, Any], tuple[str, ...]]
Shape = tuple[torch.Size, tuple[int, ...]]


@dataclass(slots=True)
class Inputs:
    """The arguments of a compiled step, beside hyperparameters.

    Attributes:
        tensors: The segment's tensor, alone in a list.
        grads: Its gradient, in the same shape.
        state: The optimizer's state for it; if the body notes changes, a pair of it and the mask.
        first: Global index of the first element, int64, 0-d; or those of the blocks.
        totals: The totals of the transform's reductions.
        policy: How all of it is stored: the param group's, for parameters of this dtype.
        decision: The results of the optimizer's masks and labels for the parameters.
        due: Which periodic work is due, as far as the host says it.
        choices: Further keyword arguments of the body, which choose its code: names and hashable values.
        returns: Whether the body returns anything.
        segment: The owner of this tensor and this state, with the same tensors of the state at every step; None: there is no such owner.
    """

    tensors: list[Tensor]
    grads: list[Tensor]
    state: Any
    first: FirstOnDevice
    totals: list[Tensor]
    policy: AnyPolicy
    decision: Decision | None
    due: Due = ()
    choices: tuple[tuple[str, Any], ...] = ()
    returns: bool = True
    segment: object = None
    layout: Layout | None = None

    def kind(self) -> _StepKind:
        """Return what tells the step apart from the others of its group."""
        return self.tensors[0].dtype, self.decision, len(self.totals), self.due, self.choices

    def shape(self) -> Shape:
        """Return the shape and strides of the tensor."""
        return self.tensors[0].shape, self.tensors[0].stride()


@dataclass(slots=True)
class _Variant(Generic[R]):
    """A compiled step.

    Attributes:
        key: The constants, and which arguments are numbers.
        given: The arguments that are tensors.
        run: Runs it.
        began: Whether its code began to run.
        ran: Whether it ran once to its end.
        refused: Whether it could not be compiled.
        others: The shapes for which the compiler made no graph any more.
        make: Makes ``run``.
        declined: How often the compiler declined to compile it.
        waits: The number of steps until it is tried again.
    """

    key: _VariantKey
    given: list[str]
    run: Body[R] = field(init=False)
    began: bool = False
    ran: bool = False
    refused: bool = False
    others: set[Shape] = field(default_factory=set)
    make: Callable[[], Body[R]] = field(init=False)
    declined: int = 0
    waits: int = 0

    def decline(self) -> None:
        """Try again at the next step, and then less and less often: an attempt takes milliseconds, and torch caches its results."""
        # Of a function that it once declined torch makes no code any more.
        self.run = self.make()
        self.declined += 1
        self.waits = 2**self.declined - 2


class Variants(Generic[R]):
    """The compiled steps of one param group, or its compiled contributions to totals.

    Args:
        number: The group's.
        factory: Makes its transform.
        seed: The seed of stochastic rounding.
        body: The step: of an optimizer, and what :class:`Inputs` holds.
        given: The optimizer's ``compile``. With ``"auto"`` the first compilation is logged as a warning, which is printed where no logging
            is set up.
    """

    def __init__(self, number: int, factory: Factory, seed: int, body: Body[R], given: bool | str = True) -> None:
        self._number, self._factory, self._seed, self._body = number, factory, seed, body
        self._given = given
        self._made: dict[_StepKind, list[_Variant[R]]] = {}
        self._constant: dict[tuple[_StepKind, frozenset[str]], set[str]] = {}  # numbers that have to be constants
        self._chosen: dict[_StepKind, _Variant[R] | None] = {}
        self._told: set[str] = set()
        self._told_of_compilation = False
        self._is_settled = True
        self._variables: list[Variable] = []  # on which direct calls depend
        self._level = logging.WARNING if given == "auto" else logging.INFO

    def follow(self, arguments: Mapping[str, Any]) -> bool:
        """Forget the variants that are of other hyperparameters than these; return whether there was one."""
        before, keys = self._chosen, {kind: self._key(kind, arguments) for kind in self._chosen}
        self._chosen = {kind: one for kind, one in before.items() if one is not None and one.key == keys[kind]}
        return len(self._chosen) < len(before)

    def look_at_variables(self) -> bool:
        """Whether a variable that code depends on has another value. Torch's guards then look at it at every call from here on."""
        if not self._variables or all(map(Variable.holds, self._variables)):
            return False
        self._is_settled = False
        self._variables.clear()
        for variant in (one for several in self._made.values() for one in several):
            if isinstance(variant.run, DirectCalls):
                variant.run = variant.make()
        return True

    def again(self, inputs: Inputs, numbers: Tensor) -> Callable[[Tensor], object] | None:
        """Return the call of the code that ran last for a segment, if nothing but its gradient and the values of numbers is new.

        It takes the gradient; see :meth:`DirectCalls.again`.
        """
        variant = self._chosen.get(inputs.kind())
        direct = None if variant is None else variant.run
        if not isinstance(direct, DirectCalls):
            return None
        return direct.again(inputs.segment, inputs.tensors[0], inputs.grads[0], inputs.first, inputs.totals, numbers)

    def step(
        self,
        inputs: Inputs,
        arguments: Mapping[str, Any],
        numbers: Tensor,
        uncompiled: Callable[[], R],
    ) -> R:
        """Run the body, which may step in place: compiled if that is possible, otherwise by ``uncompiled``, and raise the latter's errors.

        Args:
            inputs: The arguments of the step.
            arguments: The factory's.
            numbers: Those of them that are numbers, in order, float64.
            uncompiled: The same step.
        """
        variant = self._choose(inputs, arguments)
        if variant is None or variant.refused or (variant.others and inputs.shape() in variant.others):
            return uncompiled()
        if variant.waits:
            variant.waits -= 1
            return uncompiled()
        if not variant.ran and is_capturing():
            return uncompiled()  # compilers load code and measure it, which cannot be captured
        variant.began = False
        started = time.perf_counter() if not variant.ran else 0.0
        if not variant.ran and inputs.tensors[0].ndim == 1:
            # Long vectors are stepped in pieces: code for any length is as fast, and it is made once.
            let_length_vary(eb.tree.leaves((inputs.tensors, inputs.grads, inputs.state, inputs.first)))
        given = {name: arguments[name] for name in variant.given}
        try:
            is_direct = isinstance(variant.run, DirectCalls)
            segment = (inputs.segment,) if is_direct else ()
            measured = variant.run(
                inputs.tensors, inputs.grads, inputs.state, numbers, given, inputs.first, inputs.totals, inputs.layout, *segment
            )  # fmt: skip
        except Exception as error:
            if variant.began:
                raise
            declined, limited, why = isinstance(error, DeclinedError), reached_limit(error), cause(error)
        else:
            if not variant.ran:
                variant.ran = True
                self._tell_of_compilation(inputs, time.perf_counter() - started)
            return measured
        measured = uncompiled()
        if declined:
            variant.decline()
            self._tell(
                "for now",
                "torch.compile is switched off (TORCH_COMPILE_DISABLE, torch._dynamo.config, a stance), or a TorchDispatchMode is active",
                "compile=False steps so without this warning",
            )
        elif limited:
            variant.others.add(inputs.shape())
            self._tell(
                "for further shapes of tensors",
                "its compiled code exists for as many as torch._dynamo.config.recompile_limit allows",
                "Raise that limit, or store all parameters under one policy, which steps them as one tensor",
            )
        else:
            variant.refused = True
            self._tell(
                "from here on",
                f"the compiler raised {why}",
                "Accepted in compiled code are operations on tensors, without a look at their values and without input or output;"
                " compile=False steps so without this warning",
            )
        return measured

    def _choose(self, inputs: Inputs, arguments: Mapping[str, Any]) -> _Variant[R] | None:
        """The variant for these inputs; None if there are too many."""
        kind = inputs.kind()
        if kind not in self._chosen:
            self._chosen[kind] = self._find(kind, inputs, arguments)
        return self._chosen[kind]

    def _find(self, kind: _StepKind, inputs: Inputs, arguments: Mapping[str, Any]) -> _Variant[R] | None:
        numbers, constant = self._numbers(kind, arguments)
        key, made = (_constants(arguments, constant), numbers), self._made.setdefault(kind, [])
        known = next((one for one in made if one.key == key), None)
        if known is not None:
            return known
        if len(made) >= LIMIT:
            self._tell_of_too_many(made, key)
            return None
        if candidates := set(numbers) - constant:
            constant |= needed_as_numbers(self._factory, arguments, candidates, self._trial(inputs))
            key = (_constants(arguments, constant), numbers)
        variant: _Variant[R] = _Variant(key, [name for name, value in arguments.items() if isinstance(value, Tensor)])
        fixed = {name: value for name, value in arguments.items() if not _is_data(name, value, constant)}
        places = {name: index for index, name in enumerate(numbers) if name not in constant}
        variant.make = partial(
            self._compile,
            variant,
            fixed,
            places,
            inputs.policy,
            inputs.decision,
            inputs.due,
            inputs.choices,
            inputs.returns,
        )
        variant.run = variant.make()
        made.append(variant)
        return variant

    def _key(self, kind: _StepKind, arguments: Mapping[str, Any]) -> _VariantKey:
        numbers, constant = self._numbers(kind, arguments)
        return _constants(arguments, constant), numbers

    def _numbers(self, kind: _StepKind, arguments: Mapping[str, Any]) -> tuple[tuple[str, ...], set[str]]:
        """The names of the arguments that are numbers, and of those of them that have to be constants in steps of this kind."""
        numbers = tuple(name for name, value in arguments.items() if is_number(value))
        constant = self._constant.setdefault((kind, frozenset(numbers)), set())
        constant |= {name for name in numbers if not fits(arguments[name])}
        return numbers, constant

    def _trial(self, inputs: Inputs) -> Callable[[eb.Transform[Any]], object]:
        """A step of tensors without values."""

        def step(transform: eb.Transform[Any]) -> object:
            like = without_values(([*inputs.tensors], [*inputs.grads], inputs.state, inputs.first, inputs.totals))
            optimizer = applied(eb.Optimizer(transform, inputs.policy, self._seed), inputs.decision)
            choices = dict(inputs.choices)
            return self._body(optimizer, *like[:4], totals=like[4], due=inputs.due, **choices)

        return step

    def _compile(
        self,
        variant: _Variant[R],
        constants: dict[str, Any],
        places: dict[str, int],
        policy: AnyPolicy,
        decision: Decision | None,
        due: Due,
        choices: tuple[tuple[str, Any], ...],
        returns: bool,
    ) -> Body[R]:
        factory, seed, body, options = self._factory, self._seed, self._body, dict(choices)

        def step(
            tensors: list[Tensor],
            grads: list[Tensor],
            state: OptimizerState[Any] | tuple[OptimizerState[Any], Tensor],
            numbers: Tensor,
            given: dict[str, Tensor],
            first: FirstOnDevice,
            totals: list[Tensor],
            layout: Layout | None,
        ) -> R:
            know_whole_lines(eb.tree.leaves((tensors, grads, state)) if tensors[0].device.type != "cpu" else ())
            # One tensor for all numbers: of each 0-d input torch makes a symbol first, and traces everything again without.
            data = {name: numbers[place] for name, place in places.items()}
            optimizer = applied(eb.Optimizer(factory(**data, **given, **constants), policy, seed), decision)
            return body(optimizer, tensors, grads, state, first, totals=totals, due=due, layout=layout, **options)

        def began() -> None:
            variant.began = True

        def note(compiled: Callable[..., Any], given: Sequence[Any]) -> None:
            began()
            if direct is not None:
                direct.note(compiled, given)

        run = compile_step(step, note)
        read = variables((factory, policy, constants)) if self._is_settled and not returns else None
        self._variables += read or []
        direct = None if read is None else DirectCalls(run, began)
        return run if direct is None else cast(Body[R], direct)

    def _tell_of_compilation(self, inputs: Inputs, seconds: float) -> None:
        """Log the time of a first step, once for each group. It is no warning."""
        level = logging.INFO if self._told_of_compilation else self._level
        self._told_of_compilation = True
        _LOGGER.log(
            level,
            "param group %d: compiled its step (%s elements, %s) in %.1f s; compile=False steps uncompiled, with the same results.",
            self._number,
            f"{inputs.tensors[0].numel():,}",
            inputs.tensors[0].dtype,
            seconds,
        )

    def _tell_of_too_many(self, made: Sequence[_Variant[R]], key: _VariantKey) -> None:
        if all(variant.refused for variant in made):
            return  # that was told
        changing = sorted({name for one in made for name in key[0] if one.key[0].get(name) != key[0][name]})
        listed = ", ".join(changing)
        self._tell(
            f"for other values of {listed}",
            f"its compiled code exists in {LIMIT} variants",
            f"Let the factory and its transform take {listed} as a 0-d tensor; compile=False steps so without this warning",
        )

    def _tell(self, when: str, why: str, advice: str) -> None:
        if why in self._told:
            return
        self._told.add(why)
        notices.warn(
            f"param group {self._number}: compile: got {self._given!r}, but its step runs uncompiled {when}, with the same results and"
            f" slower: {why}. {advice}."
        )


def _is_data(name: str, value: object, constant: set[str]) -> bool:
    return isinstance(value, Tensor) or (is_number(value) and name not in constant)


def _constants(arguments: Mapping[str, Any], constant: set[str]) -> dict[str, Any]:
    """The arguments that are part of the code, so that those are equal which make the same code: 1 is not True, nor 1.0, nor 0.0 -0.0."""
    return {
        name: (type(value), repr(value) if is_number(value) else value)
        for name, value in arguments.items()
        if not _is_data(name, value, constant)
    }
