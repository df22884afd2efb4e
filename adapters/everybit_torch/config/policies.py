"""Policies as data: one for all parameters, or one for each pattern of names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

import everybit as eb
from everybit.formats import BUILT_IN, ParamFormat, StateFormat
from everybit.policies import PolicyName, with_name_resolved
from everybit_torch.config.reader import Kinds, Named, Reader, TableChoice

_OWN = (
    f"a format of your own, which a file cannot name; accepted are {', '.join(one.__name__ for one in BUILT_IN)}. Keep a policy with"
    " formats of your own in code."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRule:
    """A policy for the parameters with names that match a pattern.

    Args:
        pattern: Of names as ``model.named_parameters()`` has them, with ``*``, ``?`` and ``[...]`` as in names of files: ``"*.norm.*"``.
        policy: Or a preset's name.
    """

    pattern: str
    policy: eb.Policy | PolicyName

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", with_name_resolved(self.policy))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyByName:
    """A policy for each parameter by its name: that of the first rule with a matching pattern, or ``otherwise``.

    Args:
        rules: The rules, in order.
        otherwise: The policy of the parameters that no pattern matches, or a preset's name.
    """

    rules: Sequence[PolicyRule]
    otherwise: eb.Policy | PolicyName

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        object.__setattr__(self, "otherwise", with_name_resolved(self.otherwise))

    def build(self) -> eb.ByLabel:
        """Return the policy, for a model with parameters given with their names."""
        policies = {str(number): with_name_resolved(rule.policy) for number, rule in enumerate(self.rules)}
        return eb.by_label(
            FirstMatch(tuple(rule.pattern for rule in self.rules)),
            {**policies, OTHERWISE: with_name_resolved(self.otherwise)},
        )


OTHERWISE = "otherwise"


@dataclass(frozen=True, slots=True)
class FirstMatch:
    """Labels a parameter with the number of the first pattern that matches its name."""

    patterns: tuple[str, ...]

    def __call__(self, path: str, parameter: Tensor) -> str:  # noqa: ARG002 (by_label's signature)
        """Return the label of a parameter. Its path in a flat tree is ``['name']``."""
        name = path[2:-2] if path.startswith("['") and path.endswith("']") else path
        return next((str(n) for n, pattern in enumerate(self.patterns) if fnmatchcase(name, pattern)), OTHERWISE)


def require_matches(patterns: Mapping[str, str], names: list[str]) -> None:
    """Refuse patterns that no parameter's name matches.

    Args:
        patterns: The patterns, by their dotted paths.
        names: Names of a model's parameters.

    Raises:
        ValueError: The message begins with the path.
    """
    for path, pattern in patterns.items():
        if not any(fnmatchcase(name, pattern) for name in names):
            close = difflib.get_close_matches(pattern, names, n=1, cutoff=0.3)
            nearest = f" The nearest name is {close[0]!r}." if close else ""
            raise ValueError(
                f"{path}: got {pattern!r}, which matches the name of no parameter; accepted is a pattern of names such as"
                f" {names[0]!r}.{nearest}"
            )


_FORMATS = {
    kind: TableChoice("format", {one.__name__: one for one in BUILT_IN if hasattr(one, method)}, _OWN)
    for kind, method in ((ParamFormat, "for_params"), (StateFormat, "for_slot"))
}
POLICY_KINDS: Kinds = {
    **_FORMATS,
    eb.Policy: Named(eb.policies.PRESETS, (eb.Policy,)),
    frozenset({eb.Policy, PolicyByName}): Named(eb.policies.PRESETS, (PolicyByName, eb.Policy)),
}
READER = Reader(POLICY_KINDS)
