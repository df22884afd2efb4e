"""Two ways to compute the intended update: a float64 copy of torch's optimizer, or of an optimizer of everybit."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import everybit as eb
from everybit.policies import short
from everybit.stepping.entries import WEIGHTS
from everybit_torch.optim import TorchOptimizer, parameters_of
from everybit_torch.torch_internals.dtensors import is_dtensor

LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Before:
    """A parameter before an audited step, and the intended update.

    Attributes:
        weights: All the precision that is stored.
        intended: The update, float64.
        state: Those entries of the state that are rounded to nearest in fewer than 32 bits, so that they may stop moving.
        intended_state: The same entries after the step in float64.
        stored: How the weights are stored.
        stochastic: Whether they are rounded stochastically, so that an update that has no effect now has the right one on average.
        nonfinite_gradients: How many elements of the gradient are infinite or NaN.
    """

    weights: Tensor
    intended: Tensor
    state: dict[str, Tensor]
    intended_state: dict[str, Tensor]
    stored: str
    stochastic: bool
    nonfinite_gradients: int


@dataclass(frozen=True, slots=True)
class After:
    """A parameter after an audited step: weights with all the precision that is stored, and the entries of the state of its shape."""

    weights: Tensor
    state: dict[str, Tensor]


class Audited(Protocol):
    """Takes the step of an optimizer a second time, in float64."""

    def before(self) -> dict[Tensor, Before]:
        """Compute the intended update of each parameter that has a gradient. The optimizer and the model are unchanged.

        Raises:
            RuntimeError: The optimizer does not step when ``step`` is called.
        """
        ...

    def after(self) -> dict[Tensor, After]:
        """All parameters, after the optimizer's own step."""
        ...


def audited(optimizer: torch.optim.Optimizer) -> Audited:
    """Choose the way by the kind of optimizer."""
    return _OwnOptimizer(optimizer) if isinstance(optimizer, TorchOptimizer) else _OfTorch(optimizer)


class _OfTorch:
    """Any optimizer of torch.optim: its own ``step``, of a shallow copy that has one parameter, in float64."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def before(self) -> dict[Tensor, Before]:
        return {
            parameter: self._of(group, parameter)
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        }

    def after(self) -> dict[Tensor, After]:
        return {
            parameter: After(parameter.detach(), _of_its_shape(self._optimizer.state.get(parameter, {}), parameter))
            for parameter in parameters_of(self._optimizer.param_groups)
        }

    def _of(self, group: dict[str, Any], parameter: Tensor) -> Before:
        assert parameter.grad is not None
        wide = nn.Parameter(parameter.detach().double())
        wide.grad = parameter.grad.detach().double()
        shadow = copy.copy(self._optimizer)
        # A scheduler replaces the object's own step, and hooks would audit the audit.
        for name in ("step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            shadow.__dict__.pop(name, None)
        shadow._optimizer_step_pre_hooks, shadow._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        state = self._optimizer.state.get(parameter, {})
        shadow.param_groups = [{**group, "params": [wide]}]
        shadow.state = defaultdict(dict)
        if state:
            shadow.state[wide] = {
                key: _wide(value) if isinstance(value, Tensor) else copy.deepcopy(value) for key, value in state.items()
            }
        type(shadow).step(shadow)
        low = {key: value.clone() for key, value in _of_its_shape(state, parameter).items() if value.dtype in LOW}
        return Before(
            parameter.detach().clone(),
            wide.detach() - parameter.detach(),
            low,
            _of_its_shape(shadow.state[wide], wide),
            str(parameter.dtype).removeprefix("torch."),
            False,
            nonfinite(parameter.grad),
        )


class _OwnOptimizer:
    """One of everybit's: its transform, of all parameters together, with weights, gradients and state in float64."""

    def __init__(self, optimizer: TorchOptimizer) -> None:
        self._optimizer = optimizer

    def before(self) -> dict[Tensor, Before]:
        if self._optimizer.release is not None:
            raise RuntimeError(
                "audit: got an optimizer that steps during the backward pass (gradient release); accepted is one that steps when step()"
                " is called: audit some steps without gradient release."
            )
        self._optimizer.prepare()
        parameters = parameters_of(self._optimizer.param_groups)
        present = self._optimizer.full_state_dict()["state"]
        wide = {id(parameter): nn.Parameter(parameter.detach().double()) for parameter in parameters}
        for parameter in parameters:
            if parameter.grad is not None:
                wide[id(parameter)].grad = parameter.grad.detach().double()
        shadow = self._shadow(wide)
        shadow.load_full_state_dict(shadow.full_state_dict() | {"state": _all_wide(present)})
        weights = [one.detach().clone() for one in wide.values()]
        shadow.step()
        intended = shadow.full_state_dict()["state"]
        formats = self._formats()
        found = {}
        for number, parameter in enumerate(parameters):
            if parameter.grad is None:
                continue
            entries, resolved = _of_its_shape(present[number], parameter), formats[id(parameter)]
            nearest = [key for key in entries if key != WEIGHTS and _may_stop(resolved, key)]
            found[parameter] = Before(
                entries[WEIGHTS],
                wide[id(parameter)].detach() - weights[number],
                {key: entries[key] for key in nearest},
                {key: intended[number][key] for key in nearest},
                short(resolved.params),
                resolved.params.draws_bits,
                nonfinite(parameter.grad),
            )
        return found

    def after(self) -> dict[Tensor, After]:
        full = self._optimizer.full_state_dict()["state"]
        found = {}
        for number, parameter in enumerate(parameters_of(self._optimizer.param_groups)):
            if number in full:
                entries = _of_its_shape(full[number], parameter)
                found[parameter] = After(entries.pop(WEIGHTS), entries)
        return found

    def _shadow(self, wide: Mapping[int, nn.Parameter]) -> TorchOptimizer:
        """An optimizer with the present hyperparameters, of these parameters."""
        groups = self._optimizer.own.groups
        transforms = [group.factory(**group.arguments) for group in groups]
        given = []
        for number, values in enumerate(self._optimizer.param_groups):
            params: list[Any] = [wide[id(parameter)] for parameter in values["params"]]
            if "param_names" in values:
                params = list(zip(values["param_names"], params, strict=True))
            given.append({"params": params, "number": number})

        def factory(number: int = 0) -> eb.Transform[Any]:
            return transforms[number]

        return TorchOptimizer(given, factory, compile=False, number=0)

    def _formats(self) -> dict[int, Any]:
        """How each parameter is stored, by its id."""
        return {
            id(parameter): one.of.segment.stored
            for one in self._optimizer.own.stepped
            for parameter in one.of.parameters
        }


def _may_stop(resolved: Any, slot: str) -> bool:
    """Whether a slot is rounded to nearest, coarser than float32."""
    return bool(resolved.slot(slot.partition("#")[0]).resolution(resolved.policy.compute) > 0)


def nonfinite(x: Tensor) -> int:
    """How many elements are infinite or NaN."""
    return int(whole((x.detach().abs() < math.inf).logical_not().sum()))


def whole(number: Tensor) -> Tensor:
    """Return a number over all ranks that have parts of a sharded tensor. Collective for those."""
    return number.full_tensor() if is_dtensor(number) else number


def _of_its_shape(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """The entries of a parameter's state that have its shape. Of a number those are its weights: others may be counts."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape
        if value.ndim or key == WEIGHTS
    }


def _all_wide(state: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    """The same state, its numbers in float64; counts, which are whole numbers, as they are."""
    return {
        number: {
            key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in entries.items()
        }
        for number, entries in state.items()
    }


def _wide(x: Tensor) -> Tensor:
    """A copy of torch's state: in float64 if it is not a count of steps, which torch keeps as a number without dimensions."""
    return x.detach().to(torch.float64, copy=True) if x.is_floating_point() and x.ndim else x.detach().clone()
