"""The whole battery in one line, on a transform of one's own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from everybit.base import Hyperparameter, tree
from everybit.combinators import Masked, Partition, chain, partition
from everybit.optimizers import sgd
from everybit.protocol import (
    Transform,
    hyperparameters,
    is_transform,
    map_hyperparameters,
    periods,
    require_transform,
    transforms_in,
)
from everybit.testing.battery import CHECKS
from everybit.testing.examples import LEARNING_RATE, Build, at_step, example_params
from everybit.transforms import scale_by_learning_rate

_COMPILING = ("no recompilation", "compiled equals eager")


class _Promise(NamedTuple):
    """The promise that a check is about, and where to look if it fails."""

    promised: str
    look_at: str


PROMISES: Mapping[str, _Promise] = MappingProxyType(
    {
        "pure": _Promise(
            "update writes to nothing that it is given, returns memory of its own, and the same bits for the same arguments",
            "operations in place (mul_, +=, .data), tensors that are kept as they came in (clone them), torch.rand (ask ctx.keys)",
        ),
        "state is a fixed point": _Promise(
            "the state keeps structure, shapes and dtypes, and updates have those of the gradients",
            "0-d parameters, which a float64 number promotes (tree.elementwise and not tree.map); what update returns, field by field",
        ),
        "vmap": _Promise(
            "torch.func.vmap over a population is the loop over its members",
            "branches on values (if, float(x), .item()): torch.where takes their place",
        ),
        "differentiable": _Promise(
            "torch.func.grad agrees with finite differences, by the learning rate and by the gradients",
            "detach, .data and torch.no_grad; roots of what may be zero",
        ),
        "no recompilation": _Promise(
            "one compilation serves a whole run, whatever schedules and tensors hold",
            "numbers in Python that change from step to step (a counter is a tensor of the state); prints and loggers",
        ),
        "compiled equals eager": _Promise(
            "compiled code gives the bits of eager code",
            "x.to(bfloat16).float(), which compilers delete; torch.sqrt (everybit.sqrt); sums in another order (everybit.barriers)",
        ),
        "flat equals tree": _Promise(
            "with cut 'element' and no reductions one flat buffer has the bits of the tensors",
            "shapes, dimensions, sums over a tensor: say cut 'tensor', or ask ctx.per_tensor for numbers of each parameter",
        ),
        "cut": _Promise(
            "a transform that does not say that it reduces treats each tensor by itself",
            "norms and means over all tensors: they are requested (ctx.request), with reduces True",
        ),
        "shards equal whole": _Promise(
            "pieces of the parameters on several ranks have the bits of the whole",
            "cut and reduces; requests of what ctx.owned leaves; ranks that have no elements",
        ),
        "periodic work": _Promise(
            "where the host says which work is due a step has the bits that it has where the device decides",
            "what is done outside of ctx.every; what work() and otherwise() return",
        ),
        "resume equals continue": _Promise(
            "saved, loaded and continued a run has the bits of one that was not interrupted",
            "what the transform keeps outside of its state: attributes, globals, closures",
        ),
        "hyperparameters are data": _Promise(
            "a number in a field that accepts tensors may be a 0-d tensor, with the same bits",
            "if self.x > 0, float(self.x), math.sqrt(self.x); a field that decides what is computed is annotated bool, int or float",
        ),
        "meta init": _Promise(
            "init on meta tensors allocates nothing",
            "torch.zeros(shape) without a device: tree.zeros_like, p.new_zeros, torch.zeros_like",
        ),
        "no wait": _Promise(
            "a step never asks the device for a value",
            "float(x), .item(), bool(x), if x > 0, .tolist(), and printing a tensor",
        ),
    }
)
"""For each check what it holds a transform to, and where to look if it fails."""


@dataclass(frozen=True, slots=True)
class Conformance:
    """The checks that a transform passed, and those that were not run, with the reason; it prints as a table.

    Attributes:
        subject: The checked transform.
        passed: Names of the checks.
        skipped: Reasons, by the names of the checks.
    """

    subject: str
    passed: tuple[str, ...]
    skipped: Mapping[str, str]

    def __str__(self) -> str:
        width = max(map(len, CHECKS))
        outcomes = {name: f"skipped: {self.skipped[name]}" if name in self.skipped else "passed" for name in CHECKS}
        lines = [f"  {name:{width}}  {outcome}" for name, outcome in outcomes.items()]
        return "\n".join([f"{self.subject}: keeps {len(self.passed)} promises", *lines])


def assert_transform_conforms(
    transform: Transform[Any] | Build, *, compiled: bool = True, matrices_only: bool = False
) -> Conformance:
    """Run every check of :data:`everybit.testing.CHECKS` that applies to a transform; all failures are told together.

    Args:
        transform: A transform, or a function from a learning rate to one, such as ``eb.adamw``. The checks vary the learning rate: of
            a transform they replace the hyperparameters called ``learning_rate``, and a transform without is followed by
            ``eb.scale_by_learning_rate``.
        compiled: Run the two checks that compile, which takes some ten seconds. They come last, if no other check failed.
        matrices_only: The transform takes parameters of two dimensions alone. The checks give the others to ``eb.sgd``. They give the
            transform matrices of shape (0, 0), too, which stand for those that another rank works on.

    Returns:
        The checks that were run and those that were not, with the reason: ``print(assert_transform_conforms(my_optimizer))``.

    Raises:
        AssertionError: A check failed; the message has its name, the promise, the finding and the place to look at. Or a shape that the
            transform does not take.
        TypeError: Neither a transform nor a function that returns one.

    Examples:
        >>> import everybit as eb
        >>> from everybit.testing import assert_transform_conforms
        >>> print(assert_transform_conforms(eb.scale_by_sign(), compiled=False))
        ScaleBySign, then scale_by_learning_rate: keeps 11 promises
          pure                      passed
          state is a fixed point    passed
          vmap                      passed
          differentiable            passed
          no recompilation          skipped: compiled=False
          compiled equals eager     skipped: compiled=False
          flat equals tree          passed
          cut                       passed
          shards equal whole        passed
          periodic work             skipped: it has no periodic work, which a method periods() would list
          resume equals continue    passed
          hyperparameters are data  passed
          meta init                 passed
          no wait                   passed
    """
    build, subject = _build_of(transform)
    _require_shapes(build(LEARNING_RATE), subject, matrices_only=matrices_only)
    if matrices_only:
        build = _of_matrices(build)
    skipped = _skipped(build(LEARNING_RATE), compiled)
    passed: list[str] = []
    failures: dict[str, Exception] = {}
    for name in sorted(CHECKS, key=lambda name: name in _COMPILING):
        if name in _COMPILING and failures:
            skipped.setdefault(name, "others failed")
        if name in skipped:
            continue
        try:
            CHECKS[name](build)
        # An update that raises breaks a promise, too, and the checks after it are told as well.
        except Exception as error:
            failures[name] = error
        else:
            passed.append(name)
    if failures:
        raise AssertionError(_told(subject, failures, len(passed))) from next(iter(failures.values()))
    return Conformance(subject, tuple(name for name in CHECKS if name in passed), skipped)


def _build_of(given: Any) -> tuple[Build, str]:
    if isinstance(given, type) or is_transform(given) or not callable(given):
        require_transform(given, who="assert_transform_conforms")
        transform: Any = given
        name = type(given).__name__
        if any(one == "learning_rate" for one, _ in hyperparameters(given)):
            return _with_rate(transform), name
        return (lambda rate: chain(transform, scale_by_learning_rate(rate))), f"{name}, then scale_by_learning_rate"
    name = getattr(given, "__name__", type(given).__name__)
    require_transform(given(LEARNING_RATE), who=f"assert_transform_conforms, what {name}({LEARNING_RATE}) returned")
    return cast(Build, given), name


def _require_shapes(transform: Transform[Any], subject: str, *, matrices_only: bool) -> None:
    """Refuse a transform that does not take the shapes of the examples, before ten checks fail of it."""
    params = example_params()
    leaves = dict(zip(tree.paths(params), tree.leaves(params), strict=True))
    if matrices_only:
        leaves = {path: leaf for path, leaf in leaves.items() if leaf.ndim == 2} | {"['none']": torch.empty(0, 0)}
    if not matrices_only and _fails(transform, params["w"]) is not None:
        return  # of a matrix, too: the checks tell why
    for path, leaf in leaves.items():
        error = _fails(transform, leaf)
        if error is not None:
            advice = (
                "A matrix without elements stands for one that another rank works on: return updates and state without elements."
                if matrices_only
                else "For a transform of matrices alone write assert_transform_conforms(..., matrices_only=True)."
            )
            told = str(error).rstrip(".")
            raise AssertionError(
                f"{subject}: raised {type(error).__name__} for a parameter of shape {tuple(leaf.shape)}, {path} of"
                f" everybit.testing.example_params(): {told}. {advice}"
            ) from error


def _fails(transform: Transform[Any], leaf: Tensor) -> Exception | None:
    """Return the error of a step of one parameter; None for an error about a label that no parameter has."""
    try:
        transform.update([leaf.clone()], transform.init([leaf]), [leaf], at_step(1))
    except Exception as error:
        chooses = any(isinstance(one, (Masked, Partition)) for one in transforms_in(transform))
        return None if chooses and isinstance(error, ValueError) else error
    return None


def _of_matrices(build: Build) -> Build:
    def of_matrices(rate: Hyperparameter) -> Transform[Any]:
        return partition({"matrix": build(rate), "other": sgd(rate)}, lambda _, p: "matrix" if p.ndim == 2 else "other")

    return of_matrices


def _with_rate(transform: Transform[Any]) -> Build:
    def build(rate: Hyperparameter) -> Transform[Any]:
        replaced: Callable[..., Any] = lambda name, value: rate if name == "learning_rate" else value  # noqa: E731
        return map_hyperparameters(replaced, transform)

    return build


def _skipped(transform: Transform[Any], compiled: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    if transform.cut != "element":
        found["flat equals tree"] = f"its cut is {transform.cut!r}, so that it is given whole tensors"
    elif transform.reduces:
        found["flat equals tree"] = "it reduces: 'shards equal whole' has flat pieces, too"
    if not periods(transform):
        found["periodic work"] = "it has no periodic work, which a method periods() would list"
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++", "cl")
    reason = "" if any(map(shutil.which, compilers)) else "there is no C++ compiler (g++, clang++)"
    if reason or not compiled:
        found |= dict.fromkeys(_COMPILING, reason if compiled else "compiled=False")
    return found


def _told(subject: str, failures: Mapping[str, Exception], passed: int) -> str:
    lines = [f"{subject}: breaks {len(failures)} of the {len(failures) + passed} promises that were checked."]
    for name, error in failures.items():
        promise = PROMISES[name]
        found = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        lines += [
            "",
            f"{name!r}, everybit.testing.CHECKS[{name!r}]",
            f"  promised: {promise.promised}",
            f"  found:    {found}",
            f"  look at:  {promise.look_at}",
        ]
        if isinstance(error, (ValueError, KeyError)):
            lines.append(
                "  The checks use everybit.testing.example_params(): labels and masks by name or shape have to fit its tensors."
            )
    return "\n".join(lines)
