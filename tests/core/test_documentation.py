"""Examples in docstrings run, and print what they say. (Pages: tests/documentation.)"""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import everybit
import everybit_torch

# Their import is what they are for; tests/conformance imports them where these programs are installed.
PROGRAMS = ("axolotl", "lerobot", "swift", "timm", "torchtitan", "trainer")
GATES = ("lightning_gate", "trainer_gate")
FOR_OTHER_PROGRAMS = {f"everybit_torch.names.{name}" for name in PROGRAMS} | {
    f"everybit_torch.audit.{name}" for name in GATES
}
MODULES = sorted(
    module.name
    for package in (everybit, everybit_torch)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    if not module.name.endswith("__main__") and module.name not in FOR_OTHER_PROGRAMS
)
WITH_EXAMPLES = {
    "everybit.stepping.optimizer",
    "everybit.stepping.metrics",
    "everybit.combinators.chain",
    "everybit_torch.drop_ins.adam",
    "everybit_torch.optim.gradient_release",
    "everybit_torch.decay_groups",
    "everybit.policies.presets",
}


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_do_what_they_say(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert result.attempted > 0 or name not in WITH_EXAMPLES
