"""A param group as it is stepped: policies and optimizers by dtype of the parameters, and the present hyperparameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.policies import AnyPolicy, PolicyOrName, with_name_resolved
from everybit.protocol import transforms_in
from everybit.stepping import Unsafe, with_policy
from everybit_torch.arguments import (
    ARGUMENTS,
    argument_names,
    as_python,
    by_given_name,
    core_names,
    differ,
    flags_of,
    require_known_options,
    spread,
)
from everybit_torch.compiled import Factory
from everybit_torch.label_resolution import Decision
from everybit_torch.optim.param_groups import policy_for
from everybit_torch.optim.skeletons import skeleton
from everybit_torch.segments import Compile, Steps

Optimizers = dict[torch.dtype, eb.Optimizer[Any]]
"""A group's optimizers, by dtype of the parameters."""


class Group:
    """A param group as it is stepped.

    Args:
        number: The group's number.
        factory: Makes a transform of hyperparameters.
        policies: Policies by dtype of the parameters.
        names: The factory's arguments of each hyperparameter, by the user's name for it; for messages.
        owner: The optimizer's name, for messages.
        seed: The seed of stochastic rounding.
        unsafe: See :func:`everybit.with_policy`.
        compile: Whether steps are compiled; see :class:`~everybit_torch.TorchOptimizer`.
        source: The transform's source. Groups of one source are stepped by the same transform, with requests over all of them.

    Attributes:
        arguments: The factory's present keyword arguments.
        optimizers: The present optimizers.
        steps: Their steps, by dtype.
    """

    def __init__(
        self,
        number: int,
        factory: Factory,
        policies: Mapping[torch.dtype, AnyPolicy],
        *,
        names: Mapping[str, tuple[str, ...]],
        owner: str,
        seed: int,
        unsafe: Unsafe,
        compile: Compile,
        source: str = "",
    ) -> None:
        self.number, self.factory, self.names, self.source = number, factory, names, source
        self.policies = dict(policies)
        self.compile: Compile = compile
        self.owner, self._seed = owner, seed
        self._unsafe: Unsafe = unsafe
        self.arguments: dict[str, Any] = {}
        self.optimizers: Optimizers = {}
        self.steps = {
            dtype: Steps(factory, policy, seed=seed, compile=compile, number=number)
            for dtype, policy in self.policies.items()
        }
        self._decided: list[tuple[eb.Optimizer[Any], Decision, eb.Optimizer[Any]]] = []

    def build(self, arguments: Mapping[str, Any]) -> Optimizers:
        """Make the optimizers for these arguments of the factory; the present optimizers stay.

        Raises:
            TypeError: A hyperparameter of another kind.
            ValueError: A hyperparameter or policy that cannot work; the message has the user's name for it.
        """
        # Judged anew whenever hyperparameters change; a policy that was accepted with a warning gives no second warning.
        unsafe: Unsafe = "allow" if self._unsafe == "warn" and self.optimizers else self._unsafe
        try:
            transform = self.factory(**arguments)
            return {
                dtype: with_policy(transform, policy, seed=self._seed, unsafe=unsafe)
                for dtype, policy in self.policies.items()
            }
        except (TypeError, ValueError) as error:
            message = by_given_name(str(error), self.names, arguments)
            raise type(error)(f"{self.owner}, param group {self.number}: {message}") from None

    def follow(self, arguments: Mapping[str, Any], optimizers: Optimizers) -> None:
        """Step with other hyperparameters from here on; the caller gives segments their optimizer."""
        self.arguments, self.optimizers, self._decided = dict(arguments), optimizers, []
        for steps in self.steps.values():
            steps.follow(arguments)

    def decided(self, dtype: torch.dtype, decision: Decision | None) -> eb.Optimizer[Any]:
        """Return the optimizer of parameters of a dtype, as masks and labels came out for them."""
        optimizer = self.optimizers[dtype]
        if decision is None:
            return optimizer
        for of, known, made in self._decided:
            if of is optimizer and known == decision:
                return made
        made = decision.applied(optimizer)
        self._decided.append((optimizer, decision, made))
        return made

    def changed(self, optimizers: Optimizers) -> set[torch.dtype]:
        """Return the dtypes with optimizers that nest their state differently than the present optimizers."""
        return {
            dtype
            for dtype, old in self.optimizers.items()
            if skeleton(old.transform) != skeleton(optimizers[dtype].transform)
        }

    def require_capturable(self, arguments: Mapping[str, Any], device: torch.device) -> None:
        """Refuse hyperparameters that a captured step on a device could not follow.

        Raises:
            RuntimeError: One has changed since the last step.
            ValueError: A tensor that is on another device.
        """
        for name, targets in self.names.items():
            for target in (one for one in targets if one in arguments):
                value = arguments[target]
                if differ(value, self.arguments.get(target)):
                    raise RuntimeError(
                        f"param group {self.number}: {name}: has changed since the last step, and a CUDA graph is being captured; accepted"
                        " is to call step() or prepare() after the change, before the capture."
                    )
                if isinstance(value, Tensor) and value.device != device:
                    raise ValueError(
                        f"param group {self.number}: {name}: got a tensor on {value.device} while a CUDA graph is being captured; accepted"
                        f" is one on {device}, which replays read."
                    )


RATE = "learning_rate"
"""The hyperparameter that may be zero in some param groups: their parameters do not count in the totals."""


def require_alike(groups: Iterable[tuple[Group, Optimizers]]) -> None:
    """Refuse param groups of one transform with hyperparameters that would give them different common numbers.

    Args:
        groups: Each group with its optimizers, by dtype.

    Raises:
        ValueError: The message names the hyperparameter, both groups and their values.
    """
    known: dict[tuple[str, int, str], tuple[Group, Any]] = {}
    for group, optimizers in groups:
        optimizer = next(iter(optimizers.values()), None)
        if optimizer is None or not optimizer.common:
            continue
        for place, node in enumerate(transforms_in(optimizer.transform)):
            for name in getattr(node, "common_by", ()):
                value = getattr(node, name)
                if name == RATE and is_python_zero(value):
                    continue
                first, expected = known.setdefault((group.source, place, name), (group, value))
                if differ({name: value}, {name: expected}):
                    theirs = next((given for given, targets in group.names.items() if name in targets), name)
                    rate = " 0 in some groups," if name == RATE else ""
                    raise ValueError(
                        f"{group.owner}, param group {group.number}: {theirs}: got {value!r}, and param group {first.number} has"
                        f" {expected!r}; all parameters share one {node.common[0]}, which depends on it."
                        f" Accepted are equal values,{rate} and everybit.partition, in which each label has an {node.common[0]} of its own."
                    )


def is_python_zero(value: object) -> bool:
    """Whether a hyperparameter is the number 0, and no tensor or schedule."""
    return isinstance(value, (int, float)) and value == 0


class GroupMaker:
    """Makes the groups of one optimizer, all of them with the same factory.

    Args:
        owner: The optimizer's name, for messages.
        factory: Makes a transform of hyperparameters.
        hyperparameters: Their names, as the user gave them.
        policy: The policy of groups without a policy of their own.
        seed: The seed of stochastic rounding.
        unsafe: See :func:`everybit.with_policy`.
        compile: See :class:`~everybit_torch.TorchOptimizer`.
        decoupled: What torch's argument ``decoupled_weight_decay`` has to be, where torch's optimizer of this name has it.
        mixed: Whether some parameters of the optimizer are of 16 bits: others beside them are kept as they are.
    """

    def __init__(
        self,
        owner: str,
        factory: Factory,
        hyperparameters: Iterable[str],
        policy: PolicyOrName | None,
        *,
        seed: int,
        unsafe: Unsafe,
        compile: Compile,
        decoupled: bool | None,
        mixed: bool,
    ) -> None:
        known = argument_names(factory)
        self.mixed = mixed
        self.policy = with_name_resolved(policy)
        self._owner, self._factory, self._decoupled = owner, factory, decoupled
        # By the user's name, without the keys that torch adds to `defaults`, the factory's arguments that are meant.
        self._names = {name: core_names(name, ARGUMENTS, known) for name in hyperparameters}
        self._flags = flags_of(factory)
        self._seed = seed
        self._compile: Compile = compile
        self._unsafe: Unsafe = unsafe

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the factory's keyword arguments for a param group: torch's names become the core's.

        Raises:
            TypeError: A flag that is neither True nor False.
            ValueError: A pair of another length, or a number that is not finite.
        """
        arguments: dict[str, Any] = {}
        for name, targets in self._names.items():
            value = as_python(name, values[name])
            if name in self._flags and not isinstance(value, bool):
                raise TypeError(f"{self._owner}: {name}: got {value!r}; accepted are True and False.")
            arguments |= spread(name, value, targets)
        return arguments

    def options(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the hyperparameters in a param group that was given, as numbers of Python.

        Raises:
            TypeError: A hyperparameter under the core's name.
            ValueError: An argument of torch's that has no meaning here, at a value that would have one.
        """
        given = {key: value for key, value in values.items() if key not in ("params", "param_names")}
        require_known_options(self._owner, self._names, given, self._decoupled)
        return {name: as_python(name, given[name]) for name in self._names if name in given}

    def policies(
        self, policy: PolicyOrName | None, dtypes: Iterable[torch.dtype], number: int, *, mixed: bool | None = None
    ) -> dict[torch.dtype, AnyPolicy]:
        """Return the policy of a group's parameters of each dtype.

        Raises:
            ValueError: No policy for 16-bit parameters, a policy that does not fit a dtype, or an unknown policy's name.
        """
        mixed = self.mixed if mixed is None else mixed
        resolved = with_name_resolved(policy, field=f"param group {number}: policy")
        return {dtype: policy_for(resolved, dtype, number, mixed=mixed) for dtype in dtypes}

    def make(self, number: int, policies: Mapping[torch.dtype, AnyPolicy], arguments: dict[str, Any]) -> Group:
        """Make a group that steps with these arguments of the factory.

        Raises:
            TypeError: A value that is no hyperparameter.
            ValueError: A hyperparameter or policy that cannot work.
        """
        return self.made(number, self._factory, policies, arguments, names=self._names)

    def made(
        self,
        number: int,
        factory: Factory,
        policies: Mapping[torch.dtype, AnyPolicy],
        arguments: dict[str, Any],
        *,
        names: Mapping[str, tuple[str, ...]],
        source: str = "",
    ) -> Group:
        """Make a group of any factory; for makers of groups with several factories."""
        group = Group(
            number, factory, policies, names=names, owner=self._owner, seed=self._seed, unsafe=self._unsafe, compile=self._compile,
            source=source,
        )  # fmt: skip
        group.follow(arguments, group.build(arguments))
        return group
