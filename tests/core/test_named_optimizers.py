"""The list of optimizers is complete, and says of each what its function says."""

from __future__ import annotations

import inspect
import re
from typing import get_args

import pytest
import torch

import everybit as eb
from everybit.optimizers import OptimizerName, optimizer_named
from everybit.protocol import decays

PARTS = {
    "averaged_descent", "scale_by_learning_rate", "scale_by_rprop", "scale_by_torch_adafactor", "schedule_free",
}  # fmt: skip
"""Public transforms that begin with a learning rate and are parts of optimizers."""
MATRICES = {"torch_muon"}
"""Optimizers of matrices alone, which have to be told what steps the other parameters of a model."""

POLICIES = ("FP32", "LEAN_BF16", "KAHAN_BF16", "FLOOR_BF16")


def begins_with_a_learning_rate(name: str) -> bool:
    value = getattr(eb, name)
    if not callable(value) or not value.__module__.startswith("everybit."):
        return False
    return next(iter(inspect.signature(value).parameters), None) == "learning_rate"


def test_every_public_optimizer_is_in_the_list() -> None:
    found = {name for name in eb.__all__ if begins_with_a_learning_rate(name)} - PARTS - MATRICES
    assert found == set(eb.optimizers()), "a new optimizer needs a line in core/everybit/optimizers/registry.py"
    assert get_args(OptimizerName) == tuple(eb.optimizers()), "OptimizerName has the names of the list, in its order"
    for name, one in eb.optimizers().items():
        assert name == one.name
        assert one.function is getattr(eb, name)


@pytest.mark.parametrize("name", eb.optimizers())
def test_an_entry_says_what_its_function_says(name: OptimizerName) -> None:
    one = eb.optimizers()[name]
    transform = one.function()
    assert one.cut == transform.cut
    assert (one.reductions == "none") == (not transform.reduces)
    assert {decay.slot for decay in decays(transform)} == set(one.slots())
    assert list(one.arguments) == list(inspect.signature(one.function).parameters)
    assert one.learning_rate == inspect.signature(one.function).parameters["learning_rate"].default
    assert all(argument.default is not inspect.Parameter.empty for argument in one.arguments.values())
    assert re.search(r"\d{4}", one.paper)
    assert one.link.startswith("https://")
    doc = inspect.getdoc(one.function) or ""
    if "https://" in doc:
        assert one.link in doc


def test_those_with_other_weights_for_evaluation_say_so() -> None:
    found = {name for name, one in eb.optimizers().items() if one.has_evaluation_weights}
    assert found == {"asgd", "schedule_free_sgd", "schedule_free_adamw", "schedule_free_radam"}


def test_hyperparameters_choose_what_is_kept() -> None:
    found = eb.optimizers()
    assert found["sgd"].slots() == ()
    assert found["sgd"].slots(momentum=0.9) == ("momentum",)
    assert found["adamw"].slots(amsgrad=True) == ("momentum", "variance", "max_variance")


@pytest.mark.parametrize("preset", POLICIES)
@pytest.mark.parametrize("name", eb.optimizers())
@pytest.mark.sampled(3)
def test_bytes_are_those_of_a_state_that_is_made(name: OptimizerName, preset: eb.PolicyName) -> None:
    """The list counts on the meta device; here are tensors, of shapes of every kind, with state in parts."""
    one, policy = eb.optimizers()[name], eb.policies.PRESETS[preset]
    dtype = getattr(torch, policy.model_dtype)
    params = {"w": torch.zeros(6, 5, dtype=dtype), "v": torch.zeros(7, dtype=dtype), "s": torch.zeros((), dtype=dtype)}
    optimizer = eb.with_policy(one.function(), policy)
    made: dict[str, int] = {}

    def count(slot: str, value: object) -> object:
        # Of a name that two parts of an optimizer have, both.
        made[slot] = made.get(slot, 0) + sum(leaf.nbytes for leaf in eb.tree.leaves(value))
        return value

    eb.tree.map_slots(count, optimizer.init(params).inner)
    counted = one.state_bytes(preset, params)
    assert counted == pytest.approx({slot: size / 38 for slot, size in made.items()}, rel=1e-12)
    assert tuple(counted) == one.slots()


def test_bytes_of_factored_state_depend_on_shapes() -> None:
    adafactor = eb.optimizers()["torch_adafactor"]
    assert adafactor.state_bytes("FP32", torch.empty(100, 50)) == {"variance": 4 * 150 / 5000}
    assert adafactor.state_bytes("FP32", torch.empty(100)) == {"variance": 4.0}


def test_a_policy_that_cannot_work_is_refused_by_slot() -> None:
    with pytest.raises(ValueError, match=r"^Policy\.variance: got Nearest.*'variance' has a decay rate of 0.999"):
        eb.optimizers()["adamw"].state_bytes("PURE_BF16")


def test_a_name_that_there_is_not_is_answered_with_the_nearest_and_the_list() -> None:
    with pytest.raises(ValueError, match=r"^name: got 'adammw' \(did you mean 'adamw'\?\); accepted are sgd, adam, "):
        optimizer_named("adammw")
    with pytest.raises(ValueError, match=r"^--optimizer: got 'Schedule-Free-SGD' \(did you mean 'schedule_free_sgd'"):
        optimizer_named("Schedule-Free-SGD", field="--optimizer")
    assert optimizer_named("lamb") is eb.optimizers()["lamb"]


OPTIONS = {"matrices": "Matrices", "iteration": "NewtonSchulz", "where": "Kronecker", "graft": "Grafting"}
"""Arguments that take a value of options, and its class."""


@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, one) for name, each in eb.optimizers().items() for one in OPTIONS if one in each.arguments],
)
def test_options_are_of_their_class(name: eb.OptimizerName, argument: str) -> None:
    with pytest.raises(TypeError, match=rf"^{argument}: got 'smaller'; accepted is everybit\.{OPTIONS[argument]}\("):
        eb.optimizers()[name].function(**{argument: "smaller"})


def test_no_signature_has_more_than_fourteen_arguments() -> None:
    for name, one in eb.optimizers().items():
        assert len(one.arguments) <= 14, name
