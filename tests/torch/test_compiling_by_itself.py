"""``compile="auto"``, the default: steps are compiled where there is enough to step and a compiler, and say so."""

from __future__ import annotations

import logging
import os
import pickle
from functools import partial
from typing import Any

import pytest
import torch

import everybit as eb
from everybit_torch import SGD, AdamW, AnyPrecisionAdamW, Lion, TorchOptimizer
from everybit_torch.compiled import compilation
from everybit_torch.segments import steps
from tests.support.small_models import Awkward, same_bits, train

HERE = sum(p.numel() for p in Awkward().parameters())
"""Elements of the model that is stepped here."""


@pytest.fixture
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "WORTH_COMPILING", HERE)


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "everybit_torch" and r.levelno >= level]


@pytest.mark.usefixtures("worth_it")
def test_it_is_compiled_with_the_same_bits_and_says_how_long_that_took(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="everybit_torch")
    found = []
    choices: tuple[dict[str, Any], ...] = ({}, {"compile": False})
    for options in choices:
        model = Awkward()
        optimizer = AdamW(model.parameters(), lr=1e-2, **options)
        train(model, optimizer, 1)
        optimizer.param_groups[0]["lr"] = 1e-3
        found.append(train(model, optimizer, 2, start=1))
        if not options:
            assert ", compiled; FP32" in repr(optimizer)
            assert "compile='auto'" in repr(optimizer)
    assert same_bits(*found)
    (told,) = messages(caplog, logging.WARNING)
    assert told.startswith(f"param group 0: compiled its step ({HERE} elements, torch.float32) in ")
    assert told.endswith(" s; compile=False steps uncompiled, with the same results.")


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("something was compiled")


KINDS: list[Any] = [AdamW, SGD, Lion, partial(AnyPrecisionAdamW, variance_rounding="stochastic")]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_default_and_does_not_compile_small_models(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everybit_torch.compiled.variants.compile_step", refuse)
    model = Awkward()
    optimizer = kind(model.parameters(), lr=1e-2)
    train(model, optimizer, 1)
    assert "compile='auto'" in repr(optimizer)
    assert ", uncompiled; " in repr(optimizer)
    assert steps.WORTH_COMPILING > HERE


def test_a_model_that_is_stepped_uncompiled_because_it_is_small_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="everybit_torch")
    compilation.tell_of_small_models.cache_clear()
    for options in ({}, {}, {"compile": False}):
        model = Awkward()
        train(model, AdamW(model.parameters(), lr=1e-2, **options), 2)  # type: ignore[arg-type]
    (told,) = messages(caplog, logging.WARNING)
    assert told.startswith(
        "compile='auto': a model of so few elements is stepped uncompiled. compile=True makes a step five to ten times"
    )


@pytest.mark.usefixtures("worth_it")
def test_what_counts_is_what_a_group_steps_in_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen parameters do not count until they are unfrozen, and another group's never."""
    compiled: list[int] = []

    def note(self: Any, inputs: Any, arguments: Any, numbers: Any, uncompiled: Any) -> Any:
        compiled.append(inputs.tensors[0].numel())
        return uncompiled()

    monkeypatch.setattr("everybit_torch.compiled.variants.Variants.step", note)
    model, other = Awkward(), Awkward()
    groups: list[Any] = [{"params": model.parameters()}, {"params": list(other.parameters())[:2]}]
    optimizer = TorchOptimizer(groups, eb.sgd, lr=1e-2)
    model.vector.requires_grad_(False)
    for step in range(2):
        train(other, optimizer, 0)
        for parameter in [*model.parameters(), *other.parameters()]:
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        assert bool(compiled) == (step == 1)
        model.vector.requires_grad_(True)
    assert sum(compiled) == HERE


@pytest.mark.usefixtures("worth_it")
def test_without_a_compiler_it_is_not_compiled_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(compilation, "_cpp_compiler_error", lambda: "InvalidCxxCompiler")
    compilation._log_missing_compiler.cache_clear()
    monkeypatch.setattr("everybit_torch.compiled.variants.compile_step", refuse)
    model = Awkward()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 1)
    assert ", uncompiled; " in repr(optimizer)
    assert not recwarn.list
    (told,) = messages(caplog, logging.INFO)
    assert told.startswith("compile='auto': torch found no C++ compiler (InvalidCxxCompiler); steps run uncompiled")
    compilation._warn_of_missing_compiler.cache_clear()
    asked = AdamW(Awkward().parameters(), compile=True)
    with pytest.warns(
        UserWarning, match=r"compile: got True, but torch found no C\+\+ compiler \(InvalidCxxCompiler\)"
    ):
        train(asked_model := Awkward(), AdamW(asked_model.parameters(), compile=True), 1)
    assert "compile=True" in repr(asked)


@pytest.mark.usefixtures("worth_it")
@pytest.mark.exhaustive
def test_a_copy_goes_on_by_itself(tmp_path: os.PathLike[str]) -> None:
    model = Awkward()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 1)
    copied, stepped = pickle.loads(pickle.dumps((model, optimizer)))
    assert same_bits(train(model, optimizer, 1, start=1), train(copied, stepped, 1, start=1))
    assert ", compiled; " in repr(stepped)


@pytest.mark.parametrize("value", ["yes", None, 1.0, "AUTO"])
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^compile: got .*; accepted are True, False and 'auto'\.$"):
        AdamW(Awkward().parameters(), compile=value)
