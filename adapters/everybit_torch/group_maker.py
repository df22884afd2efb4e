"""From param groups to groups of the engine: hyperparameters by torch's names, and policies by the dtypes of the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import torch

from everybit.policies import AnyPolicy, PolicyOrName, describe, with_name_resolved
from everybit.stepping import Unsafe
from everybit_torch.arguments import as_python, flags_of, is_frozen, require_known_options
from everybit_torch.choosing import tree_of
from everybit_torch.compiled.probing import Factory
from everybit_torch.groups import Group
from everybit_torch.hyperparameter_names import ARGUMENTS, argument_names, core_names, spread
from everybit_torch.param_groups import described, main_gradients, policy_for
from everybit_torch.stepping import Compile


class Followed:
    """The values of param groups that the engine's groups follow already."""

    def __init__(self) -> None:
        self._known: list[Any] = []

    def note(self, given: Sequence[Mapping[str, Any]], groups: Sequence[Group]) -> None:
        """Remember the values of param groups, which the engine's groups follow."""
        self._known = _values(given, groups)

    def is_current(self, given: Sequence[Mapping[str, Any]], groups: Sequence[Group]) -> bool:
        """Whether no value was assigned since, and none can have changed in place. Tensors may: each step reads them."""
        now = _values(given, groups)
        same = len(now) == len(self._known) and all(map(is_, now, self._known))
        return same and all(map(is_frozen, now[: -len(groups)]))


def _values(given: Sequence[Mapping[str, Any]], groups: Sequence[Group]) -> list[Any]:
    """All values of param groups, and the arguments that the engine's groups have of them."""
    values = [value for group in given for name, value in group.items() if name not in ("params", "param_names")]
    return [*values, *(group.arguments for group in groups)]


class GroupMaker:
    """Makes the groups of one optimizer, all of them with the same factory.

    Args:
        owner: What messages call the optimizer.
        factory: From hyperparameters to a transform.
        hyperparameters: Names, as the user gave them.
        policy: Of groups that have none of their own.
        seed: The seed of stochastic rounding.
        unsafe: See :func:`everybit.with_policy`.
        compile: See :class:`~everybit_torch.TorchOptimizer`.
        only_flat: Whether all parameters have to be pieces of buffers.
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
        only_flat: bool,
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
        self._options: dict[str, Any] = {"seed": seed, "unsafe": unsafe, "compile": compile, "only_flat": only_flat}

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The factory's keyword arguments for a param group: torch's names become the core's.

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
        """The hyperparameters in a param group that was given, as numbers of Python.

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
        """The policy of a group's parameters of each dtype.

        Raises:
            ValueError: None was given for 16-bit parameters, one that does not fit a dtype, or a name that no policy has.
        """
        mixed = self.mixed if mixed is None else mixed
        resolved = with_name_resolved(policy, field=f"param group {number}: policy")
        return {dtype: policy_for(resolved, dtype, number, mixed=mixed) for dtype in dtypes}

    def make(self, number: int, policies: Mapping[torch.dtype, AnyPolicy], arguments: dict[str, Any]) -> Group:
        """Make a group that steps with these arguments of the factory.

        Raises:
            TypeError: A hyperparameter that is none.
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
        """Make a group of a factory.

        Args:
            number: Among the groups.
            factory: From ``arguments`` to its transform.
            policies: By dtype of the parameters.
            arguments: Of the factory.
            names: By the user's name of a hyperparameter, the factory's arguments that it stands for.
            source: Groups with the same source share their reductions.
        """
        group = Group(number, factory, policies, names=names, owner=self._owner, source=source, **self._options)
        optimizers = group.build(arguments)
        group.require_cuts(optimizers)
        group.follow(arguments, optimizers)
        return group

    # -- policies that were written to a param group --------------------------------------------------------------------------

    def is_in_force(self, group: Group, policy: PolicyOrName | None) -> bool:
        """Whether a group's parameters are stored under a policy."""
        return self.policies(policy, group.policies, group.number) == group.policies

    def described(self, group: Group, values: Mapping[str, Any], *, settled: bool) -> str:
        """Say under which policies a param group's parameters are stored, and which other one was written to it."""
        policies = described(group.policies)
        if "policy" in values and not self.is_in_force(group, values["policy"]):
            when = "not in force" if settled else "from the first step on"
            policies += (
                f" (param_groups[{group.number}]['policy'] is {describe(with_name_resolved(values['policy']))}, {when})"
            )
        return policies

    def require_in_force(self, group: Group, policy: PolicyOrName | None) -> None:
        """Refuse another policy than that under which a group's parameters are stored.

        Raises:
            ValueError: It is another.
        """
        if not self.is_in_force(group, policy):
            raise ValueError(
                f"param group {group.number}: policy: got {describe(with_name_resolved(policy))}, and since the first step its parameters"
                f" and state are stored under {described(group.policies)}; accepted is a change before it. To carry the run over delete the"
                " entry, make an optimizer with the new policy, and give the old one's full_state_dict() to its load_full_state_dict()."
            )

    def under(self, group: Group, values: Mapping[str, Any], arguments: dict[str, Any]) -> Group:
        """The group of a param group under the policy that was written to it; gradients take the dtype that this wants.

        Raises:
            ValueError: The policy cannot work.
        """
        policies = self.policies(values["policy"], group.policies, group.number)
        made = self.make(group.number, policies, arguments)
        wide = dict(main_gradients(group.number, tree_of(values), policies))
        for tensor, _ in main_gradients(group.number, tree_of(values), group.policies):
            wide.setdefault(tensor, tensor.dtype)
        for tensor, dtype in wide.items():
            tensor.grad_dtype = dtype
        return made
