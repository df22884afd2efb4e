"""The battery in one line: what it runs, what it leaves out and says so, and how it tells what is broken.

That the honest pass is an example in its docstring.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import everybit as eb
from everybit.protocol import ALONE
from everybit.testing import CHECKS, Conformance, assert_transform_conforms, conformance
from everybit.testing.conformance import PROMISES


class Plain(eb.Elementwise):
    """Gradient descent by a fixed step."""

    def init(self, params: Any) -> Any:
        return eb.identity().init(params)

    def update(self, updates: Any, state: Any, params: Any, ctx: eb.Context = ALONE) -> Any:
        return eb.tree.elementwise(lambda u: -0.1 * u, updates), state


class InPlace(Plain):
    def update(self, updates: Any, state: Any, params: Any, ctx: eb.Context = ALONE) -> Any:
        return eb.tree.map(lambda u: u.mul_(-0.1), updates), state


class AsksTheHost(Plain):
    def update(self, updates: Any, state: Any, params: Any, ctx: eb.Context = ALONE) -> Any:
        largest = max((float(u.detach().abs().max()) for u in eb.tree.leaves(updates) if u.numel()), default=1.0)
        return eb.tree.elementwise(lambda u: -u / largest, updates), state


class Raises(Plain):
    def update(self, updates: Any, state: Any, params: Any, ctx: eb.Context = ALONE) -> Any:
        raise ValueError("there is no weight called 'embed'")


def conforms(transform: Any) -> Conformance:
    return assert_transform_conforms(transform, compiled=False)


class OfMatrices(eb.WholeTensors):
    """Looks at rows and columns."""

    def init(self, params: Any) -> Any:
        return eb.identity().init(params)

    def update(self, updates: Any, state: Any, params: Any, ctx: eb.Context = ALONE) -> Any:
        return eb.tree.map(lambda u: u - u.sum(1, keepdim=True) / u.shape[1], updates), state


class OfFullMatrices(OfMatrices):
    def update(self, updates: Any, state: Any, params: Any, ctx: eb.Context = ALONE) -> Any:
        return eb.tree.map(lambda u: u - u[0, 0], updates), state


def test_a_transform_of_matrices_is_told_of_the_parameter_and_what_to_write() -> None:
    """Ten checks failed, each with a hint of its own."""
    message = (
        r"^OfMatrices, then scale_by_learning_rate: raised IndexError for a parameter of shape \(3,\), \['layers'\]\[0\]\['b'\] of"
        r" everybit\.testing\.example_params\(\): .*\. For a transform of matrices alone write assert_transform_conforms\(\.\.\.,"
        r" matrices_only=True\)\.$"
    )
    with pytest.raises(AssertionError, match=message):
        conforms(OfMatrices())
    found = assert_transform_conforms(OfMatrices(), compiled=False, matrices_only=True)
    assert "shards equal whole" in found.passed


def test_matrices_without_elements_are_checked() -> None:
    with pytest.raises(
        AssertionError, match=r"raised IndexError for a parameter of shape \(0, 0\), .* without elements\.$"
    ):
        assert_transform_conforms(OfFullMatrices(), compiled=False, matrices_only=True)


def test_a_slot_of_an_empty_dict_is_refused() -> None:
    @eb.state
    class State:
        rows: eb.Slot[Any]

    class Empty(OfMatrices):
        def init(self, params: Any) -> Any:
            return State(eb.tree.map(lambda _: {}, params))

    with pytest.raises(TypeError, match=r"^Empty\.init: state\.rows\['w'\]: got an empty dict; accepted are a tensor"):
        eb.with_policy(Empty(), "FP32").init({"w": torch.ones(2, 3)})


Builds = dict[str, Any]


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Builds:
    """Checks that pass, and note what they were given."""
    given: Builds = {}
    noting = {name: partial(given.setdefault, name) for name in CHECKS}
    monkeypatch.setattr(conformance, "CHECKS", noting)
    return given


def test_every_check_has_a_promise_and_a_place_to_look_at() -> None:
    assert list(PROMISES) == list(CHECKS)
    assert all(promise.promised and promise.look_at for promise in PROMISES.values())


def test_a_transform_and_a_function_of_the_learning_rate_are_taken(builds: Builds) -> None:
    whole = conforms(eb.sgd(0.1, momentum=0.9))
    assert str(whole).startswith("Chain: keeps 11 promises\n")
    direction = conforms(Plain())
    assert direction.subject == "Plain, then scale_by_learning_rate"
    named = conforms(eb.sgd)
    assert named.subject == "sgd"
    assert whole.passed == direction.passed == named.passed
    assert set(whole.skipped) == {"no recompilation", "compiled equals eager", "periodic work"}
    assert {*whole.passed, *whole.skipped} == {*CHECKS}


def test_the_learning_rate_of_a_transform_is_varied(builds: Builds) -> None:
    conforms(eb.chain(Plain(), eb.sgd(0.1, momentum=0.9)))
    inside = builds["pure"](0.3).transforms[1].transforms[-1]
    assert inside.learning_rate == 0.3
    builds.clear()
    conforms(eb.scale_by_adam())
    assert builds["vmap"](0.3) == eb.chain(eb.scale_by_adam(), eb.scale_by_learning_rate(0.3))
    builds.clear()
    conforms(eb.adamw)
    assert builds["vmap"] is eb.adamw


def test_what_does_not_apply_is_skipped_with_the_reason(builds: Builds) -> None:
    clipped = conforms(eb.chain(eb.clip_by_global_norm(1.0), eb.sgd(0.1)))
    assert clipped.skipped["flat equals tree"] == "it reduces: 'shards equal whole' has flat pieces, too"
    whole = conforms(eb.torch_adafactor)
    assert whole.skipped["flat equals tree"] == "its cut is 'tensor', so that it is given whole tensors"
    assert "  flat equals tree          skipped: its cut is 'tensor'" in str(whole)
    assert clipped.skipped["no recompilation"] == "compiled=False"


def test_without_a_compiler_that_is_the_reason(builds: Builds, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = assert_transform_conforms(Plain())
    assert found.skipped["compiled equals eager"] == "there is no C++ compiler (g++, clang++)"


def test_all_failures_are_told_with_promise_finding_and_advice() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_transform_conforms(AsksTheHost())
    text = str(caught.value)
    assert text.startswith("AsksTheHost, then scale_by_learning_rate: breaks ")
    for name in ("vmap", "cut", "shards equal whole", "no wait"):
        start = text.index(
            f"\n{name!r}, everybit.testing.CHECKS[{name!r}]\n  promised: {PROMISES[name].promised}\n  found:    "
        )
        assert text.index(f"\n  look at:  {PROMISES[name].look_at}", start) > start
    # The two that compile are not run any more.
    assert "'no recompilation'" not in text


def test_one_failure_is_one_entry() -> None:
    with pytest.raises(
        AssertionError, match=r"^InPlace, then scale_by_learning_rate: breaks \d+ of the \d+ promises"
    ) as caught:
        conforms(InPlace())
    assert "update wrote to updates['w'], which was passed in" in str(caught.value)


def test_an_update_that_raises_is_told_and_what_the_checks_use() -> None:
    with pytest.raises(AssertionError) as caught:
        conforms(Raises())
    assert "  found:    ValueError: there is no weight called 'embed'" in str(caught.value)
    assert "labels and masks by name or shape have to fit its tensors" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Plain, r"^assert_transform_conforms: got the class Plain; accepted are transforms: call it"),
        (3, r"^assert_transform_conforms: got 3, which has no cut"),
        (lambda rate: None, r"^assert_transform_conforms, what <lambda>\(0\.05\) returned: got None"),
        (eb.with_policy(eb.sgd(0.1), "FP32"), r"An Optimizer is the last word"),
    ],
)
def test_what_is_no_transform_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        assert_transform_conforms(wrong)


@pytest.mark.exhaustive
def test_the_checks_that_compile_are_run_by_default() -> None:
    torch._dynamo.reset()
    assert {"no recompilation", "compiled equals eager"} <= {*assert_transform_conforms(eb.sgd).passed}
